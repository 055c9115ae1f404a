"""Run the lines of Python that pages show, each in a program like those that the pages are about.

    torchrun --nproc-per-node 4 page_lines.py

The lines are in lines.json. A copy of this file is started where meshplan is installed, apart from the checkout. It prints a
JSON object: each line that failed, and why.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan import Contract
from meshplan.topology import Link, Links, Topology

# What a page leaves out of a line, by the line.
OMITTED = {
    "Topology.uniform(..., links=Links(network=Link(latency=5e-6, bandwidth=25e9)))": "40, node_size=8",
    "with meshplan.installed(...):": "strict=True",
    "install(path=...)": "'exchange'",
    "install(timeout=...)": "30",
}


def names(line: str) -> dict[str, Any]:
    """What a line finds around it. Only ``meshplan`` itself was imported by its user."""
    torch.manual_seed(0)
    plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    found = {
        **{"meshplan": meshplan, "torch": torch, "dist": dist, "mesh": plain, "Contract": Contract},
        **{"Topology": Topology, "Links": Links, "Link": Link, "world_size": 40},
        **{"tensor": torch.ones(3), "loss": torch.ones(()), "install": meshplan.install},
        **{one: getattr(meshplan, one) for one in ("clip_grad_norm_", "verify_replicas")},
    }
    if "DistributedDataParallel" in line or "ddp." in line or "join" in line:
        found["module"] = nn.Linear(4, 4)
        found["model"] = DistributedDataParallel(nn.Linear(4, 4))
        found["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found["DistributedDataParallel"] = DistributedDataParallel
    elif '"pp"' in line:
        found["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        found["parameters"] = nn.Linear(4, 4).parameters()
    elif "apply" in line or line.startswith(("set_", "verify")):
        found["model"] = model = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model, mesh=plain)
        # Pages import it as `from meshplan.integrations import fsdp` before.
        found["apply"] = meshplan.integrations.fsdp.apply
        found |= {one: getattr(model, one) for one in dir(model) if one.startswith("set_")}
    elif line == "check(step)":
        found |= {"check": meshplan.ReplicaCheck(nn.Linear(4, 4), plain, every=2), "step": 2}
    return found


def filled(line: str) -> str:
    written = line.replace("...", OMITTED.get(line, "..."))
    return f"{written} pass" if written.endswith(":") else written


def clean() -> None:
    """Take away what a line has set for the process."""
    meshplan.uninstall()
    for name in [one for one in os.environ if one.startswith("NCCL_")]:
        del os.environ[name]


def main() -> None:
    with open("lines.json") as file:
        lines = json.load(file)
    if not dist.is_initialized():
        dist.init_process_group("meshplan")
    failed = {}
    for line in lines:
        try:
            meshplan.install()
            exec(filled(line), names(line))
        except Exception:
            failed[line] = traceback.format_exc()
        clean()
    sys.stdout.write(f"failed: {json.dumps(failed)}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
