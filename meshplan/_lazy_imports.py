"""Names of a package that are imported at first use, so that light commands stay fast."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any


def make_lazy(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the source of its file.

    The imports ``from module import name as name`` are the table of its names. Type checkers read
    them there. Those below ``if TYPE_CHECKING`` run at the first use of the name, which is then
    kept. ``__all__`` lacks submodules: these have names of their own.
    """
    # Typed as a loader without this method.
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    where = {
        alias.asname: (node.module or package, alias.name)
        for node in ast.walk(ast.parse(loader.get_source(package)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None and not alias.asname.startswith("_")
    }

    def get_attribute(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Imported here: a plain import of the package loads no other module.
        from meshplan._needs_torch import import_with_torch

        module, original = where[name]
        if module == package:
            value: Any = import_with_torch(f"{package}.{original}", f"{package}.{name}")
        else:
            value = getattr(import_with_torch(module, f"{package}.{name}"), original)
        setattr(sys.modules[package], name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    names = [name for name, (module, _) in where.items() if module != package]
    return get_attribute, list_attributes, names
