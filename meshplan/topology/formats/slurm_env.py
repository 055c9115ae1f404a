"""Where ranks sit, from the environment that Slurm gives to the tasks of a job step.

Source: the manual pages srun(1) and sbatch(1) of Slurm. Rank and task number are taken for the
same, as launchers do that start one process for each task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshplan.errors import TopologyInputError
from meshplan.topology.formats._hostlist import hostlist

__all__ = ["placement", "rank_order"]

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MOST = 2_000_000  # ranks


def placement(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Node of each rank, by position in the list of nodes; ``None`` if it is not told.

    It is not told where a variable is missing, or with a distribution other than block, cyclic
    and ``plane=N``. What stands after the first ``:`` or ``,`` of a distribution is about sockets
    and cores and changes no node; ``Pack`` does change them.

    Args:
        environ: variables of the process.

    Raises:
        TopologyInputError: values that are not well formed or that contradict each other.
    """
    hosts = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    order = environ.get("SLURM_DISTRIBUTION")
    if not hosts or not tasks or not order:
        return None
    if order.lower() == "plane" and "SLURM_DIST_PLANESIZE" in environ:
        order = f"plane={environ['SLURM_DIST_PLANESIZE']}"
    nodes = len(hostlist(hosts))
    per_node = _counts(tasks)
    if len(per_node) != nodes:
        raise TopologyInputError(
            f"SLURM_TASKS_PER_NODE={tasks[:40]} is about {len(per_node)} nodes, and the list of "
            f"nodes names {nodes}; take both from one job step"
        )
    total = environ.get("SLURM_NTASKS")
    if total and (not total.isascii() or not total.isdigit() or len(total) > 9):
        raise TopologyInputError(f"SLURM_NTASKS={total[:40]!r} is not a number")
    if total and int(total) != sum(per_node):
        raise TopologyInputError(
            f"SLURM_NTASKS={total} and SLURM_TASKS_PER_NODE={tasks[:40]}, which is "
            f"{sum(per_node)} tasks; take both from one job step"
        )
    return rank_order(nodes, per_node, order)


def _counts(text: str) -> list[int]:
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
        if len(counts) + times > 1_000_000 or ranks > _MOST:
            raise TopologyInputError(
                f"SLURM_TASKS_PER_NODE={text[:40]} is more than {_MOST:,} ranks"
            )
        counts += [count] * times
    return counts


def rank_order(nodes: int, per_node: Sequence[int], order: str) -> tuple[int, ...] | None:
    """Node of each rank if node i has ``per_node[i]`` of them, handed out by ``order``.

    ``block`` fills one node after the other, ``cyclic`` gives each node one rank in turn, and
    ``plane=N`` gives each N in turn; a node that is full is passed over. Any other: ``None``.

    Args:
        nodes: how many there are.
        per_node: ranks of each.
        order: as ``SLURM_DISTRIBUTION`` has it.

    Raises:
        TopologyInputError: ``per_node`` is not about ``nodes`` nodes, or N is below 1.
    """
    if len(per_node) != nodes or any(count < 0 for count in per_node):
        raise TopologyInputError(f"expected the ranks of {nodes} nodes, found {len(per_node)}")
    words = re.split("[:,]", order.strip().lower())
    if "pack" in words:
        return None
    if words[0] == "block":
        turn = max(per_node, default=0)
    elif words[0] == "cyclic":
        turn = 1
    elif words[0].startswith("plane="):
        size = words[0].removeprefix("plane=")
        if not size.isascii() or not size.isdigit() or len(size) > 9 or int(size) < 1:
            raise TopologyInputError(f"the distribution {order[:40]!r} needs a size from 1 on")
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
