"""The local reduction alone: compiled, in plain torch, and a copy of as many bytes.

Eight leaves of 16 MiB on one thread. The fold reads all leaves and writes one result; the copy
moves as many bytes in all, half of them read and half written. So the bar of 0.8 of the machine's
bandwidth for copies is 1.25 of the copy's time. Memory is touched before.

    python -m benchmarks.fold
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, in_turn
from meshplan import definition, kernel

LEAVES, BYTES = 8, 16 << 20
DTYPES = (torch.float32, torch.bfloat16)


def measure(dtype: torch.dtype, nbytes: int, rounds: int) -> Case:
    """One dtype. In blocks, as a training loop folds: a result lies where the last one lay."""
    numel = nbytes // dtype.itemsize
    leaves = [torch.randn(numel).to(dtype) for _ in range(LEAVES)]
    half = torch.zeros(numel * (LEAVES + 1) // 2, dtype=dtype)
    other = torch.zeros_like(half)
    ways = {
        "compiled": lambda: kernel.reduce_leaves(leaves, "sum", (LEAVES,)),
        "copy": lambda: other.copy_(half),
        "in torch": lambda: definition.reduce_leaves(leaves, "sum", (LEAVES,)),
    }
    name = str(dtype).removeprefix("torch.")
    return Case(
        name=f"fold of {LEAVES} leaves of {nbytes >> 10} KiB, {name}",
        unit="ms",
        runs={way: Figures.of(s) for way, s in in_blocks(ways, rounds, scale=1e3).items()},
        peers=("copy", "in torch"),
        parameters={"dtype": name, "leaves": LEAVES, "bytes": nbytes},
        bars=(at_most(1.25, "compiled", "copy"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Large leaves of each dtype, and leaves of 4 elements."""
    torch.set_num_threads(1)
    for dtype in DTYPES:
        yield measure(dtype, 1 << 12 if smoke else BYTES, 2 if smoke else 15)
    small = [torch.ones(4) for _ in range(LEAVES)]
    ways = {
        "compiled": lambda: kernel.reduce_leaves(small, "sum", (LEAVES,)),
        "in torch": lambda: definition.reduce_leaves(small, "sum", (LEAVES,)),
    }
    samples = in_turn(ways, 3 if smoke else 1000, scale=1e6)
    yield Case(
        name=f"fold of {LEAVES} leaves of 4 elements, float32",
        unit="us",
        runs={way: Figures.of(s) for way, s in samples.items()},
        peers=("in torch",),
    )


def why_not() -> str | None:
    """Without a compiled library there is nothing to measure."""
    return None if kernel.available() else str(kernel.why_not())


SUITE = Suite(__doc__ or "", cases, lambda smoke: len(DTYPES) + 1, why_not)

if __name__ == "__main__":
    run(SUITE)
