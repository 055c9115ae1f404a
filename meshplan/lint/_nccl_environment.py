"""The environment variables of NCCL, parsed as NCCL does, and the jobs that run with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from meshplan._message_text import find_near, shorten
from meshplan.errors import PolicyError
from meshplan.topology._nccl_algo import (
    ALGORITHMS,
    PROTOCOLS,
    NcclChoice,
    parse_choice,
)

if TYPE_CHECKING:
    from meshplan.lint._job import Job

NcclVersion = tuple[int, int, int]
LISTS: tuple[Literal["NCCL_ALGO", "NCCL_PROTO"], ...] = ("NCCL_ALGO", "NCCL_PROTO")
# A number as strtoll parses it with base 0: the rest of the text is ignored.
_NUMBER = re.compile(r"\s*([+-]?(?:0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18}))")
# Of plugins for networks, tuners and profilers, which have names of their own.
_PLUGINS = (
    "GPUDIRECTTCPX_",
    "FASTRAK_",
    "DXS_",
    "IBEXT_",
    "SHARP_",
    "INSPECTOR_",
    "TUNER_",
)
# Expected names that no measure of similarity finds.
_EXPECTED = {
    "ALGORITHM": "ALGO",
    "PROTOCOL": "PROTO",
    "NVLS": "NVLS_ENABLE",
    "COLLNET": "COLLNET_ENABLE",
    "CHANNELS": "MAX_NCHANNELS",
    "THREADS": "NTHREADS",
}


@dataclass(frozen=True)
class NcclEnvironment:
    """The variables that are set and not empty, and the versions that read them."""

    values: Mapping[str, str]  # by name; NCCL treats an empty one as not set
    version: NcclVersion | None  # of NCCL; ``None`` if unknown
    driver: str | None = None  # version of NVIDIA's driver; ``None`` if unknown
    jobs: Sequence[Job] = ()  # those that run with the variables

    def is_at_least(self, *version: int) -> bool | None:
        """Whether NCCL is of this version or newer; ``None`` if unknown."""
        return None if self.version is None else self.version >= version

    @property
    def version_text(self) -> str:
        """``2.31.2``, or that it is unknown."""
        if self.version is None:
            return "of an unknown version"
        return ".".join(map(str, self.version))

    def read_number(self, name: str) -> int | None:
        """The number that NCCL reads; 0 for text, ``None`` if it is not set."""
        value = self.values.get(name)
        if value is None:
            return None
        found = _NUMBER.match(value)
        if found is None:
            return 0
        digits = found[1].lower()
        octal = re.fullmatch(r"[+-]?0[0-7]+", digits)
        return int(digits, 16 if "0x" in digits else 8 if octal else 10)

    def is_number(self, name: str) -> bool:
        """Whether all of the value is a number."""
        found = _NUMBER.match(self.values.get(name, ""))
        return found is not None and not self.values[name][found.end() :].strip()

    def read_choice(self, name: Literal["NCCL_ALGO", "NCCL_PROTO"]) -> NcclChoice:
        """The choices that the list allows; all if it is not set or unreadable."""
        try:
            return self._parse(name)
        except PolicyError:
            return parse_choice("", _list_elements(name))

    def format_variables(self, *names: str) -> str:
        """``NCCL_ALGO=ring`` for each that is set, shortened, on one line."""
        parts = []
        for name in names:
            if name in self.values:
                value = " ".join(self.values[name].split())
                parts.append(f"{name}={shorten(value)}")
        return " and ".join(parts)

    def _parse(self, name: str) -> NcclChoice:
        return parse_choice(self.values.get(name, ""), _list_elements(name))

    @property
    def lists(self) -> tuple[str, ...]:
        """Those of ``NCCL_ALGO`` and ``NCCL_PROTO`` that are set."""
        return tuple(name for name in LISTS if name in self.values)

    @cached_property
    def unread_lists(self) -> tuple[tuple[str, str], ...]:
        """The lists that NCCL cannot read: the name of each, and why."""
        found = []
        for name in LISTS:
            try:
                choice = self._parse(name)
            except PolicyError as error:
                found.append((name, f" cannot be read: {error.args[0]}"))
                continue
            if choice.per_collective and self.is_at_least(2, 24) is False:
                message = (
                    f" is not valid for NCCL {self.version_text}: lists for single "
                    "collectives need NCCL 2.24; use one list for all collectives"
                )
                found.append((name, message))
        return tuple(found)

    @property
    def lists_are_read(self) -> bool:
        """Whether a list is set, and NCCL can read those that are."""
        return bool(self.lists) and not self.unread_lists


def _list_elements(name: str) -> tuple[str, ...]:
    return ALGORITHMS if name == "NCCL_ALGO" else PROTOCOLS


def find_near_variable(name: str) -> str | None:
    """The variable that a misspelt ``NCCL_...`` probably means; ``None`` if it may be right."""
    # From NCCL_PARAM and getenv in the sources and plugins of NCCL 2.3 to 2.31 and from the user
    # guide of 2.30, with the variables that PyTorch, installers and containers read.
    known = files("meshplan.lint").joinpath("nccl_variables.txt").read_text("utf-8").split()
    bare = name.removeprefix("NCCL_")
    if bare in known or bare.startswith(_PLUGINS) or len(bare) > 60:
        return None
    near = find_near(bare, known, cutoff=0.85)
    found = _EXPECTED.get(bare) or (near[0] if near else "")
    return f"NCCL_{found}" if found else None
