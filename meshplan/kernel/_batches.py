"""An order of additions as batches of leaves: what kernels for GPUs follow, see csrc/element.h."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from meshplan.orders import ORDERS

# As csrc/device_call.h and csrc/fold.h have them.
BATCH = 8
"""Leaves of a batch at most."""
STAGED_WAITING = 3
"""Results that may wait in a fold over peers."""
TABLE_LEAVES = 256
"""Leaves of a table; no batch is in two tables."""


class Plan(NamedTuple):
    """An order as batches of leaves, in the order of the leaves."""

    # For the first leaf of a batch its number of leaves, and 16 times the number of earlier results
    # that it is added to, the newest first; 0 for its other leaves.
    batches: bytes
    chain: bool  # the leaves are added one by one, and batches only limit how many are read at once
    waiting: int  # results that wait at once, at most


@lru_cache(maxsize=256)
def plan_of(order: str, shape: tuple[int, ...]) -> Plan | None:
    """The batches of ``order`` over axes of ``shape``, from the expression that defines it.
    ``None`` if it uses the leaves in another order than theirs, or adds one batch to more than 15
    results.
    """
    # After each leaf so many nodes take the newest two results.
    nodes: list[int] = []
    indices: list[int] = []

    def leaf(index: int) -> None:
        indices.append(index)
        nodes.append(0)

    def node(_left: None, _right: None) -> None:
        nodes[-1] += 1

    ORDERS[order].expression(shape, leaf, node)
    if indices != list(range(len(indices))):
        return None
    # Exact sums have one result in every order, and so have maxima, minima and integers.
    chain = ORDERS[order].exact or nodes == [0] + [1] * (len(nodes) - 1)
    batches = bytearray(len(nodes))
    first = depth = waiting = 0
    while first < len(nodes):
        count = min(BATCH, len(nodes) - first, TABLE_LEAVES - first % TABLE_LEAVES)
        added = int(first > 0)
        if not chain:
            count = next(n for n in range(count, 0, -1) if _is_tree(nodes[first : first + n]))
            added = nodes[first + count - 1] - (count - 1).bit_count()
        if added > 15:
            return None
        batches[first] = count + 16 * added
        depth += 1 - added if first else 0
        waiting = max(waiting, depth)
        first += count
    return Plan(bytes(batches), chain, waiting)


def _is_tree(nodes: Sequence[int]) -> bool:
    """Whether these leaves are first combined among themselves, as the tree over one axis."""
    count = len(nodes)
    # As many as 1 bits end the number of the leaf: those of a counter that carries. The last leaf
    # completes every part that is open.
    inside = all(nodes[j] == (j + 1 & -j - 1).bit_length() - 1 for j in range(count - 1))
    return inside and nodes[-1] >= (count - 1).bit_count()
