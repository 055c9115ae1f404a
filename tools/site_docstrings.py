"""The extension of griffe: docstrings that name several parameters or errors in one entry."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# Names in an entry of a section, which are indented by four, and the lines that belong to them.
_ENTRY = re.compile(
    r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)+):((?: .*)?(?:\n(?: {5,}.*)?(?=\n|\Z))*)", re.M
)


def split_entries(text: str) -> str:
    """Write ``a, b: meaning`` of a docstring as an entry for each name."""

    def split(entry: re.Match[str]) -> str:
        return "\n".join(f"    {name}:{entry[2]}" for name in re.split(r",\s+", entry[1]))

    section = re.search(r"^(?:Args|Attributes|Raises):$", text, re.M)
    if section is None:
        return text
    return text[: section.end()] + _ENTRY.sub(split, text[section.end() :])


class SplitEntries(Extension):
    """Applies ``split_entries`` to every docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split_entries(obj.docstring.value)
