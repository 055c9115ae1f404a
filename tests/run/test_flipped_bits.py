"""One bit that flips on one rank at step 3, and what names it: the table of docs/run.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan.run._compare import compare_files
from tests.run.observing import flip, observe_ranks

pytestmark = [pytest.mark.full, pytest.mark.processes]

PAGE = Path(__file__).parents[2] / "docs" / "run.md"
STEPS, BAD_STEP, BAD_RANK = 4, 3, 1
JOBS = {"DDP, 3 ranks": 3, "HSDP, 2 x 2 ranks": 4}
SECOND = re.compile(r"differ: first at step (\d+): (\w+(?: state)?) (\S+) ")
NAMES = {"buffer": "seen", "value": "loss"}
FAULTS = (
    "parameter",
    "gradient before its sum",
    "gradient after its sum",
    "optimizer state",
    "buffer",
    "loss before its sum",
    "loss after its sum",
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.weight = nn.Parameter(torch.randn(32, 4))
        self.register_buffer("seen", torch.zeros(3))
        self.fault = ""

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += 1
        if self.fault == "gradient before its sum":
            self.weight.register_hook(flipped)
        return self.hidden(batch).relu() @ self.weight


def flipped(tensor: Tensor) -> Tensor:
    found = tensor.detach().clone()
    flip(found, 5, 20)
    return found


def train(job: str, fault: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inner = Model()
    model: nn.Module = inner
    if job.startswith("DDP"):
        model = DistributedDataParallel(inner)
    else:
        fully_shard(inner, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    for step in range(1, STEPS + 1):
        inner.fault = fault if (step, rank) == (BAD_STEP, BAD_RANK) else ""
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        weight, shown = inner.weight, loss.detach().clone()
        places: dict[str, Any] = {
            "parameter": weight,
            "gradient after its sum": weight.grad,
            "optimizer state": optimizer.state.get(weight, {}).get("exp_avg"),
            "buffer": inner.seen,
            "loss before its sum": shown,
        }
        if inner.fault in places:
            flip(places[inner.fault], 0, 20)
        dist.all_reduce(shown)
        if inner.fault == "loss after its sum":
            flip(shown, 0, 20)
        meshplan.log_value("loss", shown / ranks)
        optimizer.step()
        optimizer.zero_grad()


def run(job: str, fault: str, path: Path) -> Any:
    """The first difference that the run itself reports."""
    settings = f"certify={path} gradients every=1"
    report = observe_ranks(lambda *_: train(job, fault), JOBS[job], settings)[1]
    return report["replicas"]["first_difference"]


@pytest.fixture(scope="module", name="clean")
def _clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Certificates of runs without a fault."""
    paths = {job: tmp_path_factory.mktemp("clean") / "certificate" for job in JOBS}
    assert [run(job, "", path) for job, path in paths.items()] == [None, None]
    return {job: str(path) for job, path in paths.items()}


def read_table() -> dict[tuple[str, str], str]:
    """Cells of the page by job and fault."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| bit flips in |"))
    rows = [line.strip("| ").split(" | ") for line in lines[start : start + 2 + len(FAULTS)]]
    assert rows[0][1:] == list(JOBS)
    return {
        (job, row[0]): cell for row in rows[2:] for job, cell in zip(JOBS, row[1:], strict=True)
    }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("job", JOBS)
def test_a_flipped_bit_is_found_as_the_page_shows(
    job: str, fault: str, clean: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "certificate"
    first = run(job, fault, path)
    text, status = compare_files(clean[job], str(path))
    assert status == 1, text
    if first is not None:
        assert (first["step"], first["tensor"]) == (BAD_STEP, "weight")
        *rest, odd = first["ranks"]["agree"]
        assert BAD_RANK in {*odd, *rest[0]}
        # Of two replicas, either may be wrong; the order of additions is not.
        assert first["cause"] == ("one rank" if len(rest[0]) > 1 else None)
        named = f"rank {odd[0]}" if len(rest[0]) > 1 else f"rank {rest[0][0]} or {odd[0]}"
        shown = f"run: {first['kind']}, {named}"
    else:
        step, kind, name = SECOND.search(text).groups()
        assert (int(step), name) == (BAD_STEP, NAMES.get(kind, "weight"))
        odd = re.search(r"\((rank \d) holds other bits", text)
        shown = f"`compare`: {kind}" + (f", {odd[1]}" if odd else "")
    assert shown == read_table()[job, fault]
