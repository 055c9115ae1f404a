"""The process groups of a step and of a graph. Group ranks follow mesh coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshplan._torch import resolve_process_group
from meshplan.errors import GroupStateError
from meshplan.flatten import rank_in
from meshplan.kernel import Communicator


# Not frozen: one is made in every call, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True, eq=False)
class StepGroups:
    """The groups of one step: ``whole`` if it is flat, ``inner`` and ``outer`` if hierarchical. Let
    p be a rank's position in the whole group, row-major over ``step.sizes``, and
    ``p = o * step.inner + j``. Its inner group is the ranks with the same o, in the order of j; its
    outer group those with the same j, in the order of o.
    """

    whole: ProcessGroup | None  # all ranks that reduce together; unused by a hierarchical step
    inner: ProcessGroup | None = None  # of this rank; ``None`` for a flat step
    outer: ProcessGroup | None = None  # likewise
    gather: ProcessGroup | None = None  # over ``step.gather_axes``; ``None`` if there are none
    peers: Communicator[Any] | None = None  # memory that all ranks of ``whole`` share
    no_peers: str = ""  # why there is no such memory, where the configuration requests it
    # The global ranks of the whole group, for a hierarchical step.
    ranks: Callable[[], tuple[int, ...]] | None = None
    # ``whole``, for a flat step alone.
    flat: ProcessGroup = field(init=False, repr=False, compare=False)
    # The groups to reduce over, sequentially, for the one result.
    levels: tuple[ProcessGroup, ...] = field(init=False, repr=False, compare=False)
    # Every group whose collectives the step uses, once.
    all: tuple[ProcessGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.whole is None:
            self.levels = self.nested
        else:
            self.flat, self.levels = self.whole, (self.whole,)
        self.all = self.levels
        if self.gather is not None and self.gather not in self.levels:
            self.all += (self.gather,)

    @property
    def nested(self) -> tuple[ProcessGroup, ProcessGroup]:
        assert self.inner is not None
        assert self.outer is not None
        return self.inner, self.outer

    def split(self, inner: int) -> tuple[ProcessGroup, ProcessGroup]:
        """``nested`` of blocks of ``inner`` ranks, whose messages travel over ``whole``."""
        first = self.flat.rank() // inner * inner
        among = range(self.flat.rank() % inner, self.flat.size(), inner)
        found: Any = (
            Part(self.flat, range(first, first + inner)),
            Part(self.flat, among),
        )
        return found[0], found[1]

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of all that reduce together, as far as they are known."""
        if self.ranks is not None:
            return self.ranks()
        found = (rank for pg in self.levels for rank in dist.get_process_group_ranks(pg))
        return tuple(dict.fromkeys(found))

    @property
    def rank(self) -> int:
        return rank_in(self.levels[0])

    @property
    def position(self) -> int:
        """This rank's position in the whole group, which need not exist."""
        if self.whole is not None:
            return int(self.whole.rank())
        inner, outer = self.nested
        return int(outer.rank() * inner.size() + inner.rank())


class Part:
    """Some ranks of a group of gloo, in the place of a group for messages between two ranks."""

    def __init__(self, whole: ProcessGroup, places: Sequence[int]) -> None:
        self.whole, self.places = whole, places

    def size(self) -> int:
        return len(self.places)

    def rank(self) -> int:
        return self.places.index(self.whole.rank())


def resolve_group(name: str, size: int | None = None) -> ProcessGroup:
    """The process group that a graph names. Raises GroupStateError if it does not exist, or if its
    size is not ``size``, that of the group when the graph was made.
    """
    fix = (
        "call meshplan.prepare(mesh) before compiled code runs, on every rank, and "
        "torch.compiler.reset() where process groups were destroyed"
    )
    try:
        group = resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise GroupStateError(
            f"compiled code reduces over the process group {name}, and this process has none of "
            f"that name; {fix}"
        ) from error
    if size is not None and group.size() != size:
        raise GroupStateError(
            f"compiled code reduces over {size} ranks of the process group {name}, and the one of "
            f"that name has {group.size()}; {fix}"
        )
    return group
