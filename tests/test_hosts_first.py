"""Over gloo, ranks that know which of them share a host reduce there first; bits stay the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.collectives import deterministic_all_reduce
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import GroupAgreementError, PolicyError
from meshplan.execute import Purpose, StepGroups, _gloo, run_reduction
from meshplan.execute._choose import PathRequest, choose
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Message
from meshplan.flatten import HOSTS, Hosts, _connect, _join
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Link, Links
from meshplan.topology._links import CPU_LINKS
from tests.marks import full
from tests.processes import arrive, run_ranks, wait_for
from tests.steps import make_step

pytestmark = pytest.mark.processes

SLOW, FAST = 1e5, 1e11  # bytes per second
FIRST = "ranks of a host reduce first"
PURPOSE = Purpose("all_reduce", "planned", "world", kind="collective")
CONTRACTS = Contract(), Contract(order="rank"), Contract(order="exact")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def timed_hosts(near: int, speed: float) -> Hosts:
    node, network = Link(0.0, CPU_LINKS.node.bandwidth), Link(0.0, speed)
    return Hosts(near, replace(CPU_LINKS, node=node, network=network, launch=1e-4), timed=True)


def why_of(step: Step, tensor: Tensor, strict: bool = False) -> str:
    how: dict[str, Any] = {"over_gloo": True, "strict": strict}
    return choose(PathRequest(step, StepGroups(world()), tensor, "auto", **how)).why


@cache
def known_sums(ranks: int) -> list[tuple[Any, Contract, list[Tensor], Tensor]]:
    """Operations with their summands and sums, which ranks inherit."""
    found = []
    for dtype, op, numel in (
        (torch.float32, "sum", 40_000),
        (torch.bfloat16, "sum", 41),
        (torch.int8, "max", 99),
    ):
        how: Any = {"world_size": ranks, "dtype": dtype, "specials": True}
        leaves = [order_sensitive(numel, rank=r, **how) for r in range(ranks)]
        found += [(op, one, leaves, reduce_leaves(leaves, op, (ranks,), one)) for one in CONTRACTS]
    return found


def reduce_everywhere(near: int, rank: int) -> list[list[bool]]:
    """Compare ``auto`` over slow and over fast links, and ``strict``, with the contract; returns
    whether hosts reduced first, for each call.
    """
    ranks, groups, found = dist.get_world_size(), StepGroups(world()), []
    for speed, strict in ((SLOW, False), (FAST, False), (SLOW, True)):
        HOSTS[world()] = timed_hosts(near, speed)
        found.append(list[bool]())
        for (op, contract, leaves, whole), scatter in itertools.product(
            known_sums(ranks), ((), ((0, 0),))
        ):
            kind = "reduce_scatter" if scatter else "all_reduce"
            step = make_step((ranks,), kind=kind, op=op, contract=contract, scatter=scatter)
            found[-1].append(FIRST in why_of(step, leaves[rank], strict))
            options: Any = {"purpose": PURPOSE, "path": "auto", "strict": strict}
            reduced = run_reduction(leaves[rank], step, groups, **options)
            assert_bitwise_equal(reduced, select_shard(whole, step, rank).contiguous())
    return found


@pytest.mark.parametrize(
    ("ranks", "near", "first"), [(4, 2, True), full(6, 2, True), full(6, 3, False), (3, 1, False)]
)
def test_bits_do_not_depend_on_the_links(ranks: int, near: int, first: bool) -> None:
    known_sums(ranks)
    found = run_ranks(partial(reduce_everywhere, near), ranks)
    assert all(one == found[0] for one in found)
    slow, fast, strict = map(sum, found[0])
    # The choices differ, so the comparison of bits above is one. Three ranks are no subtree.
    assert (slow > fast) == first
    assert (slow != strict) == first


def reduce_in_rounds(rank: int) -> list[list[bool]]:
    """As in a group of more than 32 ranks; blocks halve too."""
    with mock.patch.object(_gloo, "MOST_AT_ONCE", 3):
        step, groups = make_step((4,), inner=2, between="halving"), StepGroups(world())
        for numel in (41, 40_000):
            leaves = [order_sensitive(numel, rank=r, world_size=4) for r in range(4)]
            reduced = run_reduction(leaves[rank], step, groups, purpose=PURPOSE, path="exchange")
            assert_bitwise_equal(reduced, reduce_leaves(leaves, "sum", (4,)))
        return reduce_everywhere(2, rank)


def test_large_groups_reduce_on_hosts_first() -> None:
    known_sums(4)
    found = run_ranks(reduce_in_rounds, 4)
    assert any(found[0][0])
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    try:
        HOSTS[world()] = timed_hosts(8, SLOW)
        assert FIRST in why_of(make_step((64,)), torch.ones(40_000))
    finally:
        dist.destroy_process_group()


def run_graphs(rank: int) -> None:
    HOSTS[world()] = timed_hosts(2, SLOW)
    groups, step = StepGroups(world()), make_step((4,))

    def reduce(tensor: Tensor) -> Tensor:
        found = run_reduction(tensor, step, groups, purpose=PURPOSE, path="auto")
        return torch.ops._c10d_functional.wait_tensor(found)

    for mode in ("symbolic", "fake"):
        call = make_fx(reduce, tracing_mode=mode)(torch.ones(40_000)) if rank % 3 else reduce
        leaves = [order_sensitive(40_000, rank=r, world_size=4) for r in range(4)]
        assert FIRST in why_of(step, leaves[rank])
        assert_bitwise_equal(call(leaves[rank]), reduce_leaves(leaves, "sum", (4,)))


def test_graphs_and_calls_meet_in_one_path() -> None:
    run_ranks(run_graphs, 4, collective_timeout=60)


def check_a_sum(rank: int) -> None:
    leaves = [order_sensitive(40_000, rank=r, world_size=4) for r in range(4)]
    reduced = deterministic_all_reduce(leaves[rank].clone())
    assert_bitwise_equal(reduced, reduce_leaves(leaves, "sum", (4,)))


def find_hosts(links: Mapping[int, str], hosts: int, rank: int) -> tuple[Hosts | None, int]:
    """The hosts that a rank knows, and how often it timed its links."""
    _connect.host = lambda: f"host {rank * hosts // 4}"
    os.environ["MESHPLAN_LINKS"] = links.get(rank, "")
    with mock.patch.object(_join, "_time_messages", wraps=_join._time_messages) as timed:
        for _ in range(2):
            check_a_sum(rank)
        return HOSTS.get(world()), timed.call_count


def test_ranks_agree_on_the_times_of_their_links() -> None:
    found = run_ranks(partial(find_hosts, {}, 2), 4)
    assert found == [found[0]] * 4
    assert found[0][0] is not None
    assert found[0][0].near == 2
    assert found[0][0].timed
    assert found[0][1] == 1


@pytest.mark.parametrize(("links", "hosts", "known"), [({1: "0"}, 2, Hosts(2)), ({}, 1, None)])
def test_links_are_not_timed(links: Mapping[int, str], hosts: int, known: Hosts | None) -> None:
    """If one rank has that turned off, and on one host."""
    assert run_ranks(partial(find_hosts, links, hosts), 4) == [(known, 0)] * 4


def test_file_of_the_first_rank_replaces_times(tmp_path: Path) -> None:
    links = Links(network=Link(1e-5, 1e6), launch=1e-3)
    file = tmp_path / "links.json"
    file.write_text(links.dumps({"ranks": 2}))
    found = run_ranks(partial(find_hosts, {0: str(file), 1: "0", 2: "missing"}, 2), 4)
    assert found == [(Hosts(2, links), 0)] * 4


def refuse_links(text: str, rank: int) -> str:
    _connect.host = lambda: f"host {rank // 2}"
    os.environ["MESHPLAN_LINKS"] = text
    with pytest.raises(PolicyError) as caught:
        deterministic_all_reduce(torch.ones(4))
    os.environ["MESHPLAN_LINKS"] = "0"
    check_a_sum(rank)
    return str(caught.value)


def test_unreadable_links_are_refused_on_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text('{"rails": 4}')
    for text, why in (
        ("missing", "[Errno 2] No such file or directory: 'missing'"),
        (
            str(file),
            'MP211: links have no "rails"; use some of domain, node, network, launch, batch, '
            "group, uses",
        ),
    ):
        fix = "write 0, the path of a file of meshplan links, or unset it"
        message = f"MP402: rank 0: MESHPLAN_LINKS={text}: {why}; {fix}"
        assert run_ranks(partial(refuse_links, text), 4) == [message] * 4


def stay_away(rank: int) -> tuple[int, ...]:
    _connect.host = lambda: f"host {rank // 2}"
    if rank == 3:

        def wait(*given: object) -> Sequence[float]:
            wait_for("the error", 3)
            return 0.0, 0.0

        _join._time_messages = wait
    with pytest.raises(GroupAgreementError) as caught:
        deterministic_all_reduce(torch.ones(4))
    arrive("the error")
    return caught.value.missing


def test_rank_that_stops_while_links_are_timed_is_named() -> None:
    assert run_ranks(stay_away, 4, collective_timeout=8.0) == [(3,)] * 4


def come_late(rank: int) -> Hosts | None:
    """Rank 3 is paused until the others have given up on its messages."""
    _connect.host = lambda: f"host {rank // 2}"
    time_messages = _join._time_messages

    def wait(pg: dist.ProcessGroup, near: int, seconds: float, name: str) -> Sequence[float]:
        if rank == 3:
            wait_for("the others", 3)
            return time_messages(pg, near, seconds, name)
        found = time_messages(pg, near, 0.1, name)
        arrive("the others")
        return found

    with mock.patch.object(_join, "_time_messages", wait):
        for _ in range(2):
            check_a_sum(rank)
    return HOSTS.get(world())


def test_rank_paused_while_links_are_timed_is_waited_for() -> None:
    assert run_ranks(come_late, 4) == [Hosts(2)] * 4


def hide_times(rank: int) -> float:
    _connect.host = lambda: f"host {rank // 2}"
    _join._time_messages = lambda *given: (0.01, 0.01)
    check_a_sum(rank)
    return HOSTS[world()].links.network.bandwidth


def test_starts_that_hide_the_rest_make_no_link_fast() -> None:
    assert run_ranks(hide_times, 4) == [(2**18 - 64) / 0.005] * 4


def reduce_over_the_backend(rank: int) -> str:
    _connect.host = lambda: f"host {rank // 2}"
    _join._time_messages = lambda *given: (1e-4, 1.0)
    leaves = [order_sensitive(40_000, rank=r, world_size=4) for r in range(4)]
    tensor = leaves[rank].clone()
    meshplan.clear_report()
    dist.all_reduce(tensor)
    assert_bitwise_equal(tensor, reduce_leaves(leaves, "sum", (4,)))
    return str(meshplan.report().entries[0]["why"])


def test_backend_reduces_on_hosts_first() -> None:
    assert all(FIRST in why for why in run_ranks(reduce_over_the_backend, 4, backend="meshplan"))


def count_bytes(near: int, dtype: torch.dtype, rank: int) -> int:
    """The bytes of messages that leave this rank for other hosts in an all-reduce."""
    ranks, sent, start = dist.get_world_size(), list[int](), _gloo.start_messages
    HOSTS[world()] = timed_hosts(near, SLOW)

    def count(messages: Sequence[Message], *given: Any) -> Any:
        far = [one for one in messages if one.sends and one.peer // near != rank // near]
        sent.extend(one.tensor.nbytes for one in far)
        return start(messages, *given)

    with mock.patch.object(_gloo, "start_messages", count):
        tensor, groups = torch.ones(1 << 16, dtype=dtype), StepGroups(world())
        run_reduction(tensor, make_step((ranks,)), groups, purpose=PURPOSE, path="auto")
    return sum(sent)


@pytest.mark.parametrize(("hosts", "near"), [(2, 2), full(2, 4), full(4, 2), full(4, 4)])
def test_a_host_sends_what_no_path_can_avoid(hosts: int, near: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = run_ranks(partial(count_bytes, near, dtype), hosts * near)
        # Partials of float32 to the host that finishes them, and results back.
        each = (1 << 16) * (hosts - 1) // hosts
        outgoing = [sum(found[i : i + near]) for i in range(0, len(found), near)]
        assert outgoing == [each * (4 + dtype.itemsize)] * hosts
