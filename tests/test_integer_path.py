"""Path ``integer``: the exact order by sums of integers, and the checksums of its messages."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan import deterministic_all_reduce, deterministic_reduce_scatter
from meshplan.contract import Contract, Op
from meshplan.definition import reduce_leaves
from meshplan.errors import (
    ChecksumError,
    FallbackRefusedError,
    PolicyError,
    SignatureMismatchError,
)
from meshplan.execute import StepGroups, Wire, clear_report, report
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import _integer, get_path
from meshplan.execute.paths._integer import _accumulator
from meshplan.kernel import (
    MAX_RANKS,
    _scaled_integers,
    find_codes,
    from_integers,
    to_integers,
    words_of,
)
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal
from tests.marks import full, longest
from tests.processes import common_result, run_ranks
from tests.steps import make_step
from tests.test_exact import EXACT, check_cases, draw_leaves

CHECKED = "integer_checksum"


def step(ranks: int, op: Op = "sum", contract: Contract = EXACT, **more: Any) -> Step:
    how = {"op": op, "divisor": ranks if op == "avg" else None, "contract": contract}
    return make_step(more.pop("sizes", (ranks,)), **how, **more)


def scaled(
    leaves: Sequence[Tensor], accumulator: torch.dtype, ranks: int, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The codes and the sum of the integers of all leaves."""
    if codes is None:
        codes = torch.stack([find_codes(leaf, accumulator) for leaf in leaves]).amax(0)
    words = torch.empty(len(leaves), words_of(accumulator), codes.numel(), dtype=torch.int64)
    for leaf, out in zip(leaves, words, strict=True):
        to_integers(leaf, codes, ranks, accumulator, out)
    return codes, words.sum(0)


def simulate(leaves: Sequence[Tensor], op: Op, shape: Sequence[int], contract: Contract) -> Tensor:
    """What all ranks of the path compute, in one process."""
    dtype, ranks = leaves[0].dtype, len(leaves)
    how = step(ranks, op, contract)
    accumulator = _accumulator(leaves[0], how)
    codes, total = scaled(leaves, accumulator, ranks)
    result, unclear = from_integers(total, codes, ranks, accumulator, dtype, how.divisor)
    repaired = reduce_leaves([leaf[unclear] for leaf in leaves], op, shape, contract)
    return result.index_copy_(0, unclear, repaired)


@contextmanager
def plain_torch() -> Iterator[None]:
    with mock.patch.object(_scaled_integers, "available", return_value=False):
        yield


def simulate_plainly(*arguments: Any) -> Tensor:
    with plain_torch():
        return simulate(*arguments)


@pytest.mark.parametrize("cases", [20, full(300), longest(5000)])
def test_integers_equal_the_oracle_in_any_order(cases: int) -> None:
    check_cases(cases, simulate, simulate_plainly, seed=1)


@pytest.mark.parametrize("ranks", [1, 5, 1024, 1025, MAX_RANKS])
def test_compiled_integers_are_those_of_the_definition(ranks: int) -> None:
    """Every word, also of a sum with any bits in it."""
    for dtype, accumulator in (
        *((dtype, torch.float32) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, torch.float64) for dtype in (torch.float32, torch.float64)),
    ):
        leaves = [leaf.repeat(40) for leaf in draw_leaves(random.Random(ranks), 3, dtype)]
        codes, total = scaled(leaves, accumulator, ranks)
        # Any sums of small and large numbers, of both signs.
        draw = torch.Generator().manual_seed(ranks)
        any_bits = torch.randint(-(1 << 62), 1 << 62, total.shape, generator=draw)
        any_bits >>= torch.randint(0, 62, total.shape, generator=draw)
        any_bits[1:] &= (1 << 62) - 1
        any_codes = torch.randint(0, 256, codes.shape, generator=draw, dtype=torch.uint8)
        sums = [(total, codes), (any_bits, codes), (any_bits, any_codes)]
        found = [from_integers(*one, ranks, accumulator, dtype, 7) for one in sums]
        with plain_torch():
            plain_codes, plain = scaled(leaves, accumulator, ranks)
            assert torch.equal(plain_codes, codes)
            assert torch.equal(plain, total)
            for (result, unclear), one in zip(found, sums, strict=True):
                expected, ambiguous = from_integers(*one, ranks, accumulator, dtype, 7)
                assert_bitwise_equal(result, expected)
                assert torch.equal(unclear, ambiguous)


def test_few_elements_are_ambiguous() -> None:
    draw = torch.Generator().manual_seed(0)
    for ranks in (2, 8, 64):
        leaves = list(torch.randn(ranks, 20_000, generator=draw))
        codes, total = scaled(leaves, torch.float32, ranks)
        _, unclear = from_integers(total, codes, ranks, torch.float32, torch.float32)
        assert unclear.numel() < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 1024, 1025, MAX_RANKS])
