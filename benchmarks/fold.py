"""The local reduction alone: compiled, in plain torch, and a copy of as many bytes, in one run.

Eight leaves of 16 MiB on one thread. The fold reads all leaves and writes one result; the copy
moves as many bytes in all, half of them read and half written. Medians; memory is touched before.

    python benchmarks/fold.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from meshplan import contract, kernel

LEAVES, BYTES = 8, 16 << 20


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds; the ratio is that of the copy's time to the fold's."""

    dtype: str
    compiled_ms: float
    copy_ms: float
    torch_ms: float
    of_copy_bandwidth: float


def median_ms(function: Callable[[], object], rounds: int) -> float:
    """The median of ``rounds`` calls, after one that is not counted."""
    function()
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        samples.append((time.perf_counter() - started) * 1000)
    return statistics.median(samples)


def measure(dtype: torch.dtype, rounds: int) -> Row:
    """One dtype, the three in turn."""
    numel = BYTES // dtype.itemsize
    leaves = [torch.randn(numel).to(dtype) for _ in range(LEAVES)]
    half = torch.zeros(numel * (LEAVES + 1) // 2, dtype=dtype)
    other = torch.zeros_like(half)
    compiled = median_ms(lambda: kernel.reduce_leaves(leaves, "sum", (LEAVES,)), rounds)
    copy = median_ms(lambda: other.copy_(half), rounds)
    plain = median_ms(lambda: contract.reduce_leaves(leaves, "sum", (LEAVES,)), max(3, rounds // 5))
    name = str(dtype).removeprefix("torch.")
    return Row(name, compiled, copy, plain, copy / compiled)


def main() -> None:
    """Run, print, and write the JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not kernel.available():
        raise SystemExit(str(kernel.why_not()))
    torch.set_num_threads(1)
    rows = [measure(dtype, options.rounds) for dtype in (torch.float32, torch.bfloat16)]
    small = [torch.ones(4) for _ in range(LEAVES)]
    call = 1000 * median_ms(lambda: kernel.reduce_leaves(small, "sum", (LEAVES,)), 1000)
    print(f"torch {torch.__version__}, {LEAVES} leaves of {BYTES >> 20} MiB, one thread")
    print(f"{'':10}{'compiled':>10}{'copy':>10}{'torch':>10}{'of copy':>9}  (bar 0.80)")
    for row in rows:
        print(
            f"{row.dtype:10}{row.compiled_ms:8.1f}ms{row.copy_ms:8.1f}ms{row.torch_ms:8.1f}ms"
            f"{row.of_copy_bandwidth:9.2f}"
        )
    print(f"a call on 4 elements: {call:.0f} us")
    if options.json:
        found = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "rounds": options.rounds,
            "rows": [asdict(row) for row in rows],
            "call_us": call,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
