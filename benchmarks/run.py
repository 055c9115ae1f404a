"""CPU time of a training step under `meshplan run`, compared with the same step alone.

Three jobs of two ranks take turns in blocks of ten steps: alone, observed with ``--every 100``, and
with a certificate of each step. DDP and AdamW step a model of bytes on one thread. A step's time is
that of all threads of rank 0, which compares what both ranks post, to the end of its last message.

    python -m benchmarks.run
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks
from benchmarks.training import example
from meshplan.run import RunSettings
from meshplan.run._observation import observe

RANKS, LAYERS, TOKENS = 2, 4, 64
# The width of the model, sequences in a step, and blocks of ten steps.
JOB = (128, 4, 20)
SMOKE_JOB = (32, 1, 1)
BLOCK, SETTLE_SECONDS = 10, 0.2
BARS = (at_most(1.05, "observed", "alone"), at_most(1.25, "certified", "alone"))


def train(width: int, batch: int, blocks: int, settings: str, turn: Any) -> Iterator[float]:
    """On every rank of a job: the milliseconds of a step in each block that has its turn."""
    if settings:
        observe(RunSettings.parse(settings)).start()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(example.ByteTransformer(width, LAYERS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = time.process_time()
    for _ in range(1 + blocks):
        turn.acquire()
        for _ in range(BLOCK):
            model(torch.randint(256, (batch, TOKENS + 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        # The thread that compares is behind the steps.
        time.sleep(SETTLE_SECONDS)
        now = time.process_time()
        yield (now - before) / BLOCK * 1e3
        before = now


def measure(width: int, batch: int, blocks: int, smoke: bool) -> Case:
    """The mean over all steps: few of them are compared."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"alone": "", "observed": "every=100"}
        settings["certified"] = f"every=100 certify={folder}/certificate"
        turns = {way: context.Semaphore(0) for way in settings}
        jobs = {
            way: on_ranks(RANKS, train, width, batch, blocks, text, turns[way])
            for way, text in settings.items()
        }
        samples: dict[str, list[float]] = {way: [] for way in settings}
        for _ in range(1 + blocks):
            for way, job in jobs.items():
                for _ in range(RANKS):
                    turns[way].release()
                samples[way].append(next(job))
        assert not any(list(job) for job in jobs.values())
    runs = {way: Figures.of([sum(found[1:]) / blocks]) for way, found in samples.items()}
    count = sum(one.numel() for one in example.ByteTransformer(width, LAYERS).parameters())
    return Case(
        name=f"{BLOCK * blocks} steps of {count / 1e6:.2g} million parameters",
        unit="ms",
        runs=runs,
        peers=("alone",),
        ranks=RANKS,
        parameters={"parameters": count, "tokens": batch * TOKENS},
        bars=() if smoke else BARS,
    )


def cases(smoke: bool) -> Iterator[Case]:
    """One model."""
    yield measure(*(SMOKE_JOB if smoke else JOB), smoke)


SUITE = Suite(
    __doc__ or "",
    cases,
    lambda _: 1,
    reasons={"certified / alone": "the words of parameters and states take most of it"},
)

if __name__ == "__main__":
    run(SUITE)
