"""The peer protocol under sanitizers, each (rank, block) a thread; and mutants that must be caught.

The sources are compiled here, with g++ and its sanitizers. A mutant is a copy of the sources with
one thing changed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from expecttest import TestCase

from tests.harnesses import DEVICE, RACE, THREADS, UNDEFINED, Builds, run

HARNESS = "peer_harness"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: sanitizers are not run"),
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def threads(builds: Builds) -> Path:
    return builds.program(HARNESS, THREADS)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_protocol_has_no_race_and_no_wrong_bit(threads: Path, world_size: int) -> None:
    for seed in (1, 2) if world_size < 8 else (1,):
        code, printed = run(threads, "random", world_size, seed, 60 if world_size < 8 else 30)
        assert RACE not in printed
        assert code == 0, printed
        assert "0 failed, 0 elements wrong" in printed


@pytest.mark.parametrize("world_size", [1, 4, 6, 7, 16, 72])
def test_any_number_of_ranks_is_exact(builds: Builds, world_size: int) -> None:
    """Any number of ranks, not only 2, 4, 6 and 8."""
    calls = 60 if world_size < 72 else 12
    code, printed = run(builds.program(HARNESS, ()), "random", world_size, 5, calls)
    assert code == 0, printed
    assert f"world {world_size}: {calls} calls pulled and pushed, 0 failed, 0 elements" in printed


def test_protocol_has_no_undefined_behaviour(builds: Builds) -> None:
    program = builds.program(HARNESS, UNDEFINED)
    for world_size in (2, 3, 5):
        code, printed = run(program, "random", world_size, 3)
        assert code == 0, printed
        assert "runtime error" not in printed


def test_pushing_blocks_stage_ahead_and_every_other_one_is_late(builds: Builds) -> None:
    """Of four pieces; one is a quarter of a piece and the rest of it. Results take more rounds."""
    code, printed = run(builds.program(HARNESS, ()), "rounds", 3)
    assert code == 0, printed
    assert printed.splitlines() == [
        "one_shot pulled: 4 4 4 rounds, pushed: 4 5 4",
        "two_shot pulled: 5 5 5 rounds, pushed: 6 7 6",
        "scatter pulled: 4 4 4 rounds, pushed: 4 5 4",
        "two_shot of one piece pulled: 2 2 2 rounds, pushed: 2 2 2",
    ]


class TestFaults(TestCase):
    @pytest.fixture(autouse=True)
    def _programs(self, threads: Path) -> None:
        self.threads = threads

    def test_absent_rank_is_named_by_every_block(self) -> None:
        """Fate 1 waited itself, fate 2 read a refusal."""
        code, printed = run(self.threads, "missing", 4)
        assert code == 0, printed
        lines = printed.splitlines()
        assert len(lines) == 9
        assert all(line.endswith("rank 3") for line in lines)
        assert {line.split("fate ")[1][0] for line in lines} <= {"1", "2"}
        assert any("fate 1" in line for line in lines)

    def test_different_rank_is_named_by_every_rank(self) -> None:
        code, printed = run(self.threads, "differs", 3)
        assert code == 0, printed
        lines = printed.splitlines()
        # Each rank finds it in its first block at the latest when that waits for the others.
        assert len(lines) == 9
        assert all(line.endswith("rank 2") for line in lines[:6])
        assert all(line.endswith("rank 0") for line in lines[6:])


AWAIT = "if (!await_all(generation(round), round < now_.pieces || first ? 0 : 1)) return false;"
MUTANTS = {
    "relaxed stores": ("host.h", "value, __ATOMIC_RELEASE", "value, __ATOMIC_RELAXED"),
    "relaxed loads": ("host.h", "word, __ATOMIC_ACQUIRE", "word, __ATOMIC_RELAXED"),
    "one slot": (
        "peer.h",
        "return i32(generation(round) % u32(slots_of(Block::kPush)));",
        "return 0 * round;",
    ),
    "a slot less": (
        "region.h",
        "return 2 + 2 * most_ahead(push);",
        "return push ? 1 + 2 * most_ahead(push) : 2;",
    ),
    "no wait for the pieces": ("peer.h", AWAIT, f"if (round >= now_.pieces) {AWAIT}"),
    "no wait for the last results": (
        "peer.h",
        AWAIT,
        f"if (round < now_.pieces || first) {AWAIT}",
    ),
    "results in the slot that is read": (
        "peer.h",
        "result(round + 1 + now_.ahead, rank)",
        "result(round, rank)",
    ),
    "results that are read too early": (
        "peer.h",
        "if (message_.mode == Mode::two_shot && round > now_.ahead) copy_results(round);",
        "if (message_.mode == Mode::two_shot && round > 0) copy_results(round);",
    ),
    "staged two rounds ahead": (
        "peer.h",
        "for (i32 round = -now_.ahead; round < now_.rounds; ++round) {\n"
        "        if (round + now_.ahead < now_.rounds) announce(round + now_.ahead);",
        "for (i32 round = -2 * now_.ahead; round < now_.rounds; ++round) {\n"
        "        if (round + 2 * now_.ahead < now_.rounds) announce(round + 2 * now_.ahead);",
    ),
    "no round for the results": ("peer.h", "found.rounds += 1 + found.ahead;", ""),
    "a first piece that is a quarter, and no rest": (
        "peer.h",
        "found.pieces += found.quarter > 0;",
        "",
    ),
    "a result that is not pushed": (
        "element.h",
        "for (i32 k = 0; k < into.copies; ++k) write(",
        "for (i32 k = 1; k < into.copies; ++k) write(",
    ),
    "lanes that raise flags before all have staged": ("peer.h", "block_.publish();", ""),
    "lanes that go on before all have read": (
        "device.h",
        "gpu::sync();\n    return *static_cast<volatile u64*>",
        "return *static_cast<volatile u64*>",
    ),
    "rotated order": (
        "peer.h",
        "if (from == rank) return own;",
        "if (rank & 1) from = from == 0 ? 2 : from == 2 ? 0 : from;\n    if (from == rank) return own;",
    ),
    "flags that do not wrap": ("host.h", "i32(load(flag) - wanted) < 0", "load(flag) < wanted"),
    "a result that is not staged": (
        "peer.h",
        "block_.copy(peers_.region[peers_.rank] + result(round, peers_.rank), "
        "message_.out + own.start,\n                  own.bytes, {});",
        "(void)own;",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(builds: Builds, name: str) -> None:
    file, old, new = MUTANTS[name]
    # Races need the sanitizer, and barriers of a block several lanes. Else wrong values show without
    # them, which is faster.
    flags = THREADS if "relaxed" in name else DEVICE if "lanes" in name else ()
    program = builds.harness(HARNESS, flags, builds.mutant(file, old, new))
    caught = []
    for world_size in (3, 5):
        for seed in range(4):
            try:
                bound = 60 if flags else 8
                code, printed = run(program, "random", world_size, seed, timeout=bound)
            except subprocess.TimeoutExpired:
                caught.append("hangs")
                break
            if RACE in printed:
                caught.append("race")
            elif code != 0:
                caught.append("wrong")
        if caught:
            break
    assert caught, f"nobody noticed: {name}"
    if "relaxed" in name:
        assert "race" in caught
