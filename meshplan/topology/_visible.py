"""Which GPU a process calls its number 0, 1, 2, ...: the variables that choose and order them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["choice", "visible"]

_NUMBER = re.compile(r"\s*\+?(\d{1,6})", re.ASCII)


def visible(text: str | None, ids: Sequence[str]) -> list[int | str]:
    """What ``CUDA_VISIBLE_DEVICES`` and its like choose, in order.

    As in the CUDA Programming Guide: numbers, or ids that may be cut short where they stay
    unambiguous; what stands behind an entry that is not a device is not visible.

    Args:
        text: value of the variable; ``None`` if it is not set, and then all are visible.
        ids: of all devices, in the order of their numbers.

    Returns:
        Positions in ``ids``, or as they stand the ids of parts of devices (``MIG-...``).
    """
    if text is None:
        return list(range(len(ids)))
    found: list[int | str] = []
    for entry in text.split(","):
        entry = entry.strip()
        number = _NUMBER.match(entry)
        if number is not None and int(number[1]) < len(ids):
            one: int | str = int(number[1])
        elif entry.startswith("MIG-") and len(entry) > 4:
            one = entry
        else:
            alike = [i for i, name in enumerate(ids) if entry and _starts(name, entry)]
            if len(alike) != 1:
                break
            one = alike[0]
        if one in found:
            # The driver then shows no device at all.
            return []
        found.append(one)
    return found


def choice(environ: Mapping[str, str], *names: str) -> str | None:
    """The value of the first of ``names`` that is set."""
    return next((environ[name] for name in names if name in environ), None)


def _starts(name: str, entry: str) -> bool:
    return entry[:4].upper() == "GPU-" and name.lower().startswith(entry.lower())
