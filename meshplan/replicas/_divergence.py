"""What is known of replicas that differ, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshplan.layout import Layout
from meshplan.replicas._elements import Difference, index_of, text_of

__all__ = ["Divergence", "Elements", "ReplicaReport", "message"]

_SHOWN_RANKS = 4


@dataclass(frozen=True, slots=True)
class Elements:
    """How the local tensor of one rank differs from that of the reference rank.

    Attributes:
        rank: global rank that was looked at.
        count: elements that differ; 0 if a second look found none: the tensor changes while it is
            compared.
        index: of the first of them in the local tensor; ``None`` if there is none, or if the local
            shapes differ.
        value, reference: of that element on ``rank`` and on the reference rank, with the bits:
            ``0.5 (0x3f000000)``.
        max_ulps: the largest distance in units in the last place; ``None`` for dtypes other than
            float16, bfloat16, float32, float64 and complex of them, and where each pair has a NaN.
        numel: elements of the local tensor.
        shapes: local shapes of ``rank`` and of the reference rank, where they differ.
    """

    rank: int
    count: int
    index: tuple[int, ...] | None
    value: str
    reference: str
    max_ulps: int | None
    numel: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @classmethod
    def of(
        cls, rank: int, difference: Difference, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Elements:
        """From what was found on ``rank``.

        Args:
            rank: the global rank.
            difference: from the reference, in elements.
            shape, dtype: of the local tensor.
        """
        any_differs = difference.count > 0
        return cls(
            rank=rank,
            count=difference.count,
            index=index_of(difference.first, shape) if any_differs else None,
            value=text_of(difference.mine, dtype) if any_differs else "",
            reference=text_of(difference.theirs, dtype) if any_differs else "",
            max_ulps=difference.ulps if difference.ulps >= 0 else None,
            numel=torch.Size(shape).numel(),
        )

    def line(self, reference: int) -> str:
        """In words.

        Args:
            reference: the global rank that is compared with.
        """
        if self.shapes is not None:
            mine, theirs = map(list, self.shapes)
            return f"its local shape is {mine}, that of rank {reference} {theirs}"
        if self.count == 0:
            return (
                "a second look found no difference: the tensor is being changed while it is "
                "compared; wait for whatever writes to it"
            )
        ulps = "" if self.max_ulps is None else f", at most {self.max_ulps} ulps apart"
        return (
            f"{self.count} of {self.numel} elements differ, first at index {self.index}: "
            f"{self.value}, on rank {reference} {self.reference}{ulps}"
        )


@dataclass(frozen=True, slots=True)
class Divergence:
    """One tensor that ranks should hold alike and do not, in one group of replicas.

    Attributes:
        name: of the tensor; what ``what`` says about it: dtype, shape, placements.
        what: see ``name``.
        replicated: axes along which all ranks should hold the same.
        axes: those of them along which ranks that are neighbours differ.
        reference: global rank that the others are measured by: of the largest class (of equally
            large ones, of the class with the lowest coordinate) the one with the lowest coordinate.
        coordinate: of the reference rank, by axis label.
        classes: global ranks by what they hold; the first class is the reference's.
        coordinates: of ``classes``, in the same places.
        elements: for the first few divergences, one rank of each of the first classes that differ
            from the reference's.
    """

    name: str
    what: str
    replicated: tuple[str, ...]
    axes: tuple[str, ...]
    classes: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[tuple[int, ...], ...], ...]
    elements: tuple[Elements, ...] = ()

    @property
    def reference(self) -> int:
        """As above."""
        return self.classes[0][0]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that differ from the reference."""
        return tuple(rank for ranks in self.classes[1:] for rank in ranks)

    def lines(self, layout: Layout) -> list[str]:
        """In words, for a message.

        Args:
            layout: of the mesh; names the coordinates.
        """
        along, replicated = ", ".join(self.axes), ", ".join(self.replicated)
        rest = "" if self.axes == self.replicated else f", though replicated along {replicated}"
        lines = [
            f"  {self.what}: differs along {along}{rest}",
            f"    {_who(layout, self.classes[0], self.coordinates[0])}: the reference",
        ]
        seen = {one.rank: one for one in self.elements}
        for ranks, coordinates in zip(
            self.classes[1 : 1 + _SHOWN_RANKS], self.coordinates[1 : 1 + _SHOWN_RANKS], strict=True
        ):
            found = seen.get(ranks[0])
            how = f": {found.line(self.reference)}" if found else ""
            lines.append(f"    {_who(layout, ranks, coordinates)}{how}")
        more = len(self.classes) - 1 - _SHOWN_RANKS
        if more > 0:
            lines.append(f"    and {more} more different replicas")
        return lines


def _who(layout: Layout, ranks: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> str:
    shown = []
    for rank, place in list(zip(ranks, places, strict=True))[:_SHOWN_RANKS]:
        at = ", ".join(f"{axis}={i}" for axis, i in zip(layout.axes, place, strict=True))
        shown.append(f"rank {rank} ({at})")
    more = len(ranks) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What was compared, on this rank, and found equal.

    Attributes:
        tensors: how many.
        elements, nbytes: of their local data.
        by_axes: how many tensors were compared along which axes, by label.
        cut: names of tensors of which no rank of the mesh holds a second replica.
        step: the step number that was given, or ``None``.
        seconds: all of it took.
    """

    tensors: int
    elements: int
    nbytes: int
    by_axes: tuple[tuple[tuple[str, ...], int], ...]
    cut: tuple[str, ...]
    step: int | None
    seconds: float

    def __str__(self) -> str:
        along = "; ".join(f"{count} along {', '.join(axes)}" for axes, count in self.by_axes)
        step = "" if self.step is None else f"step {self.step}: "
        compared = f"{self.tensors} tensors, {self.nbytes} bytes, agree on all ranks"
        cut = f"; {len(self.cut)} have one replica each" if self.cut else ""
        return f"{step}{compared}{f' ({along})' if along else ''}{cut}, in {self.seconds:.3f} s"


def message(
    layout: Layout,
    divergences: tuple[Divergence, ...],
    *,
    tensors: int,
    compared: int,
    groups: int,
    step: int | None,
) -> str:
    """The text of the error.

    Args:
        layout: of the mesh.
        divergences: the first of them.
        tensors, compared: how many differ, and out of how many.
        groups: how many divergences there are in all.
        step: if given.
    """
    at = "" if step is None else f" at step {step}"
    lines = [f"replicas differ{at} in {tensors} of {compared} tensors, on mesh {layout}"]
    for divergence in divergences:
        lines += divergence.lines(layout)
    if groups > len(divergences):
        lines.append(f"  and {groups - len(divergences)} more groups of replicas")
    lines.append(
        "go back to a checkpoint from before; if it is one rank that differs test its hardware, if "
        "many do reduce in one order (meshplan.install()) and start from one set of weights"
    )
    return "\n".join(lines)
