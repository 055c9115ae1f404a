"""Arguments of Megatron-LM, and the scripts that hold them."""

from __future__ import annotations

from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._read_jobs import RankOptions, read_arguments, read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=5
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-5}
export TP=${TP:-2}   # within a domain
PP="1"

ARGS=(
    --num-layers 12  # --tensor-model-parallel-size 99
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size "${PP}"
    --use-distributed-optimizer
    --sequence-parallel
)

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$NNODES \\
    pretrain_gpt.py \\
    ${ARGS[@]}
"""
ONE_COMMAND = """\
torchrun --nnodes 4 --nproc-per-node=8 \\
  pretrain_gpt.py \\
  --tensor-model-parallel-size 4 \\
  --pipeline-model-parallel-size $((1 + 1)) \\
  --expert-model-parallel-size 2
"""
YAML = """\
args:
  - "--tensor-model-parallel-size=8"
  - "--world-size"
  - "16"
"""


def arguments(text: str, world_size: int | None = None) -> str:
    return format_jobs(read_arguments(text.split(), RankOptions(world_size)))


class TestMegatron(TestCase):
    def test_scripts_are_read(self) -> None:
        found = "".join(
            format_jobs(read_jobs("run.sh", one)) for one in (SCRIPT, ONE_COMMAND, YAML)
        )
        self.assertExpectedInline(
            found,
            """\
run.sh:10 (pp=1, dp=20, tp=2) apart shard model: fsdp2, sequence parallel
run.sh:1 (pp=2, dp=4, tp=4) apart replicate model: ddp
run.sh:1 (pp=2, edp=2, ep=2, etp=4) apart replicate experts model: ddp
run.sh:2 (dp=2, tp=8) replicate model: ddp
""",
        )

    def test_sharding_options_set_the_roles(self) -> None:
        sizes = "--tensor-model-parallel-size 2 --context-parallel-size 2"
        found = "".join(
            arguments(f"{sizes} {more}", 32)
            for more in (
                "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
                "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
                "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard",
                "--use-distributed-optimizer --expert-model-parallel-size 4 --sequence-parallel",
                "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
            )
        )
        self.assertExpectedInline(
            found,
            """\
--tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-op... (dp_replicate=4, dp_shard=2, cp=2, tp=2) replicate shard shard model: fsdp2, flattened dp_shard+cp
--tensor-model-parallel-size 2 --context-parallel-size 2 --use-megatron-fsdp ... (dp=8, cp=2, tp=2) shard shard model: fsdp2, flattened dp+cp
--tensor-model-parallel-size 2 --context-parallel-size 2 --use-megatron-fsdp ... (dp=8, cp=2, tp=2) replicate replicate model: ddp, flattened dp+cp
--tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-op... (dp=8, cp=2, tp=2) shard shard model: fsdp2, flattened dp+cp, sequence parallel
--tensor-model-parallel-size 2 --context-parallel-size 2 --use-distributed-op... (edp=4, ep=4, etp=2) shard experts model: fsdp2
--tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-paral... (dp=8, cp=2, tp=2) replicate replicate model: ddp, flattened dp+cp
--tensor-model-parallel-size 2 --context-parallel-size 2 --expert-model-paral... (edp=8, ep=4, etp=1) replicate experts model: ddp
""",
        )

    def test_rewrite_changes_only_the_sizes(self) -> None:
        job = read_jobs("run.sh", SCRIPT).jobs[0]
        dense, experts = read_jobs("run.sh", ONE_COMMAND).jobs
        (yaml,) = read_jobs("run.yaml", YAML).jobs
        found = (
            changed_lines(SCRIPT, job, pp=1, dp=10, tp=4),
            changed_lines(SCRIPT, job, pp=5, dp=4, tp=2),
            changed_lines(SCRIPT, job, pp=1, dp=10, cp=2, tp=2),
            changed_lines(SCRIPT, job, dp=1, pp=20, tp=2),
            changed_lines(SCRIPT, job, dp=16, tp=2),
            changed_lines(ONE_COMMAND, dense, pp=4, dp=2, tp=4),
            changed_lines(ONE_COMMAND, experts, pp=2, edp=4, ep=2, etp=2),
            changed_lines(YAML, yaml, dp=4, tp=4),
            changed_lines(YAML, yaml, dp=2, cp=2, tp=4),
        )
        self.assertExpectedInline(
            "--\n".join(found),
            """\
