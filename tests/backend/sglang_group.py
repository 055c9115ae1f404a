"""Reductions by a group of SGLang, as its workers make them; the results of each rank as JSON.

For ``test_sglang``, started by torchrun in an environment that has SGLang.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins import load_plugins

import meshplan
from meshplan.testing import order_sensitive


def main() -> None:
    variable = sys.argv[1]
    load_plugins()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, backend="gloo"
    )
    group = parallel_state.init_model_parallel_group(
        [list(range(ranks))], rank, "gloo", use_custom_allreduce=False, group_name="tp"
    )
    summand = order_sensitive(64 * ranks, rank=rank, world_size=ranks)
    results = []
    with meshplan.coverage(keep=2) as coverage:
        # SGLang reads its variables at each call.
        for setting in ("1", "0"):
            os.environ[variable] = setting
            results.append(group.all_reduce(summand.clone()))
            results.append(group.reduce_scatter_along_dim(summand, 0))
            coverage.end_step()
    mine = {
        "bits": [one.view(torch.int32).tolist() for one in results],
        "counted": [step.to_scalars() for step in coverage.steps],
    }
    every: list[object] = [None] * ranks
    dist.all_gather_object(every, mine)
    if rank == 0:
        sys.stdout.write(json.dumps(every) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
