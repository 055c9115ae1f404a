"""The logical mesh: axes, coordinates, groups in mesh-coordinate order, siblings.

A ``Layout`` has names, sizes and the global rank at each coordinate, and no devices or process
groups. Any order of ranks is legal, e.g. ``[[0, 3], [2, 1]]``: a group lists its ranks by mesh
coordinate, row-major, never by sorted rank. That order fixes the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from meshplan._message_text import format_first, suggest
from meshplan.errors import AxisNameError, LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Integers: TypeAlias = npt.NDArray[np.int64]
"""An int64 array."""

# Stands for ``range(n)``, with n from the sizes.
_ALL = range(0)


@dataclass(frozen=True)
class Layout:
    """Names, sizes and ranks of a device mesh. Frozen, hashable, compared by value.

    Attributes:
        sizes: ranks along each axis, outermost first.
        names: one name per axis, or ``None`` for a mesh without names.
        ranks: global rank at each coordinate, row-major; a ``range`` where the ranks are
            consecutive (so that a layout of a million ranks costs nothing), else a tuple.

    Raises:
        LayoutError: no axis, a size below 1, names that repeat or do not match the sizes, or
            ranks that repeat, are negative, or do not fill the mesh.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None = None
    ranks: range | tuple[int, ...] = _ALL

    def __post_init__(self) -> None:
        if not self.sizes or any(size < 1 for size in self.sizes):
            raise LayoutError(
                f"a mesh needs axes of size 1 or more, got sizes {list(self.sizes)}; "
                "pass for example Layout.of(ddp=8, fsdp=5)"
            )
        if self.names is not None and (
            len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names)
        ):
            raise LayoutError(
                f"axis names must be unique and one for each of the {len(self.sizes)} axes, "
                f"got {list(self.names)}; pass one name per axis, or names=None"
            )
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "names", None if self.names is None else tuple(self.names))
        object.__setattr__(self, "ranks", _normalize_ranks(self.ranks, math.prod(self.sizes)))

    @classmethod
    def of(cls, ranks: Iterable[int] | None = None, /, **axes: int) -> Layout:
        """A layout from axis names and sizes, e.g. ``Layout.of(ddp=8, fsdp=5, tp=1)``.

        Args:
            ranks: global ranks, row-major; 0..n-1 if not given.
            **axes: size of each axis by name, outermost first.

        Raises:
            LayoutError: sizes and ranks that do not describe a mesh.
        """
        return cls(
            sizes=tuple(axes.values()),
            names=tuple(axes),
            ranks=_ALL if ranks is None else tuple(ranks),
        )

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Layout:
        """The layout of a torch ``DeviceMesh`` or sub-mesh, unnamed axes included.

        Raises:
            LayoutError: something else, such as the name of an axis.
        """
        if not hasattr(mesh, "mesh_dim_names"):
            raise LayoutError(
                f"mesh={mesh!r} is not a DeviceMesh; pass a mesh, or a slice of one such as "
                "device_mesh['dp', 'tp']"
            )
        grid = mesh.mesh
        return cls(
            sizes=tuple(grid.shape),
            names=mesh.mesh_dim_names,
            ranks=tuple(grid.flatten().tolist()),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return len(self.ranks)

    @property
    def highest_rank(self) -> int:
        """The highest global rank in the mesh."""
        return self.ranks[-1] if isinstance(self.ranks, range) else max(self.ranks)

    @property
    def axes(self) -> tuple[str, ...]:
        """A label per axis: its name, or ``axis0``, ``axis1``, ... on a mesh without names."""
        return self.names or tuple(f"axis{i}" for i in range(len(self.sizes)))

    @cached_property
    def grid(self) -> Integers:
        """Global ranks: an int64 array of shape ``sizes``, read-only."""
        if isinstance(self.ranks, range):
            flat = np.arange(self.ranks.start, self.ranks.stop, dtype=np.int64)
        else:
            flat = np.array(self.ranks, dtype=np.int64)
        flat.flags.writeable = False
        return flat.reshape(self.sizes)

    def axis_index(self, axis: str | int) -> int:
        """The position of an axis, by its label or position.

        Raises:
            AxisNameError: the mesh has no such axis; the message lists those it has.
        """
        if isinstance(axis, int):
            if not -len(self.sizes) <= axis < len(self.sizes):
                raise AxisNameError(
                    f"no axis {axis} in a mesh of {len(self.sizes)} axes; "
                    f"pass a position from 0 to {len(self.sizes) - 1}"
                )
            return axis % len(self.sizes)
        if axis in self.axes:
            return self.axes.index(axis)
        hint = suggest(axis, self.axes)
        raise AxisNameError(f"no axis '{axis}' in the mesh, it has {', '.join(self.axes)}{hint}")

    def axis_indices(self, axes: Iterable[str | int] | str | int) -> tuple[int, ...]:
        """Positions of several axes (or of one), ascending, each once."""
        if isinstance(axes, str | int):
            axes = (axes,)
        return tuple(sorted({self.axis_index(axis) for axis in axes}))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The mesh coordinate of a global rank, or ``None`` if it is not in the mesh."""
        try:
            position = self.ranks.index(rank)
        except ValueError:
            return None
        coordinate = []
        for size in reversed(self.sizes):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def siblings(self, axes: Iterable[str | int] | str | int) -> Integers:
        """All groups of ``axes``: an int64 array [number of groups, ranks per group].

        Rows are the groups by the coordinate of the other axes, row-major; the columns of a row
        are its ranks by the coordinate of ``axes``, row-major.
        """
        inner = self.axis_indices(axes)
        outer = tuple(i for i in range(len(self.sizes)) if i not in inner)
        group_size = math.prod(self.sizes[i] for i in inner)
        return self.grid.transpose(*outer, *inner).reshape(-1, group_size)

    def ascends(self, axes: Iterable[str | int] | str | int) -> bool:
        """True if ranks ascend with the coordinate in every group of ``axes``.

        Torch sorts the ranks of its groups. If this is false, that order differs from the order of
        coordinates.
        """
        if isinstance(self.ranks, range):
            return True
        groups = self.siblings(axes)
        return bool((groups[:, 1:] > groups[:, :-1]).all())

    def group_of(self, rank: int, axes: Iterable[str | int] | str | int) -> tuple[int, ...] | None:
        """The ordered global ranks of ``rank``'s group over ``axes``.

        Args:
            rank: a global rank.
            axes: labels or positions of the reduced axes.

        Returns:
            By mesh coordinate, row-major; ``None`` if ``rank`` is outside the mesh.

        Raises:
            AxisNameError: an axis that the mesh does not have.
        """
        coordinate = self.coordinate(rank)
        if coordinate is None:
            return None
        inner = self.axis_indices(axes)
        positions = [0]
        for i, size in enumerate(self.sizes):
            indices = range(size) if i in inner else (coordinate[i],)
            positions = [p * size + index for p in positions for index in indices]
        return tuple(self.ranks[p] for p in positions)

    def __str__(self) -> str:
        axes = ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.sizes, strict=True))
        first = self.ranks[0]
        if self.ranks == range(self.world_size):
            return f"({axes})"
        if isinstance(self.ranks, range):
            return f"({axes}; ranks {first}..{first + self.world_size - 1})"
        return f"({axes}; ranks {format_first(self.ranks)})"


def signature(group: Sequence[int], node_of_rank: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a group on each of its nodes, nodes in order of their first rank.

    Args:
        group: ordered global ranks.
        node_of_rank: node of each global rank.
    """
    counts: dict[int, int] = {}
    for rank in group:
        node = node_of_rank[rank]
        counts[node] = counts.get(node, 0) + 1
    return tuple(counts.values())


def _normalize_ranks(ranks: Sequence[int], count: int) -> range | tuple[int, ...]:
    if ranks is _ALL:
        return range(count)
    if isinstance(ranks, range) and ranks.step == 1 and ranks.start >= 0 and len(ranks) == count:
        return ranks
    found = np.array(ranks, dtype=np.int64)
    ordered = np.sort(found)
    repeats = bool((ordered[1:] == ordered[:-1]).any())
    if len(ranks) != count or repeats or int(ordered[0]) < 0:
        raise LayoutError(
            f"a mesh of {count} coordinates needs {count} different ranks from 0 up, "
            f"got {len(ranks)}: {format_first(ranks)}; pass the global rank at each coordinate, "
            "row-major"
        )
    first = int(found[0])
    if np.array_equal(found, np.arange(first, first + count)):
        return range(first, first + count)
    return tuple(int(rank) for rank in ranks)
