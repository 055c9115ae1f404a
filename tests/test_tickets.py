"""No call is paired with another call: after an error that was caught, in threads, between meshes.

Each call has values of its own, so a sum over different calls is wrong on every rank. A call is
right on all ranks or an error on all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshplan
from meshplan import deterministic_all_reduce_coalesced
from meshplan._calls import calls_of
from meshplan.contract import Contract
from meshplan.flatten import _join
from meshplan.flatten._connect import connect
from meshplan.kernel import why_not
from meshplan.topology import Topology
from tests.doors import DOORS, LONG, Door, Member, Result, attempt, call_values, expected_words
from tests.marks import full
from tests.processes import arrive, run_in_threads, run_ranks, wait_for

pytestmark = pytest.mark.processes

# Of a wait for a rank that comes only after it.
SECONDS = 2.0
# Of calls that wait only if the guard is absent.
BOUND = 30.0


def run(door: Door, world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """``function`` on each rank; the default group has the door's backend."""
    with door.environment():
        return run_ranks(function, world_size, backend=door.backend, timeout=300.0)


def reduce(door: Door, member: Member, call: int) -> Result:
    """This rank's part of a call."""
    values = call_values(call, member.number, dist.get_rank())
    return attempt(lambda: door.reduce(member, values))


def readings(results: list[dict[int, Result]], group: int = 0) -> dict[int, list[str]]:
    """For each call, how it ended on each rank that made it."""
    world_size = len(results)
    return {
        call: [
            found[call].reading(expected_words(call, group, world_size))
            for found in results
            if call in found
        ]
        for call in sorted({call for found in results for call in found})
    }


def assert_right(results: list[list[dict[int, Result]]], calls: Iterable[int]) -> None:
    """Of both groups of each rank."""
    for which in (0, 1):
        how = readings([found[which] for found in results], which + 1)
        assert how == {call: ["right"] * len(results) for call in calls}, which


def assert_same_fate(found: dict[int, list[str]]) -> None:
    """Each call is right on all ranks, or an error on all of them."""
    for call, how in found.items():
        assert "wrong" not in how, (call, found)
        assert "right" not in how or set(how) == {"right"}, (call, found)


@pytest.mark.parametrize(
    ("door", "world_size", "groups", "missed"),
    [
        ("seam", 2, 1, 1),
        ("seam that exchanges placements", 2, 1, 1),
        ("seam that exchanges placements", 3, 2, 1),
        ("functions", 3, 1, 1),
        ("backend", 2, 1, 1),
        full("seam that exchanges placements", 3, 1, 1),
        *(full("seam that exchanges placements", 2, *how) for how in ((2, 2), (3, 1), (2, 3))),
        *(full(door, 2, 2, 2) for door in ("seam", "functions", "seam in a thread")),
        full("seam over axes that exchanges placements", 4, 2, 2),
        full("backend", 3, 1, 1),
    ],
)
def test_rank_late_to_the_first_reductions_joins_no_later_one(
    door: str, world_size: int, groups: int, missed: int
) -> None:
    """The others give its first calls up and go on. It gets their errors for these, and goes on.

    Call n is on group n modulo their number.
    """
    late = world_size - 1
    placement = None if "placements" in door else Topology.unknown(world_size)
    through = Door(door.partition(" ")[0], topology=placement)

    def ranks(rank: int) -> dict[int, Result]:
        seconds = LONG if rank == late else SECONDS
        members = [through.open(seconds)]
        members += [through.open_another(number, seconds) for number in range(1, groups)]
        if "over axes" in door:
            # Equal meshes.
            meshes = [init_device_mesh("cpu", (2, 2)) for _ in members]
            members = [one._replace(mesh=mesh) for one, mesh in zip(members, meshes, strict=True)]
        found = {}

        def work() -> None:
            if rank == late:
                wait_for("gave up", world_size - 1)
            for call in range(missed + groups + 1):
                if call == missed and rank != late:
                    arrive("gave up")
                    # Less than the late rank would wait in a group in which it is alone.
                    through.wait_at_most(BOUND, *members)
                found[call] = reduce(through, members[call % groups], call)

        if "thread" in door:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        return found

    results = run(through, world_size, ranks)
    how = {call: readings(results, call % groups)[call] for call in results[0]}
    assert_same_fate(how)
    for call, fates in how.items():
        if call < missed:
            assert fates == ["MP501"] * world_size, how
            assert [found[call].missing for found in results] == [(late,)] * world_size
        elif door != "backend":
            # A group of the backend may stop, as torch's own do.
            assert fates == ["right"] * world_size, how


