"""Jobs of torchtitan on CPUs: plain, and over the backend, on nodes of unequal numbers of ranks.

    python -m tests.backend.torchtitan_jobs --job JOB.py rep=2,shard=3,tp=2,node=4 ...

Each configuration runs three times: over ``nccl_model``, as ``meshplan run`` observes it; the same
with its ``--backend meshplan``; and over the backend around ``nccl_model``, which ``JOB.py`` selects as
torchtitan's ``--module``. For each run a line of JSON: the reductions of rank 0 by kind, and the
tensors whose replicas have had other bits after any step; observed, the first line of the verdict.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshplan
from meshplan.run import RunSettings
from meshplan.run._job import ObservedJob
from meshplan.run._verdict import format_verdict
from meshplan.testing import nccl_model
from tests.backend.torchtitan_on_cpu import configure, prepare
from tests.processes import run_ranks

OBSERVED = "every=1 gradients"
DEGREES = {
    "rep": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
"""Of torchtitan, by the words of a configuration. Its other words: ``node``, the ranks per node;
``ac``, activation checkpointing; ``spmd``, torchtitan's backend for model parallelism."""


def train(job: Path | str, words: dict[str, str], steps: int, rank: int) -> dict[str, Any]:
    """One rank of a job. The Python file ``job`` selects the backend, or how a plain job is
    observed; ``words`` are the configuration.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MESHPLAN_INNER": "nccl_model"}
    nccl_model.register()
    nccl_model.configure(domain_size=int(words["node"]), algorithm="tree")
    dist.Backend.default_device_backend_map["cpu"] = "nccl_model"
    observed = ObservedJob(RunSettings.parse(job)) if isinstance(job, str) else None
    if isinstance(job, Path):
        sys.path.insert(0, str(job.parent))
        manager: Any = importlib.import_module("torchtitan.config").ConfigManager()
        manager.parse_args(["--module", job.stem, "--config", "llama3_8b"])
    trainers: Any = importlib.import_module("torchtitan.trainer")
    degrees = {field: int(words.get(word, "1")) for word, field in DEGREES.items()}
    with tempfile.TemporaryDirectory() as folder, meshplan.coverage() as counted:
        trainer = trainers.Trainer(
            configure(
                folder,
                steps,
                words.get("ac", "none"),
                spmd_backend=words.get("spmd", "spmd_types"),
                **degrees,
            )
        )
        replicas = Replicas(trainer)
        trainer.train()
        trainer.close()
    found = {
        "group": dist.get_backend(),
        "tensors": len(replicas.names),
        "differ": len(replicas.differing),
        "since step": min(replicas.differing.values(), default=None),
        "norms": [min(replicas.norms), max(replicas.norms)],
    }
    dist.destroy_process_group()
    if observed is not None:
        report = observed._observation.finish(None)
        found["verdict"] = report and format_verdict(report).splitlines()
    # Ranks of tests end without a flush.
    sys.stdout.flush()
    (step,) = counted.steps
    for kind in ("contract", "native", "any order", "outside"):
        found[kind] = sum(row["count"] for row in step.rows if row["kind"] == kind)
    found["reduce_scatter"] = sum(
        row["count"] for row in step.rows if "reduce_scatter" in row["reduction"]
    )
    return found


class Replicas:
    """The bits of the parameters and of the gradient norm of ``trainer``, compared over all ranks
    in each step.
    """

    def __init__(self, trainer: Any) -> None:
        self.names: set[str] = set()
        self.differing: dict[str, int] = {}
        self.norms: list[float] = []
        self._parts = trainer.model_parts
        step, log = trainer.train_step, trainer.metrics_processor.log

        def log_and_keep(number: int, loss: float, most: float, norm: float, **more: Any) -> None:
            self.norms.append(norm)
            log(number, loss, most, norm, **more)

        def step_and_compare(batches: Any) -> None:
            step(batches)
            for name in self._compare():
                self.differing.setdefault(name, trainer.step)

        trainer.metrics_processor.log = log_and_keep
        trainer.train_step = step_and_compare

    def _compare(self) -> set[str]:
        mine = {("gradient norm", ""): math.frexp(self.norms[-1])}
        for part in self._parts:
            for name, parameter in part.named_parameters():
                mine[name, _shard(parameter)] = _digest(parameter)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        found: dict[tuple[str, str], set[Any]] = {}
        for one in ranks:
            for key, bits in one.items():
                found.setdefault(key, set()).add(bits)
        self.names |= {name for name, _ in found}
        return {name for (name, _), bits in found.items() if len(bits) > 1}


def _shard(parameter: Tensor) -> str:
    """Where this rank is on the axes that the parameter is not replicated over."""
    if not isinstance(parameter, DTensor):
        return ""
    places = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return str([place for place, placement in places if not placement.is_replicate()])


def _digest(parameter: Tensor) -> str:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    flat = local.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def run_job(job: Path | str, configuration: str, steps: int) -> dict[str, Any]:
    """The findings of rank 0 of a job, see ``train``. ``configuration`` is such as
    ``rep=2,tp=4,node=3``.
    """
    words = dict(word.split("=") for word in configuration.split(","))
    ranks = math.prod(int(words.get(word, "1")) for word in DEGREES)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    found: dict[str, Any] = run_ranks(partial(train, job, words, steps), ranks, init=False)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("configurations", nargs="+")
    options = parser.parse_args()
    prepare()
    # Once for all ranks, which are forked.
    importlib.import_module("torchtitan.trainer")
    for configuration in options.configurations:
        for job in (OBSERVED, f"{OBSERVED} backend=meshplan", options.job.resolve()):
            found = run_job(job, configuration, options.steps)
            sys.stdout.write(json.dumps({"configuration": configuration} | found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
