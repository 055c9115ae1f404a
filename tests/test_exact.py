"""``order="exact"``: sums that no order of the leaves can change, against exact rationals."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan import definition, kernel
from meshplan.contract import Contract, check_dtype
from meshplan.errors import ContractError, ContractTypeError
from meshplan.planner import Problem, plan
from meshplan.testing import assert_bitwise_equal, order_sensitive, reference_reduce_tensors
from meshplan.topology import Link, Links, Topology
from tests.marks import full, longest
from tests.peer_folds import PeerFolds
from tests.processes import run_ranks
from tests.refusals import refusal

Reduce = Callable[..., Tensor]
EXACT, DOUBLE = Contract("exact"), Contract("exact", "float64")
FORMATS = {
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}
# More than 16 bytes, for the loops over vectors and over what is left, in every dtype.
NUMEL = 9


def draw_leaves(draw: random.Random, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Bit patterns: near or wide exponents, subnormals; columns that cancel; few special values."""
    integer, fraction = FORMATS[dtype]
    width = 8 * dtype.itemsize
    sign, infinity = 1 << width - 1, (1 << width - 1) - (1 << fraction)
    top = infinity >> fraction
    columns = []
    for _ in range(NUMEL):
        base = draw.choice([0, 1, top // 2, top - 3, draw.randrange(top)])
        spread = draw.choice([0, 2, 30, 2 * fraction + 8, top])

        def number(base: int = base, spread: int = spread) -> int:
            exponent = min(max(base + draw.randint(-spread, spread), 0), top - 1)
            significand = draw.choice([0, 1, (1 << fraction) - 1, draw.getrandbits(fraction)])
            return draw.getrandbits(1) * sign | exponent << fraction | significand

        column = [number() for _ in range(count)]
        # Pairs whose sum is 0, up to all of them: what is left is far below their size.
        for i in range(draw.choice([0, 0, 1, count // 3, count // 2])):
            column[i] = column[count - 1 - i] ^ sign
        if draw.random() < 0.1:
            edges = [0, sign, infinity, infinity | sign, infinity | 1, infinity - 1]
            for i in range(draw.choice([1, 2, count])):
                column[i % count] = draw.choice(edges)
        draw.shuffle(column)
        columns.append([bits - (bits & sign) * 2 for bits in column])
    rows = zip(*columns, strict=True)
    return [torch.tensor(row, dtype=integer).view(dtype) for row in rows]


def check_cases(cases: int, *reduces: Reduce, seed: int = 0) -> None:
    """``cases`` times ``NUMEL`` columns equal the oracle, in two orders of the leaves."""
    draw = random.Random(seed)
    for _ in range(cases):
        dtype = draw.choice(list(FORMATS))
        count = draw.choice([1, 2, 3, 8, draw.randint(1, 72)])
        leaves = draw_leaves(draw, count, dtype)
        op = draw.choice(["sum", "sum", "avg"])
        contract = draw.choice([EXACT, EXACT, DOUBLE])
        expected = reference_reduce_tensors(leaves, op, (count,), contract)
        for _ in range(2):
            for reduce in reduces:
                assert_bitwise_equal(reduce(leaves, op, (count,), contract), expected)
            draw.shuffle(leaves)
        # In blocks of any sizes, whose partial sums come in any order.
        ends = sorted(draw.choices(range(1, count + 1), k=draw.randint(1, 4)))
        blocks = [leaves[i:j] for i, j in pairwise([0, *ends, count]) if i < j]
        partials = [definition.combine_leaves(b, op, (len(b),), contract) for b in blocks]
        whole = definition.combine_leaves(leaves, op, (count,), contract)
        turned = definition.combine_leaves(leaves[::-1], op, (count,), contract)
        assert_bitwise_equal(turned, whole)
        draw.shuffle(partials)
        finish = draw.choice([definition, kernel]).finish_partials
        divisor = count if op == "avg" else None
        found = finish(partials, op, (len(blocks),), contract, dtype, divisor)
        assert_bitwise_equal(found, expected)


def check_ties(*reduces: Reduce) -> None:
    """Sums of few bits far apart: many are next to the middle of two numbers, and some cancel."""
    draw = torch.Generator().manual_seed(0)
    for dtype, count, spread in product(
        (torch.float32, torch.bfloat16), (3, 9, 65), (20, 40, 80, 120)
    ):
        digits = torch.randint(-3, 4, (count, 1000), generator=draw)
        exponents = torch.randint(-spread, spread + 1, (count, 1000), generator=draw)
        leaves = list((digits * 2.0**exponents).to(dtype))
        for i in range(count // 2):
            leaves[-1 - i][::2] = -leaves[i][::2]
        expected = definition.reduce_leaves(leaves, "sum", (count,), EXACT)
        for reduce in reduces:
            found = reduce(leaves, "sum", (count,), EXACT)
            assert_bitwise_equal(found, expected, f"{dtype}, {count} leaves, 2^{spread}")


def test_folds_equal_the_oracle_in_any_order() -> None:
    check_cases(30, definition.reduce_leaves, kernel.reduce_leaves)
    check_ties(kernel.reduce_leaves)


@pytest.fixture
def device_fold(tmp_path: Path) -> Reduce:
    """The fold of the kernels for GPUs, compiled for a CPU."""
    folds = PeerFolds(tmp_path)

    def reduce(leaves: Sequence[Tensor], op: str, shape: Sequence[int], how: Contract) -> Tensor:
        return folds(leaves, op, shape, how)[0]

    return reduce


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the kernels are not compiled")
@pytest.mark.parametrize("cases", [full(500), longest(5000)])
def test_all_folds_equal_the_oracle_in_many_cases(cases: int, device_fold: Reduce) -> None:
    check_cases(cases, definition.reduce_leaves, kernel.reduce_leaves, device_fold)
    check_ties(device_fold)


def sums(columns: Sequence[Sequence[float]], contract: Contract = EXACT) -> list[float]:
    found = []
    for column in columns:
        leaves = [torch.tensor([float(x)]) for x in column]
        found += definition.reduce_leaves(leaves, "sum", (len(column),), contract).tolist()
    return found


def test_sums_are_rounded_once() -> None:
    big = torch.finfo(torch.float32).max
    assert sums([[2.0**24, 1, 1, 1, -(2.0**24)], [1e20, 1, -1e20, 1]]) == [3, 2]
    # Ties to even, and a bit far below that breaks the tie.
    assert sums([[2.0**24, 1], [2.0**24 + 2, 1], [2.0**24, 1, 1e-30]]) == [
        2.0**24,
        2.0**24 + 4,
        2.0**24 + 2,
    ]
    # A partial sum above the largest number is none of the result.
    assert sums([[big, big, -big], [big, big], [big, 2.0**103], [big, 2.0**102]]) == [
        big,
        math.inf,
        math.inf,
        big,
    ]


def test_signs_of_zeros_and_special_values() -> None:
    columns = [[-0.0, -0.0], [-0.0, 0.0], [1, -1], [-0.0, 1, -1], [math.inf, -1], [math.nan, 1]]
    found = sums([*columns, [math.inf, -math.inf, 1]])
    signs = [math.copysign(1, x) for x in found[:4]]
    assert (found[:5], signs) == ([0, 0, 0, 0, math.inf], [-1, 1, 1, 1])
    assert [math.isnan(x) for x in found[5:]] == [True, True]


def test_axes_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = draw_leaves(random.Random(1), 12, torch.float32)
    expected = definition.reduce_leaves(leaves, "sum", (12,), EXACT)
    for shape in ((3, 4), (2, 3, 2), (12, 1)):
        assert_bitwise_equal(definition.reduce_leaves(leaves, "sum", shape, EXACT), expected)
    monkeypatch.setattr(definition, "_COLUMNS", 3)
    assert_bitwise_equal(definition.reduce_leaves(leaves, "sum", (12,), EXACT), expected)
    # Beyond one tile of the compiled fold, with elements that it adds a second time.
    whole = [leaf.repeat(300) for leaf in leaves]
    found = kernel.reduce_leaves(whole, "sum", (12,), EXACT)
    assert_bitwise_equal(found, expected.repeat(300))
    assert definition.reduce_leaves([x[:0] for x in leaves], "sum", (12,), EXACT).shape == (0,)


@pytest.mark.processes
def test_every_path_has_the_same_bits_for_any_numbering_of_ranks() -> None:
    leaves = [order_sensitive(1000, rank=r, world_size=6) for r in range(6)]
    expected = definition.reduce_leaves(leaves, "sum", (6,), EXACT)
    tree = definition.reduce_leaves(leaves, "sum", (6,))
    assert not torch.equal(tree, definition.reduce_leaves(leaves[::-1], "sum", (6,)))

    def ranks(rank: int) -> None:
        for sizes, ranks in (
            ((2, 3), range(6)),
            ((2, 3), (4, 0, 5, 2, 1, 3)),
            ((6, 1), (3, 5, 1, 0, 2, 4)),
        ):
            mesh = DeviceMesh("cpu", torch.tensor(ranks).view(sizes))
            for path in ("exchange", "reference", "one_shot", "two_shot"):
                with meshplan.installed(path=path, contract=EXACT, strict=True):
                    local = DTensor.from_local(leaves[rank], mesh, [Partial()] * 2, run_check=False)
                    found = local.redistribute(mesh, [Replicate()] * 2).to_local()
                    assert_bitwise_equal(found, expected, f"{path} {ranks}")
                    place = mesh.get_coordinate()
                    assert place is not None
                    shard = local.redistribute(mesh, [Replicate(), Shard(0)]).to_local()
                    wanted = expected.chunk(sizes[1])[place[1]]
                    assert_bitwise_equal(shard, wanted, f"{path} {ranks}, sharded")

    run_ranks(ranks, 6)


@pytest.mark.processes
@pytest.mark.parametrize(("sizes", "node"), [((3, 2), 2), full((2, 4), 4), full((3, 4), 4)])
def test_blocks_exchange_exact_partials(sizes: tuple[int, int], node: int) -> None:
    """Blocks of whole nodes, with any ranks in them: the bits of the definition."""
    world = math.prod(sizes)
    order = random.Random(1).sample(range(world), world)
    # A message over the network costs so much that only the number of peers counts.
    links = Links(network=Link(1.0, 50e9))
    place = [0] * world
    for position, number in enumerate(order):
        place[number] = position // node
    topology = Topology.of(place, links=links)
    drawn = {
        (dtype, repeats): [
            leaf.repeat(repeats) for leaf in draw_leaves(random.Random(2), world, dtype)
        ]
        for dtype, repeats in ((torch.float32, 5), (torch.bfloat16, 1), (torch.float64, 2))
    }
    # Larger than one chunk; the definition takes seconds for it.
    if world == 8:
        drawn[torch.float32, 0] = [
            order_sensitive(300_000, rank=r, world_size=world) for r in range(world)
        ]
    contracts = EXACT, DOUBLE
    # By the definition, which takes long: once for all ranks.
    cases = [
        (leaves, contract, definition.reduce_leaves(leaves, "sum", (world,), contract))
        for (dtype, repeats), leaves in drawn.items()
        for contract in contracts[: 1 if dtype is torch.float64 or not repeats else 2]
    ]

    def ranks(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.tensor(order).view(sizes))
        place = mesh.get_coordinate()
        assert place is not None
        for leaves, contract, expected in cases:
            with meshplan.installed(contract=contract, strict=True, topology=topology):
                local = DTensor.from_local(leaves[rank], mesh, [Partial()] * 2, run_check=False)
                found = local.redistribute(mesh, [Replicate()] * 2).to_local()
                assert_bitwise_equal(found, expected, f"{leaves[0].dtype} {contract}")
                shard = local.redistribute(mesh, [Replicate(), Shard(0)]).to_local()
                wanted = [*expected.chunk(sizes[1]), *[expected[:0]] * sizes[1]][place[1]]
                assert_bitwise_equal(shard, wanted, f"{leaves[0].dtype} {contract}, sharded")
        planned = [entry["planned"] for entry in meshplan.report().entries]
        assert all(f"in blocks of {node}" in one for one in planned), planned

    run_ranks(ranks, world)


@pytest.mark.processes
@pytest.mark.full
def test_compiled_blocks_have_exact_sums() -> None:
    leaves = [order_sensitive(60, rank=r, world_size=4) for r in range(4)]
    expected = definition.reduce_leaves(leaves, "sum", (4,), EXACT)
    topology = Topology.uniform(4, node_size=2, links=Links(network=Link(1.0, 50e9)))

    def ranks(rank: int) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
        place = mesh.get_coordinate()
        assert place is not None

        def reduce(x: Tensor) -> tuple[Tensor, Tensor]:
            local = DTensor.from_local(x, mesh, [Partial()] * 2, run_check=False)
            whole = local.redistribute(mesh, [Replicate()] * 2).to_local()
            shard = local.redistribute(mesh, [Replicate(), Shard(0)]).to_local()
            return whole * 1.0, shard * 1.0

        with meshplan.installed(contract=EXACT, strict=True, topology=topology):
            compiled = torch.compile(reduce, backend="aot_eager", fullgraph=True)
            whole, shard = compiled(leaves[rank])
        assert_bitwise_equal(whole, expected)
        assert_bitwise_equal(shard, expected.chunk(2)[place[1]])
        assert all("in blocks of 2" in e["planned"] for e in meshplan.report().entries)

    run_ranks(ranks, 4)


def test_plans_have_blocks_if_exact_partials_save_time() -> None:
    layout = meshplan.Layout((64,))
    topology = Topology.uniform(64, node_size=8, domain_size=8)
    found = []
    for dtype in ("float32", "bfloat16", "float64", None):
        shape = (1 << 22,) if dtype else None
        options = {"topology": topology, "shape": shape, "dtype": dtype, "contract": EXACT}
        one = plan(Problem.of(layout, ["P"], ["R"], **options))
        blocks = {c.steps[0].inner: c.cost for c in one.candidates if not c.steps[0].scatter}
        share = blocks[8].network / blocks[1].network
        found.append(f"{dtype}: {share:.2f} of the bytes; {one.steps[0].why}")
    assert_expected_inline(
        "\n".join(found),
        """\
float32: 0.75 of the bytes; one axis, exact sums, the same in any order, hierarchical, 8 ranks per block, exact partials between blocks
bfloat16: 1.44 of the bytes; one axis, exact sums, the same in any order, no blocks: exact partials cost more than they save
float64: 2.19 of the bytes; one axis, exact sums, the same in any order, no blocks: exact partials cost more than they save
None: 2.19 of the bytes; one axis, exact sums, the same in any order, no blocks: exact partials cost more than they save""",
    )


def test_integers_are_reduced_as_in_other_orders() -> None:
    leaves = [torch.tensor([2**31 - 1 - i, -i], dtype=torch.int32) for i in range(5)]
    for op in ("sum", "product", "max", "min"):
        found = definition.reduce_leaves(leaves, op, (5,), EXACT)
        assert_bitwise_equal(found, definition.reduce_leaves(leaves, op, (5,), Contract()))


def test_undefined_reductions_are_refused() -> None:
    leaf, bad = torch.ones(1), torch.ones(4, 1, dtype=torch.int32)
    rows = []
    for kind, call in (
        (ContractError, lambda: Contract("exact", rounding="node")),
        (ContractTypeError, lambda: check_dtype("product", torch.float16, EXACT)),
        (ContractTypeError, lambda: definition.reduce_leaves([leaf], "product", (1,), EXACT)),
        (
            ContractTypeError,
            lambda: definition.finish_partials([bad], "sum", (1,), EXACT, leaf.dtype),
        ),
    ):
        rows.append(refusal(kind, call))
    assert_expected_inline(
        "\n".join(rows),
        """\
MP411: order='exact' rounds a sum once and has no nodes; use rounding='once'
MP412: order='exact' defines no product of torch.float16; use order='tree' or order='rank'
MP412: order='exact' defines no product of torch.float32; use order='tree' or order='rank'
MP412: exact partials of torch.float32 have 11 words in their first dim, got a tensor of [4, 1]; pass the results of combine_leaves""",
    )
