"""The location of ranks in the environment that Slurm sets for the tasks of a job step.

Source: the manual pages srun(1) and sbatch(1) of Slurm. Rank and task number are taken as equal, as
in launchers that start one process for each task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.slurm import expand_hosts

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MOST_NODES, _MOST_RANKS = 1_000_000, 2_000_000


def read_nodes(environ: Mapping[str, str], default: str = "block") -> tuple[int, ...] | None:
    """Node of each rank, by position in the list of nodes; ``None`` if unknown, as with a
    distribution other than block, cyclic and ``plane=N``. Its parts after the first ``:`` or ``,``
    are about sockets and cores and change no node, except for ``Pack``. sbatch sets no
    ``SLURM_DISTRIBUTION``, and then ``default`` holds.
    """
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    order = environ.get("SLURM_DISTRIBUTION") or default
    if not hosts or not tasks:
        return None
    if order.lower() == "plane" and "SLURM_DIST_PLANESIZE" in environ:
        order = f"plane={environ['SLURM_DIST_PLANESIZE']}"
    nodes = len(expand_hosts(hosts))
    per_node = _parse_counts(tasks)
    if len(per_node) != nodes:
        raise TopologyInputError(
            f"SLURM_TASKS_PER_NODE={tasks[:40]} has {len(per_node)} nodes, and the list of "
            f"nodes has {nodes}; use both from one job step"
        )
    total = environ.get("SLURM_NTASKS")
    if total and not _NUMBER.fullmatch(total):
        raise TopologyInputError(f"SLURM_NTASKS={total[:40]!r} is not a number")
    if total and int(total) != sum(per_node):
        raise TopologyInputError(
            f"SLURM_NTASKS={total} and SLURM_TASKS_PER_NODE={tasks[:40]}, which is "
            f"{sum(per_node)} tasks; use both from one job step"
        )
    return assign_nodes(nodes, per_node, order)


def _parse_counts(text: str) -> list[int]:
    """``8(x4),4`` is five numbers."""
    counts: list[int] = []
    ranks = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise TopologyInputError(
                f"SLURM_TASKS_PER_NODE has {part[:20]!r}; expected numbers like 8(x4),4"
            )
        count, times = int(match[1]), int(match[2] or 1)
        ranks += count * times
        if len(counts) + times > _MOST_NODES or ranks > _MOST_RANKS:
            raise TopologyInputError(
                f"SLURM_TASKS_PER_NODE={text[:40]} is more than {_MOST_RANKS:,} ranks"
            )
        counts += [count] * times
    return counts


def assign_nodes(nodes: int, per_node: Sequence[int], order: str) -> tuple[int, ...] | None:
    """Node of each rank if node i has ``per_node[i]`` of them, assigned by ``order``. ``block``
    fills nodes sequentially, ``cyclic`` places one rank on each node in turn, ``plane=N`` places N
    on each in turn; a full node is skipped. Any other order: ``None``.
    """
    if len(per_node) != nodes or any(count < 0 for count in per_node):
        raise TopologyInputError(f"expected the ranks of {nodes} nodes, got {len(per_node)}")
    words = re.split("[:,]", order.strip().lower())
    if "pack" in words:
        return None
    if words[0] == "block":
        turn = max(per_node, default=0)
    elif words[0] == "cyclic":
        turn = 1
    elif words[0].startswith("plane="):
        size = words[0].removeprefix("plane=")
        if not _NUMBER.fullmatch(size) or int(size) < 1:
            raise TopologyInputError(f"the distribution {order[:40]!r} needs a size from 1 up")
        turn = int(size)
    else:
        return None
    left = dict(enumerate(per_node))
    ranks: list[int] = []
    while left := {node: count for node, count in left.items() if count > 0}:
        for node, count in left.items():
            ranks += [node] * min(turn, count)
            left[node] = count - turn
    return tuple(ranks)
