"""Random faults through every door: no wrong result, no hang, no error without a rank or a reason.

``MESHPLAN_TEST_SEED`` is the first of the seeds. A failure lists a command for each case.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.doors import DOORS
from tests.faults.judge import judge
from tests.faults.random_faults import FAULTS, draw, play_all

pytestmark = pytest.mark.processes

FIRST = int(os.environ.get("MESHPLAN_TEST_SEED", "0"))
CASES, BLOCK = 400, 100
# Each door with prompt faults, and a case of each fault that ranks wait for but for stops.
SAMPLE = (2, 3, 5, 6, 8, 9, 10, 12, 15, 16, 18, 33)


def check(seeds: Sequence[int], lanes: int) -> None:
    found = []
    for seen in play_all([draw(seed) for seed in seeds], lanes):
        verdicts = judge(seen)
        if verdicts:
            found.append("\n  ".join([seen.case.reproducer, *map(str, verdicts)]))
    assert not found, f"{len(found)} of {len(seeds)} cases:\n" + "\n".join(found)


def test_random_cases_are_right_or_explained() -> None:
    check(SAMPLE, 3)


@pytest.mark.dist
@pytest.mark.parametrize("start", range(0, CASES, BLOCK))
def test_many_random_cases_are_right_or_explained(start: int) -> None:
    check(range(FIRST + start, FIRST + start + BLOCK), 4)


def test_seeds_draw_every_fault_through_every_door() -> None:
    cases = [draw(seed) for seed in range(CASES)]
    drawn = {(case.fault, case.door) for case in cases}
    assert drawn == {
        (fault, door)
        for fault in FAULTS
        for door in DOORS
        if door != "seam" or fault not in ("sparse", "overlapping")
    }
    for name, values in {
        "path": {"auto", "exchange", "halving", "reference", "integer", "hierarchical"},
        "order": {"tree", "rank", "exact"},
        "world": {2, 3, 4, 5},
        "retries": {False, True},
        "ending": {"shutdown", "group"},
    }.items():
        assert {getattr(case, name) for case in cases} == values
    threads = {(case.threads, case.backward) for case in cases}
    assert threads == {(False, False), (False, True), (True, False), (True, True)}
