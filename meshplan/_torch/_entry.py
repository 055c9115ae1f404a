"""One private name of torch: where it is, what for, and how it is looked up and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import attrgetter, methodcaller
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
