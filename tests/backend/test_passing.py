"""What the inner backend gets: every call, memory layout and dtype, against an oracle.

Each case is right on every rank, or an error on every rank, and writes nothing between the elements
of a view.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from meshplan.errors import BackendError
from tests.processes import run_ranks

pytestmark = pytest.mark.processes
RANKS, SHAPE = 3, (4, 6)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64)
LAYOUTS = (
    "contiguous",
    "strided",
    "transposed",
    "expanded",
    "offset",
    "scalar",
    "empty",
    "conjugated",
    "negated",
)


class View:
    """A tensor of some layout, its elements, and the memory between them."""

    def __init__(self, layout: str, dtype: torch.dtype, seed: int, rows: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        high = 2 if dtype is torch.bool else 60
        values = torch.randint(0, high, (rows, 6), generator=generator).to(dtype)
        if dtype.is_complex:
            values = values * (1 + 2j) + 1j
        # Room for a call that takes a view for contiguous memory.
        self.base = torch.ones(16 * values.numel(), dtype=dtype)
        size = values.numel()
        if layout == "expanded":
            values[:] = values[0].clone()
            self.tensor = self.base[:6].expand(values.shape)
            self.base[:6] = values[0]
        else:
            if layout == "strided":
                self.tensor = self.base.view(2 * rows, -1)[::2, 1:13:2]
            elif layout == "transposed":
                self.tensor = self.base[:size].view(6, rows).t()
            elif layout == "offset":
                self.tensor = self.base[7 : 7 + size].view(values.shape)
            elif layout == "scalar":
                values = values[0, 0]
                self.tensor = self.base[3]
            elif layout == "empty":
                values = values[:, :0]
                self.tensor = self.base[:0].view(values.shape)
            elif layout == "conjugated":
                self.tensor = self.base[:size].view(values.shape).conj()
            elif layout == "negated":
                self.base = torch.ones(2 * size, dtype=torch.complex64)
                self.tensor = self.base[:size].view(values.shape).conj().imag
                values = values.float()
            else:
                self.tensor = self.base[:size].view(values.shape)
            self.tensor.copy_(values)
        self.values = values
        raw = self.raw()
        place = self.tensor.stride(), self.tensor.storage_offset()
        inside = torch.arange(raw.numel()).as_strided(values.shape, *place)
        self.outside = torch.ones(raw.numel(), dtype=torch.bool)
        self.outside[inside.reshape(-1)] = False
        self.before = raw.clone()

    def raw(self) -> Tensor:
        """All elements of the memory."""
        return torch.view_as_real(self.base).reshape(-1) if self.tensor.is_neg() else self.base

    def leaks(self) -> bool:
        """Whether memory beside the elements has changed."""
        return bool((self.raw()[self.outside] != self.before[self.outside]).any())


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bytes."""
    found, expected = (one.resolve_conj().resolve_neg().contiguous() for one in (found, expected))
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    return torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


Make = Callable[..., View]
Pairs = list[tuple[View, Tensor]]


def broadcast(rank: int, make: Make) -> Pairs:
    x = make(rank)
    dist.broadcast(x.tensor, 1)
    return [(x, make(1).values)]


