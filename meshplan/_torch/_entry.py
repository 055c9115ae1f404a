"""One private name of torch: where it is, what for, and how it is looked up and checked."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce
from importlib import import_module
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, Literal

from meshplan.errors import UnsupportedTorchError

TESTED_TORCH = ((2, 11), (2, 15))
"""The first and the last series of torch that meshplan is tested with."""

Gives = Literal["value", "call", "current", "loaded", "attribute", "method", "text"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A private name of torch's."""

    module: str
    path: str  # the name there, with attributes; empty: the module itself
    use: str  # what meshplan does with it, in the words of an error
    # What ``from meshplan._torch import NAME`` returns. ``value``: what the name stands for, looked
    # up once. ``call``: a function that looks the name up on each call and calls it, for what torch
    # and tests replace. ``current``: a function that returns the value of the moment. ``loaded``: a
    # function that returns the value if its module is imported, else ``None``. ``attribute``: a
    # function that reads the attribute of an object. ``method``: a function that calls the method
    # of an object. ``text``: the last part of the name, for ``getattr`` and ``setattr``.
    gives: Gives = "value"
    parts: tuple[str, ...] = ()  # attributes of the value that are used as well
    # Attributes that objects of the class have, set by its functions or in the class
    stores: tuple[str, ...] = ()
    # Of a function, or the fields of a dataclass; ``...`` at the end: and others
    parameters: tuple[str, ...] = ()
    # Functions of torch's, each a module and a path, that must use it by its name
    callers: tuple[tuple[str, str], ...] = ()
    same_in: tuple[str, ...] = ()  # modules that must have the same object by this name
    # A pattern that the module's file must have; for modules that are not imported to be checked
    source: str = ""
    # No torch must have it; where it is missing the function returns ``None``
    optional: bool = False
    # Objects of other classes come as well; for those the function returns ``None``
    lenient: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.path}".rstrip(".")

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The path without its last part."""
        return self.path.rpartition(".")[0]

    def found(self) -> Any:
        """The value in this torch, looked up now; a class that raises when it is used if none."""
        return _find(self.module, self.path)

    def given(self) -> Any:
        """What the name in ``meshplan._torch`` is, see ``gives``."""
        return _GIVES[self.gives](self)


class _Absent(type):
    """The class of what stands for a name that this torch does not have."""

    _name: str

    def _refuse(cls) -> UnsupportedTorchError:
        import torch

        return UnsupportedTorchError(
            f"torch {torch.__version__} does not have {cls._name}; install torch {tested_range()}, "
            "which meshplan is tested with"
        )

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        raise cls._refuse()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise cls._refuse()

    def __instancecheck__(cls, instance: object) -> bool:
        raise cls._refuse()


def is_absent(*found: object) -> bool:
    """Whether one of these stands for a name that this torch does not have."""
    return any(type(one) is _Absent for one in found)


def tested_range() -> str:
    (low_major, low), (high_major, high) = TESTED_TORCH
    return f"{low_major}.{low} to {high_major}.{high}"


def _find(module: str, path: str) -> Any:
    try:
        # A module that is there already need not be one that can be imported.
        owner = sys.modules.get(module) or _imported(module)
        found = reduce(getattr, path.split(".") if path else (), owner)
    except (ImportError, AttributeError):
        found = None
    if found is None:
        return _Absent("Absent", (), {"_name": f"{module}.{path}".rstrip(".")})
    return found


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        # A module of an extension is an attribute of it.
        parent, _, name = module.rpartition(".")
        return getattr(import_module(parent), name)


def _current(entry: Entry) -> Callable[[], Any]:
    if entry.source:
        # Of a module that is not imported before it is used.
        return entry.found
    holder, name = _find(entry.module, entry.owner), entry.name

    def current() -> Any:
        found = getattr(holder, name, None)
        return entry.found() if found is None else found

    return current


def _call(entry: Entry) -> Callable[..., Any]:
    current = _current(entry)

    def call(*arguments: Any, **options: Any) -> Any:
        return current()(*arguments, **options)

    return call


def _loaded(entry: Entry) -> Callable[[], Any]:
    def loaded() -> Any:
        return entry.found() if entry.module in sys.modules else None

    return loaded


def _attribute(entry: Entry) -> Callable[[Any], Any]:
    if entry.optional or entry.lenient:
        return lambda owner: getattr(owner, entry.name, None)
    return attrgetter(entry.name)


def _method(entry: Entry) -> Callable[..., Any]:
    plain = methodcaller(entry.name)

    def call(owner: Any, *arguments: Any) -> Any:
        return getattr(owner, entry.name)(*arguments) if arguments else plain(owner)

    return call


_GIVES: dict[Gives, Callable[[Entry], Any]] = {
    "value": Entry.found,
    "call": _call,
    "current": _current,
    "loaded": _loaded,
    "attribute": _attribute,
    "method": _method,
    "text": lambda entry: entry.name,
}


# Whether this torch has the names, in the form that meshplan uses them in.


def find_moved(names: Mapping[str, Entry]) -> Iterator[str]:
    """What of these names has moved: each with what meshplan uses it for, and what was found."""
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
