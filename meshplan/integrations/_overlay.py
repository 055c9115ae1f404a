"""A module with some functions of its own; all else is another module's, looked up each time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from meshplan.errors import IntegrationError

__all__ = ["Overlay"]


class Overlay(ModuleType):
    """Stands in for ``below``.

    A module, and no other object, because torch.compile reads attributes of modules, and compiles
    anew when a name holds another module.

    Args:
        below: what names are looked up in that are not taken.
        taken: functions of its own. Those that ``below`` does not have are left out.
        refused: names of functions that raise instead of being those of ``below``.
    """

    def __init__(
        self, below: ModuleType, taken: Mapping[str, Callable[..., Any]], refused: Collection[str]
    ) -> None:
        title = getattr(below, "__name__", type(below).__name__)
        super().__init__(f"meshplan over {title}", below.__doc__)
        self.__dict__["below"] = below
        for name, function in taken.items():
            if hasattr(below, name):
                self.__dict__[name] = function
        for name in refused:
            if hasattr(below, name):
                self.__dict__[name] = _refuser(name, title, sorted(taken))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["below"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__dict__["below"]), *self.__dict__})


def _refuser(name: str, module: str, taken: list[str]) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise IntegrationError(
            f"{name} would reduce outside the contract, where meshplan stands in for {module}; "
            f"write {', '.join(taken)}, or call {module}.{name} itself"
        )

    return refuse
