"""The hosts that the other tests run on are gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode.cluster import why_not
from tests.multinode.launch import ROOT, processes_of

pytestmark = [pytest.mark.multinode]
NAMESPACES = pytest.mark.skipif(bool(why_not("namespaces")), reason=why_not("namespaces"))


def until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("namespaces", marks=NAMESPACES),
        # torchrun needs some seconds to end after the signal.
        pytest.param("loopback", marks=pytest.mark.dist),
    ],
)
def test_killed_test_run_leaves_no_processes_and_links(kind: str, tmp_path: Path) -> None:
    """Neither processes nor links: killed as hard as can be, with a job under way."""
    before = set(os.listdir("/sys/class/net"))
    script = f"""
import sys, time
from tests.multinode.cluster import cluster
from tests.multinode.launch import job
with cluster(2, {kind!r}) as hosts, job(hosts, "idle", [2, 1]) as started:
    started.wait_for("ready", 40)
    print(started.folder, flush=True)
    time.sleep(60)
"""
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    try:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().strip())
        # An agent and its ranks on each host, and what has brought them there.
        assert len(processes_of(folder)) >= 5
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: not processes_of(folder), 40)
        assert set(os.listdir("/sys/class/net")) == before
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
