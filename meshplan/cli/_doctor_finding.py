"""One line of ``meshplan doctor``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked for, and what was found.

    Attributes:
        what: e.g. ``GPUs``.
        found: in words.
        remedy: what to do; empty where nothing is missing.
    """

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'missing' if self.remedy else 'ok':<8}{self.what}: {self.found}"
        return f"{line}\n{'':<8}{self.remedy}" if self.remedy else line
