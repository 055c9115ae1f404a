"""All-reduces between hosts over gloo, beside gloo's own and what a host's link must carry.

The hosts are network namespaces whose links the kernel limits. Each group times its links at its
first use. Calls take turns; bytes are those that leave the busiest host for one call.

    gloo       torch.distributed.all_reduce, in place
    auto       what `path="auto"` runs
    exchange   all-to-all among all ranks, addition, all-gather
    halving    rounds of messages between pairs of all ranks
    in blocks  the same as exchange inside each host first, then between hosts
    limit      the bytes that every path under the contract must send, at the rate of the link

    python -m benchmarks.paths
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.record import Bar, Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import in_blocks, on_hosts, say_cases, slowest
from meshplan.collectives import deterministic_all_reduce
from meshplan.execute import BoundReduction, Purpose, StepGroups
from meshplan.flatten import _join
from tests.multinode.cluster import why_not
from tests.steps import make_step

# Hosts, ranks on each, and megabits a second between hosts.
JOBS = (
    *((hosts, each, 1000) for hosts in (2, 4) for each in (1, 2, 4)),
    *((hosts, 2, 10_000) for hosts in (2, 4)),
)
SMOKE_JOBS = ((2, 2, 1000),)
# Bytes, calls that count, and dtypes.
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (
    *((1 << bits, calls, DTYPES) for bits, calls in ((16, 20), (20, 8), (22, 6))),
    (1 << 26, 2, DTYPES[:1]),
)
SMOKE_SIZES = ((1 << 10, 2, DTYPES[:1]),)


def sent_bytes() -> int:
    """Bytes that have left this host by its link."""
    found = re.search(r"eth0:((?:\s+\d+){9})", Path("/proc/net/dev").read_text())
    return int(found[1].split()[8]) if found else 0


def count(call: Callable[[], object]) -> tuple[Figures, Figures]:
    """MiB that leave the busiest host during one call, and CPU time of all ranks in ms. Collective,
    and the same on every rank.
    """
    dist.barrier()
    before, every = (sent_bytes(), time.process_time()), [(0, 0.0)] * dist.get_world_size()
    call()
    dist.barrier()
    dist.all_gather_object(every, (sent_bytes() - before[0], time.process_time() - before[1]))
    sent, used = zip(*every, strict=True)
    return Figures.of([max(sent) / 2**20]), Figures.of([sum(used) * 1e3])


def bars(nbytes: int, each: int, rate: int) -> Iterator[Bar]:
    """What was wanted."""
    if each == 1:
        yield at_most(1.05, "auto", "gloo")
    elif nbytes <= 1 << 16:
        yield at_most(1.0, "auto", "gloo")
    if nbytes >= 4 << 20 and rate <= 1000:
        yield at_most(1.15, "auto", "limit")


def measure(hosts: int, rate: int, sizes: Sequence[tuple[int, int, Any]]) -> Iterator[Case]:
    """Every path at every size, on every rank of a job."""
    ranks, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    each, taken = ranks // hosts, list[float]()
    find_hosts = _join._find_hosts

    def timed(*given: Any) -> Any:
        started = time.perf_counter()
        try:
            return find_hosts(*given)
        finally:
            taken.append((time.perf_counter() - started) * 1e3)

    with mock.patch.object(_join, "_find_hosts", timed):
        deterministic_all_reduce(torch.zeros(1))
    where = f"{hosts} hosts of {each}, {rate / 1000:g} Gb/s"
    about: dict[str, int | str] = {"hosts": hosts, "world_size": ranks, "rate": rate}
    yield Case(
        name=f"links timed, {where}",
        unit="ms",
        runs=slowest({"links": taken}),
        ranks=ranks,
        parameters=about,
        bars=(at_most(50, "links"),),
    )
    ways = {"auto": ("auto", 1), "exchange": ("exchange", 1), "halving": ("halving", 1)}
    if each > 1:
        ways["in blocks"] = "exchange", each
    for nbytes, calls, dtypes in sizes:
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            # Partials of float32 leave a host of several ranks, and results come back.
            share = 1 + (4 // dtype.itemsize if each > 1 else 1)
            tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
            runs: dict[str, Callable[[], object]] = {"gloo": partial(dist.all_reduce, tensor)}
            for way, (path, inner) in ways.items():
                step = make_step((ranks,), inner=inner, chunk=1 << 20)
                if (way, inner) == ("exchange", 1) and each > 1 and nbytes > 4 << 20:
                    continue  # up to seconds a call, which is why `auto` does not take it
                bound = BoundReduction(step, Purpose(way, "", "all ranks"), path=path)
                runs[way] = partial(bound.start, tensor, StepGroups(world))
            limit = share * (hosts - 1) / hosts * nbytes
            samples = slowest(in_blocks(runs, calls, scale=1e3, warm_up=1 if calls < 6 else 2))
            load = f"load {os.getloadavg()[0]:.1f}"
            counted = {way: count(call) for way, call in runs.items()}
            for what, unit, found, least in (
                (load, "ms", samples, limit * 8 / rate / 1e3),
                (
                    "bytes out of a host",
                    "MiB",
                    {w: c[0] for w, c in counted.items()},
                    limit / 2**20,
                ),
                ("CPU time of all ranks", "ms", {w: c[1] for w, c in counted.items()}, 0.0),
            ):
                yield Case(
                    name=f"{nbytes >> 10} KiB of {name}, {where}, {what}",
                    unit=unit,
                    runs=found | ({"limit": Figures.of([least])} if least else {}),
                    peers=("gloo", "limit") if least else ("gloo",),
                    ranks=ranks,
                    parameters=about | {"bytes": nbytes, "dtype": name},
                    bars=tuple(bars(nbytes, each, rate)) if what == load else (),
                )


def cases(smoke: bool) -> Iterator[Case]:
    """Jobs of some ranks on each host."""
    for hosts, each, rate in SMOKE_JOBS if smoke else JOBS:
        words = ["--hosts", str(hosts), "--rate", str(rate), *["--smoke"] * smoke]
        yield from on_hosts(__file__, [each] * hosts, words, rate)


def total(smoke: bool) -> int:
    """Times, bytes and CPU time of each size and dtype, and the links of each job."""
    jobs, sizes = (SMOKE_JOBS, SMOKE_SIZES) if smoke else (JOBS, SIZES)
    return len(jobs) * (1 + 3 * sum(len(dtypes) for _, _, dtypes in sizes))


SUITE = Suite(
    __doc__ or "",
    cases,
    total,
    lambda: why_not("namespaces") or None,
    reasons={
        "auto / gloo": "up to 1 MiB: all hosts share 2 cores, and `auto` mostly has 1.1 to 1.7 of "
        "gloo's CPU time, for a header and two collectives in place of one",
        "auto / limit": "its bytes are 1.05 to 1.15 of the limit's. Gloo, too, has 1.4 to 3.7 of "
        "the limit's time on 2 cores, for up to 1.85 of its bytes",
        "links": "8 and more ranks on 2 cores",
    },
)


def main() -> None:
    """The whole suite; or, under torchrun, the ranks of one job."""
    if "RANK" not in os.environ:
        run(SUITE)
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--rate", type=int)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    sizes = SMOKE_SIZES if options.smoke else SIZES
    say_cases(measure(options.hosts, options.rate, sizes))


if __name__ == "__main__":
    main()
