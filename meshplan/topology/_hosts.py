"""Ranks handed out to hosts: which host and which of its GPUs each rank has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.errors import TopologyError, TopologyInputError
from meshplan.topology._files import content_of
from meshplan.topology.formats.slurm_env import rank_order

__all__ = ["Placed", "hand_out", "is_rank_order", "of_hosts", "ranks_from_file"]

_ORDERS = re.compile(r"(?:block|cyclic|plane=[1-9]\d{0,8})(?:[:,].*)?", re.IGNORECASE | re.DOTALL)
_SLOTS = re.compile(r"(?:slots=|:)(\d{1,6})", re.ASCII)
_MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Placed:
    """Where ranks 0, 1, 2, ... are.

    Attributes:
        hosts: number of each rank's host.
        gpus: which GPU of its host each rank has: 0, 1, 2, ... in the order of the host's ranks, as
            launchers give them.
        names: of the hosts, by number; empty if they have none.
    """

    hosts: tuple[int, ...]
    gpus: tuple[int, ...]
    names: tuple[str, ...] = ()


def is_rank_order(text: str) -> bool:
    """Whether it is ``block``, ``cyclic`` or ``plane=N``, and not the name of a file.

    Raises:
        TopologyError: a plane of another size.
    """
    found = _ORDERS.fullmatch(text) is not None
    if not found and text.lower().startswith("plane="):
        raise TopologyError(
            f"rank order {text[:60]!r}: a plane is a whole number of ranks from 1 up; write for "
            "example plane=4"
        )
    return found


def hand_out(per_host: Sequence[int], order: str) -> Placed:
    """Ranks handed out to hosts that take ``per_host[i]`` each: ``block``, ``cyclic``, ``plane=N``.

    Raises:
        TopologyError: another order.
    """
    hosts = rank_order(len(per_host), per_host, order) if is_rank_order(order) else None
    if hosts is None:
        raise TopologyError(
            f"no rank order {order[:60]!r}; write block, cyclic, plane=N, or the name of a file "
            "with the host of each rank, one a line"
        )
    return of_hosts(hosts)


def of_hosts(hosts: Sequence[int], names: tuple[str, ...] = ()) -> Placed:
    """From the host of each rank."""
    taken: dict[int, int] = {}
    gpus = []
    for host in hosts:
        gpus.append(taken.get(host, 0))
        taken[host] = gpus[-1] + 1
    return Placed(tuple(hosts), tuple(gpus), names)


def ranks_from_file(name: str) -> Placed:
    """From a file of hosts; ``-`` is standard input.

    A line is the name of the host of the next rank. ``name slots=8`` (as in Open MPI's hostfiles)
    and ``name:8`` (as in MPICH's) are the next eight ranks. ``#`` starts a comment.

    Raises:
        TopologyInputError: it cannot be read, has no host in it, or a line that is not understood.
    """
    numbers: dict[str, int] = {}
    hosts: list[int] = []
    shown = "standard input" if name == "-" else name
    for line, content in enumerate(content_of(name).splitlines(), start=1):
        words = content.partition("#")[0].replace(":", " :").split()
        if not words:
            continue
        match = _SLOTS.fullmatch(words[1]) if len(words) == 2 else None
        if words[0].startswith(":") or len(words) > 2 or (len(words) == 2 and match is None):
            raise TopologyInputError(
                f"{shown}:{line}: expected the host of a rank, or host slots=8, found "
                f"{content.strip()[:60]!r}"
            )
        times = 1 if match is None else int(match[1])
        if len(hosts) + times > _MOST_RANKS:
            raise TopologyInputError(f"{shown}:{line}: more than {_MOST_RANKS:,} ranks")
        hosts += [numbers.setdefault(words[0], len(numbers))] * times
    if not hosts:
        raise TopologyInputError(f"{shown}: no host in it; write the host of each rank, one a line")
    return of_hosts(hosts, tuple(numbers))
