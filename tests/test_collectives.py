"""The paths over real gloo processes: golden bits, any size, any strides, any dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor

from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import FallbackRefusedError
from meshplan.execute import Purpose, StepGroups, _gloo, report, run_reduction
from meshplan.execute._gloo import GlooWire
from meshplan.execute._header import tensor_header
from meshplan.execute._wire import wait_for_group
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.inputs import FLOATS, INTEGERS, draw_leaves, golden_cases
from tests.marks import full, longest
from tests.processes import run_ranks
from tests.steps import make_step
from tests.traffic import Sent

pytestmark = pytest.mark.processes


def step(path: str, op: str = "sum", sizes: tuple[int, ...] = (3,), **more: Any) -> Step:
    return make_step(sizes, path=path, op=op, **more)


def run(
    tensor: Tensor, wanted: Step, groups: StepGroups | None = None, *, strict: bool = False
) -> Tensor:
    """Run a step; on the default group, if ``groups`` are not given."""
    result = run_reduction(
        tensor,
        wanted,
        groups or StepGroups(dist.group.WORLD),
        purpose=Purpose("asked", "planned", "world"),
        strict=strict,
    )
    return torch.ops._c10d_functional.wait_tensor(result)


def groups_of(wanted: Step) -> StepGroups:
    """New groups of this rank, whose rank is its position. All ranks of the world must call it."""
    ranks = torch.arange(wanted.group_size)

    def mine(rows: Tensor) -> dist.ProcessGroup:
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]

    gather = None
    if wanted.gather_axes:
        axes = wanted.gather_axes
        rest = [axis for axis in wanted.axes if axis not in axes]
        grid = ranks.view(wanted.sizes).permute(*rest, *axes)
        gather = mine(grid.reshape(-1, math.prod(wanted.sizes[axis] for axis in axes)))
    if wanted.inner == 1:
        return StepGroups(dist.group.WORLD, gather=gather)
    blocks = ranks.view(-1, wanted.inner)
    return StepGroups(None, inner=mine(blocks), outer=mine(blocks.t()), gather=gather)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, full(4), full(6), full(9), full(16)])
def test_every_path_matches_the_golden_file(world_size: int) -> None:
    cases = golden_cases(ranks=world_size)
    assert len(cases) >= 4

    def ranks(rank: int) -> None:
        for (number, case), path in itertools.product(enumerate(cases), ("exchange", "reference")):
            how: dict[str, Any] = {"contract": case.contract, "divisor": case.divisor}
            found = run(case.leaves[rank], step(path, case.op, case.shape, **how))
            assert_bitwise_equal(found, case.result, f"case {number} {path}")

    run_ranks(ranks, world_size)


def draw_all(numels: Sequence[int], world_size: int) -> Iterator[list[Tensor]]:
    """The leaves of all ranks, of every dtype; drawn once, before the ranks are forked."""
    for numel, dtype in itertools.product(numels, (*FLOATS, *INTEGERS)):
        yield draw_leaves(world_size, numel, dtype, specials=True)


@pytest.mark.parametrize(("world_size", "sizes"), [(3, (3,)), full(6, (2, 3))])
def test_any_number_of_elements_is_reduced(world_size: int, sizes: tuple[int, ...]) -> None:
    """Fewer elements than ranks, slices that do not divide evenly, none at all."""
    cases = [
        (leaves, contract, reduce_leaves(leaves, "sum", sizes, contract))
        for leaves in draw_all((0, 1, 2, 3, 5, 7, 16, 17, 31, 1000), world_size)
        for contract in (Contract(), Contract(order="rank"))
    ]

    def ranks(rank: int) -> None:
        for leaves, contract, expected in cases:
            for path in ("exchange", "reference"):
                found = run(leaves[rank], step(path, "sum", sizes, contract=contract))
                where = f"{path} {contract.id} {expected.dtype} {expected.numel()}"
                assert_bitwise_equal(found, expected, where)

    run_ranks(ranks, world_size)


def test_wire_dtype_matches_the_tensor() -> None:
    """16-bit values travel as 16 bits."""

    def ranks(rank: int) -> list[torch.dtype]:
        with Sent() as sent:
            run(torch.ones(7, dtype=torch.bfloat16), step("exchange"))
            run(torch.ones(7, dtype=torch.bfloat16), step("reference"))
        assert sent.elements == [9, 3, 3 * 7]
        return sent.dtypes

    # The reference sends all of a small message to every rank at once, behind the header.
    assert run_ranks(ranks, 3) == [[torch.bfloat16] * 3] * 3


def test_each_empty_collective_is_waited_for() -> None:
    def ranks(rank: int) -> list[str]:
        empty, group = torch.ones(0), dist.group.WORLD
        assert group is not None
        header = tensor_header(empty, step("exchange", sizes=(2,)), "exchange", False)
        wire, waited = GlooWire(StepGroups(group), (rank, header)), []
        found = [wire.all_gather(empty, group), wire.all_gather(torch.ones(0, 2), group)]
        found.append(wire.all_to_all(empty, [0, 0], [0, 0], group))

        def wait(work: dist.Work, group: dist.ProcessGroup) -> None:
            waited.append(work)
            wait_for_group(work, group)

        with mock.patch.object(_gloo, "wait_for_group", wait):
            shapes = [str(tuple(wire.wait(one).shape)) for one in found]
        assert len(set(waited)) == 3
        return shapes

    assert run_ranks(ranks, 2) == [["(0,)", "(0, 2)", "(0,)"]] * 2


def test_native_average_divides_once() -> None:
    def ranks(rank: int) -> list[float]:
        wanted = step("native", "avg", (2, 3), contract=None, divisor=3)
        return run(torch.full((2,), float(rank)), wanted).tolist()

    assert run_ranks(ranks, 6) == [[5.0, 5.0]] * 6


def test_norms_are_reduced() -> None:
    def ranks(rank: int) -> None:
        small = [order_sensitive(5, rank=r, world_size=3, seed=3).clamp(-9, 9) for r in range(3)]
        wanted = reduce_leaves([leaf**2.0 for leaf in small], "sum", (3,)) ** 0.5
        assert_bitwise_equal(run(small[rank], step("exchange", norm=2.0)), wanted)

    run_ranks(ranks, 3)


NESTED = [
    ((2, 2), 2),
    ((4,), 2),
    full((2, 3), 3),
    full((8,), 4),
    longest((2, 2, 2), 2),
    full((3, 4), 2),
    longest((3, 4), 4),
    full((12,), 4),
    longest((2, 6), 2),
]
TREES = (
    Contract(),
    Contract(accumulate="float64"),
    Contract(rounding="node"),
    Contract(accumulate="float64", rounding="node"),
)


@pytest.mark.parametrize(("sizes", "inner"), NESTED, ids=str)
def test_hierarchical_equals_flat(sizes: tuple[int, ...], inner: int) -> None:
    world_size = math.prod(sizes)
    cases = []
    for leaves in draw_all((0, 1, 5, 31, 1000), world_size):
        mean = "avg" if leaves[0].is_floating_point() else "sum"
        for op, contract in zip(("sum", mean, "max", "product"), TREES, strict=True):
            how: dict[str, Any] = {"contract": contract, "divisor": 3 if op == "avg" else None}
            expected = reduce_leaves(leaves, op, sizes, **how)
            cases.append((leaves, step("exchange", op, sizes, inner=inner, **how), expected))

    def ranks(rank: int) -> None:
        groups = groups_of(step("exchange", sizes=sizes, inner=inner))
        assert groups.position == rank
        for leaves, wanted, expected in cases:
            found = run(leaves[rank], wanted, groups)
            where = f"{wanted.op} {wanted.contract} {expected.dtype} {expected.numel()}"
            assert_bitwise_equal(found, expected, where)

    run_ranks(ranks, world_size)


def shard(whole: Tensor, wanted: Step, rank: int) -> Tensor:
    """The shard of ``rank``, split as by ``torch.chunk``."""
    where = (torch.arange(wanted.group_size).view(wanted.sizes) == rank).nonzero()[0].tolist()
    for axis, dim in wanted.scatter:
        chunks = whole.chunk(wanted.sizes[axis], dim)
        empty = whole.narrow(dim, 0, 0)
        whole = chunks[where[axis]] if where[axis] < len(chunks) else empty
    return whole.contiguous()


@pytest.mark.parametrize(
    ("sizes", "inners", "scatter"),
    [
        ((2, 2), (1, 2), ((0, 0),)),
        ((2, 3), (1, 3), ((0, 0), (1, 0))),
        ((2, 3), (1, 3), ((1, 1),)),
        full((8,), (1, 2, 4), ((0, 0),)),
        full((2, 2, 2), (1, 2, 4), ((1, 0),)),
        longest((2, 2, 2), (1, 2, 4), ((2, 1),)),
        full((3, 4), (1, 2, 4), ((0, 0), (1, 1))),
        longest((3, 4), (1, 2, 4), ((1, 0),)),
        full((2, 3, 2), (1, 2, 6), ((0, 1),)),
    ],
    ids=str,
)
def test_hierarchical_shards_equal_flat(
    sizes: tuple[int, ...],
    inners: tuple[int, ...],
    scatter: tuple[tuple[int, int], ...],
) -> None:
    """Shards that do not divide evenly, some of them empty."""
    world_size = math.prod(sizes)
    # Drawn and reduced once, for all ranks and blocks.
    cases = []
    for shape in ((1, 1), (2, 1), (5, 3), (7, 4), (3, 13), (16, 24)):
        for dtype, contract in (
            (torch.float32, Contract()),
            (torch.bfloat16, Contract()),
            (torch.float32, Contract(accumulate="float64")),
            (torch.bfloat16, Contract(rounding="node")),
        ):
            leaves = draw_leaves(world_size, math.prod(shape), dtype)
            whole = reduce_leaves(leaves, "sum", sizes, contract)
            cases.append((shape, leaves, contract, whole.view(shape)))

    def ranks(rank: int) -> None:
        for inner in inners:
            more: dict[str, Any] = {"inner": inner, "scatter": scatter}
            groups = groups_of(step("exchange", sizes=sizes, **more))
            for shape, leaves, contract, whole in cases:
                wanted = step("exchange", sizes=sizes, contract=contract, **more)
                found = run(leaves[rank].view(shape), wanted, groups)
                assert found.is_contiguous()
                assert_bitwise_equal(found, shard(whole, wanted, rank), f"{inner} {shape}")

    run_ranks(ranks, world_size)


def test_only_partial_results_travel_in_the_accumulator_dtype() -> None:
    def ranks(rank: int) -> list[list[torch.dtype]]:
        groups = groups_of(step("exchange", sizes=(2, 2), inner=2))
        found = []
        for dtype, contract, op in (
            (torch.bfloat16, Contract(), "sum"),
            (torch.float32, Contract(accumulate="float64"), "sum"),
            (torch.bfloat16, Contract(rounding="node"), "sum"),
            (torch.float16, Contract(), "max"),
            (torch.int32, Contract(), "sum"),
        ):
            wanted = step("exchange", op, (2, 2), inner=2, contract=contract)
            with Sent() as sent:
                run(torch.ones(7, dtype=dtype), wanted, groups)
            found.append(sent.dtypes)
        return found

    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert (
        run_ranks(ranks, 4)
        == [
            [
                [half, single, half, half],
                [single, double, single, single],
                [half] * 4,
                [torch.float16] * 4,
                [torch.int32] * 4,
            ]
        ]
        * 4
    )


@pytest.mark.parametrize("cut", [False, True])
def test_hierarchical_sends_less_between_nodes(cut: bool) -> None:
    """Eight ranks on two nodes of four: of each summand a quarter of the flat bytes leaves."""
    more: dict[str, Any] = {"scatter": ((0, 0), (1, 0))} if cut else {}
    numel = 80

    def ranks(rank: int) -> list[int]:
        found = []
        for inner in (1, 4):
            wanted = step("exchange", sizes=(2, 4), inner=inner, **more)
            groups = groups_of(wanted)
            for dtype in (torch.float32, torch.bfloat16):
                leaves = draw_leaves(8, numel, dtype)
                with Sent(per_node=4) as sent:
                    result = run(leaves[rank], wanted, groups)
                whole = reduce_leaves(leaves, "sum", (2, 4))
                assert_bitwise_equal(result, shard(whole, wanted, rank))
                found.append(sent.off_node)
        return found

    for flat_4, flat_2, nested_4, nested_2 in run_ranks(ranks, 8):
        # Half of the group is on the other node, and gets 1 / 8 of the summand each.
        assert (flat_4, flat_2) == ((2 - cut) * numel // 2 * 4, (2 - cut) * numel // 2 * 2)
        assert nested_4 * 4 == flat_4
        # Results travel in bfloat16, partial results in float32.
        assert nested_2 * 4 == (flat_2 * 2 if cut else flat_2 * (4 + 2) // (2 * 2))


HEADERS_AND_ALL_REDUCES = ("all_to_all_single",) * 2 + ("all_reduce",) * 2


class TestRefusals(TestCase):
    def test_hierarchical_dtype_outside_the_contract_falls_back(self) -> None:
        cuts: list[dict[str, Any]] = [{}, {"scatter": ((0, 0), (1, 0))}]
        steps = [step("exchange", "max", (2, 3), inner=3, **more) for more in cuts]

        def ranks(rank: int) -> tuple[list[bool], list[bool], list[tuple[str, ...]]]:
            mine = torch.arange(6) == rank
            mine[2] = False
            groups = groups_of(steps[0])
            whole, part = (run(mine, wanted, groups) for wanted in steps)
            return whole.tolist(), part.tolist(), [e["sends"] for e in report().fallbacks]

        for rank, found in enumerate(run_ranks(ranks, 6)):
            expected = [True, True, False, True, True, True]
            assert found == (expected, [expected[rank]], [HEADERS_AND_ALL_REDUCES])

    def test_dtype_outside_the_contract_falls_back(self) -> None:
        def ranks(rank: int) -> tuple[list[bool], list[dict[str, Any]], str]:
            mine = torch.tensor([rank == 0, False, True])
            found = run(mine, step("exchange", "max", sizes=(2,)))
            entries = list(report().fallbacks)
            with pytest.raises(FallbackRefusedError) as caught:
                run(mine, step("exchange", "max", sizes=(2,)), strict=True)
            return found.tolist(), entries, str(caught.value)

        found = run_ranks(ranks, 2)
        for values, entries, _ in found:
            assert values == [True, False, True]
            (entry,) = entries
            assert (entry["ran"], entry["dtype"], entry["sends"]) == (
                "native",
                "bool",
                ("all_to_all_single", "all_reduce"),
            )
        self.assertExpectedInline(
            found[0][2],
            """MP701: asked: torch.bool would run on the backend's own max, in its own order; convert the tensor, or pass strict=False""",
        )
        self.assertExpectedInline(
            entry["why"],
            """MP412: torch.bool is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8""",
        )
