"""Fixes by program: every offered fix was tried for the library that issues the reductions."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from expecttest import TestCase

from meshplan.lint._programs import (
    find_program_of_modules,
)
from meshplan.lint._read_jobs import read_arguments, read_jobs
from meshplan.lint._reporters import FORMATS
from tests.cli import meshplan

MEGATRON = """\
#!/bin/bash
# meshplan-comment
torchrun --nnodes 3 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 3 \\
  --pipeline-model-parallel-size 1 --sequence-parallel
"""
PYTHON = """\
{imports}
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", (8, 5), mesh_dim_names=("dp", "fsdp"))  # meshplan-comment
{calls}
"""
UNREACHED = {
    "megatron.sh": MEGATRON,
    "sharded.sh": MEGATRON.replace("--sequence-parallel", "--use-distributed-optimizer"),
    "torch_fsdp2.sh": MEGATRON.replace("--sequence-parallel", "--use-torch-fsdp2"),
    "vllm.sh": "# meshplan-comment\nvllm serve model --dp 8 --fsdp 5\n",
    "sglang.sh": "# meshplan-comment\npython -m sglang.launch_server --dp 8 --fsdp 5\n",
    "deepspeed.sh": "# meshplan-comment\ndeepspeed --num_nodes 5 --num_gpus 8 train.py --dp 8 --fsdp 5\n",
    "megatron.py": PYTHON.format(imports="from megatron.core import parallel_state", calls=""),
    "vllm.py": PYTHON.format(imports="import vllm", calls=""),
    "sglang.py": PYTHON.format(imports="import sglang as sgl", calls=""),
    "deepspeed.py": PYTHON.format(imports="import deepspeed.comm", calls=""),
    "fsdp1.py": PYTHON.format(imports="", calls="FullyShardedDataParallel(model)"),
}
TITAN = """\
[parallelism]
data_parallel_replicate_degree = 8
data_parallel_shard_degree = 5
"""
REASONS = (
    "train.py calls meshplan.install()",
    "install() is called",
    "meshplan is installed",
    "reduced by meshplan",
    "fsdp.apply(model)",
)
WHERE = ("--domain-size", "8")


@pytest.fixture(autouse=True)
def place(no_scheduler: None) -> None:
    for name, text in UNREACHED.items():
        Path(name).write_text(text.replace("meshplan-comment", "the job"))


@pytest.fixture
def lint() -> Any:
    return partial(meshplan, "lint", "--no-env", "--isolated")


def jagged(text: str) -> list[dict[str, Any]]:
    return [one for one in json.loads(text)["findings"] if one["code"] == "MP101"]


@pytest.mark.parametrize("framework", [(), ("--framework", "dtensor")])
@pytest.mark.parametrize("name", list(UNREACHED))
def test_fix_by_meshplan_is_offered_to_reachable_programs_only(
    lint: Any, name: str, framework: tuple[str, ...]
) -> None:
    for output in FORMATS:
        status, out, err = lint(name, *WHERE, *framework, "--output-format", output)
        assert (status, err) == (1, "")
        assert "MP101" in out
        if output == "sarif":  # whose help of each rule has the fixes for all programs
            out = json.dumps(json.loads(out)["runs"][0]["results"])
        assert not re.search(r"install\(|meshplan\.install|fsdp\.apply|ddp\.register", out)
        # Reductions in another order, and ranks in another, take code of its own.
        assert "--reduce-order" not in out
        assert "permute" not in out
    status, out, err = lint(name, *WHERE, *framework, "--fix")
    assert "install(" not in out + err


@pytest.mark.parametrize("name", list(UNREACHED))
def test_every_offered_fix_is_clean(lint: Any, name: str) -> None:
    status, out, _ = lint(name, *WHERE, "--output-format", "json")
    assert status == 1
    fixes = {fix["title"]: fix for one in jagged(out) for fix in one["fixes"]}
    for title, fix in fixes.items():
        if used := re.match(r"use (\d+) of the 8 GPUs of each node", title):
            launch = r"--(nnodes|nproc-per-node|num_nodes|num_gpus)[ =]\d+"
            Path("fewer.sh").write_text(re.sub(launch, "", Path(name).read_text()))
            ranks = ("--world-size", "24", "--node-size", used[1])
            status, out, _ = lint("fewer.sh", *ranks, "--output-format", "json")
        elif title.startswith("call torch.distributed.init_process_group('meshplan')"):
            assert name.startswith(("megatron", "sharded", "torch_fsdp2", "deepspeed", "fsdp1"))
            continue
        elif "VLLM_PLUGINS" in title or "SGLang" in title:
            assert name.startswith(("vllm", "sglang"))
            continue
        else:
            # What the file can express: the file with the diff in it.
            assert fix["diff"]
            (job, *_) = read_jobs(name, Path(name).read_text()).jobs
            sizes = dict(pair.split("=") for pair in fix["mesh"].split(","))
            layout = type(job.layout).of(**{axis: int(size) for axis, size in sizes.items()})
            assert job.rewrite is not None
            changed = Path("changed") / name
            changed.parent.mkdir(exist_ok=True)
            changed.write_text(job.rewrite(layout) or "")
            status, out, _ = lint(str(changed), *WHERE, "--output-format", "json")
        assert (status, jagged(out)) == (0, []), title


@pytest.mark.parametrize(("name", "reason"), [*zip(UNREACHED, itertools.cycle(REASONS))])
def test_comment_relying_on_meshplan_is_refused(lint: Any, name: str, reason: str) -> None:
    for codes in ("MP101", "MP1"):
        comment = f"meshplan: ignore[{codes}] {reason}"
        Path(name).write_text(UNREACHED[name].replace("meshplan-comment", comment))
        status, out, _ = lint(name, *WHERE, "--output-format", "json")
        assert status == 1
        found = jagged(out)
        assert found
        assert (
            "does not suppress this: meshplan does not run the reductions of "
            in (found[0]["details"][-1])
        )
        # The comment is about a finding that is there.
        assert not [one for one in json.loads(out)["findings"] if one["code"] == "MP190"]


@pytest.mark.parametrize(
    ("name", "reason", "status"),
    [
        ("megatron.sh", "we call init_process_group('meshplan')", 0),
        ("vllm.sh", "we call init_process_group('meshplan')", 1),
        ("vllm.sh", "VLLM_PLUGINS=meshplan is set", 0),
        ("megatron.sh", "the plugin meshplan is set", 1),
    ],
)
def test_comment_is_accepted_if_it_names_the_way_to_the_program(
    lint: Any, name: str, reason: str, status: int
) -> None:
    comment = f"meshplan: ignore[MP101] {reason}"
    Path(name).write_text(UNREACHED[name].replace("meshplan-comment", comment))
    assert lint(name, *WHERE)[0] == status


@pytest.mark.parametrize("name", list(UNREACHED))
def test_comment_with_another_reason_is_accepted(lint: Any, name: str) -> None:
    comment = "meshplan: ignore[MP101] two racks, agreed with the cluster team"
    Path(name).write_text(UNREACHED[name].replace("meshplan-comment", comment))
    status, out, _ = lint(name, *WHERE, "--output-format", "json")
    assert (status, jagged(out)) == (0, [])


def test_comment_relying_on_meshplan_is_accepted_for_its_programs(lint: Any) -> None:
    calls = "meshplan.install(); distribute_tensor(x, mesh)"
    text = PYTHON.format(imports="import torch", calls=calls)
    comment = "meshplan: ignore[MP101] this file calls meshplan.install()"
    Path("train.py").write_text(text.replace("meshplan-comment", comment))
    assert lint("train.py", *WHERE)[0] == 0


@pytest.mark.parametrize(
    ("imports", "calls", "program", "framework"),
    [
        ("", "", "unknown", "dtensor"),
        ("", "distribute_tensor(x, mesh)", "torch", "dtensor"),
        ("", "fully_shard(model, mesh=mesh)", "torch", "fsdp2"),
        ("", "DistributedDataParallel(model)", "torch", "ddp"),
        ("import vllm", "fully_shard(model)", "unknown", "fsdp2"),
        ("from megatron.core import x", "FSDP(model)", "megatron", "fsdp2"),
        ("from .vllm import x", "", "unknown", "dtensor"),
        ("import horovod.torch as hvd", "", "horovod", "dtensor"),
    ],
)
def test_program_is_read_from_python(
    imports: str, calls: str, program: str, framework: str
) -> None:
    (job,) = read_jobs("train.py", PYTHON.format(imports=imports, calls=calls)).jobs
    assert (job.program, job.framework) == (program, framework)


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("--dp 8 --fsdp 5", "unknown"),
        ("vllm serve -tp 8", "vllm"),
        ("python -m sglang.launch_server --tp-size 8", "sglang"),
        ("--tensor-parallel-size 8", "serving"),
        ("deepspeed train.py --dp 8", "deepspeed"),
        ("Megatron-LM/pretrain.py --tp 8", "megatron"),
        ("--tensor-model-parallel-size 8 --world-size 8", "megatron"),
        ("--parallelism.tensor_parallel_degree=8 --world-size 8", "torchtitan"),
        ("train.py --dp 8 --model my_vllm_fork", "unknown"),
    ],
)
def test_program_is_read_from_arguments(words: str, program: str) -> None:
    (job,) = read_arguments(shlex.split(words)).jobs[:1]
    assert job.program == program


def test_modules_of_a_program_are_read() -> None:
    assert find_program_of_modules(frozenset({"torch", "vllm"}), torch_reduces=False) == "vllm"
    assert find_program_of_modules(frozenset({"torch", "vllm"}), torch_reduces=True) == "unknown"


class TestOfferedFixes(TestCase):
    def lines(self, name: str, text: str, *words: str) -> str:
        Path(name).write_text(text)
        _, out, _ = meshplan("lint", "--no-env", "--isolated", name, *WHERE, *words)
        return "\n".join(re.findall(r"  fix \d: (.*training script.*)", out))

    def test_fixes_follow_the_program(self) -> None:
        """Those that name the training script: torchtitan has none; the last two programs are unknown."""
        python = [
            PYTHON.format(imports="", calls=calls)
            for calls in ("distribute_tensor(x, mesh)", "fully_shard(model, mesh=mesh)")
        ]
        ddp = '[[mesh]]\naxes = "dp=8,tp=3"\nframework = "ddp"\n'
        found = [
            *(self.lines("train.py", text) for text in python),
            self.lines("mesh.toml", ddp),
            self.lines("job.toml", TITAN) or "none",
            self.lines("mesh.toml", 'mesh = "ddp=8,fsdp=5"\n'),
            self.lines("mesh.toml", 'mesh = "ddp=8,fsdp=5"\n', "--framework", "fsdp2"),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
call meshplan.install() in the training script (two lines, the layout stays; every reduction adds in one fixed order)
call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)
call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)
none
if torch.distributed issues these reductions: call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order; not for vLLM, SGLang or Horovod, which bypass it)
call torch.distributed.init_process_group('meshplan') in the training script (one word, the layout stays; every reduction adds in one fixed order)""",
        )


