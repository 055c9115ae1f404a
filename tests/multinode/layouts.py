"""The expected results of a job of ``workers/layout.py``, computed from the placement of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.multinode.cluster import cluster
from tests.multinode.launch import launch

AXES = ("ddp", "fsdp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of all ranks of a job.

    Attributes:
        sizes: of its axes.
        cyclic: whether its ranks are dealt out over the hosts in turn; else consecutive ranks share a host.
        prepare: whether its groups are made up front.
        blocks: how many ranks reduce intra-node first, for each set of axes where some do.
        findings: the linter's, where ranks lie host by host.
    """

    sizes: tuple[int, ...]
    cyclic: bool = False
    prepare: bool = False
    blocks: tuple[tuple[str, int], ...] = ()
    findings: tuple[str, ...] = ()


def run(
    per_host: Sequence[int], meshes: Sequence[Mesh], *, seconds: float, kind: str | None = None
) -> dict[int, Any]:
    """The results of each rank, in one job."""
    asked = {
        "meshes": [
            {"sizes": mesh.sizes, "cyclic": mesh.cyclic, "prepare": mesh.prepare} for mesh in meshes
        ]
    }
    with cluster(len(per_host), kind) as hosts:
        arguments = [json.dumps(asked)]
        found = launch(hosts, "layout", per_host, seconds=seconds, arguments=arguments)
        check(found, per_host, meshes, apart=hosts.kind == "namespaces")
    return found


def check(
    found: dict[int, Any], per_host: Sequence[int], meshes: Sequence[Mesh], *, apart: bool
) -> None:
    """All of it: places, findings, plans, paths and bits. ``apart``: hosts share no memory."""
    nodes = [host for host, count in enumerate(per_host) for _ in range(count)]
    for rank, one in found.items():
        assert one["nodes"] == nodes
        assert one["hosts"] == [f"host{node}" for node in nodes]
        if apart:
            assert one["host"] == f"host{nodes[rank]}"
            assert one["shm"] == []
        for mesh, reductions in zip(meshes, one["meshes"], strict=True):
            order = _cyclic(per_host) if mesh.cyclic else list(range(len(nodes)))
            for axes, reduction in reductions.items():
                names = axes.split() if axes != "bfloat16" else _wide(mesh)
                _check_reduction(reduction, mesh, names, order, nodes, rank, apart)
    _check_lint(found, meshes)


def _wide(mesh: Mesh) -> list[str]:
    return [axis for axis, size in zip(AXES, mesh.sizes, strict=False) if size > 1]


def _check_reduction(
    reduction: dict[str, Any],
    mesh: Mesh,
    axes: list[str],
    order: list[int],
    nodes: list[int],
    rank: int,
    apart: bool,
) -> None:
    what = (rank, mesh, axes, reduction)
    assert reduction["wrong"] == [], what
    assert reduction["replicas"] == [1, 1], what
    assert reduction["fallbacks"] == 0, what
    (planned,) = reduction["planned"]
    block = dict(mesh.blocks).get(" ".join(axes))
    hosts = {nodes[other] for other in _group(mesh, axes, order, rank)}
    if block is not None:
        assert f"exchange in blocks of {block}," in planned, what
        assert reduction["ran"] == ["exchange"], what
        assert "near ranks reduce first" in reduction["why"][0], what
        return
    assert "in blocks of" not in planned, what
    if len(hosts) == 1:
        # Memory that ranks of one host share, in one form or another.
        assert set(reduction["ran"]) <= {"one_shot", "two_shot"}, what
    elif apart:
        assert set(reduction["ran"]) <= {"exchange", "reference"}, what
        assert "its ranks are on several hosts" in reduction["why"][0], what


def _group(mesh: Mesh, axes: list[str], order: list[int], rank: int) -> list[int]:
    """The ranks that differ from ``rank`` along ``axes`` alone."""
    coordinates = list(product(*map(range, mesh.sizes)))
    mine = coordinates[order.index(rank)]
    fixed = [i for i in range(len(mesh.sizes)) if AXES[i] not in axes]
    return [
        order[place]
        for place, coordinate in enumerate(coordinates)
        if all(coordinate[i] == mine[i] for i in fixed)
    ]


def _cyclic(per_host: Sequence[int]) -> list[int]:
    """Ranks dealt out over the hosts in turn, by counting."""
    order = []
    for turn in range(max(per_host)):
        first = 0
        for count in per_host:
            if turn < count:
                order.append(first + turn)
            first += count
    return order


def _check_lint(found: dict[int, Any], meshes: Sequence[Mesh]) -> None:
    judged = [mesh for mesh in meshes if not mesh.cyclic]
    for mesh, linted in zip(judged, found[0]["lint"], strict=True):
        codes = tuple(sorted({one["code"] for one in linted["report"]["findings"]}))
        assert codes == mesh.findings, (mesh, linted)
        failed = "MP101" in codes
        assert linted["code"] == int(failed), linted
    for rank, one in found.items():
        assert [linted["code"] for linted in one["lint"]] == [
            linted["code"] for linted in found[0]["lint"]
        ]
        assert rank == 0 or all(linted["report"] is None for linted in one["lint"])
