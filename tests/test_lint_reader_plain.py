"""Plain arguments, those of vLLM and SGLang, and torchtitan's on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import LayoutError
from meshplan.layout import Layout
from meshplan.lint._read_jobs import MAX_CHARACTERS, RankOptions, read_arguments, read_jobs
from tests.lint_inputs import changed_lines, damaged_texts, format_jobs, refusal

LINES = (
    "--dp 8 --fsdp 5 --tp 1",
    "--tp_size=4",
    "-tp 4",
    "--tensor-parallel-size 8 --data-parallel-size 2",
    "vllm serve model -tp 8 -dp 2 --pipeline-parallel-size 2",
    "torchrun --nnodes 5 --nproc-per-node 8 train.py --fsdp -1 --tp=2 --sequence-parallel",
    "--tp 2 --cp 2 --pp 2 --dp-replicate 2 --dp-shard 2",
    "./run_train.sh --parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree=4",
)


class TestPlainArguments(TestCase):
    def test_arguments_are_read(self) -> None:
        found = "".join(format_jobs(read_arguments(line.split())) for line in LINES)
        self.assertExpectedInline(
            found,
            """\
--dp 8 --fsdp 5 --tp 1 (dp=8, fsdp=5, tp=1) replicate shard model: dtensor
--tp_size=4 (tp=4) model: dtensor
-tp 4 (tp=4) model: dtensor
--tensor-parallel-size 8 --data-parallel-size 2 (dp=2, tp=8) apart model: dtensor
vllm serve model -tp 8 -dp 2 --pipeline-parallel-size 2 (dp=2, pp=2, tp=8) apart apart model: dtensor
torchrun --nnodes 5 --nproc-per-node 8 train.py --fsdp -1 --tp=2 --sequence-p... (fsdp=20, tp=2) shard model: dtensor, sequence parallel
--tp 2 --cp 2 --pp 2 --dp-replicate 2 --dp-shard 2 (pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2) apart replicate shard shard model: dtensor
./run_train.sh --parallelism.tensor_parallel_degree 2 --parallelism.data_para... (dp_shard=4, tp=2) shard model: fsdp2, sequence parallel
""",
        )

    def test_unknown_size_is_skipped_with_reason(self) -> None:
        lines = (
            "--tp eight",
            "--tp",
            "--tp --dp 4",
            "--tp $TP",
            "--tp 4 --tensor-parallel-size 8",
            "--fsdp -1 --tp 2",
            "--fsdp -1 --dp -1",
            "sglang --tp-size 8 --dp-size 2 --enable-dp-attention",
        )
        found = "".join(format_jobs(read_arguments(line.split())) for line in lines)
        self.assertExpectedInline(
            found,
            """\
--tp eight: not judged: --tp eight is not an integer; give the mesh with --mesh
--tp: not judged: --tp has no value; pass an integer after it
--tp --dp 4: not judged: --tp has no value; pass an integer after it
--tp '$TP': not judged: --tp $TP has no single value in this file; give the mesh with --mesh
--tp 4 --tensor-parallel-size 8: not judged: --tensor-parallel-size is 8 here and --tp was 4 before; give the mesh with --mesh
--fsdp -1 --tp 2: not judged: the size of fsdp depends on the number of ranks, which is unknown; pass --world-size, or --hosts and --node-size
--fsdp -1 --dp -1: not judged: the size of fsdp depends on the number of ranks, which is unknown; pass --world-size, or --hosts and --node-size
sglang --tp-size 8 --dp-size 2 --enable-dp-attention: not judged: --enable-dp-attention has two meshes on the same ranks; give the mesh with --mesh
""",
        )

    def test_invalid_sizes_are_refused(self) -> None:
        found = []
        lines = ("", "--lr 3", "--tp 0", "--tp 3 --fsdp -1", "--tp 99999999")
        for line in lines:
            with pytest.raises(LayoutError) as error:
                read_arguments(line.split(), RankOptions(40))
            found.append(f"{error.value}\n")
        self.assertExpectedInline(
            "".join(found),
            """\
MP111: no axis size in the arguments ''; use, for example, --tensor-model-parallel-size 8, --tp 8 or --dp 4
MP111: no axis size in the arguments '--lr 3'; use, for example, --tensor-model-parallel-size 8, --tp 8 or --dp 4
MP111: arguments:1: --tp must be 1 or more, or -1 for the rest, got 0
MP111: arguments:1: 40 ranks are not a multiple of tp 3 = 3; use sizes whose product divides the ranks
MP111: arguments:1: a mesh has at most 4194304 ranks, got axes of 99999999; is a size wrong?
""",
        )

    def test_rewrite_changes_only_the_sizes(self) -> None:
        found = []
        for line, sizes in (
            (LINES[0], {"dp": 5, "fsdp": 8, "tp": 1}),
            (LINES[0], {"fsdp": 5, "dp": 8, "tp": 1}),
            (LINES[0], {"dp": 1, "fsdp": 5, "tp": 8}),
            (LINES[1], {"tp": 8}),
            (LINES[5], {"fsdp": 10, "tp": 4}),
            (LINES[5], {"fsdp": 10, "tp": 2}),
            (LINES[7], {"dp_shard": 2, "cp": 2, "tp": 2}),
        ):
            (job,) = read_arguments(line.split()).jobs
            found.append(changed_lines(line, job, **sizes))
        self.assertExpectedInline(
            "--\n".join(found),
            """\
