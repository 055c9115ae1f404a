"""``meshplan lint --live``: the placement of the ranks of a running job."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from expecttest import TestCase

from meshplan.cli._ranks import find_live_cluster
from meshplan.errors import GroupAgreementError, TopologyError
from tests.programs import torchrun
from tests.refusals import refusal


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("localhost", 0))
        return int(probing.getsockname()[1])


def live(*words: str, ranks: int, per_host: int) -> subprocess.CompletedProcess[str]:
    script = (
        "import os, sys; from meshplan.cli import main; "
        f"os.environ['MESHPLAN_HOST'] = 'host%d' % (int(os.environ['RANK']) // {per_host}); "
        "sys.exit(main(['lint', '--live', '--no-env', '--exit-zero', *sys.argv[1:]]))"
    )
    return torchrun(ranks, "--no-python", sys.executable, "-c", script, *words)


@pytest.mark.full
@pytest.mark.processes
def test_all_ranks_are_located_and_one_reports() -> None:
    # Groups of three ranks one after the other fall on the hosts as (3) and (2, 1).
    words = ("--isolated", "--mesh", "ddp=2,fsdp=3", "--output-format", "json")
    done = live(*words, ranks=6, per_host=5)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "MP101" in {finding["code"] for finding in report["findings"]}
    assert report["judged"] == [
        "--mesh ddp=2,fsdp=3: (ddp=2, fsdp=3) on 2 nodes of 5, the last of 1"
    ]


@pytest.mark.full
@pytest.mark.processes
def test_mesh_larger_than_the_job_is_refused() -> None:
    done = live("--isolated", "--mesh", "ddp=2,fsdp=3", ranks=2, per_host=2)
    assert done.returncode != 0
    assert (
        "MP211: the topology describes 2 ranks, the mesh (ddp=2, fsdp=3) has rank 5" in done.stderr
    )


def test_absent_rank_is_named() -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environ.items():
            patch.setenv(key, value)
        with pytest.raises((GroupAgreementError, TopologyError)):
            find_live_cluster(environ, 2.0)


class TestMessages(TestCase):
    def test_missing_launcher_is_reported(self) -> None:
        self.assertExpectedInline(
            refusal(TopologyError, find_live_cluster, {"RANK": "0"}, 1.0),
            """MP211: meshplan lint --live runs on all ranks of a job at once, and WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set; use torchrun --nproc-per-node 8 -m meshplan lint --live --mesh ddp=8,fsdp=5""",
        )
