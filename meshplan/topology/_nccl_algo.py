"""The lists of ``NCCL_ALGO`` and ``NCCL_PROTO``: what they allow for each collective.

As ``parseList`` of NCCL reads them (``src/graph/tuning.cc`` of 2.24 to 2.30, then
``src/tuning/cost_model.cc``): ``ring,tree;allreduce:tree``, with ``^`` in front of a list for all
but its elements.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshplan.errors import PolicyError

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "PROTOCOLS",
    "REDUCE_SCATTER",
    "Choice",
    "runnable",
    "parse_choice",
]

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
REDUCE_SCATTER = ("Ring", "CollNetDirect", "NVLS", "PAT")
# What NCCL has code for; every algorithm but these two runs with one protocol only.
_POSSIBLE: Mapping[str, Sequence[str]] = {
    "Broadcast": ("Ring",),
    "Reduce": ("Ring",),
    "AllGather": REDUCE_SCATTER,
    "ReduceScatter": REDUCE_SCATTER,
    "AllReduce": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"),
}
_ALL_PROTOCOLS = ("Tree", "Ring")


@dataclass(frozen=True, slots=True)
class Choice:
    """What a variable allows.

    Attributes:
        allowed: elements for each collective; all of them where it names none.
        named: collectives that it names, or all of them if it begins with a list for all.
        per_collective: whether it uses the syntax of NCCL 2.24 and later.
    """

    allowed: Mapping[str, frozenset[str]]
    named: frozenset[str]
    per_collective: bool


def parse_choice(text: str, elements: Sequence[str]) -> Choice:
    """Reads the value of ``NCCL_ALGO`` (``elements=ALGORITHMS``) or ``NCCL_PROTO`` (``PROTOCOLS``).

    Raises:
        PolicyError: what NCCL 2.24 and later would refuse, or leave out in silence.
    """
    allowed = dict.fromkeys(COLLECTIVES, frozenset(elements))
    named: set[str] = set()
    for entry in re.finditer(r"[^;]+", text):
        parts = [part for part in entry[0].split(":") if part]
        if len(parts) > 2:
            raise PolicyError(
                f"'{_short(entry[0])}' has more than one ':', and NCCL leaves out what is after "
                "the second; put ';' between collectives"
            )
        if len(parts) < 2 and entry.start() > 0:
            raise PolicyError(
                f"'{_short(entry[0])}' names no collective, which only the first list may; "
                f"write for example allreduce:{_short(parts[0]) if parts else 'ring'}"
            )
        if not parts:
            raise PolicyError("a list is empty; write for example allreduce:ring")
        collectives: tuple[str, ...] = COLLECTIVES
        if len(parts) == 2:
            collectives = (_element(parts[0], COLLECTIVES, "collective"),)
        listed = _listed(parts[-1], elements)
        allowed |= dict.fromkeys(collectives, listed)
        named |= set(collectives)
    return Choice(allowed, frozenset(named), ":" in text or ";" in text)


def runnable(collective: str, algorithms: Choice, protocols: Choice) -> frozenset[str]:
    """The algorithms with which a collective can run under both variables; empty: it fails."""
    found = algorithms.allowed[collective] & set(_POSSIBLE[collective])
    allowed = protocols.allowed[collective]
    return frozenset(
        one for one in found if "Simple" in allowed or (one in _ALL_PROTOCOLS and allowed)
    )


def _listed(text: str, elements: Sequence[str]) -> frozenset[str]:
    without = text.startswith("^")
    names = [name for name in text.removeprefix("^").split(",") if name]
    found = {_element(name, elements, "value") for name in names}
    return frozenset(elements) - found if without else frozenset(found)


def _element(name: str, elements: Sequence[str], what: str) -> str:
    for element in elements:
        if element.lower() == name.lower():
            return element
    stripped = {element.lower(): element for element in elements}
    near = difflib.get_close_matches(name.strip(" ^").lower()[:40], list(stripped), n=1)
    hint = f"did you mean {stripped[near[0]]}?" if near else f"it knows {', '.join(elements)}"
    spaces = "; no spaces may stand in the list" if name != name.strip() else ""
    raise PolicyError(f"NCCL knows no {what} '{_short(name)}'; {hint}{spaces}")


def _short(text: str) -> str:
    shown = " ".join(text.split()) or " "
    return shown if len(shown) <= 40 else shown[:37] + "..."