-export TP=${TP:-2}   # within a domain
+export TP=${TP:-4}   # within a domain
--
-PP="1"
+PP="5"
--
-    --tensor-model-parallel-size $TP
+    --tensor-model-parallel-size $TP --context-parallel-size 2
--
-PP="1"
+PP="20"
--
cannot be written
--
-  --pipeline-model-parallel-size $((1 + 1)) \\
+  --pipeline-model-parallel-size 4 \\
--
-  --expert-model-parallel-size 2
+  --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
--
-  - "--tensor-model-parallel-size=8"
+  - "--tensor-model-parallel-size=4"
--
cannot be written
""",
        )

    def test_unknown_size_is_skipped_with_reason(self) -> None:
        texts = (
            "TP=2\nTP=4\n--tensor-model-parallel-size $TP --world-size 8",
            "A=$B\nB=$A\n--tensor-model-parallel-size $A --world-size 8",
            "--tensor-model-parallel-size $((8 / 3)) --world-size 8",
            "torchrun --nnodes 1:4 --nproc-per-node gpu x --tensor-model-parallel-size 8",
        )
        found = "".join(format_jobs(read_jobs("run.sh", text)) for text in texts)
        self.assertExpectedInline(
            found,
            """\
run.sh:3: not judged: --tensor-model-parallel-size $TP has no single value in this file; give the mesh with --mesh
run.sh:3: not judged: --tensor-model-parallel-size $A has no single value in this file; give the mesh with --mesh
run.sh:1: not judged: --tensor-model-parallel-size $((8 / 3)) has no single value in this file; give the mesh with --mesh
run.sh:1: not judged: the size of dp depends on the number of ranks, which is unknown; pass --world-size, or --hosts and --node-size
""",
        )

    def test_invalid_sizes_are_refused_with_file_and_line(self) -> None:
        texts = (
            "--tensor-model-parallel-size 3",
            "--tensor-model-parallel-size 0",
            "\n--tensor-model-parallel-size 8 --context-parallel-size 100",
            "--tensor-model-parallel-size 4 --num-distributed-optimizer-instances 3",
            "--tensor-model-parallel-size 4 --order tp-dp-xx",
            "--tensor-model-parallel-size 4 --expert-model-parallel-size 7",
        )
        self.assertExpectedInline(
            "".join(f"{refusal('run.sh', t)}\n" for t in texts),
            """\
MP111: run.sh:1: 40 ranks are not a multiple of tp 3 = 3; use sizes whose product divides the ranks
MP111: run.sh:1: --tensor-model-parallel-size must be 1 or more, got 0
MP111: run.sh:2: 40 ranks are not a multiple of cp 100 x tp 8 = 800; use sizes whose product divides the ranks
MP111: run.sh:1: 40 ranks are not a multiple of dp_replicate 3 x tp 4 = 12; use sizes whose product divides the ranks
MP111: run.sh:1: an order names tp, cp, ep, dp and pp once each, innermost first, got 'tp-dp-xx'; use for example tp-cp-ep-dp-pp
MP111: run.sh:1: 40 ranks are not a multiple of ep 7 x etp 4 = 28; use sizes whose product divides the ranks
""",
        )


def test_variable_with_equal_values_is_replaced_at_its_use() -> None:
    text = "TP=2\nTP=2\nrun --tensor-model-parallel-size ${TP} --world-size 8\n"
    (job,) = read_jobs("run.sh", text).jobs
    assert job.layout == Layout.of(dp=4, tp=2)
    assert job.rewrite is not None
    assert job.rewrite(Layout.of(dp=2, tp=4)) == text.replace("${TP}", "4")


def test_shared_variable_is_rewritten_only_to_one_value() -> None:
    text = "N=2\nrun --tensor-model-parallel-size $N --pipeline-model-parallel-size $N\n"
    (job,) = read_jobs("run.sh", text, RankOptions(16)).jobs
    assert changed_lines(text, job, pp=2, dp=2, tp=4) == "cannot be written\n"
    assert changed_lines(text, job, pp=4, dp=1, tp=4) == "-N=2\n+N=4\n"


def test_long_chain_of_variables_is_skipped() -> None:
    lines = [f"V{i}=$((V{i + 1} + V{i + 1}))" for i in range(3000)]
    lines += ["run --tensor-model-parallel-size $V0 --world-size 8"]
    assert refusal("run.sh", "\n".join(lines)) == ""


@given(damaged_texts(SCRIPT + ONE_COMMAND + YAML) | st.text(max_size=200))
def test_damaged_script_raises_one_line(text: str) -> None:
    refusal("run.sh", text)
    refusal("run.sh", "--tensor-model-parallel-size 2 " + text, world_size=None)