@pytest.mark.skipif(why_not() is not None, reason="no compiled library")
def test_rank_late_to_the_memory_of_a_group_joins_no_later_call() -> None:
    """It has agreed on the group with the others, which then give up on it."""
    through, world_size = Door("functions"), 2

    def ranks(rank: int) -> dict[int, Result]:
        late = rank == 1
        members = [through.open(LONG if late else SECONDS)]
        members.append(through.open_another(1, LONG if late else SECONDS))

        def connect_late(*given: Any, **options: Any) -> Any:
            wait_for("gave up", 1)
            return connect(*given, **options)

        with mock.patch.object(_join, "connect", connect_late if late else connect):
            found = {0: reduce(through, members[0], 0)}
        if not late:
            arrive("gave up")
            through.wait_at_most(BOUND, *members)
        return found | {call: reduce(through, members[call % 2], call) for call in (1, 2)}

    results = run(through, world_size, ranks)
    how = [readings(results, call % 2)[call] for call in range(3)]
    assert how == [["MP501"] * 2, ["right"] * 2, ["right"] * 2], results


@pytest.mark.parametrize("door", DOORS)
def test_groups_of_the_same_ranks_are_told_apart_between_threads(door: str) -> None:
    """Each thread has a group. On each rank, another of them comes first."""
    through, world_size, calls = Door(door), 2, 20

    def ranks(rank: int) -> list[dict[int, Result]]:
        through.open(BOUND)
        members = [through.open_another(number, BOUND) for number in (1, 2)]
        found: list[dict[int, Result]] = [{}, {}]

        def work(which: int) -> None:
            if which == rank:
                arrive("first threads")
            wait_for("first threads", world_size)
            # Not needed for the result: the other thread finds this one in its first reduction.
            time.sleep(0.3 * (which != rank))
            for call in range(1, calls + 1):
                found[which][call] = reduce(through, members[which], call)
                if found[which][call].error:
                    return

        run_in_threads(partial(work, rank), partial(work, 1 - rank))
        return found

    assert_right(run(through, world_size, ranks), range(1, calls + 1))


@pytest.mark.parametrize(
    ("door", "warm"),
    [
        ("seam", False),
        # The memory of a group keeps the time-out with which the group was created.
        full("seam", True),
        *(full(door, warm) for door in ("functions", "backend") for warm in (False, True)),
    ],
)
def test_groups_of_the_same_ranks_are_told_apart_in_one_thread(door: str, warm: bool) -> None:
    """Ranks that use two groups in different order wait for each other, as over plain groups."""
    through, world_size = Door(door, topology=Topology.unknown(2)), 2

    def ranks(rank: int) -> list[dict[int, Result]]:
        through.open(BOUND)
        members = [through.open_another(number, BOUND) for number in (1, 2)]
        found: list[dict[int, Result]] = [{}, {}]
        if warm:
            for which, member in enumerate(members):
                found[which][1] = reduce(through, member, 1)
        through.wait_at_most(SECONDS, *members)
        arrive("warm")
        wait_for("warm", world_size)
        for which in (rank, 1 - rank):
            found[which][2] = reduce(through, members[which], 2)
        return found

    results = run(through, world_size, ranks)
    for which in (0, 1):
        how = readings([found[which] for found in results], which + 1)
        if warm:
            assert how[1] == ["right"] * world_size
        assert_same_fate(how)


