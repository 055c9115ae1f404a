"""torchft's quorums over the backend: replica groups with default groups of their own, one killed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
# `make test-clients` installs it.
MISSING = importlib.util.find_spec("torchft") is None

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.skipif(MISSING, reason="pip install --no-deps --group without-dependencies"),
]


class Rank:
    """A process of ``torchft_replica``."""

    def __init__(self, words: list[str], observed: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.backend.torchft_replica", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MESHPLAN_RUN": observed},
        )
        self.steps: list[dict[str, Any]] = []

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def wait_for(self, last: str) -> None:
        """Read its steps up to the line ``last``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == f"{last}\n":
                return
            self.steps.append(json.loads(line))
        raise AssertionError(f"a rank has ended with status {self.process.wait()}")


@contextmanager
def replica_group(number: int, lighthouse: str, ranks: int, observed: str) -> Iterator[list[Rank]]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    words = [[number, lighthouse, rank, ranks, store.port] for rank in range(ranks)]
    group = [Rank([*map(str, one)], observed) for one in words]
    try:
        for one in group:
            one.wait_for("ready")
        yield group
    finally:
        kill(group)


def kill(group: list[Rank]) -> None:
    for one in group:
        one.process.kill()
        one.process.communicate()


def run(order: str, *groups: list[Rank]) -> None:
    ranks = list(chain.from_iterable(groups))
    for one in ranks:
        one.order(order)
    for one in ranks:
        one.wait_for("done")


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("ranks", [1])
def test_replicas_are_equal_before_and_after_one_was_killed(
    ranks: int, observed: bool, tmp_path: Path
) -> None:
    lighthouses: Any = importlib.import_module("torchft.coordination")
    # A quorum waits for every replica that is alive.
    lighthouse = lighthouses.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=300_000, heartbeat_timeout_ms=10_000
    )
    address, numbers = lighthouse.address(), count()
    with ExitStack() as stack:

        def start(number: int) -> list[Rank]:
            # Each replica group is a job of its own, with a report of its own.
            settings = f"every=1 report={tmp_path / str(next(numbers))}" * observed
            return stack.enter_context(replica_group(number, address, ranks, settings))

        first, second, third = map(start, range(3))
        run("steps 3 3", first, second, third)
        # In a step, so that a reduction of the others fails; they leave the step out.
        for one in third:
            one.order("die")
        for one in (*first, *second):
            one.order("steps 2 2")
        assert third[0].process.wait() == -signal.SIGKILL
        # As torchrun ends the other ranks of a job.
        kill(third)
        for one in (*first, *second):
            one.wait_for("done")
        fourth = start(2)
        run("steps 3 3", first, second, fourth)
        for one in (*first, *second, *fourth):
            one.process.communicate()
            assert one.process.returncode == 0
        steps = [step for one in chain(first, second, third, fourth) for step in one.steps]
    lighthouse.shutdown()
    digests = defaultdict(list)
    for step in steps:
        digests[step["rank"], step["step"], step["participants"]].append(step["digest"])
        assert step["outside"] == 0
        # Four parameters, and those of a step that failed.
        assert step["contract"] >= 4
    holders = {place: len(found) for place, found in digests.items()}
    for rank in range(ranks):
        counts = [(size, count) for (one, _, size), count in holders.items() if one == rank]
        assert counts.count((3, 3)) == 6
        assert counts.count((2, 2)) >= 2
    assert all(len(set(found)) == 1 for found in digests.values())
    reports = [json.loads(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    # The third one was killed: its report is that of up to a second before.
    states = [report["state"] for report in reports]
    assert states == (["ended", "ended", "running", "ended"] if observed else [])
    for report in reports:
        assert all(one["contract"] for one in report["reductions"])
        assert report["state"] == "running" or report["reductions"]


def test_replica_group_needs_a_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = importlib.import_module("meshplan.integrations.torchft")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    group = ours.ProcessGroupMeshplan()
    with pytest.raises(ours.BackendError, match="no default group; call init_process_group"):
        group._create_pg(dist.HashStore(), 0, 1)
