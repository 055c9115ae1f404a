"""Meshes as a person writes them: ``ddp=8,fsdp=5,tp=1``, and ranks as nested lists."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from meshplan._message_text import shorten
from meshplan.errors import LayoutError
from meshplan.layout import Layout

MAX_RANKS = 1 << 22
# torch has tensors of at most 64 dims, and real meshes have a handful of axes.
MAX_AXES = 32
_MAX_CHARACTERS = 2000
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_SIZES = re.compile(r"\d+(?:[xX*]\d+)*")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def parse_mesh(text: str, ranks: object = None) -> Layout:
    """The mesh that ``text`` describes, outermost axis first: ``ddp=8,fsdp=5,tp=1``; also with
    ``:`` for ``=``, with spaces or ``x`` between axes, in brackets, and without names as ``8x5x1``.
    ``ranks`` are global, at each coordinate, as nested lists or one flat list, row-major; 0..n-1 by
    default. Raises LayoutError for another form, a size below 1, a repeated name, more than
    ``MAX_RANKS`` ranks, or ranks that do not fill the mesh.
    """
    if len(text) > _MAX_CHARACTERS:
        raise LayoutError(
            f"a mesh description has at most {_MAX_CHARACTERS} characters, got {len(text)}; "
            "use, for example, ddp=8,fsdp=5,tp=1"
        )
    pieces = _split_axes(text)
    plain = [piece for piece in pieces if _SIZES.fullmatch(piece)]
    if plain and len(plain) < len(pieces):
        raise LayoutError(
            f"'{_shorten(plain[0])}' has no axis name and others have one in '{_shorten(text)}'; "
            "name all axes, or none"
        )
    if plain:
        sizes = [(f"axis{i}", size) for i, size in enumerate(re.split("[xX*]", "x".join(plain)))]
        return make_layout([_read_size(*one) for one in sizes], None, ranks)
    axes: dict[str, int] = {}
    for piece in pieces:
        name, size = _split_name(piece)
        if name in axes:
            raise LayoutError(f"axis '{name}' appears twice in '{_shorten(text)}'; name it once")
        axes[name] = _read_size(name, size)
    return make_layout(list(axes.values()), list(axes), ranks)


def make_layout(
    sizes: Sequence[int],
    names: Sequence[str] | None,
    ranks: object = None,
) -> Layout:
    """A layout from unchecked sizes, names and ranks of an input. Raises LayoutError."""
    if len(sizes) > MAX_AXES:
        raise LayoutError(
            f"a mesh has at most {MAX_AXES} axes, got {len(sizes)}; leave out axes of size 1"
        )
    # Check each size first: the product of many large sizes is slow to compute.
    if any(size > MAX_RANKS for size in sizes) or math.prod(sizes) > MAX_RANKS:
        raise LayoutError(
            f"a mesh has at most {MAX_RANKS} ranks, got axes of "
            f"{' x '.join(_shorten(str(size)) for size in sizes)}; is a size wrong?"
        )
    named = None if names is None else tuple(names)
    if ranks is None:
        return Layout(tuple(sizes), named)
    shape, flat = flatten_ranks(ranks)
    if len(shape) > 1 and shape != tuple(sizes):
        raise LayoutError(
            f"ranks of shape {' x '.join(map(str, shape))} do not fit axes of "
            f"{' x '.join(map(str, sizes))}; use one list for each coordinate of the outer axes"
        )
    return Layout(tuple(sizes), named, flat)


def flatten_ranks(
    ranks: object,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and flat content of nested lists of ranks. Raises LayoutError for other lists."""
    shape: list[int] = []
    level: list[object] = [ranks]
    while level and all(isinstance(one, list | tuple) for one in level):
        rows = [one for one in level if isinstance(one, list | tuple)]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1 or len(shape) == MAX_AXES:
            raise LayoutError(
                f"lists of ranks on one level must have one length, got lengths "
                f"{', '.join(map(str, sorted(lengths)))}; use, for example, [[0, 2], [1, 3]]"
            )
        shape.append(lengths.pop())
        level = [item for row in rows for item in row]
    flat = [item for item in level if isinstance(item, int) and not isinstance(item, bool)]
    if not shape or not flat or len(flat) != len(level):
        raise LayoutError(
            f"ranks must be integers in nested lists, got {_shorten(repr(ranks))}; "
            "use, for example, [[0, 2], [1, 3]]"
        )
    if len(flat) > MAX_RANKS or max(flat) >= MAX_RANKS:
        raise LayoutError(f"ranks must be 0 to {MAX_RANKS - 1}, got {_shorten(str(max(flat)))}")
    return tuple(shape), tuple(flat)


def format_mesh(layout: Layout) -> str:
    """The text that `parse_mesh` reads: ``ddp=8,fsdp=5``, or ``8x5`` without names."""
    if layout.names is None:
        return "x".join(map(str, layout.sizes))
    return format_axes(layout)


def format_axes(layout: Layout) -> str:
    """``ddp=8,fsdp=5``, with the default names of axes without one."""
    return ",".join(f"{a}={s}" for a, s in zip(layout.axes, layout.sizes, strict=True))


def _split_axes(text: str) -> list[str]:
    inner = text.strip()
    if inner and _BRACKETS.get(inner[0]) == inner[-1]:
        inner = inner[1:-1].strip()
    inner = re.sub(r"\s*([=:])\s*", r"\1", inner.replace("\u00d7", "x"))
    found: list[str] = []
    parts = inner.removesuffix(",").split(",")
    for part in parts:
        if not part.strip():
            after = f" after '{_shorten(found[-1])}'" if found else ""
            raise LayoutError(
                f"an axis is missing{after} in '{_shorten(text)}'; "
                "use, for example, ddp=8,fsdp=5,tp=1"
            )
        found += [word for word in part.split() if word not in ("x", "X", "*")]
    if not found:
        raise LayoutError(f"no axis in '{_shorten(text)}'; use, for example, ddp=8,fsdp=5,tp=1")
    return found


def _split_name(piece: str) -> tuple[str, str]:
    name, separator, size = piece.replace(":", "=").partition("=")
    if not separator:
        raise LayoutError(f"no size in '{_shorten(piece)}'; use, for example, {_shorten(name)}=8")
    if not _NAME.fullmatch(name):
        raise LayoutError(
            f"'{_shorten(name)}' in '{_shorten(piece)}' is not a valid axis name; "
            "use letters, digits and underscores, e.g. ddp=8"
        )
    return name, size


def _read_size(name: str, text: str) -> int:
    # Python refuses to convert thousands of digits.
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise LayoutError(
            f"the size of axis '{_shorten(name)}' must be a positive integer, "
            f"got '{_shorten(text)}'; use, for example, {_shorten(name)}=8"
        )
    return int(text)


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split()))
