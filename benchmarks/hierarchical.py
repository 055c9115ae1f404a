"""Bytes between nodes, counted, with and without the topology.

Eight ranks on two nodes of four reduce a gradient, near ranks first and flat, with the same bits.
Counted is what all ranks hand to functional collectives for ranks of the other node, which is all
for messages of this size. What an all-reduce of the backend sends cannot be counted so.

    python -m benchmarks.hierarchical
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import meshplan
from benchmarks.record import Case, Figures, at_most
from benchmarks.script import Suite, run
from benchmarks.timing import on_ranks
from meshplan.topology import Topology
from tests.traffic import Sent

P, R = Partial(), Replicate()
NODE = 4
TARGETS: dict[str, tuple[Placement, Placement]] = {
    "P,P -> R,R": (R, R),
    "P,P -> R,S(0)": (R, Shard(0)),
}
DTYPES = (torch.float32, torch.bfloat16)


def measure(smoke: bool) -> Iterator[Case]:
    """On every rank of a job."""
    mesh = init_device_mesh("cpu", (2, NODE), mesh_dim_names=("ddp", "fsdp"))
    ranks = dist.get_world_size()
    topologies = {
        "near first": Topology.uniform(ranks, node_size=NODE, domain_size=NODE),
        "flat": Topology.unknown(ranks),
    }
    for dtype in DTYPES[smoke:]:
        name = str(dtype).removeprefix("torch.")
        gradient = torch.arange(256 if smoke else 65536).to(dtype)
        for text, target in TARGETS.items():
            d = DTensor.from_local(gradient, mesh, (P, P), run_check=False)
            runs = {}
            for way, topology in topologies.items():
                with meshplan.installed(path="exchange", topology=topology), Sent(NODE) as sent:
                    d.redistribute(mesh, target).to_local()
                every = [0] * ranks
                dist.all_gather_object(every, sent.off_node)
                runs[way] = Figures.of([sum(every) / 1024])
                meshplan.shutdown()
            # The reduction alone: partial sums of bfloat16 travel as float32.
            limit = 0.25 if dtype is torch.float32 else 0.375
            yield Case(
                name=f"{text} of {gradient.nbytes >> 10} KiB, {name}: bytes between nodes",
                unit="KiB",
                runs=runs,
                peers=("flat",),
                ranks=ranks,
                parameters={"dtype": name, "bytes": gradient.nbytes},
                bars=(at_most(limit, "near first", "flat"),) if target == (R, R) else (),
            )


def cases(smoke: bool) -> Iterator[Case]:
    """One job of eight ranks."""
    yield from on_ranks(2 * NODE, measure, smoke)


SUITE = Suite(__doc__ or "", cases, lambda smoke: len(DTYPES[smoke:]) * len(TARGETS))

if __name__ == "__main__":
    run(SUITE)
