"""Order `exact`: its fold compared with the tree's, path `integer` with the exchange, and norms.

The fold may take 2.5 times the time of the tree for 8 leaves of 16 MiB, and 3 times for 64. The
same bars hold for wide leaves: each number has a magnitude of its own, over a range of 10^6.
Cancelling leaves are wide ones, half of them the negatives of the others but for the last bits of
one.

CPU time, which other processes on the machine do not move: of all threads of a rank for a
reduction, messages included, and of its arithmetic alone. `integer` sends 9 bytes per element of
float32, and 17 of float64, in place of 4 and 8: its place is where a switch or a tree of the
backend adds. The exact norm may take twice the time of `torch.linalg.vector_norm` in float64.

    python -m benchmarks.exact
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn, on_ranks, slowest
from meshplan import deterministic_all_reduce, exact_norm, kernel
from meshplan.contract import Contract
from meshplan.kernel._operators import reduce_into

WORLDS, BYTES, NORM_BYTES = (2, 4), 16 << 20, 64 << 20
REDUCED = (torch.float32, torch.float64)
NORMED = (torch.float64, torch.float32, torch.bfloat16)
FOLDED = {8: 2.5, 64: 3.0}


def draw_leaves(leaves: int, numel: int) -> dict[str, list[Tensor]]:
    """Float32 leaves of each kind."""
    draw = torch.Generator().manual_seed(0)
    normal = [torch.randn(numel, generator=draw) for _ in range(leaves)]
    wide = [leaf * 10.0 ** torch.randint(-3, 4, (numel,), generator=draw) for leaf in normal]
    cancelling = wide[: leaves // 2] + [-leaf for leaf in wide[: leaves // 2]]
    cancelling[-1] = cancelling[-1] * (1 + 2.0**-20)
    return {"normal": normal, "wide": wide, "cancelling": cancelling}


def fold(leaves: int, nbytes: int, rounds: int, most: float) -> Case:
    """One thread; both orders take turns."""
    numel = nbytes // 4
    out = torch.empty(numel)

    def run_fold(order: str, summands: list[Tensor]) -> Callable[[], None]:
        return lambda: reduce_into(out, summands, "sum", (leaves,), Contract(order))

    drawn = draw_leaves(leaves, numel)
    ways = {"tree": run_fold("tree", drawn["normal"])}
    ways |= {f"exact, {kind}": run_fold("exact", summands) for kind, summands in drawn.items()}
    samples = in_turn(ways, rounds, scale=1e3, clock=time.thread_time)
    return Case(
        name=f"fold of {leaves} leaves of {nbytes >> 10} KiB, float32",
        unit="ms",
        runs={way: Figures.of(s) for way, s in samples.items()},
        peers=("tree",),
        parameters={"leaves": leaves, "bytes": nbytes, "clock": "CPU time of the thread"},
        bars=tuple(at_most(most, f"exact, {kind}", "tree") for kind in ("normal", "wide")),
    )


def reduce(dtype: torch.dtype, nbytes: int, rounds: int) -> Iterator[Case]:
    """One summand, on every rank."""
    torch.set_num_threads(1)
    ranks, numel = dist.get_world_size(), nbytes // dtype.itemsize
    draw = torch.Generator().manual_seed(dist.get_rank())
    summand = torch.randn(numel, dtype=dtype, generator=draw)
    words = torch.empty(kernel.words_of(dtype), numel, dtype=torch.int64)
    own = [torch.randn(numel // ranks, dtype=dtype) for _ in range(ranks)]

    def over(path: str) -> Tensor:
        found = deterministic_all_reduce(summand.clone(), path=path, contract=Contract("exact"))
        assert isinstance(found, Tensor)
        return found

    def integers() -> None:
        codes = kernel.find_codes(summand, dtype)
        kernel.to_integers(summand, codes, ranks, dtype, words)
        kernel.from_integers(words, codes, ranks, dtype, dtype)

    figures = slowest(
        in_turn(
            {
                "exchange": lambda: over("exchange"),
                "integer": lambda: over("integer"),
                "arithmetic of exchange": lambda: kernel.reduce_leaves(
                    own, "sum", (ranks,), Contract("exact")
                ),
                "arithmetic of integer": integers,
            },
            rounds,
            scale=1e3,
            before=dist.barrier,
            clock=time.process_time,
        )
    )
    name = str(dtype).removeprefix("torch.")
    yield Case(
        name=f"{nbytes >> 10} KiB of {name} over {ranks} ranks",
        unit="ms",
        runs=figures,
        peers=("exchange", "arithmetic of exchange"),
        parameters={"ranks": ranks, "bytes": nbytes, "clock": "CPU time of the process"},
        bars=(at_most(1.0, "arithmetic of integer", "exchange"),),
    )


def norm(dtype: torch.dtype, nbytes: int, rounds: int) -> Case:
    """One tensor on one thread."""
    tensor = torch.randn(nbytes // dtype.itemsize, dtype=torch.float32).to(dtype)
    ways = {
        "exact": lambda: exact_norm(tensor),
        "torch": lambda: torch.linalg.vector_norm(tensor, dtype=torch.float64),
    }
    samples = in_turn(ways, rounds, scale=1e3, clock=time.thread_time)
    name = str(dtype).removeprefix("torch.")
    return Case(
        name=f"norm of {nbytes >> 10} KiB, {name}",
        unit="ms",
        runs={way: Figures.of(s) for way, s in samples.items()},
        peers=("torch",),
        parameters={"bytes": nbytes, "clock": "CPU time of the thread"},
        bars=(at_most(2.0, "exact", "torch"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Reductions over every number of ranks; folds; norms of each dtype."""
    for ranks in WORLDS[:1] if smoke else WORLDS:
        for dtype in REDUCED:
            nbytes, rounds = (1 << 12, 2) if smoke else (BYTES, 9)
            yield from on_ranks(ranks, reduce, dtype, nbytes, rounds)
    torch.set_num_threads(1)
    for leaves, most in FOLDED.items():
        yield fold(leaves, 1 << 12 if smoke else BYTES, 2 if smoke else 9, most)
    for dtype in NORMED:
        yield norm(dtype, 1 << 12 if smoke else NORM_BYTES, 2 if smoke else 9)


def count(smoke: bool) -> int:
    """How many cases there are."""
    return len(REDUCED) * (1 if smoke else len(WORLDS)) + len(FOLDED) + len(NORMED)


SUITE = Suite(
    __doc__ or "",
    cases,
    count,
    reasons={
        "arithmetic of integer / exchange": "float64: its integers have two words, which are "
        "made, added and rounded with carries",
        "exact / torch": "norm of float64 on AMD: as above (1.5 on Intel)",
    },
)

if __name__ == "__main__":
    run(SUITE)