@pytest.mark.parametrize("door", ["functions", "backend"])
def test_asynchronous_calls_on_two_groups_need_no_common_order(door: str) -> None:
    """Each group has its own order; both calls are under way before the first wait."""
    through, world_size = Door(door), 2

    def ranks(rank: int) -> list[dict[int, Result]]:
        through.open(LONG)
        members = [through.open_another(number, LONG) for number in (1, 2)]
        for member in members:
            # Agreement rounds of asynchronous calls are held by the caller, in its order.
            start(member, 0).wait()
        found: list[dict[int, Result]] = [{}, {}]
        for call in (1, 2):
            works = {which: start(members[which], call) for which in (rank, 1 - rank)}
            for which, work in works.items():
                found[which][call] = attempt(lambda w=work, m=members[which], c=call: end(w, m, c))  # type: ignore[misc]
        return found

    tensors: dict[tuple[int, int], torch.Tensor] = {}

    def start(member: Member, call: int) -> Any:
        values = call_values(call, member.number, dist.get_rank())
        tensors[member.number, call] = values
        if door == "backend":
            return dist.all_reduce(values, group=member.group, async_op=True)
        return meshplan.deterministic_all_reduce(values, group=member.group, async_op=True)

    def end(work: Any, member: Member, call: int) -> torch.Tensor:
        work.wait()
        return tensors[member.number, call]

    assert_right(run(through, world_size, ranks), (1, 2))


# What one rank passes by mistake: an error before anything is sent.
MISTAKES: dict[str, Callable[[Door, Member, torch.Tensor], torch.Tensor]] = {
    "average of integers": lambda door, member, x: door.reduce(member, x.long(), "avg"),
    "elements that share memory": lambda door, member, x: door.reduce(member, x[:1].expand(8)),
    "no elements": lambda door, member, x: door.reduce(member, x.to("meta")),
    "no tensor": lambda door, member, x: door.reduce(member, 5),  # type: ignore[arg-type]
    "two tensors": lambda door, member, x: member.group.allreduce([x, x]).result()[0],  # type: ignore[call-arg, arg-type]
}


WRONG_CALLS = (
    ("seam", "average of integers"),
    ("seam", "no elements"),
    ("functions", "average of integers"),
    ("functions", "no elements"),
    ("functions", "no tensor"),
    ("functions", "elements that share memory"),
    ("backend", "elements that share memory"),
    ("backend", "no elements"),
    ("backend", "two tensors"),
)
# Whether it is a later call of its group, and what makes reductions work again.
HOW = ((False, "shutdown"), (True, "group"), (True, "shutdown"), (False, "group"))


@pytest.mark.parametrize(
    ("door", "mistake", "warm", "ending"),
    # In the quick run, first and later calls in turn.
    [
        (*call, *how) if number % 2 == place else full(*call, *how)
        for number, call in enumerate(WRONG_CALLS)
        for place, how in enumerate(HOW)
    ],
)
def test_call_that_fails_on_one_rank_is_paired_with_no_other(
    door: str, mistake: str, warm: bool, ending: str
) -> None:
    through, world_size = Door(door, topology=Topology.unknown(2)), 2
    calls = (1, 2, 3, 4)

    def ranks(rank: int) -> dict[int, Result]:
        member = through.open(BOUND)
        found = {0: reduce(through, member, 0)} if warm else {}
        for call in calls:
            found[call] = (
                attempt(lambda: MISTAKES[mistake](through, member, call_values(1, 0, rank)))
                if (rank, call) == (1, 1)
                else reduce(through, member, call)
            )
        arrive("stopped")
        wait_for("stopped", world_size)
        if ending == "shutdown":
            through.wait_at_most(LONG, member)
            meshplan.shutdown()
        else:
            member = through.open_another(0)
        found[5] = reduce(through, member, 5)
        return found

    results = run(through, world_size, ranks)
    how = readings(results)
    assert_same_fate(how)
    assert results[1][1].code.startswith("MP4"), results[1][1]
    if warm:
        assert how[0] == ["right"] * world_size
    assert how[5] == ["right"] * world_size, how


