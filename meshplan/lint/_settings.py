"""The settings of the linter in ``meshplan.toml`` and ``[tool.meshplan]``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshplan._message_text import shorten, suggest
from meshplan.errors import PolicyError
from meshplan.lint._finding import SEVERITIES, Severity
from meshplan.lint._roles import ROLES, Role

_SELECTOR = re.compile(r"MP\d{0,3}|ALL")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a project; ``None`` or empty if not set.

    ``hosts``, ``rank_order`` and ``output_format`` have the form of the options of the same name; a
    list in the file is joined by commas.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    fail_level: Severity | None = None  # lowest severity that makes the linter fail
    # Names of files that describe the cluster, as written: relative to this file
    topology: tuple[str, ...] = ()
    hosts: str = ""
    node_size: int | None = None
    domain_size: int | None = None  # GPUs that NVLink or xGMI joins
    rank_order: str = ""
    output_format: str = ""
    # Of axes, by name, in all meshes that the files describe
    roles: Mapping[str, Role] = field(default_factory=dict)
    # Patterns of the files of directories that are linted, instead of the default
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # patterns of files and directories that are not linted


def read_settings(table: Mapping[str, Any]) -> Settings:
    """Settings from a table with checked, hyphenated keys. Raises PolicyError."""
    given = [(key, value) for key, value in table.items() if key in _READERS]
    return Settings(**{key.replace("-", "_"): _READERS[key](key, value) for key, value in given})


def read_roles(given: object) -> dict[str, Role]:
    """The role of each axis of a table. Raises PolicyError for another value."""
    if not isinstance(given, dict):
        raise PolicyError(f'roles are a table such as {{ fsdp = "shard" }}, got {_shorten(given)}')
    found: dict[str, Role] = {}
    for axis, role in given.items():
        if role not in ROLES:
            raise PolicyError(
                f"roles are {', '.join(ROLES)}, got {repr(role)[:40]} for axis {axis[:40]}"
                f"{suggest(str(role), ROLES)}"
            )
        found[axis] = role
    return found


def check_keys(table: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises:
    PolicyError: an unknown key; the message starts with it.
    """
    names = sorted(known)
    for key in table:
        if key not in names:
            raise PolicyError(
                f"{_shorten(key)} is not a valid key; use one of {', '.join(names)}"
                f"{suggest(key, names)}"
            )


def read_strings(key: str, value: object) -> tuple[str, ...]:
    """A list of strings, or one string. Raises PolicyError for another type."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise PolicyError(f"{key} must be a list of strings, got {_shorten(value)}")
    return tuple(items)


def _read_level(key: str, level: object) -> Severity:
    for one in SEVERITIES:
        if level == one:
            return one
    raise PolicyError(
        f"{key} must be one of {', '.join(SEVERITIES)}, got {_shorten(level)}"
        f"{suggest(str(level), SEVERITIES)}"
    )


def _read_selectors(key: str, value: object) -> tuple[str, ...]:
    found = read_strings(key, value)
    for selector in found:
        if not _SELECTOR.fullmatch(selector):
            raise PolicyError(
                f'{key} takes codes and prefixes such as "MP101" and "MP3", got '
                f"{_shorten(selector)}"
            )
    return found


def _read_size(key: str, size: object) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size >= 1:
        return size
    raise PolicyError(f"{key} must be a positive integer, got {_shorten(size)}")


def _read_option(key: str, value: object) -> str:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in items):
        raise PolicyError(
            f"{key} must be a string, an integer or a list of these, got {_shorten(value)}"
        )
    return ",".join(str(item) for item in items)


def _shorten(value: object) -> str:
    return shorten(repr(value))


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("select", "ignore", "extend-select"), _read_selectors),
    "fail-level": _read_level,
    **dict.fromkeys(("topology", "include", "exclude"), read_strings),
    **dict.fromkeys(("hosts", "rank-order", "output-format"), _read_option),
    **dict.fromkeys(("node-size", "domain-size"), _read_size),
    "roles": lambda _, given: read_roles(given),
}
SETTINGS_KEYS = (*_READERS,)