def test_headroom_of_the_largest_sums(ranks: int, dtype: torch.dtype) -> None:
    """All summands have the largest significand; then one of them is rounded down as well."""
    most, tiny = 2 - 2 * torch.finfo(dtype).eps / 2, 2.0**-160
    for sign in (1.0, -1.0):
        leaf = torch.tensor([most, most, 1.0, 0.0], dtype=dtype) * sign
        bound = torch.tensor([1.0, 2.0**30, 1, 0], dtype=dtype)
        codes = torch.maximum(find_codes(leaf, dtype), find_codes(bound, dtype))
        _, words = scaled([leaf], dtype, ranks, codes)
        low, unclear = from_integers(words * ranks, codes, ranks, dtype, dtype)
        exact = [Fraction(x) * ranks for x in leaf.tolist()]
        ambiguous = set(unclear.tolist())
        assert not ambiguous & {0, 2}
        expected = [x.numerator / x.denominator for x in exact]
        for i in {0, 1, 2, 3} - ambiguous:
            assert low[i] == torch.tensor(expected[i], dtype=dtype)
        _, other = scaled([torch.full((4,), tiny, dtype=dtype)], dtype, ranks, codes)
        mixed, unclear = from_integers(words * (ranks - 1) + other, codes, ranks, dtype, dtype)
        for i in {0, 1, 2} - set(unclear.tolist()):
            near = exact[i] - Fraction(leaf[i].item()) + Fraction(tiny)
            assert mixed[i] == torch.tensor(near.numerator / near.denominator, dtype=dtype)


