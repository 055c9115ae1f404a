"""Ranks that come after a failure: a call that is done is right, and every other one is an error.

Each (rank, block) is a thread and queues several calls; ranks are late at random calls, by times around
the time-out. ``MESHPLAN_TEST_SEED`` and ``MESHPLAN_TEST_SCHEDULES`` choose other schedules.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harnesses import DEVICE, RACE, THREADS, Builds, run

SEED = int(os.environ.get("MESHPLAN_TEST_SEED", "1"))
SCHEDULES = int(os.environ.get("MESHPLAN_TEST_SCHEDULES", "300"))
HARNESS = "late_harness"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: nothing is compiled"),
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("late"))


def check(program: Path, world_size: int, schedules: int, timeout_us: int) -> None:
    """Nothing is wrong, and both outcomes occurred. The printed lines have the seed.

    On a busy machine ranks that wait are as late as those that they wait for: longer times follow.
    """
    for longer in (1, 20, 500):
        words = (world_size, SEED, max(schedules // longer, 6), timeout_us * longer)
        _, printed = run(program, "late", *words, timeout=1100)
        assert RACE not in printed, printed
        found = re.search(
            r"(\d+) done, (\d+) refused; 0 wrong, 0 unpoisoned, 0 done after a failure", printed
        )
        assert found is not None, printed
        if min(map(int, found.groups())) > 0:
            return
    pytest.fail(printed)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_finished_calls_are_exact_and_others_poisoned(builds: Builds, world_size: int) -> None:
    check(builds.program(HARNESS, ()), world_size, SCHEDULES, 2000)


@pytest.mark.parametrize("world_size", [3, 8])
def test_gpu_kernels_poison_unfinished_calls(builds: Builds, world_size: int) -> None:
    check(builds.program(HARNESS, DEVICE), world_size, SCHEDULES // 3, 4000)


@pytest.mark.parametrize("world_size", [3, 5])
def test_late_ranks_under_the_thread_sanitizer(builds: Builds, world_size: int) -> None:
    check(builds.program(HARNESS, THREADS), world_size, SCHEDULES // 6, 10_000)


@pytest.mark.parametrize("flags", [(), THREADS])
@pytest.mark.parametrize("world_size", [2, 3])
def test_peer_failure_in_the_middle_of_a_step_is_noticed(
    builds: Builds, world_size: int, flags: tuple[str, ...]
) -> None:
    """After every fold and every copy, in every mode, for pushed and for pulled pieces."""
    _, printed = run(builds.program(HARNESS, flags), "interrupted", world_size)
    lines = printed.splitlines()
    expected = f"fate 2 rank {world_size - 1}, poisoned"
    assert len(lines) == {2: 15, 3: 22}[world_size]
    assert all(line.endswith(expected) for line in lines), printed


@pytest.mark.parametrize("flags", [(), DEVICE])
def test_a_call_after_a_failure_writes_to_no_region(builds: Builds, flags: tuple[str, ...]) -> None:
    """So no slot that a late peer still reads is used again, and no flag says otherwise."""
    _, printed = run(builds.program(HARNESS, flags), "refused", 3)
    lines = printed.splitlines()
    assert len(lines) == (3 if flags == DEVICE else 6)
    assert all(line.endswith(": 9 refused, 0 bytes changed") for line in lines), printed


@pytest.mark.parametrize("flags", [(), DEVICE, THREADS])
def test_two_calls_of_one_rank_at_once_are_refused(builds: Builds, flags: tuple[str, ...]) -> None:
    """Every rank fails, and no bits are left that might pass for a result."""
    _, printed = run(builds.program(HARNESS, flags), "overlapping")
    expected = [f"call {i}: fate 2 rank 0 phase 3, poisoned" for i in range(4)]
    assert printed.splitlines() == expected


MUTANTS = {
    "no read before a step": (
        "refused",
        "? kOverlap : block_.load(refusal())};",
        "? kOverlap : 0u};",
    ),
    "no read after a round": (
        "interrupted",
        "    return !refused();",
        "    block_.sync();\n    return true;",
    ),
    "no poison": ("late", "      poison();\n", ""),
    "no refusal in its own region": (
        "refused",
        "block_.store(at<u32>(p, map().refusal()), word);",
        "if (p != peers_.rank) block_.store(at<u32>(p, map().refusal()), word);",
    ),
    "overlapping calls go on": ("overlapping", "? kOverlap : block_", "? 0u : block_"),
    # In device.h, and by the kernels for GPUs.
    "lanes that give up alone": ("late", "found) = missing;\n    sync();", "found) = missing;"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(builds: Builds, name: str) -> None:
    verb, old, new = MUTANTS[name]
    file, flags = ("device.h", DEVICE) if "lanes" in name else ("peer.h", ())
    program = builds.harness(HARNESS, flags, builds.mutant(file, old, new))
    words = (3, SEED, 200) if verb == "late" else (3,)
    try:
        code, printed = run(program, verb, *words, timeout=30)
    except subprocess.TimeoutExpired:
        return
    if verb == "refused":
        assert ", 0 bytes changed" not in printed
    elif verb == "interrupted":
        assert "fate 0" in printed
    elif verb == "overlapping":
        assert "fate 2 rank 0 phase 3" not in printed.splitlines()[0]
    else:
        assert code == 1, printed