def shift(rank: int, make: Make) -> Pairs:
    x, y = make(rank), make(7)
    works = [
        dist.irecv(y.tensor, (rank - 1) % RANKS),
        dist.isend(x.tensor, (rank + 1) % RANKS),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [(x, x.values), (y, make((rank - 1) % RANKS).values)]


def all_gather(rank: int, make: Make) -> Pairs:
    x, outs = make(rank), [make(9 + r) for r in range(RANKS)]
    dist.all_gather([out.tensor for out in outs], x.tensor)
    return [(x, x.values), *((outs[r], make(r).values) for r in range(RANKS))]


def all_gather_single(rank: int, make: Make) -> Pairs:
    x, out = make(rank), make(9, RANKS * SHAPE[0])
    if x.tensor.dim() == 0:
        raise ValueError("an all-gather of 0-dim tensors has another shape")
    dist.all_gather_single(out.tensor, x.tensor)
    return [(x, x.values), (out, torch.cat([make(r).values for r in range(RANKS)]))]


def all_gather_coalesced(rank: int, make: Make) -> Pairs:
    x, outs = make(rank), [make(9 + r) for r in range(RANKS)]
    dist.all_gather_coalesced([[out.tensor] for out in outs], [x.tensor])
    return [(x, x.values), *((outs[r], make(r).values) for r in range(RANKS))]


def gather(rank: int, make: Make) -> Pairs:
    x, outs = make(rank), [make(9 + r) for r in range(RANKS if rank == 0 else 0)]
    dist.gather(x.tensor, [out.tensor for out in outs] or None)
    return [(x, x.values), *((out, make(r).values) for r, out in enumerate(outs))]


def scatter(rank: int, make: Make) -> Pairs:
    x, parts = make(rank), [make(9 + r) for r in range(RANKS if rank == 0 else 0)]
    dist.scatter(x.tensor, [part.tensor for part in parts] or None)
    return [(x, make(9 + rank).values), *((part, part.values) for part in parts)]


def all_to_all(rank: int, make: Make) -> Pairs:
    ins, outs = ([make(n + 10 * rank + r) for r in range(RANKS)] for n in (0, 90))
    dist.all_to_all([out.tensor for out in outs], [one.tensor for one in ins])
    moved = [(out, make(10 * r + rank).values) for r, out in enumerate(outs)]
    return [*moved, *((one, one.values) for one in ins)]


def all_to_all_single(rank: int, make: Make) -> Pairs:
    x, out = make(rank, RANKS * 2), make(9, RANKS * 2)
    if x.tensor.dim() == 0:
        raise ValueError("a scalar has no blocks")
    dist.all_to_all_single(out.tensor, x.tensor)
    parts = [make(r, RANKS * 2).values.chunk(RANKS)[rank] for r in range(RANKS)]
    return [(x, x.values), (out, torch.cat(parts))]


MOVES = (
    broadcast,
    shift,
    all_gather,
    all_gather_single,
    all_gather_coalesced,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
BITS = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
LOGICAL = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and}
LOGICAL |= {"MAX": torch.logical_or, "MIN": torch.logical_and}


def total(name: str, leaves: list[Tensor]) -> Tensor:
    if name in BITS and (leaves[0].is_floating_point() or leaves[0].is_complex()):
        raise ValueError("no bits")
    combine = BITS.get(name) or LOGICAL[name]
    found = leaves[0]
    for leaf in leaves[1:]:
        found = combine(found, leaf)
    return found


def reductions(name: str) -> Iterator[Callable[[int, Make], Pairs]]:
    """The reductions that the inner backend runs, since the contract does not define them."""
    op = getattr(dist.ReduceOp, name)

    def whole(make: Make) -> Tensor:
        return total(name, [make(r).values for r in range(RANKS)])

    def all_reduce(rank: int, make: Make) -> Pairs:
        expected, x = whole(make), make(rank)
        dist.all_reduce(x.tensor, op)
        return [(x, expected)]

    def all_reduce_coalesced(rank: int, make: Make) -> Pairs:
        expected, x = whole(make), make(rank)
        with _coalescing_manager():
            dist.all_reduce(x.tensor, op)
        return [(x, expected)]

    def reduce(rank: int, make: Make) -> Pairs:
        expected, x = whole(make), make(rank)
        dist.reduce(x.tensor, 1, op)
        return [(x, expected if rank == 1 else x.values)]

    def reduce_scatter(rank: int, make: Make) -> Pairs:
        ins, out = [make(10 * rank + r) for r in range(RANKS)], make(99)
        expected = total(name, [make(10 * r + rank).values for r in range(RANKS)])
        dist.reduce_scatter(out.tensor, [one.tensor for one in ins], op)
        return [(out, expected), *((one, one.values) for one in ins)]

    def reduce_scatter_single(rank: int, make: Make) -> Pairs:
        x, out = make(rank, RANKS * 4), make(9)
        if x.tensor.dim() == 0:
            raise ValueError("a scalar has no blocks")
        leaves = [make(r, RANKS * 4).values.chunk(RANKS)[rank] for r in range(RANKS)]
        expected = total(name, leaves)
        dist.reduce_scatter_single(out.tensor, x.tensor, op)
        return [(x, x.values), (out, expected)]

    yield from (all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_single)


def outcome(call: Callable[[int, Make], Pairs], rank: int, make: Make) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            pairs = call(rank, make)
        except (RuntimeError, ValueError, TypeError):
            return "error"
    wrong = "wrong" * any(not same(view.tensor, expected) for view, expected in pairs)
    return wrong + " writes between" * any(view.leaks() for view, _ in pairs) or "right"


def run_table(rank: int) -> dict[str, str]:
    found = {}
    for layout in LAYOUTS:
        for dtype in DTYPES:
            if (layout == "conjugated" and not dtype.is_complex) or (
                layout == "negated" and dtype is not torch.float32
            ):
                continue

            def make(seed: int, rows: int = 4, layout: str = layout, dtype: Any = dtype) -> View:
                return View(layout, dtype, seed, rows)

            for call in MOVES:
                found[f"{call.__name__} {layout} {dtype}"] = outcome(call, rank, make)
            for name in (*BITS, *(LOGICAL if dtype is torch.bool else ())):
                for call in reductions(name):
                    key = f"{call.__name__} {name} {layout} {dtype}"
                    found[key] = outcome(call, rank, make)
    return found


def test_calls_are_right_or_an_error_on_every_rank() -> None:
    ranks = run_ranks(run_table, RANKS, backend="meshplan")
    cells = {key: sorted({rank[key] for rank in ranks}) for key in ranks[0]}
    # The root alone sees that the results of a gather do not fit.
    allowed = (["right"], ["error"], ["error", "right"])
    wrong = {
        key: cell
        for key, cell in cells.items()
        if cell not in allowed[: 3 if key.startswith("gather expanded") else 2]
    }
    assert wrong == {}
    usable = {key for key, cell in cells.items() if cell == ["right"]}
    for layout in ("contiguous", "strided", "transposed", "offset", "scalar", "empty"):
        assert f"broadcast {layout} torch.float32" in usable
        assert f"all_reduce BAND {layout} torch.int16" in usable
        assert f"reduce BXOR {layout} torch.bool" in usable
        assert f"all_reduce SUM {layout} torch.bool" in usable
    assert {f"{name} negated torch.float32" for name in ("broadcast", "scatter")} <= usable


def combine_one_element(rank: int) -> list[list[int]]:
    """A contiguous tensor whose stride is not 1, which its bytes do not have."""
    found = []
    for rows in (0, 1):
        column = torch.full((rows, 2), rank + 1, dtype=torch.int32)[:, 0]
        dist.all_reduce(column, dist.ReduceOp.BOR)
        found.append(column.tolist())
    return found


def test_bits_of_one_element_of_a_column() -> None:
    assert run_ranks(combine_one_element, 2, backend="meshplan") == [[[], [3]]] * 2


def mix_layouts(rank: int) -> list[str]:
    """Another layout on each rank, and results that are written back by whoever waits."""
    layouts = ("contiguous", "transposed", "strided")

    def make(seed: int, rows: int = 4, at: int = rank) -> View:
        return View(layouts[at], torch.int32, seed, rows)

    wrong = []
    for call in (*MOVES[:1], *MOVES[2:8], *reductions("BXOR")):
        wrong += [
            f"{call.__name__}: {what}" for what in [outcome(call, rank, make)] if what != "right"
        ]
    if torch.__version__.startswith("2.11."):  # whose gloo has no all-to-all of lists
        wrong = [what for what in wrong if what != "all_to_all: error"]
    group: Any = dist.group.WORLD
    waits: list[Callable[[Any], Any]] = [
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        _poll,
    ]
    for i, wait in enumerate(waits):
        x, expected = make(i + rank), make(i + 1).values
        work = group.broadcast([x.tensor], _root(1))
        wait(work)
        wrong += [f"wait {i}"] * (not same(x.tensor, expected) or x.leaks())
        # Not written again, over what the caller has written since.
        x.tensor.fill_(5)
        work.wait()
        wrong += [f"wait {i} writes twice"] * bool((x.tensor != 5).any())
    with torch.inference_mode():
        y = make(rank)
    dist.broadcast(y.tensor, 1)
    return wrong + ["inference"] * (not same(y.tensor, make(1).values))


def _poll(work: Any) -> None:
    while not work.is_completed():
        pass


def _root(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def test_ranks_may_differ_in_layout() -> None:
    assert run_ranks(mix_layouts, RANKS, backend="meshplan") == [[]] * RANKS


def refuse_after_the_transfer(rank: int) -> list[Any]:
    """One rank cannot write the result; the next call still pairs with the others' next call."""
    x = torch.full((1,), float(rank)).expand(4) if rank == 2 else torch.full((4,), float(rank))
    try:
        dist.broadcast(x, 0)
        first = "no error"
    except ValueError as error:
        first = str(error)
    y = torch.full((4,), 10.0 + rank)
    dist.broadcast(y, 1)
    return [first, y.tolist()]


def test_a_rank_that_cannot_write_stays_in_step() -> None:
    found = run_ranks(refuse_after_the_transfer, RANKS, backend="meshplan")
    assert [second for _, second in found] == [[11.0] * 4] * RANKS
    assert [first for first, _ in found] == [
        "no error",
        "no error",
        "MP411: the result is written in place, and elements of the tensor may share memory: "
        "shape (4,), strides (0,); pass tensor.contiguous()",
    ]


CPU = torch.device("cpu")


def coalesce(rank: int) -> list[Any]:
    """Blocks with a device: a move of a strided tensor, errors, and calls after them."""
    group: Any = dist.group.WORLD
    whole = float(sum(range(1, RANKS + 1)))
    moved = torch.full((3, 4), float(rank)).t()
    with _coalescing_manager(group, device=CPU, async_ops=True) as block:
        dist.broadcast(moved, 1, group=group, async_op=True)
    block.wait()
    found: list[Any] = [bool((moved == 1).all())]
    for device in ("cuda", "meta"):
        try:
            with _coalescing_manager(group, device=torch.device(device)):
                found.append("entered")
        except BackendError as error:
            found.append(str(error).split(":")[:2])
    try:
        with _coalescing_manager(group, device=CPU):
            dist.all_reduce(torch.ones(3 + rank), group=group)
    except RuntimeError as error:
        found.append(str(error)[:5])
    except ValueError as error:
        found.append(str(error)[:5])
    with suppress(KeyError), _coalescing_manager(group, device=CPU):
        dist.all_reduce(torch.ones(3), group=group)
        raise KeyError
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, group=group)
    return [*found, x.tolist() == [whole] * 3]


def test_blocks_of_coalesced_calls_on_cpus() -> None:
    refused = ["MP505", " the inner backend cannot coalesce calls on {}"]
    on_devices = [[one.format(kind) for one in refused] for kind in ("cuda", "meta")]
    expected = [True, *on_devices, "MP703", True]
    assert run_ranks(coalesce, RANKS, backend="meshplan") == [expected] * RANKS


def coalesce_over_gloo(rank: int) -> list[Any]:
    """Plain gloo raises on entry, and torch then queues the group's later calls without an end."""
    with pytest.raises(RuntimeError, match="does not implement startCoalescing"):  # noqa: SIM117
        with _coalescing_manager(dist.group.WORLD, device=CPU):
            pass
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    return x.tolist()


def test_a_refused_block_over_gloo_leaves_reductions_without_effect() -> None:
    assert run_ranks(coalesce_over_gloo, 2) == [[1.0] * 3, [2.0] * 3]