def test_call_over_a_group_of_one_rank_is_none_of_its_peers() -> None:
    through = Door("functions")

    def ranks(rank: int) -> dict[int, Result]:
        alone = [dist.new_group([one]) for one in range(2)]
        if rank == 1:
            deterministic_all_reduce_coalesced([torch.ones(1)], group=alone[1])
        return {1: reduce(through, through.open(BOUND), 1)}

    assert readings(run_ranks(ranks, 2, timeout=300.0)) == {1: ["right", "right"]}


def test_empty_list_of_one_rank_is_a_call() -> None:
    """The other rank's list meets no later one, on whichever device it is."""

    def ranks(rank: int) -> list[object]:
        found = []
        for call in (1, 2):
            values = [] if (rank, call) == (1, 1) else [call_values(call, 0, rank)]
            found.append(
                attempt(lambda v=values: torch.cat(deterministic_all_reduce_coalesced(v)))  # type: ignore[misc]
            )
        group: Any = dist.group.WORLD
        return [*(one.code for one in found[rank:]), calls_of(group).take("cuda").number]

    assert run_ranks(ranks, 2, timeout=300.0) == [["MP703", "MP503", 1], ["MP703", 2]]


# How the call of one rank differs.
DIFFERENCES: dict[str, Callable[[Door, Member, int, int], torch.Tensor]] = {
    "shape": lambda door, member, call, rank: door.reduce(member, call_values(call, 0, rank, 9)),
    "dtype": lambda door, member, call, rank: door.reduce(
        member, call_values(call, 0, rank, dtype=torch.float64)
    ),
    "operation": lambda door, member, call, rank: door.reduce(
        member, call_values(call, 0, rank), "max"
    ),
    "contract": lambda door, member, call, rank: door.reduce(
        member, call_values(call, 0, rank), contract=Contract("rank")
    ),
}


@pytest.mark.parametrize("path", ["auto", full("exchange")])
@pytest.mark.parametrize("door", DOORS)
def test_calls_after_different_arguments_are_right(door: str, path: str) -> None:
    """Every rank raises MP703 for that call, and names a rank; the next call is right."""
    through, world_size = Door(door, path), 3
    # The contract of the backend is its group's.
    differences = [name for name in DIFFERENCES if (door, name) != ("backend", "contract")]

    def ranks(rank: int) -> dict[int, Result]:
        member = through.open()
        found = {0: reduce(through, member, 0)}
        for number, name in enumerate(differences):
            call = 1 + 3 * number
            found[call] = (
                attempt(lambda n=name, c=call: DIFFERENCES[n](through, member, c, rank))  # type: ignore[misc]
                if rank == 1
                else reduce(through, member, call)
            )
            for later in (call + 1, call + 2):
                found[later] = reduce(through, member, later)
        return found

    results = run(through, world_size, ranks)
    for call, how in readings(results).items():
        differs = call % 3 == 1
        assert how == ["MP703" if differs else "right"] * world_size, (call, how)
        assert all(found[call].names_a_rank() for found in results) or not differs


def test_stop_of_a_group_holds_for_the_functions_and_the_seam() -> None:
    """Different calls stop a process group, also for a door that was not in the failed call."""
    functions, seam = Door("functions"), Door("seam", topology=Topology.unknown(2))

    def ranks(rank: int) -> dict[int, Result]:
        member = seam.open(BOUND)
        found = {0: reduce(functions, member, 0), 1: reduce(seam, member, 1)}
        values = call_values(2, 0, rank)
        if rank == 1:
            values = values.long()
        # The other rank's next call comes to it.
        found[2] = attempt(lambda: functions.reduce(member, values, "avg"))
        found[3] = reduce(functions, member, 3)
        arrive("stopped")
        wait_for("stopped", 2)
        found[4] = reduce(seam, member, 4)
        return found

    how = readings(run(functions, 2, ranks))
    assert how[0] == how[1] == ["right"] * 2
    assert how[2] == ["MP703", "MP412"]
    assert how[3] == ["MP503", "MP703"]
    assert how[4] == ["MP503"] * 2
