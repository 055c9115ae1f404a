"""``meshplan probe`` on every rank: reduces with the backend's own all-reduce, and compares."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._torch import default_store
from meshplan.cli._output import track
from meshplan.cli._probe import NUMELS, ProbeRow
from meshplan.cli._ranks import open_default_group
from meshplan.errors import PolicyError
from meshplan.flatten import discover
from meshplan.layout import Layout
from meshplan.lint._spec import parse_mesh
from meshplan.testing import bits, nccl_model, order_sensitive, replica_fingerprints


def run_probe(
    given: argparse.Namespace,
) -> tuple[dict[str, Any], Sequence[ProbeRow]]:
    """A header and the rows of the report; the same on all ranks. ``PolicyError`` and
    ``LayoutError`` for options that contradict the job, otherwise the errors of
    `open_default_group`.
    """
    layout = parse_mesh(given.mesh)
    world_size = int(os.environ["WORLD_SIZE"])
    if layout.world_size != world_size:
        raise PolicyError(
            f"the mesh {layout} has {layout.world_size} ranks and the job {world_size}; pass the "
            "mesh of this job"
        )
    wide = [i for i, size in enumerate(layout.sizes) if size > 1]
    if not wide:
        raise PolicyError(f"the mesh {layout} has no axis larger than 1: nothing is reduced")
    backend = given.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl_model":
        nccl_model.register()
        nccl_model.configure(domain_size=given.node_size, algorithm=given.algorithm or "ring")
    with open_default_group(backend, given.timeout) as device:
        store = default_store()
        cluster = discover(store, dist.get_rank(), world_size, given.timeout)
        dtypes = [getattr(torch, name) for name in given.dtype]
        rows: list[ProbeRow] = []
        choices = [*((i,) for i in wide), *combinations(wide, 2)]
        cases = [(d, n) for d in dtypes for n in given.numel or NUMELS]
        for axes in track("probing axes", choices):
            rows += _probe_axes(layout, axes, cases, device, timedelta(seconds=given.timeout))
    about = f"{backend} ({nccl_model.ABOUT})" if backend == "nccl_model" else backend
    return {"mesh": str(layout), "backend": about, "origin": cluster.origin}, rows


def _group_of(
    layout: Layout, axes: tuple[int, ...], timeout: timedelta
) -> tuple[list[list[int]], Any, int]:
    """The ranks of all groups over ``axes``, this rank's group, and its place in it."""
    groups = layout.siblings(axes).tolist()
    # As DeviceMesh creates groups: every rank takes part in every creation. Without a timeout
    # torch waits half an hour.
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timeout
    )
    place = next(ranks for ranks in groups if dist.get_rank() in ranks).index(dist.get_rank())
    return groups, group, place


def _probe_axes(
    layout: Layout,
    axes: tuple[int, ...],
    cases: Sequence[tuple[torch.dtype, int]],
    device: torch.device,
    timeout: timedelta,
) -> list[ProbeRow]:
    groups, group, place = _group_of(layout, axes, timeout)
    rows = []
    for dtype, numel in cases:
        # The same inputs in every group.
        mine = order_sensitive(numel, rank=place, world_size=len(groups[0]), dtype=dtype)
        result = mine.to(device)
        dist.all_reduce(result, group=group)
        seen = replica_fingerprints(result)
        digests = [[seen[rank] for rank in ranks] for ranks in groups]
        rows.append(
            ProbeRow(
                axes=tuple(layout.axes[i] for i in axes),
                groups=len(groups),
                size=len(groups[0]),
                dtype=str(dtype).removeprefix("torch."),
                numel=numel,
                results=len({found[0] for found in digests}),
                share=_count_differing(result) / numel,
                consistent=all(len(set(found)) == 1 for found in digests),
            )
        )
    dist.destroy_process_group(group)
    return rows


def _count_differing(result: Tensor) -> int:
    first = result.clone()
    dist.broadcast(first, 0)
    count = (bits(result) != bits(first)).sum().reshape(1)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)
