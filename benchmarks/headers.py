"""The cost of an exchange's headers, compared with the same collectives without them.

Ranks over gloo on this machine. Both variants issue one all-to-all and one all-gather and fold in
the kernel; only one of them sends headers and compares them. They take turns call by call, in an
order that changes, so that a busy machine slows both; a call is as slow as its slowest rank. Of
messages of 1 KiB, which are all latency, the ratio is reported without a bar.

    python -m benchmarks.headers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import Case, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks, seconds, slowest
from meshplan.contract import Contract
from meshplan.execute import StepGroups, Wire
from meshplan.execute._gloo import GlooWire
from meshplan.execute._header import tensor_header
from meshplan.execute.paths import get_path
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive

WORLDS = (2, 3, 4)
# Bytes of a message, and the most that it may take of the time without headers.
SIZES = ((1 << 10, None), (64 << 10, 1.03))
_ops = torch.ops._c10d_functional


def in_pairs(functions: dict[str, Callable[[], Tensor]], calls: int) -> dict[str, list[float]]:
    """Microseconds of each call; which function is first changes from pair to pair."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for number in range(calls + 10):
        for name in order:
            sample = seconds(functions[name]) * 1e6
            if number >= 10:
                found[name].append(sample)
        order.reverse()
    return found


def measure(nbytes: int, bar: float | None, smoke: bool) -> Iterator[Case]:
    """One message, on every rank."""
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    summand = order_sensitive(nbytes // 4, rank=dist.get_rank(), world_size=ranks)
    step = Step(
        kind="all_reduce",
        axes=(0,),
        sizes=(ranks,),
        move="",
        why="",
        op="sum",
        path="exchange",
        contract=Contract(),
    )
    groups = StepGroups(group)

    exchange = get_path("exchange")

    def over(wire: Wire) -> Tensor:
        reduced = exchange.all_reduce(summand, step, groups, wire)
        found: Tensor = _ops.wait_tensor(reduced.tensor)
        return found

    def without() -> Tensor:
        return over(Wire())

    def with_headers() -> Tensor:
        header = tensor_header(summand, step, "exchange", False)
        return over(GlooWire(groups, (groups.rank, header)))

    assert_bitwise_equal(with_headers(), without())
    functions = {"without": without, "headers": with_headers}
    figures = slowest(in_pairs(functions, 5 if smoke else 1500))
    yield Case(
        name=f"{nbytes >> 10} KiB over {ranks} ranks",
        unit="us",
        runs=figures,
        peers=("without",),
        bars=() if bar is None else (at_most(bar, "headers", "without"),),
    )


def cases(smoke: bool) -> Iterator[Case]:
    """Every size over every number of ranks."""
    for ranks in WORLDS[:1] if smoke else WORLDS:
        for nbytes, bar in SIZES:
            yield from on_ranks(ranks, measure, nbytes, bar, smoke)


SUITE = Suite(__doc__ or "", cases, lambda smoke: len(SIZES) * (1 if smoke else len(WORLDS)))

if __name__ == "__main__":
    run(SUITE)