def leaves_of(ranks: int, numel: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(numel)
    found = torch.randn(ranks, numel, generator=draw)
    if kind == "wide":
        found = found * torch.exp(10 * torch.randn(ranks, numel, generator=draw))
    if kind == "cancelling":
        found = found * 2.0 ** torch.randint(-90, 90, (1, numel), generator=draw)
        found[1::2] = -found[: ranks // 2]
        found[-1] = found[-1] * 2.0**-80
    if kind == "special":
        rows = draw_leaves(random.Random(numel), ranks, dtype)
        found = torch.stack(rows)[:, torch.arange(numel) % rows[0].numel()]
    return list(found.to(dtype))


FORMS = [
    (dtype, numel, kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for numel in (1, 5, 701)
    for kind in ("normal", "wide", "cancelling", "special")
]


def check_ranks(rank: int, forms: Sequence[tuple[torch.dtype, int, str]]) -> Any:
    """With checksums and without; the summands are those of other ranks for each size."""
    ranks, seen = dist.get_world_size(), set()
    for path, verify in (("integer", None), (CHECKED, "checksum")):
        how: dict[str, Any] = {"contract": EXACT, "strict": True, "verify": verify}
        how["path"] = "integer"
        for dtype, numel, kind in forms:
            leaves = leaves_of(ranks, numel, dtype, kind)
            for op in ("sum", "avg"):
                expected = reduce_leaves(leaves, op, (ranks,), EXACT)
                mine = leaves[(rank + numel) % ranks]
                clear_report()
                assert_bitwise_equal(deterministic_all_reduce(mine.clone(), op=op, **how), expected)
                (entry,) = report().entries
                assert entry["ran"] == path
                seen.add(entry["sends"][1:])
                # Uneven and empty shards.
                sizes = [numel // ranks] * ranks
                sizes[-1] += numel % ranks
                found = deterministic_reduce_scatter(mine, op=op, sizes=sizes, **how)
                assert_bitwise_equal(found, expected.split(sizes)[rank])
    return sorted(seen)


@pytest.mark.parametrize(
    ("world_size", "forms"),
    [
        pytest.param(3, FORMS[8:12], id="3 ranks, few"),
        *(pytest.param(n, FORMS, id=f"{n} ranks", marks=pytest.mark.full) for n in (2, 5)),
    ],
)
def test_ranks_have_the_bits_of_the_definition(
    world_size: int, forms: list[tuple[torch.dtype, int, str]]
) -> None:
    sums, repair = ["all_reduce"] * 2, ["all_to_all_single", "all_gather_into_tensor"]
    check = ["all_reduce"]
    for found in run_ranks(partial(check_ranks, forms=forms), world_size):
        assert found == sorted(
            map(tuple, [sums, sums + repair, sums + check, sums + check + repair + check])
        )


def redistributions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for kind in ("wide", "special"):
        leaves = [leaf.view(42, 7) for leaf in leaves_of(4, 294, torch.float32, kind)]
        expected = reduce_leaves(leaves, "sum", (2, 2), EXACT)
        source = DTensor.from_local(leaves[rank], mesh, [Partial()] * 2, run_check=False)
        for path, verify in (("integer", None), (CHECKED, "checksum")):
            for target in (
                [Replicate(), Replicate()],
                [Shard(0), Replicate()],
                [Shard(0), Shard(1)],
                [Replicate(), Shard(1)],
            ):
                clear_report()
                how: dict[str, Any] = {"contract": EXACT, "strict": True, "verify": verify}
                with meshplan.installed(path="integer", audit=1, **how):
                    found = source.redistribute(mesh, target)
                assert {entry["ran"] for entry in report().entries} == {path}
                assert_bitwise_equal(found.full_tensor(), expected)


@pytest.mark.full
def test_redistributions_of_a_mesh() -> None:
    """Shards of one rank and of several."""
    run_ranks(redistributions, 4)


class FaultyWire(Wire):
    """Flips one bit of what one rank sends or receives in one of its collectives."""

    def __init__(self, call: int, received: bool, element: int, bit: int) -> None:
        super().__init__()
        self.fault = call, received, element, bit
        self.calls: list[tuple[str, torch.dtype]] = []
        self.issue = self.issue_with_a_fault

    def issue_with_a_fault(self, collective: Any, tensor: Tensor, *rest: Any) -> Any:
        call, received, element, bit = self.fault
        self.calls.append((collective.__name__, tensor.dtype))
        hit = len(self.calls) - 1 == call
        if hit and not received:
            tensor = flipped(tensor, element, bit)
        found = self.log.issue(collective, tensor, *rest)
        found = torch.ops._c10d_functional.wait_tensor(found)
        return flipped(found, element, bit) if hit and received else found


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    changed = tensor.clone()
    words = changed.view(torch.uint8).view(-1)
    width = tensor.element_size()
    place = element % tensor.numel() * width + bit // 8 % width
    words[place] ^= 1 << bit % 8
    return changed


def faults(rank: int) -> dict[str, int]:
    """Every message of a reduction, sent and received, by each rank: raised, or masked."""
    ranks, path = dist.get_world_size(), get_path(CHECKED)
    mesh = init_device_mesh("cpu", (2, 2))
    groups = StepGroups(dist.group.WORLD, gather=mesh.get_group(1))
    draw, counts = random.Random(0), {"raised": 0, "masked": 0}
    # Few elements are ambiguous, so that they are listed.
    leaves = leaves_of(ranks, 64, torch.float32, "normal")
    for i, leaf in enumerate(leaves):
        # In every part of 16 elements one, so that no message has padding.
        leaf[[3, 20, 40]] = [1e30, 1.0, -1e30, 1e-20][i]
        leaf[60] = [math.inf, 0, 1, 2][i]
    for how in (step(ranks), step(ranks, sizes=(2, 2), scatter=((0, 0),))):
        whole = reduce_leaves(leaves, "sum", (ranks,), EXACT)
        run = path.reduce_scatter if how.scatter else path.all_reduce
        expected = select_shard(whole, how, rank)
        clean = FaultyWire(-1, False, 0, 0)
        assert_bitwise_equal(run(leaves[rank], how, groups, clean).tensor, expected)
        votes = [i for i, (name, dtype) in enumerate(clean.calls) if is_vote(i, name, dtype)]
        for call in range(len(clean.calls)):
            for received in (False, True):
                for _ in range(8):
                    who, element, bit = (
                        draw.randrange(ranks),
                        draw.getrandbits(9),
                        draw.randrange(64),
                    )
                    wire = FaultyWire(call if who == rank else -1, received, element, bit)
                    try:
                        found = run(leaves[rank], how, groups, wire).tensor
                        outcome = 0
                        assert_bitwise_equal(found, expected)
                    except ChecksumError:
                        outcome = 1
                    total = torch.tensor([outcome])
                    dist.all_reduce(total)
                    assert int(total) in (0, ranks), (how.kind, call, received, who, element, bit)
                    # Only a maximum may discard a bit; the verdict is that of two of three.
                    assert int(total) == ranks or call in votes or (call == 0 and not received)
                    if call in votes:
                        assert int(total) == 0
                    else:
                        counts["raised" if int(total) else "masked"] += 1
        for name, repeated in (("fold", True), ("from_integers", how.kind == "reduce_scatter")):
            for first in (True, False) if repeated else ():
                with faulty_arithmetic(name, rank == 2, first), pytest.raises(ChecksumError):
                    run(leaves[rank], how, groups, Wire())
    return counts


@contextmanager
def faulty_arithmetic(name: str, faulty: bool, first: bool) -> Iterator[None]:
    """Flips one bit of the first or the second result of a function of the path."""
    function, results = getattr(_integer, name), []

    def call(*arguments: Any) -> Any:
        found = function(*arguments)
        results.append(found)
        if not faulty or len(results) != (1 if first else 2):
            return found
        if isinstance(found, tuple):
            return flipped(found[0], 0, 3), *found[1:]
        return flipped(found, 0, 3)

    with mock.patch.object(_integer, name, call):
        yield


def is_vote(place: int, name: str, dtype: torch.dtype) -> bool:
    return name == "all_reduce" and dtype is torch.int64 and place > 1


@pytest.mark.full
def test_every_flipped_bit_is_an_error_on_every_rank() -> None:
    found = run_ranks(faults, 4)
    assert all(one == found[0] for one in found)
    assert found[0]["raised"] > 150
    assert found[0]["masked"] <= 16


def other_uses(rank: int) -> None:
    """Asynchronous, compiled, empty, and what the path leaves to the exchange."""
    leaves = leaves_of(2, 600, torch.float32, "cancelling")
    expected = reduce_leaves(leaves, "sum", (2,), EXACT)
    work = deterministic_all_reduce(
        leaves[rank].clone(), path="integer", contract=EXACT, async_op=True
    )
    assert not isinstance(work, Tensor)
    work.wait()
    assert_bitwise_equal(work.result(), expected)
    compiled = torch.compile(
        lambda x: deterministic_all_reduce(x, path="integer", contract=EXACT) * 1,
        backend="aot_eager",
        fullgraph=True,
    )
    assert_bitwise_equal(compiled(leaves[rank].clone()), expected)
    for leaf in (torch.ones(0), torch.tensor([rank, 7], dtype=torch.int16)):
        found = deterministic_all_reduce(leaf.clone(), path="integer", contract=EXACT, strict=True)
        assert found.tolist() == (leaf.tolist() and [1, 14])
    largest = deterministic_all_reduce(
        leaves[rank].clone(), op="max", path="integer", contract=EXACT, strict=True
    )
    assert_bitwise_equal(largest, reduce_leaves(leaves, "max", (2,)))
    with pytest.raises(SignatureMismatchError):
        deterministic_all_reduce(torch.ones(2 + rank), path="integer", contract=EXACT)
    again = deterministic_all_reduce(leaves[rank].clone(), path="integer", contract=EXACT)
    assert_bitwise_equal(again, expected)


@pytest.mark.full
def test_other_uses() -> None:
    run_ranks(other_uses, 2)


class TestMessages(TestCase):
    def test_what_it_cannot_add_is_refused(self) -> None:
        def messages(rank: int) -> list[str]:
            found = []
            checked = {"verify": "checksum"}
            calls: list[tuple[Any, torch.dtype, Any, dict[str, Any]]] = [
                (None, torch.float32, "sum", {"strict": True}),
                (EXACT, torch.float32, "max", checked),
            ]
            for contract, dtype, op, more in calls:
                with pytest.raises(FallbackRefusedError) as caught:
                    deterministic_all_reduce(
                        torch.ones(3, dtype=dtype), op=op, path="integer", contract=contract, **more
                    )
                found.append(str(caught.value))
            for path, word in (("exchange", "checksum"), ("integer", "crc")):
                with pytest.raises(PolicyError) as refused:
                    deterministic_all_reduce(torch.ones(3), path=path, verify=word)  # type: ignore[arg-type]
                found.append(str(refused.value))
            return found

        self.assertExpectedInline(
            "\n".join(common_result(messages, 2)),
            """\
MP701: deterministic_all_reduce sum: path integer was requested and exchange would run: path integer; path integer adds in order='exact', and this is order='tree'; pass another path, or strict=False
MP701: deterministic_all_reduce max: path integer_checksum was requested and exchange would run: path integer_checksum; max of float32 has no checksum; pass another path
MP402: verify='checksum' with path='exchange': only the messages of path 'integer' have checksums; pass path='integer' and verify='checksum', or leave verify out
MP402: verify='crc' with path='integer': only the messages of path 'integer' have checksums; pass path='integer' and verify='checksum', or leave verify out""",
        )

    def test_wrong_checksum_names_the_reduction(self) -> None:
        def messages(rank: int) -> list[str]:
            found = []
            for call in (0, 1):
                wire = FaultyWire(call if rank == 1 else -1, True, 2, 1)
                with pytest.raises(ChecksumError) as caught:
                    get_path(CHECKED).all_reduce(
                        torch.ones(3), step(2), StepGroups(dist.group.WORLD), wire
                    )
                found.append(str(caught.value))
            return found

        self.assertExpectedInline(
            "\n".join(common_result(messages, 2)),
            """\
MP706: all_reduce sum over 2 ranks of group 0, contract v1/exact/wide/once: the checksum of its exponents and results is wrong, so that a bit changed on its way or in memory. No rank has a result: stop the job and check the hosts, devices and links of these ranks
MP706: all_reduce sum over 2 ranks of group 0, contract v1/exact/wide/once: the checksum of its integers is wrong, so that a bit changed on its way or in memory. No rank has a result: stop the job and check the hosts, devices and links of these ranks""",
        )
