"""The paths: one line each, in the order of texts for users."""

from __future__ import annotations

from meshplan.errors import PolicyError
from meshplan.execute.paths import (
    _exchange,
    _halving,
    _hierarchical,
    _integer,
    _native,
    _reference,
    _shared_memory,
)
from meshplan.execute.paths._path import Outcome as Outcome
from meshplan.execute.paths._path import Path as Path
from meshplan.flatten import Sharing

_instances: tuple[Path, ...] = (
    _shared_memory.ONE_SHOT,
    _shared_memory.TWO_SHOT,
    _exchange.PATH,
    _halving.PATH,
    _hierarchical.PATH,
    _integer.PATH,
    _integer.CHECKED,
    _reference.PATH,
    _native.PATH,
)
_PATHS = {path.name: path for path in _instances}
PATHS = ("auto", *(path.name for path in _instances if path.offered))
"""The names of paths that users may write: ``auto``, and every path that is offered."""


def get_path(name: str) -> Path:
    """The path of that name. Raises PolicyError if there is none."""
    if name not in _PATHS:
        check_path(name)
        raise PolicyError("auto stands for a chosen path; pass the name of a path")
    return _PATHS[name]


def check_path(name: str) -> None:
    """Raise PolicyError, which names the existing paths, if ``name`` is not one of ``PATHS``."""
    if name not in PATHS:
        raise PolicyError(f"no path {name!r}; use one of {', '.join(map(repr, PATHS))}")


def select_path(name: str, verify: str | None) -> str:
    """The path that runs for path ``name`` with this ``verify``. Raises PolicyError if it has no
    such check.
    """
    if verify is None:
        return name
    if verify != "checksum" or name != "integer":
        raise PolicyError(
            f"verify={verify!r} with path={name!r}: only the messages of path 'integer' have "
            "checksums; pass path='integer' and verify='checksum', or leave verify out"
        )
    return "integer_checksum"


def sharing_of(name: str, device_type: str) -> Sharing:
    """When ranks that can share memory use it, for ``name``, one of ``PATHS`` or another word. By
    ``auto`` on GPUs where it was timed to be faster.
    """
    if name == "auto":
        return "always" if device_type == "cpu" else "timed"
    return "always" if name in _PATHS and _PATHS[name].shares_memory else "never"
