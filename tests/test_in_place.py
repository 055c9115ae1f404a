"""The in-place exchange of large messages over gloo: bits, messages sent, and its choice."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import CollectiveError
from meshplan.execute import (
    Purpose,
    StepGroups,
    clear_report,
    report,
    run_reduction,
)
from meshplan.execute._gloo import GlooWire
from meshplan.execute.paths import _exchange
from meshplan.kernel import _operators, combine_leaves, large_pages, reduce_into
from meshplan.kernel._host_peers import LARGE_BYTES
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.marks import full
from tests.processes import arrive, run_ranks, wait_for
from tests.steps import make_step
from tests.traffic import count_sent

pytestmark = pytest.mark.processes

FUNCTIONAL = ("all_to_all_single", "all_gather_into_tensor")


def step(ranks: int, op: str = "sum", **more: Any) -> Step:
    return make_step(more.pop("sizes", (ranks,)), op=op, **more)


def run(tensor: Tensor, wanted: Step) -> tuple[Tensor, tuple[str, ...]]:
    """The result on the default group, and the collectives in the report."""
    clear_report()
    purpose = Purpose("asked", "planned", "world")
    result = run_reduction(tensor, wanted, StepGroups(dist.group.WORLD), purpose=purpose)
    (entry,) = report().entries
    return torch.ops._c10d_functional.wait_tensor(result), entry["sends"]


def leaf(numel: int, rank: int, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return order_sensitive(numel, rank=rank, world_size=ranks, dtype=dtype, specials=True)


def repeat(one: Tensor, numel: int) -> Tensor:
    """A long message that is drawn and summed in no time."""
    return one.repeat(numel // one.numel() + 1)[:numel]


@pytest.mark.parametrize("world_size", [2, full(5)])
def test_uneven_slices_have_the_bits_of_the_definition(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices that are shorter than others, or empty: both ways give the bits of the definition."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int8):
        for numel in (*range(world_size, 4 * world_size + 1), 61, 12288, 30001):
            leaves = [leaf(numel, r, world_size, dtype) for r in range(world_size)]
            for op, order in (("sum", "tree"), ("sum", "rank"), ("max", "tree")):
                wanted = step(world_size, op, contract=Contract(order=order))  # type: ignore[arg-type]
                expected = reduce_leaves(leaves, op, (world_size,), wanted.contract)
                cases.append((leaves, wanted, expected, f"{dtype} {numel} {op} {order}"))

    def ranks(rank: int) -> None:
        for leaves, wanted, expected, what in cases:
            for least in (1, 1 << 30):
                monkeypatch.setattr(GlooWire, "in_place_bytes", least)
                found, sends = run(leaves[rank], wanted)
                assert ("send" in sends) == (least == 1)
                assert_bitwise_equal(found, expected, what)

    run_ranks(ranks, world_size)


@pytest.mark.parametrize("world_size", [2, full(4)])
def test_bits_match_around_the_size_threshold(world_size: int) -> None:
    def ranks(rank: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            least = GlooWire.in_place_bytes // dtype.itemsize
            leaves = [leaf(999, r, world_size, dtype) for r in range(world_size)]
            expected = reduce_leaves(leaves, "sum", (world_size,))
            for numel in (least - world_size, least, least + 1, 3 * least + 7):
                found, sends = run(repeat(leaves[rank], numel), step(world_size))
                assert ("send" in sends) == (numel >= least)
                assert_bitwise_equal(found, repeat(expected, numel), f"{dtype} {numel}")

    run_ranks(ranks, world_size)


def test_several_axes_and_averages_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlooWire, "in_place_bytes", 1)

    def ranks(rank: int) -> None:
        leaves = [leaf(1003, r, 6) for r in range(6)]
        for divisor in (6, 3):
            found, sends = run(leaves[rank], step(6, "avg", sizes=(2, 3), divisor=divisor))
            assert "send" in sends
            assert_bitwise_equal(found, reduce_leaves(leaves, "avg", (2, 3), divisor=divisor))

    run_ranks(ranks, 6)


def test_message_in_huge_pages_is_exact() -> None:
    numel = LARGE_BYTES // 4 + 3

    def ranks(rank: int) -> None:
        found, sends = run(repeat(leaf(999, rank, 2), numel), step(2))
        assert "send" in sends
        expected = reduce_leaves([leaf(999, r, 2) for r in range(2)], "sum", (2,))
        assert_bitwise_equal(found, repeat(expected, numel))

    run_ranks(ranks, 2)


def test_any_strides_are_reduced_and_inputs_stay() -> None:
    forms = ("in place", "exchange", "reference", "native")
    views = [
        lambda t: t,
        lambda t: t[1],
        lambda t: t[2:3, 3:4].squeeze(),
        lambda t: t[:, ::2],
        lambda t: t.t(),
        lambda t: t[:1].expand(4, 10),
        lambda t: t.view(1, 6, 10, 1).permute(3, 2, 0, 1),
        lambda t: t.requires_grad_().mul(1),
        lambda t: torch.nn.Parameter(t),
    ]

    def ranks(rank: int) -> None:
        for form, view in itertools.product(forms, views):
            GlooWire.in_place_bytes = 1 if form == "in place" else 1 << 30
            base = leaf(60, rank, 3).view(6, 10)
            mine = view(base)
            version, before = mine._version, mine.detach().clone()
            leaves = [view(leaf(60, r, 3).view(6, 10)).detach() for r in range(3)]
            path = "exchange" if form == "in place" else form
            found, sends = run(mine, step(3, path=path))
            assert ("send" in sends) == (form == "in place")
            assert found.is_contiguous()
            assert found.shape == mine.shape
            assert not found.requires_grad
            if form != "native":
                assert_bitwise_equal(found, reduce_leaves(leaves, "sum", (3,)))
            assert_bitwise_equal(mine.detach(), before)
            assert mine._version == version
            assert found.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()

    run_ranks(ranks, 3)


def test_each_rank_sends_its_pieces_and_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlooWire, "in_place_bytes", 1)

    def ranks(rank: int) -> tuple[tuple[str, ...], list[int]]:
        (_, sends), sent = count_sent(lambda: run(torch.ones(11), step(4)))
        return sends, sent

    # Slices have 3 elements, the last one has 2. Headers are compared before.
    three = [12] * 3
    pieces = [[12, 12, 8], [12, 8, 12], [8, 12, 12], three]
    round_of_messages = ("recv", "recv", "recv", "send", "send", "send")
    expected = ("all_to_all_single", *round_of_messages, *round_of_messages)
    found = run_ranks(ranks, 4)
    assert [sends for sends, _ in found] == [expected] * 4
    assert [sent for _, sent in found] == [piece + three for piece in pieces]


def test_larger_groups_use_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GlooWire, "in_place_bytes", 1)
    monkeypatch.setattr(GlooWire, "in_place_ranks", 2)

    def ranks(rank: int) -> tuple[str, ...]:
        return run(torch.ones(12), step(3))[1]

    assert run_ranks(ranks, 3) == [FUNCTIONAL] * 3


def test_tracing_sees_one_operator() -> None:
    numel = 2 * GlooWire.in_place_bytes

    def ranks(rank: int) -> list[list[str]]:
        group, found = dist.group.WORLD, []
        for mode in ("real", "fake", "symbolic"):

            def reduce(tensor: Tensor) -> Tensor:
                purpose = Purpose("asked", "planned", "world")
                return run_reduction(tensor, step(2), StepGroups(group), purpose=purpose)

            graph = make_fx(reduce, tracing_mode=mode)(torch.ones(numel)).graph
            names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
            found.append([n for n in names if "view" not in n])
        return found

    assert run_ranks(ranks, 2) == [[["meshplan.reduction.default"]] * 3] * 2


@pytest.mark.parametrize("compiled", [(0,), full((0, 1, 2))])
def test_graphs_and_eager_calls_issue_the_same_collectives(compiled: tuple[int, ...]) -> None:
    """Sizes that go in place and sizes that do not, by one graph that was traced for any size."""

    def ranks(rank: int) -> None:
        def reduce(tensor: Tensor) -> Tensor:
            purpose = Purpose("asked", "planned", "world")
            result = run_reduction(tensor, step(3), StepGroups(dist.group.WORLD), purpose=purpose)
            return torch.ops._c10d_functional.wait_tensor(result)

        call = (
            make_fx(reduce, tracing_mode="symbolic")(torch.ones(50)) if rank in compiled else reduce
        )
        leaves = [leaf(999, r, 3) for r in range(3)]
        expected = reduce_leaves(leaves, "sum", (3,))
        for numel in (7, GlooWire.in_place_bytes + 1, 50):
            assert_bitwise_equal(call(repeat(leaves[rank], numel)), repeat(expected, numel))

    run_ranks(ranks, 3, collective_timeout=10)


def test_simulated_ranks_keep_functional_collectives() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with LocalTensorMode(2) as simulated:
            numel = 2 * GlooWire.in_place_bytes
            summand = simulated.rank_map(lambda r: torch.full((numel,), float(r + 1)))
            found, sends = run(summand, step(2))
        assert sends == FUNCTIONAL
        assert set(found._local_tensors[1].tolist()) == {3.0}
        assert run(torch.ones(numel), step(2))[1] == FUNCTIONAL
    finally:
        dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("leaves_at", ["start", "reduction"])
def test_absent_rank_is_an_error_within_the_timeout(leaves_at: str) -> None:
    numel = GlooWire.in_place_bytes

    def leave(*_: object) -> None:
        wait_for("the error", 2)
        raise KeyError

    def ranks(rank: int) -> None:
        if rank == 2:
            if leaves_at == "reduction":
                # After the headers: the other ranks are in the all-to-all of the data.
                _exchange._exchange_in_place = leave  # type: ignore[assignment]
                with pytest.raises(KeyError):
                    run(torch.ones(3 * numel), step(3))
            else:
                wait_for("the error", 2)
            return
        with pytest.raises(CollectiveError, match=r"ranks? (\d, )?2 did not report"):
            run(torch.ones(3 * numel), step(3))
        arrive("the error")

    run_ranks(ranks, 3, collective_timeout=3)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("target", [None, 0, 1, 2])
def test_output_may_be_a_leaf_or_separate(
    compiled: bool, target: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(_operators, "_serves", lambda leaves: False)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for numel in (0, 1, 4095, 4097, 10000):
            leaves = [leaf(numel, r, 3, dtype) for r in range(3)]
            expected = reduce_leaves(leaves, "sum", (3,))
            out = torch.empty(numel, dtype=dtype) if target is None else leaves[target]
            reduce_into(out, leaves, "sum", (3,))
            assert_bitwise_equal(out, expected)


def test_huge_pages_are_requested() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("no large pages on this system")

    def advised(tensor: Tensor) -> bool:
        middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(part, 16) for part in first.split("-"))
                inside = start <= middle < stop
            elif inside and first == "VmFlags:":
                return "hg" in line.split()
        raise AssertionError("no mapping")

    def mapped(nbytes: int) -> Tensor:
        # What the allocator gives may have been advised for another test.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.float32)

    large = mapped(LARGE_BYTES + 4)
    assert not advised(large)
    assert advised(large_pages(large))
    assert not advised(large_pages(mapped(LARGE_BYTES - 4)))
    leaf = mapped(LARGE_BYTES)
    assert advised(combine_leaves([leaf, leaf], "sum", [2]))