def test_fix_may_not_harm_another_mesh_of_the_file(lint: Any) -> None:
    """The size of one mesh is a constant that another mesh is made of."""
    Path("train.py").write_text(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "A, B = 8, 5\n"
        'init_device_mesh("cuda", (A, B), mesh_dim_names=("ddp", "fsdp"))\n'
        'init_device_mesh("cuda", (B, A), mesh_dim_names=("ddp", "fsdp"))\n'
    )
    status, out, _ = lint("train.py", *WHERE, "--output-format", "json")
    assert status == 1
    offered = {fix["mesh"]: fix["diff"] for one in jagged(out) for fix in one["fixes"]}
    # ddp=10 would leave the other mesh as (4, 10), which is jagged.
    assert "ddp=10,fsdp=4" not in offered
    text = Path("train.py").read_text()
    diffs = [diff for diff in offered.values() if diff]
    assert diffs
    for diff in diffs:
        Path("train.py").write_text(text)
        subprocess.run(["git", "apply"], input=diff, text=True, check=True, capture_output=True)
        status, out, _ = lint("train.py", *WHERE, "--output-format", "json")
        assert (status, jagged(out)) == (0, [])


def test_impossible_axis_order_is_not_proposed(lint: Any) -> None:
    """vLLM has one order of axes; a mesh that is given by itself may have any."""
    Path("vllm.sh").write_text("vllm serve m --dp-size 2 --pp-size 4 --tp-size 3\n")
    Path("plain.sh").write_text("python serve.py --dp-size 2 --pp-size 4 --tp-size 3\n")
    found = {}
    for name in ("vllm.sh", "plain.sh"):
        _, out, _ = lint(name, *WHERE, "--output-format", "json")
        found[name] = {one["code"] for one in json.loads(out)["findings"]}
    assert "MP103" not in found["vllm.sh"]
    assert "MP103" in found["plain.sh"]


def test_idle_gpus_leave_even_domains(lint: Any) -> None:
    """Of two domains of four, six ranks of a node take four and two: groups of three differ."""
    words = ("--mesh", "dp=8,tp=3", "--node-size", "8", "--output-format", "json")
    for domain, offered in (("8", True), ("4", False)):
        status, out, _ = lint(*words, "--domain-size", domain)
        assert status == 1
        titles = {fix["title"] for one in jagged(out) for fix in one["fixes"]}
        assert ("use 6 of the 8 GPUs of each node" in titles) is offered