---dp 8 --fsdp 5 --tp 1
+--dp 5 --fsdp 8 --tp 1
--
cannot be written
--
---dp 8 --fsdp 5 --tp 1
+--dp 1 --fsdp 5 --tp 8
--
---tp_size=4
+--tp_size=8
--
-torchrun --nnodes 5 --nproc-per-node 8 train.py --fsdp -1 --tp=2 --sequence-parallel
+torchrun --nnodes 5 --nproc-per-node 8 train.py --fsdp -1 --tp=4 --sequence-parallel
--
cannot be written
--
-./run_train.sh --parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree=4
+./run_train.sh --parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree=2 --parallelism.context_parallel_degree 2
""",
        )


def test_hosts_and_ranks_are_read_from_the_launcher() -> None:
    found = read_arguments(LINES[5].split())
    assert (found.hosts, found.ranks_per_host) == (5, 8)
    script = "#SBATCH -N 2\n#SBATCH --ntasks-per-node=1 --gpus-per-node 8\nsrun x --fsdp -1\n"
    found = read_jobs("run.sh", script)
    assert (found.hosts, found.ranks_per_host) == (2, 8)
    assert found.jobs[0].layout == Layout.of(fsdp=16)
    found = read_arguments(["deepspeed", "--num_nodes=2", "--num_gpus=4", "train.py", "--tp=8"])
    assert (found.hosts, found.ranks_per_host) == (2, 4)


def test_command_beats_the_world_size_of_the_user() -> None:
    line = ["--nnodes", "2", "--nproc-per-node", "8", "--fsdp", "-1"]
    for size in (None, 16, 40):
        assert read_arguments(line, RankOptions(size)).jobs[0].layout == Layout.of(fsdp=16)
    # One host is torchrun's default, which its other options may replace.
    alone = line[2:]
    assert read_arguments(alone).jobs[0].layout == Layout.of(fsdp=8)
    assert read_arguments(alone, RankOptions(40)).jobs[0].layout == Layout.of(fsdp=40)
    # A number of hosts alone is multiplied by the user's ranks on each host, not by all of them.
    hosts = [*line[:2], *line[4:]]
    options = RankOptions(world_size=40, hosts=5, node_size=8)
    assert read_arguments(hosts, options).jobs[0].layout == Layout.of(fsdp=16)


def test_source_is_the_arguments() -> None:
    (job,) = read_arguments(["--tp", "8", "--name", "two words"]).jobs
    assert str(job.source) == "--tp 8 --name 'two words'"
    assert job.source.file == ""


def test_constants_of_a_sourced_file_are_followed(tmp_path: Path) -> None:
    (tmp_path / "sizes.env").write_text("export TP=4\nPP=2\nDP=$(nproc)\n", encoding="utf-8")
    script = tmp_path / "run.sh"
    for line in ("source ./sizes.env", ". ${DIR}/sizes.env", 'source "$DIR/sizes.env"'):
        text = f"{line}\nserve --tp $TP --pp ${{PP}}"
        (job,) = read_jobs(str(script), text).jobs
        assert job.layout.sizes == (2, 4)
    for text in (
        "source sizes.env\nTP=2\nserve --tp $TP",
        "source sizes.env\nserve --tp 4 --dp $DP",
    ):
        found = read_jobs(str(script), text)
        assert not found.jobs
        assert "no single value" in found.skipped[0].why


def test_too_long_script_is_refused() -> None:
    assert "longer than 256 thousand" in refusal("run.sh", "--tp 8 " * (MAX_CHARACTERS // 7 + 1))
    assert refusal("run.sh", "--tp 8 " * (MAX_CHARACTERS // 7)) == ""


@given(st.lists(st.sampled_from(" ".join(LINES).split()) | st.text(max_size=8), max_size=12))
def test_any_arguments_raise_one_line(words: list[str]) -> None:
    said = ""
    try:
        read_arguments(words, RankOptions(40))
    except LayoutError as error:
        said = str(error)
    assert "\n" not in said


@given(damaged_texts("\n".join(LINES)) | st.text(max_size=200))
def test_damaged_script_raises_one_line(text: str) -> None:
    refusal("run.sh", text)
