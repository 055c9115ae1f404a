"""NCCL's graph XML: what ``NCCL_GRAPH_DUMP_FILE`` writes and ``NCCL_GRAPH_FILE`` reads.

The format is that of NCCL's ``src/graph/xml.cc`` and ``search.cc``: for each algorithm a
``<graph id=...>``, in it for each channel the GPUs of this node in the order that was searched.
It says in which order a node's GPUs add, and nothing about which of them NVLink joins.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats._xml import Element, number, parse, root_tag

__all__ = ["KIND", "read", "recognises"]

KIND = "NCCL graph XML"
"""``Reading.kind`` of what is read here."""

# The graphs whose order of GPUs is the order of additions; in the others a switch adds.
_GRAPHS = {"0": "ring", "1": "tree"}
_CHANNELS_SHOWN = 4
_GPUS_SHOWN = 72


def recognises(text: str) -> bool:
    """Whether the root of ``text`` is ``<graphs>``."""
    return root_tag(text) == "graphs"


def read(text: str) -> Reading:
    """The order of GPUs per channel, as notes; domains and nodes are not in this format.

    Args:
        text: the file of ``NCCL_GRAPH_DUMP_FILE``.

    Raises:
        TopologyInputError: not XML, or not this format.
    """
    elements = parse(text, ("graphs", "graph", "channel", "gpu"))
    root = elements[0]
    if root.tag != "graphs":
        raise TopologyInputError(
            f"the root is <{root.tag[:40]}>; write an NCCL graph, which starts with <graphs>",
            line=root.line,
        )
    channels: dict[Element, list[Element]] = {}
    orders: dict[Element, list[int]] = {}
    for element in elements[1:]:
        around = element.parent
        if element.tag == "graph":
            channels[element] = []
        elif element.tag == "channel" and around in channels:
            channels[around].append(element)
            orders[element] = []
        elif element.tag == "gpu" and around in orders:
            orders[around].append(_index(element))
    lacking = [graph for graph in channels if not _whole(graph, len(channels[graph]))]
    notes = [_lacks(graph, len(channels[graph])) for graph in lacking]
    for graph, own in channels.items():
        name = _GRAPHS.get(graph.attributes.get("id", ""))
        if name:
            notes += _orders(name, own, orders)
    notes.append(Note("a graph does not say which GPUs NVLink joins", line=root.line))
    return Reading(
        kind=KIND,
        complete=bool(channels) and not lacking,
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
    )


def _index(gpu: Element) -> int:
    # Old versions write dev, newer ones rank.
    told = gpu.attributes.get("rank", gpu.attributes.get("dev"))
    index = number(told)
    if index is None:
        raise TopologyInputError(
            f"<gpu> needs rank= or dev= with a number, found {(told or '')[:20]!r}; give the "
            "file as NCCL wrote it",
            line=gpu.line,
        )
    return index


def _whole(graph: Element, found: int) -> bool:
    return number(graph.attributes.get("nchannels")) in (None, found)


def _lacks(graph: Element, found: int) -> Note:
    told = graph.attributes["nchannels"]
    return Note(f"{told} channels are announced, {found} are listed", "MP202", graph.line)


def _orders(name: str, channels: list[Element], orders: dict[Element, list[int]]) -> Iterator[Note]:
    for at, channel in enumerate(channels[:_CHANNELS_SHOWN]):
        gpus = orders[channel]
        shown = " ".join(map(str, gpus[:_GPUS_SHOWN])) or "no GPU"
        more = f" ... {len(gpus) - _GPUS_SHOWN} more" if len(gpus) > _GPUS_SHOWN else ""
        yield Note(f"{name}, channel {at}: {shown}{more}", line=channel.line)
    if len(channels) > _CHANNELS_SHOWN:
        yield Note(
            f"{name}: ... {len(channels) - _CHANNELS_SHOWN} more channels",
            line=channels[_CHANNELS_SHOWN].line,
        )
