"""The cost of a replica check: a digest compared with one read of the tensor, on one thread.

The read is ``torch.sum`` over the tensor as int64, which does one addition for 8 bytes. Digest and
read take turns. A tensor is larger than the caches.

    python -m benchmarks.replicas
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_turn
from meshplan import kernel
from meshplan.kernel import digest_table

BYTES = 256 << 20


def measure(name: str, tensors: list[torch.Tensor], rounds: int) -> Case:
    """Digest and read of the same tensors."""
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors]

    def read() -> None:
        for one in words:
            one.sum()

    samples = in_turn({"digest": lambda: digest_table(tensors), "read": read}, rounds, scale=1e3)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return Case(
        name=f"{nbytes >> 20} MiB of {name}",
        unit="ms",
        runs={way: Figures.of(found) for way, found in samples.items()},
        peers=("read",),
        parameters={"bytes": nbytes},
        bars=(at_most(1.2, "digest", "read"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """One large tensor of each dtype, and the parameters of a layer many times over."""
    torch.set_num_threads(1)
    nbytes, rounds, layers = (1 << 20, 2, 1) if smoke else (BYTES, 15, 7)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(nbytes // dtype.itemsize).to(dtype)
        yield measure(str(dtype).removeprefix("torch."), [tensor], rounds)
    shapes = [(1024, 1024), (4096, 1024), (1024, 4096), (1024,), (4096,)]
    parameters = [torch.randn(shape) for _ in range(layers) for shape in shapes]
    yield measure(f"{len(parameters)} parameters, float32", parameters, rounds)


def why_not() -> str | None:
    """Without a compiled library the digest is torch's, and the bar is not for it."""
    return None if kernel.available() else str(kernel.why_not())


SUITE = Suite(__doc__ or "", cases, lambda smoke: 3, why_not)

if __name__ == "__main__":
    run(SUITE)
