"""The lists of ``NCCL_ALGO`` and ``NCCL_PROTO`` for each collective.

As ``parseList`` of NCCL reads them (``src/graph/tuning.cc`` of 2.24 to 2.30, then
``src/tuning/cost_model.cc``): ``ring,tree;allreduce:tree``. ``^`` before a list inverts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshplan._message_text import find_near, shorten
from meshplan.errors import PolicyError

COLLECTIVES = (
    "Broadcast",
    "Reduce",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
)
ALGORITHMS = (
    "Tree",
    "Ring",
    "CollNetDirect",
    "CollNetChain",
    "NVLS",
    "NVLSTree",
    "PAT",
)
PROTOCOLS = ("LL", "LL128", "Simple")
REDUCE_SCATTER = ("Ring", "CollNetDirect", "NVLS", "PAT")
# Algorithms that NCCL implements; all but Tree and Ring run with one protocol only.
_POSSIBLE: Mapping[str, Sequence[str]] = {
    "Broadcast": ("Ring",),
    "Reduce": ("Ring",),
    "AllGather": REDUCE_SCATTER,
    "ReduceScatter": REDUCE_SCATTER,
    "AllReduce": ALGORITHMS[:-1],
}
_ALL_PROTOCOLS = ("Tree", "Ring")


@dataclass(frozen=True, slots=True)
class NcclChoice:
    # Elements for each collective; all elements for an unnamed one.
    allowed: Mapping[str, frozenset[str]]
    # The named collectives, or all of them if the value begins with a list for all.
    named: frozenset[str]
    per_collective: bool  # whether it uses the syntax of NCCL 2.24 and later


def parse_choice(text: str, elements: Sequence[str]) -> NcclChoice:
    """Read the value of ``NCCL_ALGO`` (of ``ALGORITHMS``) or ``NCCL_PROTO`` (of ``PROTOCOLS``)."""
    allowed = dict.fromkeys(COLLECTIVES, frozenset(elements))
    named: set[str] = set()
    for entry in re.finditer(r"[^;]+", text):
        parts = [part for part in entry[0].split(":") if part]
        if len(parts) > 2:
            raise PolicyError(
                f"'{_shorten(entry[0])}' has more than one ':', and NCCL ignores the text after "
                "the second; put ';' between collectives"
            )
        if len(parts) < 2 and entry.start() > 0:
            raise PolicyError(
                f"'{_shorten(entry[0])}' names no collective, which only the first list may; "
                f"use, for example, allreduce:{_shorten(parts[0]) if parts else 'ring'}"
            )
        if not parts:
            raise PolicyError("a list is empty; use, for example, allreduce:ring")
        collectives: tuple[str, ...] = COLLECTIVES
        if len(parts) == 2:
            collectives = (_find_element(parts[0], COLLECTIVES, "collective"),)
        listed = _parse_list(parts[-1], elements)
        allowed |= dict.fromkeys(collectives, listed)
        named |= set(collectives)
    return NcclChoice(allowed, frozenset(named), ":" in text or ";" in text)


def list_allowed_algorithms(
    collective: str, algorithms: NcclChoice, protocols: NcclChoice
) -> frozenset[str]:
    """The algorithms that both variables allow a collective; empty: it fails."""
    found = algorithms.allowed[collective] & set(_POSSIBLE[collective])
    allowed = protocols.allowed[collective]
    return frozenset(
        one for one in found if "Simple" in allowed or (one in _ALL_PROTOCOLS and allowed)
    )


def _parse_list(text: str, elements: Sequence[str]) -> frozenset[str]:
    without = text.startswith("^")
    names = [name for name in text.removeprefix("^").split(",") if name]
    found = {_find_element(name, elements, "value") for name in names}
    return frozenset(elements) - found if without else frozenset(found)


def _find_element(name: str, elements: Sequence[str], what: str) -> str:
    for element in elements:
        if element.lower() == name.lower():
            return element
    stripped = {element.lower(): element for element in elements}
    near = find_near(name.strip(" ^").lower(), stripped)
    hint = f"did you mean {stripped[near[0]]}?" if near else f"it knows {', '.join(elements)}"
    spaces = "; no spaces may stand in the list" if name != name.strip() else ""
    raise PolicyError(f"NCCL knows no {what} '{_shorten(name)}'; {hint}{spaces}")


def _shorten(text: str) -> str:
    return shorten(" ".join(text.split()) or " ", 40)
