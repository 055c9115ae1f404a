"""``meshplan probe``: what the backend's own all-reduces do on this machine, and on a model."""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase

from meshplan.cli import _probe
from meshplan.cli._probe import ProbeRow, add, probe
from meshplan.cli._probe_run import _probe_axes
from meshplan.layout import Layout
from tests.processes import arrive, run_ranks, wait_for

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return parser.parse_args(["probe", *words])


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("localhost", 0))
        return int(probing.getsockname()[1])


def launched(world_size: int, *words: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank."""
    port = free_port()

    def ranks(rank: int) -> tuple[int, str, str]:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        out, said = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(said):
            code = probe(options(*words))
        return code, out.getvalue(), said.getvalue()

    return run_ranks(ranks, world_size, init=False)


def refused(*words: str, **environ: str) -> str:
    said = io.StringIO()
    with mock.patch.dict(os.environ, {**LAUNCHED, **environ}), redirect_stderr(said):
        assert probe(options(*words)) == 2
    return said.getvalue()


class TestProbe(TestCase):
    @pytest.mark.processes
    def test_gloo_has_equal_bits(self) -> None:
        found = launched(4, "--mesh", "ddp=2,one=1,fsdp=2", "--backend", "gloo", "--numel", "1021")
        assert [(code, said) for code, _, said in found] == [(0, "")] * 4
        assert [out for _, out, _ in found[1:]] == [""] * 3
        lines = found[0][1].splitlines()
        assert lines[1].startswith("live: 4 ranks on 1 host, ")
        self.assertExpectedInline(
            "\n".join([lines[0], *lines[2:]]),
            """\
mesh (ddp=2, one=1, fsdp=2), backend gloo
axes        groups  dtype     elements  results  differ  in a group
ddp         2 of 2  float32   1021      1        0.0%    equal
ddp         2 of 2  bfloat16  1021      1        0.0%    equal
fsdp        2 of 2  float32   1021      1        0.0%    equal
fsdp        2 of 2  bfloat16  1021      1        0.0%    equal
ddp x fsdp  1 of 4  float32   1021      1        0.0%    equal
ddp x fsdp  1 of 4  bfloat16  1021      1        0.0%    equal
all groups with the same inputs had the same bits (observed in this run; equal bits prove nothing about other sizes, placements or versions)""",
        )

    @pytest.mark.processes
    def test_model_on_a_jagged_mesh_differs(self) -> None:
        """Groups of five on nodes of eight: (5) and (3,2)."""
        words = "--mesh ddp=2,fsdp=5 --backend nccl_model --node-size 8 --algorithm tree"
        found = launched(10, *words.split(), "--numel", "1021", "--dtype", "float32")
        assert {code for code, _, _ in found} == {1}
        lines = found[0][1].splitlines()
        self.assertExpectedInline(
            "\n".join([lines[0], *lines[2:]]),
            """\
mesh (ddp=2, fsdp=5), backend nccl_model (model of NCCL 2.30 association order: 1 channel, NVSwitch hosts, no NVLS; not NCCL)
axes        groups   dtype    elements  results  differ  in a group
ddp         5 of 2   float32  1021      1        0.0%    equal
fsdp        2 of 5   float32  1021      2        73.2%   equal
ddp x fsdp  1 of 10  float32  1021      1        0.0%    equal
groups with the same inputs had different bits over: fsdp (observed in this run; equal bits prove nothing about other sizes, placements or versions)""",
        )

    @pytest.mark.full
    @pytest.mark.processes
    def test_absent_rank_is_an_error_within_the_timeout(self) -> None:
        """The groups wait as long as was said, not for torch's half an hour."""

        def away(*_: object, **__: object) -> None:
            wait_for("the error", 2)
            raise RuntimeError

        def ranks(rank: int) -> None:
            late = mock.patch.object(dist, "all_reduce", side_effect=away)
            cases = [(torch.float32, 7)]
            with late if rank == 2 else nullcontext(), pytest.raises(RuntimeError):
                _probe_axes(Layout.of(a=3), (0,), cases, torch.device("cpu"), timedelta(seconds=3))
            arrive("the error")

        # Ranks 0 and 1 know while rank 2 is still away.
        run_ranks(ranks, 3)

    @pytest.mark.processes
    def test_json_report_is_printed(self) -> None:
        words = "--mesh a=3 --backend gloo --numel 7 --dtype float64 --output-format json"
        code, out, _ = launched(3, *words.split())[0]
        assert code == 0
        answer = json.loads(out)
        assert answer.pop("origin").startswith("live: 3 ranks on 1 host")
        self.assertExpectedInline(
            json.dumps(answer),
            """{"mesh": "(a=3)", "backend": "gloo", "differs": false, "reductions": [{"axes": ["a"], "groups": 1, "size": 3, "dtype": "float64", "numel": 7, "results": 1, "share": 0.0, "consistent": true, "differs": false}], "about": "observed in this run; equal bits prove nothing about other sizes, placements or versions"}""",
        )

    def test_invalid_use_is_refused(self) -> None:
        said = [
            refused("--mesh", "ddp=2,fsdp=4", RANK="", WORLD_SIZE=""),
            refused("--mesh", "ddp=2,fsdp=4"),
            refused("--mesh", "ddp"),
            refused("--mesh", "ddp=2,ddp=2"),
            refused("--mesh", "ddp=0"),
            refused("--mesh", "a=1,b=1", WORLD_SIZE="1"),
            refused("--mesh", "a=4", "--backend", "nccl_model"),
            refused("--mesh", "a=4", "--node-size", "8"),
            refused("--mesh", "a=4", "--numel", "0"),
            refused("--mesh", "a=4", "--timeout", "-1"),
        ]
        self.assertExpectedInline(
            "".join(said),
            """\
meshplan: MP402: meshplan probe runs on all ranks of a job at once, and RANK, WORLD_SIZE is not set; use torchrun --nproc-per-node 8 -m meshplan probe --mesh ddp=2,fsdp=4
meshplan: MP402: the mesh (ddp=2, fsdp=4) has 8 ranks and the job 4; pass the mesh of this job
meshplan: MP111: no size in 'ddp'; use, for example, ddp=8
meshplan: MP111: axis 'ddp' appears twice in 'ddp=2,ddp=2'; name it once
meshplan: MP111: the size of axis 'ddp' must be a positive integer, got '0'; use, for example, ddp=8
meshplan: MP402: the mesh (a=1, b=1) has no axis larger than 1: nothing is reduced
meshplan: MP402: nccl_model needs the number of consecutive ranks on a node; use, for example, --node-size 8
meshplan: MP402: --node-size and --algorithm need --backend nccl_model; add it, or leave them out
meshplan: MP402: --numel: use 1 to 2147483648, got 0
meshplan: MP402: --timeout: use a positive number of seconds, got -1
""",
        )

    def test_different_ranks_of_one_group_are_reported(self) -> None:
        row = ProbeRow(("a", "b"), 1, 4, "float32", 10, 1, 0.1, False)
        text = _probe._format_text({"mesh": "m", "backend": "b", "origin": "o"}, [row])
        assert row.differs
        self.assertExpectedInline(
            text,
            """\
mesh m, backend b
o
axes   groups  dtype    elements  results  differ  in a group
a x b  1 of 4  float32  10        1        10.0%   DIFFERENT
groups with the same inputs had different bits over: a x b (observed in this run; equal bits prove nothing about other sizes, placements or versions)""",
        )


def test_missing_gpu_of_a_rank_is_reported() -> None:
    said = refused("--mesh", "a=4", "--backend", "nccl", RANK="3", LOCAL_RANK="99")
    assert said.startswith("meshplan: rank 3: MP503: backend nccl needs a GPU for each rank")
    assert said.count("\n") == 1


def test_absent_rank_is_one_line() -> None:
    said = refused(
        "--mesh", "a=4", "--backend", "gloo", "--timeout", "2", MASTER_PORT=str(free_port())
    )
    assert said.startswith("meshplan: rank 0: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "mesh", ["", ",", "=", "a=", "=3", "a=²", "a=99999999999", "a=3,,b=2", "\n"]
)
def test_any_invalid_mesh_is_refused_in_one_line(mesh: str) -> None:
    said = refused("--mesh", mesh)
    assert said.startswith("meshplan: MP1")
    assert said.count("\n") == 1


@pytest.mark.processes
@pytest.mark.full
def test_probe_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "meshplan", "probe"]
    done = subprocess.run(
        [*command, "--mesh", "a=2", "--numel", "5", "--backend", "gloo"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mesh (a=2), backend gloo\nlive: 2 ranks on 1 host")


def test_options_do_not_import_torch() -> None:
    ask = "import sys; import meshplan.cli._probe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
