"""What links cost: latency and bandwidth per class, the figures of the alpha-beta model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from meshplan.errors import TopologyError

__all__ = ["LINKED", "Link", "Links"]

# The classes of links, the nearest first.
LINKED = ("domain", "node", "network")
_MEASURED = "measured"
# Figures beyond any link would overflow where costs are added up.
_MOST_SECONDS = 1e6
_EXAMPLE = 'write for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}'


@dataclass(frozen=True, slots=True)
class Link:
    """A class of links: a message of n bytes takes ``latency + n / bandwidth`` seconds.

    Attributes:
        latency: seconds per message (alpha).
        bandwidth: bytes per second that one rank sends in one direction (1 / beta).

    Raises:
        TopologyError: a latency below 0, or a bandwidth that is not above 0.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency <= _MOST_SECONDS and 1e-3 <= self.bandwidth <= 1e18):
            raise TopologyError(
                f"a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, found "
                f"latency={str(self.latency)[:30]}, "
                f"bandwidth={str(self.bandwidth)[:30]}; write for example "
                "Link(latency=2.7e-6, bandwidth=50e9)"
            )


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster, by class.

    The defaults are data-sheet figures, good for comparing plans and not for predicting seconds:
    bandwidths per GPU and direction of NVLink 4 (450 GB/s), PCI Express 5.0 x16 (63 GB/s) and a
    400 Gb/s adapter (50 GB/s); latencies and launch as in NCCL's tuning tables for its LL protocol
    (0.6, 1.0 and 2.7 us a hop, 6.6 us base).

    Attributes:
        domain: between ranks of one NVLink or xGMI domain.
        node: between ranks of one node and different domains, or where domains are unknown.
        network: between nodes, and wherever nothing is known.
        launch: seconds that each collective takes before it sends anything.
        group: seconds to create one more process group.
        uses: reductions among which the creation of a group is divided.

    Raises:
        TopologyError: a negative time, or less than one use.
    """

    domain: Link = Link(0.6e-6, 450e9)
    node: Link = Link(1.0e-6, 63e9)
    network: Link = Link(2.7e-6, 50e9)
    launch: float = 6.6e-6
    group: float = 0.5
    uses: int = 10_000

    def __post_init__(self) -> None:
        times = (self.launch, self.group)
        if not all(0 <= time <= _MOST_SECONDS for time in times) or not 1 <= self.uses <= 10**12:
            raise TopologyError(
                f"launch and group are times of 0 or more seconds and uses is 1 or more, found "
                f"launch={str(self.launch)[:30]}, group={str(self.group)[:30]}, "
                f"uses={str(self.uses)[:30]}; leave out what you "
                "do not know"
            )

    @classmethod
    def loads(cls, text: str) -> Links:
        """From JSON, as ``dumps`` and ``meshplan links`` write it; what is left out is the default.

        Args:
            text: one JSON object; latencies in seconds, bandwidths in bytes per second.

        Raises:
            TopologyError: no JSON, a name that is none of ours, or figures that cannot be.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, ValueError) else "nested too deeply"
            raise TopologyError(f"links are no JSON: {reason}; {_EXAMPLE}") from error
        if not isinstance(found, dict):
            raise TopologyError(f"links are {_shown(found)}; {_EXAMPLE}")
        found.pop(_MEASURED, None)
        known = {field.name: field.default for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, value in found.items():
            if name not in known:
                raise TopologyError(
                    f"links have no {_shown(name)}; write some of {', '.join(known)}"
                )
            given[name] = _link(name, value) if name in LINKED else _number(name, value)
        if not isinstance(given.get("uses", 1), int):
            raise TopologyError(f"uses is a whole number, found {given['uses']}; write 10000")
        return cls(**given)

    def dumps(self, measured: dict[str, Any] | None = None) -> str:
        """As JSON that ``loads`` reads, with how it was measured if that is known."""
        about = {} if measured is None else {_MEASURED: measured}
        return json.dumps({**asdict(self), **about}, indent=2)

    def __str__(self) -> str:
        classes = (
            f"{name} {link.latency * 1e6:.3g} us, {link.bandwidth / 1e9:.3g} GB/s"
            for name, link in ((name, getattr(self, name)) for name in LINKED)
        )
        return f"{'; '.join(classes)}; launch {self.launch * 1e6:.3g} us"


def _link(name: str, value: Any) -> Link:
    if not isinstance(value, dict) or set(value) != {"latency", "bandwidth"}:
        raise TopologyError(f"{name} is {_shown(value)}; {_EXAMPLE}")
    return Link(**{key: _number(f"{name}.{key}", found) for key, found in value.items()})


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TopologyError(f"{name} is {_shown(value)}, not a number; {_EXAMPLE}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
