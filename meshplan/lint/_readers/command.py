"""Command lines: arguments, scripts that start jobs, and YAML or JSON that holds arguments."""

from __future__ import annotations

import re

from meshplan.lint._job import JobFile
from meshplan.lint._readers._degrees import read_document
from meshplan.lint._readers._documents import find_framework
from meshplan.lint._readers._options import read_command

# Part of each key in the table; a text without them has no degrees.
_MARK = re.compile(
    r"parallel|actor_rollout_ref|fsdp_size|autotp|(?<![\w-])--?(?:tp|pp|dp|cp|sp|ddp|fsdp)[\w-]*",
)


def recognises(name: str, text: str) -> bool:
    """Whether the text has an option for the size of an axis."""
    if name.endswith((".py", ".pyi", ".toml")) or not _MARK.search(text):
        return False
    return find_framework(read_command(name, text)) is not None


def read(name: str, text: str, *, world_size: int | None) -> JobFile:
    """The meshes of the options.

    Raises:
        LayoutError: sizes without a valid mesh; the message names file and line.
    """
    return read_document(read_command(name, text), world_size)
