"""Whether this torch has the names of the room, in the form that meshplan uses them in."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshplan._torch._entry import Entry, is_absent, tested_range
from meshplan.errors import UnsupportedTorchError


def find_moved(names: Mapping[str, Entry]) -> Iterator[str]:
    """What of these names has moved: each with what meshplan uses it for, and what was found.

    Args:
        names: a table of the room.
    """
    for entry in names.values():
        if not entry.optional:
            yield from _differences(entry)


def refuse_moved(found: list[str]) -> None:
    """Raise UnsupportedTorchError if ``found``, from ``find_moved``, has anything; it lists all of
    it.
    """
    if found:
        import torch

        raise UnsupportedTorchError(
            f"torch {torch.__version__} is not what meshplan was written for: {'; '.join(found)}; "
            f"install torch {tested_range()}, and undo what other packages have replaced in it"
        )


def _differences(entry: Entry) -> Iterator[str]:
    said = f"{entry} ({entry.use})"
    if entry.source:
        if not _is_in_source(entry.module, entry.source):
            yield f"{said}: not found"
        return
    if entry.gives in ("attribute", "text") and _is_of_objects(entry):
        yield from _stored(entry)
        return
    found = entry.found()
    if is_absent(found):
        # Its parts are what is used of it.
        for one in (entry.parts or entry.stores) or ("",):
            yield f"{f'{entry}.{one}'.rstrip('.')} ({entry.use}): not found"
        return
    lacking = [one for one in entry.parts if not hasattr(found, one)]
    lacking += [one for one in entry.stores if not _stores(found, one)]
    yield from (f"{entry}.{one} ({entry.use}): not found" for one in lacking)
    if entry.parameters:
        yield from _form(entry, found)
    for module in entry.same_in:
        yield from _same(entry, Entry(module, entry.path, entry.use))
    for module, path in entry.callers:
        yield from _called(entry, Entry(module, path, entry.use))


def _is_of_objects(entry: Entry) -> bool:
    owner = Entry(entry.module, entry.owner, entry.use).found() if entry.owner else None
    return not entry.parameters and (is_absent(owner) or isinstance(owner, type))


def _stored(entry: Entry) -> Iterator[str]:
    owner = Entry(entry.module, entry.owner, entry.use).found()
    if not _stores(owner, entry.name):
        yield f"{entry} ({entry.use}): not found"


def _form(entry: Entry, found: Any) -> Iterator[str]:
    wanted = entry.parameters
    if is_dataclass(found):
        names = tuple(field.name for field in fields(found))
    elif callable(found):
        names = tuple(inspect.signature(found).parameters)
    else:
        yield f"{entry} ({entry.use}): not found"
        return
    same = names[: len(wanted) - 1] == wanted[:-1] if wanted[-1] == "..." else names == wanted
    if not same:
        has = ", ".join(names) or "nothing"
        yield f"{entry} ({entry.use}): has {has} instead of {', '.join(wanted)}"


def _same(entry: Entry, other: Entry) -> Iterator[str]:
    found, own = inspect.unwrap(other.found()), inspect.unwrap(entry.found())
    if is_absent(found):
        yield f"{other} ({entry.use}): not found"
    elif found is not own:
        yield f"{other} ({entry.use}): another one than that of {entry.module}"


def _called(entry: Entry, caller: Entry) -> Iterator[str]:
    found = caller.found()
    code = getattr(inspect.unwrap(found), "__code__", None)
    if is_absent(found):
        yield f"{caller} ({entry.use}): not found"
    elif code is None or entry.name not in code.co_names:
        yield f"{caller} ({entry.use}): does not call {entry.name}"


def _stores(owner: Any, attribute: str) -> bool:
    if not isinstance(owner, type) or is_absent(owner):
        return False
    return hasattr(owner, attribute) or any(
        attribute in getattr(getattr(function, "__code__", None), "co_names", ())
        for kind in owner.__mro__
        for function in vars(kind).values()
    )


@cache
def _is_in_source(module: str, pattern: str) -> bool:
    """Whether a file of torch's has the pattern; true where it is installed without its source."""
    import torch

    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, TypeError):
        return True
    return re.search(pattern, text, re.M) is not None
