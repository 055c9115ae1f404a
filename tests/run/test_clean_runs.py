"""Fifty runs without a fault: no difference, no rank with other steps, and repeatable certificates.

Each job runs five times, with three seeds. Jobs of `tests/jobs` run here in forked ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import meshplan
from meshplan.run._compare import compare_files
from tests.run.observing import observe_ranks, run_script

pytestmark = [pytest.mark.full, pytest.mark.processes]

SETTINGS = (
    "every=1",
    "first=1 every=2",
    "every=1 gradients",
    "first=2 every=3 gradients",
    "every=1",
)
SEEDS = (1, 1, 2, 2, 3)


def skip_together() -> None:
    """As a scaler of gradients does, all ranks skip the steps that one of them cannot take."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for step in range(8):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        skip = torch.tensor(float(step in (2, 5) and dist.get_rank() == 1))
        dist.all_reduce(skip, dist.ReduceOp.MAX)
        if not skip:
            dist.all_reduce(shown := loss.detach().clone())
            meshplan.log_value("loss", shown)
            optimizer.step()
        optimizer.zero_grad()


def accumulate() -> None:
    """Micro-batches without a reduction, and statistics of batches that ranks do not share."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        with model.no_sync():
            model(torch.randn(4, 8)).square().mean().backward()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        meshplan.log_value("loss", loss)  # of this rank alone
        optimizer.step()
        optimizer.zero_grad()


def step_alone() -> None:
    """A shared model, and one of each rank's own, which some ranks step more often."""
    shared, own = DistributedDataParallel(nn.Linear(8, 8)), nn.Linear(8, 8)
    steps, more = AdamW(shared.parameters(), lr=1e-2), SGD(own.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        shared(own(torch.randn(4, 8))).square().mean().backward()
        for _ in range(1 + dist.get_rank()):
            more.step()
        steps.step()
        steps.zero_grad()
        more.zero_grad()


# Parameters of both stages have the same names, and no mesh shows the shards of FSDP1.
UNCERTIFIED = ("pipeline", "fsdp1")
CASES: dict[str, tuple[int, Callable[[], None]]] = {
    "skip together": (3, skip_together),
    "accumulate": (2, accumulate),
    "step alone": (3, step_alone),
    "gan": (2, partial(run_script, "gan")),
    "gan on three": (3, partial(run_script, "gan")),
    "pipeline": (4, partial(run_script, "pipeline")),
    "fsdp2": (2, partial(run_script, "fsdp2")),
    "hsdp_tp": (4, partial(run_script, "hsdp_tp")),
    "fsdp1": (4, partial(run_script, "fsdp1")),
    "experts": (4, partial(run_script, "experts")),
}


@pytest.mark.parametrize("case", CASES)
def test_clean_runs_raise_no_alarm(case: str, tmp_path: Path) -> None:
    ranks, job = CASES[case]
    seed_all = torch.manual_seed

    def run(seed: int, *_: Any) -> None:
        with mock.patch.object(torch, "manual_seed", lambda n: seed_all(n + 10_000 * seed)):
            torch.manual_seed(0)
            job()

    paths = [str(tmp_path / str(number)) for number in range(len(SEEDS))]
    for seed, settings, path in zip(SEEDS, SETTINGS, paths, strict=True):
        shown = f"certify={path} {settings}"
        report = observe_ranks(partial(run, seed), ranks, shown)[1]
        assert report["replicas"]["first_difference"] is None
        assert report["steps"]["unequal"] == []
        # FSDP2 alone has no replicas.
        assert (report["replicas"]["compared"] > 0) == (case != "fsdp2")
        certified = report["certificate"]["links"] > 0
        assert certified == (case not in UNCERTIFIED)
    # Two with the same seed, and the first with the last one.
    statuses = [compare_files(paths[i], paths[j])[1] for i, j in ((0, 1), (2, 3), (0, 4))]
    assert statuses == ([0, 0, 1] if certified else [2, 2, 2])
