"""A mesh as it is written on the command line."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from meshplan.errors import LayoutError

if TYPE_CHECKING:
    from meshplan.layout import Layout

__all__ = ["MAX_RANKS", "mesh_of"]

MAX_RANKS = 1 << 20
_MAX_AXES = 16
_AXIS = re.compile(r"(?:(?P<name>[A-Za-z_][A-Za-z0-9_]{0,63})=)?(?P<size>[0-9]{1,9})")


def mesh_of(text: str) -> Layout:
    """The layout of ``ddp=8,fsdp=5,tp=1``, or of ``8,5,1`` without names; ranks are 0, 1, 2, ...

    Raises:
        LayoutError: text of another form, a name twice, a size below 1, or too many axes or ranks.
    """
    from meshplan.layout import Layout

    items = [item.strip() for item in text.split(",")]
    if len(items) > _MAX_AXES:
        raise LayoutError(f"a mesh of {len(items)} axes; write up to {_MAX_AXES}")
    names, sizes = list[str](), list[int]()
    for item in items:
        match = _AXIS.fullmatch(item)
        if match is None:
            raise LayoutError(
                f"no axis {item[:40]!a}; write names and sizes, for example --mesh ddp=8,fsdp=5"
            )
        if match["name"] is not None:
            names.append(match["name"])
        sizes.append(int(match["size"]))
    if names and len(names) != len(sizes):
        raise LayoutError(
            f"{len(sizes)} axes and {len(names)} names; name all axes of a mesh, or none"
        )
    if math.prod(sizes) > MAX_RANKS:
        raise LayoutError(f"a mesh of {math.prod(sizes)} ranks; write one of up to {MAX_RANKS}")
    return Layout(tuple(sizes), tuple(names) or None)
