"""Predict the time of path ``peer`` on 8 H100, from published times of similar kernels.

    python -m tools.peer_latency

The sum of barriers, of the bytes that pass a GPU's link in one direction, and of work in local
memory while the link is idle. Nothing here was measured by meshplan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshplan.kernel._communicator import LINE_BYTES
from meshplan.kernel._device_peers import DEVICE_ONE_SHOT_BYTES, LANES, share_out, tile_bytes
from meshplan.kernel._library import MAX_BLOCKS

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Bytes in a us that a GPU's stores to peers reach. NCCL's ring, whose ranks store to the next one:
# 370 GB/s by its authors, github.com/NVIDIA/nccl-tests/issues/212. Writes of one GPU to another:
# 371 to 377 GB/s, github.com/NVIDIA/nccl/issues/1264.
PUSH = 370e3
# us until a load of the GPU's own memory arrives while others are under way: an assumption.
LOAD = 0.7
# Bytes in a us of its memory, both directions together: data sheet of H100 SXM.
MEMORY = 3350e3
# Words of 16 bytes that each lane has on their way in a copy: kBatch of csrc/device.h. In a fold it
# has one of each rank, as tests/test_device_build.py finds in the compiled code.
COPIED_AT_ONCE = 4


class Work(NamedTuple):
    """What one rank does in a call.

    Attributes:
        barriers: waits for all peers while the link is idle, each behind a release at system scope.
        link: bytes through its link, in the direction that has more.
        local: us in its own memory while the link is idle.
    """

    barriers: int
    link: float
    local: float = 0.0

    def time(self, barrier: float, rate: float) -> float:
        """In us, for us of a barrier and bytes in a us of the link."""
        return self.barriers * barrier + self.link / rate + self.local


class Published(NamedTuple):
    """Times of a kernel on H100 for sums of bfloat16, in CUDA graphs.

    Attributes:
        shots: 1 if each rank reads all of every message, 2 if it reduces a part.
        times: us, by MiB of the message.
    """

    name: str
    ranks: int
    shots: int
    times: dict[float, float]

    def work(self, nbytes: float) -> Work:
        """A barrier before the first byte is not counted: it is part of the launch."""
        others = self.ranks - 1
        each = others if self.shots == 1 else 2 * others / self.ranks
        return Work(self.shots, nbytes * each)


def _of(*times: float) -> dict[float, float]:
    return dict(zip((0.5, 1, 1.5, 2, 3, 4), times, strict=True))


# github.com/vllm-project/vllm/pull/24111 (4 and 6 ranks) and /42324 (8 ranks).
PUBLISHED = (
    Published("vLLM, one stage", 4, 1, _of(10, 15, 19, 22, 30, 38)),
    Published("vLLM, one stage", 6, 1, _of(13, 21, 30, 38, 53, 70)),
    Published("vLLM, two stages", 4, 2, _of(17, 18, 27, 27, 35, 43)),
    Published("vLLM, two stages", 6, 2, _of(15, 17, 20, 26, 29, 37)),
    Published("torch, two_shot", 4, 2, _of(18, 19, 19, 23, 25, 29)),
    Published("torch, two_shot", 6, 2, _of(17, 21, 24, 29, 35, 41)),
    Published(
        "torch, two_shot",
        8,
        2,
        _of(15, 17, 19, 22, 29, 37) | {8: 65, 16: 125, 32: 242, 64: 468, 128: 923},
    ),
)
NCCL = {0.5: 24.0, 1: 25.0, 4: 50.0, 16: 121.0, 64: 316.0, 128: 561.0}


class Fit(NamedTuple):
    """What is fitted.

    Attributes:
        barrier: us, with its share of the launch, of first loads and of waiting for slow ranks.
        one_shot, two_shot: bytes in a us of the link, in kernels of as many shots.
    """

    barrier: float
    one_shot: float
    two_shot: float

    def time(self, kernel: Published, nbytes: float) -> float:
        """us of a published kernel."""
        return kernel.work(nbytes).time(self.barrier, self[kernel.shots])


@lru_cache(maxsize=1)
def fit() -> Fit:
    """The least squares of relative errors over all published times."""
    rows = []
    for kernel in PUBLISHED:
        for size, time in kernel.times.items():
            work = kernel.work(size * MIB)
            links = [work.link if kernel.shots == shots else 0.0 for shots in (1, 2)]
            rows.append([one / time for one in (work.barriers, *links)])
    (barrier, one, two), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    return Fit(float(barrier), float(1 / one), float(1 / two))


def errors(kernel: Published) -> list[float]:
    """Of the model for each published time, relative to it."""
    return [fit().time(kernel, size * MIB) / time - 1 for size, time in kernel.times.items()]


def peer_work(nbytes: int, ranks: int = 8) -> tuple[str, Work]:
    """The mode that ``auto`` takes for an aligned message on GPUs with room for all blocks."""
    limit = next(size for most, size in DEVICE_ONE_SHOT_BYTES if ranks <= most)
    one_shot = nbytes <= limit
    parts = 1 if one_shot else ranks
    longest = -(-nbytes // (parts * LINE_BYTES)) * LINE_BYTES
    _, blocks = share_out(longest, MAX_BLOCKS, tile_bytes(ranks))
    in_flight = 16 * blocks * LANES
    if one_shot:
        # Staging waits for a load. Then a fold reads all leaves, a word of each at once.
        read = min(ranks * in_flight / LOAD, MEMORY)
        return "one_shot", Work(1, (ranks - 1) * nbytes, LOAD + ranks * nbytes / read)
    # The first stage and the last copy of results wait for a load. Stages and folds keep the link
    # busy: they store to peers what they load, or its sum. The copy behind the last wait does not.
    moved = (ranks - 1) * longest
    copy = min(COPIED_AT_ONCE * in_flight / LOAD, MEMORY / 2)
    pieces = rounds(nbytes, ranks)
    local = 2 * LOAD + moved / pieces / copy
    if pieces == 1:
        # The fold waits for its first load too.
        return "two_shot", Work(2, 2 * moved, local + LOAD)
    # A block stages a piece ahead of each wait, but for the last one. Copies of earlier results
    # fall into the time in which the other lanes store to peers, and first loads and releases of
    # earlier rounds into that of the other half of the blocks.
    return "two_shot", Work(1, 2 * moved, local)


def rounds(nbytes: int, ranks: int = 8) -> int:
    """Pieces of an aligned two_shot message for each block."""
    longest = -(-nbytes // (ranks * LINE_BYTES)) * LINE_BYTES
    piece, blocks = share_out(longest, MAX_BLOCKS, tile_bytes(ranks))
    return -(-longest // (piece * blocks))


def together(nbytes: int, ranks: int = 8) -> float:
    """us that a two_shot call takes longer if all blocks leave the link idle at the same time.

    They do so for the first loads of a stage and of a fold in each round. Their release is a part
    of the barrier: no published time separates the two.
    """
    return 2 * LOAD * (rounds(nbytes, ranks) - 1)


def predict(nbytes: int, rate: float = PUSH) -> float:
    """us of path ``peer`` over 8 H100, if the link has so many bytes in a us."""
    return peer_work(nbytes)[1].time(fit().barrier, rate)


def calibration_table() -> str:
    """How well the model explains what it was fitted to."""
    rows = [(kernel.name, str(kernel.ranks), errors(kernel)) for kernel in PUBLISHED]
    rows.append(("all", "", [one for *_, off in rows for one in off]))
    lines = ["| kernel | ranks | times | median error | worst error |", "|---|---|---|---|---|"]
    for name, ranks, off in rows:
        worst = f"{np.median(np.abs(off)):.0%} | {max(off, key=abs):+.0%}".replace("%", " %")
        lines.append(f"| {name} | {ranks} | {len(off)} | {worst} |")
    return "\n".join(lines)


def prediction_table() -> str:
    """8 H100, by size: path ``peer``, and what is published of others."""
    torch = {int(size * MIB): time for size, time in PUBLISHED[-1].times.items()}
    nccl = {int(size * MIB): time for size, time in NCCL.items()}
    lines = [
        "| message | mode | waits | link, MB | predicted, us | predicted for the slower link "
        "| torch, us | NCCL, us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for nbytes in (*(n * KIB for n in (16, 256, 512)), *(n * MIB for n in (1, 4, 16, 64)), GIB):
        mode, work = peer_work(nbytes)
        times = (
            predict(nbytes),
            predict(nbytes, fit().two_shot),
            torch.get(nbytes),
            nccl.get(nbytes),
        )
        cells = [f"{us:.0f}" if us else "" for us in times]
        lines.append(
            f"| {_size(nbytes)} | {mode} | {work.barriers} | {work.link / 1e6:.4g} "
            f"| {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def registered(nbytes: int, rate: float, ranks: int = 8) -> float:
    """us of a two_shot that loads the inputs of its peers and stores to their results, unstaged.

    It has a barrier before the loads and one after the stores. The fitted barriers include the
    first loads.
    """
    return Work(2, 2 * (ranks - 1) * nbytes / ranks).time(fit().barrier, rate)


def alternatives_table() -> str:
    """8 H100, two_shot: kernels that we do not have, beside path ``peer``."""
    lines = [
        "| message | staged, us | registered, loads as fast as stores, us | registered, us "
        "| into a GPU, MB | out of it, MB | out of it with multicast, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for nbytes in (512 * KIB, 4 * MIB, 64 * MIB, GIB):
        link = peer_work(nbytes)[1].link
        times = predict(nbytes), registered(nbytes, PUSH), registered(nbytes, fit().two_shot)
        cells = [f"{us:.0f}" for us in times]
        # Results leave once instead of once for each peer, and arrive as before.
        cells += [f"{one / 1e6:.4g}" for one in (link, link, link / 2 + nbytes / 8)]
        lines.append(f"| {_size(nbytes)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    each, unit = next(one for one in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if nbytes >= one[0])
    return f"{nbytes // each} {unit}"


def main() -> None:
    """Print the tables and the fit."""
    found = fit()
    rates = f"{found.one_shot / 1e3:.0f} and {found.two_shot / 1e3:.0f} GB/s"
    print(f"a barrier {found.barrier:.1f} us, links {rates}\n")
    print(calibration_table(), prediction_table(), alternatives_table(), sep="\n\n")


if __name__ == "__main__":
    main()
