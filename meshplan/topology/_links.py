"""The cost of links: latency and bandwidth per class, the figures of the alpha-beta model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from meshplan.errors import TopologyError

# Nearest first.
_CLASSES = ("domain", "node", "network")
_MEASURED = "measured"
# Fits of one set of exchanges, each weighted by the times that the one before predicts.
_FITS = 12
# A figure that explains a smaller part of the times is 0. Libraries of linear algebra differ in
# the last bits, which are far smaller; clocks differ in far larger parts.
_LEAST_PART = 1e-6
# Figures beyond any link would overflow where costs are added up.
_MOST_SECONDS = 1e6
_EXAMPLE = 'use for example {"network": {"latency": 2.7e-6, "bandwidth": 50e9}, "launch": 6.6e-6}'


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
                f"a link has a latency of 0 or more seconds and a bandwidth above 0 bytes/s, got "
                f"latency={str(self.latency)[:30]}, "
                f"bandwidth={str(self.bandwidth)[:30]}; use for example "
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
        launch: seconds that each collective, and each batch of messages between pairs of ranks,
            takes before it sends anything.
        batch: seconds of the host that such a batch takes in addition. 0 by default, as in a CUDA
            graph, or where the host is ahead of the GPU.
        group: seconds to create one more process group.
        uses: reductions among which the creation of a group is divided.

    Raises:
        TopologyError: a negative time, or less than one use.
    """

    domain: Link = Link(0.6e-6, 450e9)
    node: Link = Link(1.0e-6, 63e9)
    network: Link = Link(2.7e-6, 50e9)
    launch: float = 6.6e-6
    batch: float = 0.0
    group: float = 0.5
    uses: int = 10_000

    def __post_init__(self) -> None:
        times = (self.launch, self.batch, self.group)
        if not all(0 <= time <= _MOST_SECONDS for time in times) or not 1 <= self.uses <= 10**12:
            raise TopologyError(
                "launch, batch and group are times of 0 or more seconds and uses is 1 or more, got "
                f"launch={str(self.launch)[:30]}, batch={str(self.batch)[:30]}, "
                f"group={str(self.group)[:30]}, uses={str(self.uses)[:30]}; leave out unknown "
                "figures"
            )

    @classmethod
    def loads(cls, text: str) -> Links:
        """From JSON of ``dumps`` or ``meshplan links``; missing figures have their default.

        Args:
            text: one JSON object; latencies in seconds, bandwidths in bytes per second.

        Raises:
            TopologyError: invalid JSON, an unknown name, or figures out of range.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = error if isinstance(error, ValueError) else "nested too deeply"
            raise TopologyError(f"links are not valid JSON: {reason}; {_EXAMPLE}") from error
        if not isinstance(found, dict):
            raise TopologyError(f"links are {_show(found)}; {_EXAMPLE}")
        found.pop(_MEASURED, None)
        known = {field.name: field.default for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, value in found.items():
            if name not in known:
                raise TopologyError(f"links have no {_show(name)}; use some of {', '.join(known)}")
            given[name] = _read_link(name, value) if name in _CLASSES else _read_number(name, value)
        if not isinstance(given.get("uses", 1), int):
            raise TopologyError(
                f"uses is a whole number, got {given['uses']}; pass for example 10000"
            )
        return cls(**given)

    def dumps(self, measured: dict[str, Any] | None = None) -> str:
        """As JSON that ``loads`` reads; ``measured`` describes the measurement, if any."""
        about = {} if measured is None else {_MEASURED: measured}
        return json.dumps({**asdict(self), **about}, indent=2)

    def __str__(self) -> str:
        classes = (
            f"{name} {link.latency * 1e6:.3g} us, {link.bandwidth / 1e9:.3g} GB/s"
            for name, link in ((name, getattr(self, name)) for name in _CLASSES)
        )
        batch = f"; batch {self.batch * 1e6:.3g} us" if self.batch else ""
        return f"{'; '.join(classes)}; launch {self.launch * 1e6:.3g} us{batch}"


CPU_LINKS = Links(
    domain=Link(20e-6, 2e9),
    node=Link(20e-6, 2e9),
    network=Link(25e-6, 1.2e9),
    launch=50e-6,
    batch=100e-6,
)
"""Between processes on CPUs whose links were not measured: TCP, over 10 Gb/s between hosts.
With faster links, paths of few messages save less, and cost little more."""


def _read_link(name: str, value: Any) -> Link:
    if not isinstance(value, dict) or set(value) != {"latency", "bandwidth"}:
        raise TopologyError(f"{name} is {_show(value)}; {_EXAMPLE}")
    return Link(**{key: _read_number(f"{name}.{key}", found) for key, found in value.items()})


def _read_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TopologyError(f"{name} is {_show(value)}, not a number; {_EXAMPLE}")
    return value


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


@dataclass(frozen=True, slots=True)
class TimedExchange:
    """The measured time in which each rank sends ``peers`` others ``size`` bytes each."""

    # The class of the links to all of them: ``"domain"``, ``"node"`` or ``"network"``.
    link: str
    peers: int  # number of the others
    size: int  # bytes for each
    seconds: float  # time of the slowest rank
    # In ``peers`` batches of one message, which run sequentially; else in one all-to-all.
    batched: bool = False


def fit_links(found: Sequence[TimedExchange]) -> tuple[Links, float]:
    """Fit links to measured exchanges. Least squares over the launch, the time of a batch and, for
    each measured class, its latency and the inverse of its bandwidth; none below zero. Of times s
    and predictions p, the sum of p / s + s / p is smallest: half the time is as far off as twice
    the time. An exchange counts as often as it has peers, as predictions are for groups rather than
    pairs. Also returns the median over ``found`` of ``|predicted / measured - 1|``.
    """
    classes = [name for name in _CLASSES if any(one.link == name for one in found)]
    if not classes or any(one.seconds <= 0 for one in found):
        raise TopologyError("no link was measured; time exchanges between two ranks or more")
    rows = np.zeros((len(found), 2 + 2 * len(classes)))
    for row, one in zip(rows, found, strict=True):
        at = 2 + 2 * classes.index(one.link)
        row[[at, at + 1]] = one.peers, one.peers * one.size
        row[[0, 1]] = (one.peers, one.peers) if one.batched else (1, 0)
    seconds = predicted = np.array([one.seconds for one in found])
    peers = np.array([one.peers for one in found])
    for _ in range(_FITS):
        # With these weights the squares have the derivative of that sum, where the fit repeats.
        weights = np.sqrt(peers * (1 + predicted / seconds)) / predicted
        figures = _fit_nonnegative(rows * weights[:, None], seconds * weights)
        predicted = np.maximum(rows @ figures, 1e-9)
    changed: dict[str, Any] = {}
    for i, name in enumerate(classes):
        latency, inverse = figures[2 + 2 * i : 4 + 2 * i].tolist()
        if inverse <= 0:
            raise TopologyError(
                f"the bandwidth of {name} is unknown: large exchanges took no longer than "
                "small ones; measure larger sizes, on an idle machine"
            )
        changed[name] = Link(latency, 1 / inverse)
    links = Links(**changed, launch=float(figures[0]), batch=float(figures[1]))
    errors = [abs(predict_seconds(links, one) / one.seconds - 1) for one in found]
    return links, float(np.median(errors))


def predict_seconds(links: Links, one: TimedExchange) -> float:
    link: Link = getattr(links, one.link)
    starts = one.peers * (links.launch + links.batch) if one.batched else links.launch
    return starts + one.peers * (link.latency + one.size / link.bandwidth)


def _fit_nonnegative(
    rows: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x of least squares with ``rows @ x`` near ``target`` and no x below 0, one dropped at a
    time; an x of less than ``_LEAST_PART`` of ``target`` is 0. Columns are scaled to length 1
    first.
    """
    scale = np.linalg.norm(rows, axis=0)
    kept = [int(column) for column in scale.nonzero()[0]]
    figures = np.zeros(rows.shape[1])
    least = _LEAST_PART * np.linalg.norm(target)
    while kept:
        # Columns that are the same but for rounding, as of launch and latency between two ranks,
        # share a figure.
        x = np.linalg.lstsq(rows[:, kept] / scale[kept], target, rcond=_LEAST_PART)[0]
        # Equal but for rounding: the first.
        lowest = int(np.round(x / least).argmin())
        if x[lowest] >= least:
            figures[kept] = x / scale[kept]
            break
        del kept[lowest]
    return figures
