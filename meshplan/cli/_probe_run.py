"""``meshplan probe`` on every rank: reduces with the backend's own all-reduce, and compares."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._torch import default_store
from meshplan._torch import functional_operators as _ops
from meshplan.cli._output import track
from meshplan.cli._probe import EXACT_NUMELS, NUMELS, ProbeRow, RoundingRow
from meshplan.cli._ranks import open_default_group
from meshplan.contract import Contract
from meshplan.errors import PolicyError
from meshplan.flatten import discover
from meshplan.kernel import reduce_leaves
from meshplan.layout import Layout
from meshplan.lint._spec import parse_mesh
from meshplan.testing import bits, nccl_model, order_sensitive, replica_fingerprints

# NCCL reads the variable when it makes a communicator.
_NCCL_ALGORITHMS = ("default", "Ring", "Tree", "NVLS", "NVLSTree")


def run_probe(
    given: argparse.Namespace,
) -> tuple[dict[str, Any], Sequence[ProbeRow | RoundingRow]]:
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
        numels = given.numel or (EXACT_NUMELS if given.exact else NUMELS)
        rows: list[ProbeRow | RoundingRow] = []
        algorithms: Sequence[str] = _NCCL_ALGORITHMS if backend == "nccl" else ["default"]
        choices = [*((i,) for i in wide), *combinations(wide, 2)]
        for axes in track("probing axes", choices):
            cases = [(d, n) for d in dtypes for n in numels]
            if given.exact:
                for algorithm in algorithms:
                    rows += _probe_rounding(layout, axes, cases, device, given.timeout, algorithm)
                continue
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


def _probe_rounding(
    layout: Layout,
    axes: tuple[int, ...],
    cases: Sequence[tuple[torch.dtype, int]],
    device: torch.device,
    timeout: float,
    algorithm: str,
) -> list[RoundingRow]:
    """Compare the backend's sums with those of the exact order, on every rank."""
    rows = []
    forced = {} if algorithm == "default" else {"NCCL_ALGO": algorithm}
    with mock.patch.dict(os.environ, forced):
        groups, group, place = _group_of(layout, axes, timedelta(seconds=timeout))
        for dtype, numel in cases:
            for inputs in ("cancelling", "wide"):
                leaves = _adversarial(inputs, len(groups[0]), numel, dtype)
                exact = reduce_leaves(leaves, "sum", (len(leaves),), Contract("exact"))
                for collective in ("all_reduce", "reduce_scatter"):
                    try:
                        wrong = _count_wrong(collective, leaves, exact, place, group, device)
                    except RuntimeError:
                        # An algorithm that these ranks, or this collective, do not have.
                        wrong = -1
                    most = torch.tensor([wrong, -wrong], device=device)
                    dist.all_reduce(most, dist.ReduceOp.MAX)
                    rows.append(
                        RoundingRow(
                            axes=tuple(layout.axes[i] for i in axes),
                            size=len(leaves),
                            collective=collective,
                            algorithm=algorithm,
                            dtype=str(dtype).removeprefix("torch."),
                            numel=numel,
                            inputs=inputs,
                            wrong=None if int(most[1]) > 0 else int(most[0]),
                        )
                    )
        dist.destroy_process_group(group)
    return rows


def _adversarial(inputs: str, ranks: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """The summands of all ranks: 1e8, 1, -1e8, 1 in any order, or exponents from -60 to 60."""
    draw = torch.Generator().manual_seed(numel)
    if inputs == "cancelling":
        values = torch.tensor([1e8, 1.0, -1e8, 1.0])[torch.arange(ranks) % 4]
        found = values[torch.rand(ranks, numel, generator=draw).argsort(0)]
    else:
        exponents = torch.randint(-60, 61, (ranks, numel), generator=draw)
        found = torch.ldexp(torch.randn(ranks, numel, generator=draw), exponents)
    return list(found.to(dtype))


def _count_wrong(
    collective: str,
    leaves: Sequence[Tensor],
    exact: Tensor,
    place: int,
    group: Any,
    device: torch.device,
) -> int:
    """Elements that are not those of ``exact``: of this rank's result, or of all shards."""
    result = leaves[place].to(device, copy=True)
    if collective == "all_reduce":
        dist.all_reduce(result, group=group)
    else:
        width = -(-exact.numel() // len(leaves))
        padding = (0, width * len(leaves) - exact.numel())
        whole = torch.nn.functional.pad(result, padding)
        name = group.group_name
        result = _ops.wait_tensor(_ops.reduce_scatter_tensor(whole, "sum", len(leaves), name))
        exact = torch.nn.functional.pad(exact, padding).view(-1, width)[place]
    wrong = (bits(result.cpu()) != bits(exact)).sum().to(device).reshape(1)
    if collective == "reduce_scatter":
        dist.all_reduce(wrong, group=group)
    return int(wrong)
