"""Reads one AMD GPU from the files of the kernel's driver in /sys.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux. libhsakmt of ROCm defines which nodes a
process may use, and their order. Files are small lists of ``name value``. ROCm is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshplan.topology._location import Gpu, select_devices
from meshplan.topology._reading import find_components

KFD_ROOT = Path("/sys/class/kfd/kfd/topology")

_NUMBER = re.compile(r"\d{1,20}", re.ASCII)
_XGMI = 11  # HSA_IOLINK_TYPE_XGMI
_MAX_NODES, _MAX_LINKS, _MAX_BYTES = 4096, 4096, 1 << 16


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU that this process may use. ``id`` is its name in ``ROCR_VISIBLE_DEVICES``."""

    number: int
    id: str
    bus: str
    links: tuple[int, ...]
    unread: tuple[int, ...]


def find_amd_gpu(environ: Mapping[str, str], index: int, root: Path = KFD_ROOT) -> Gpu | str:
    """The GPU that this process calls number ``index``; or why it is unknown."""
    try:
        nodes, hidden = _read_nodes(root)
    except OSError as error:
        return f"{root}: {error.strerror or error}"
    if not nodes:
        return f"{root} shows no GPU"
    # First ROCm's runtime selects, then HIP among those.
    chosen = nodes
    for text in (
        environ.get("ROCR_VISIBLE_DEVICES"),
        environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")),
    ):
        selected = select_devices(text, [node.id for node in chosen])
        chosen = [chosen[one] for one in selected if isinstance(one, int)]
    # Launchers that give each process one GPU count their processes all the same.
    index = 0 if len(chosen) == 1 else index
    if not 0 <= index < len(chosen):
        count = f"{len(chosen)} GPU{'' if len(chosen) == 1 else 's'}"
        return f"no GPU {index} among {count} that are visible here"
    node = chosen[index]
    buses = {one.number: one.bus for one in nodes}
    gpus = {*buses, *hidden}
    peers = [number for number in node.links if number in gpus]
    unique = sum(one.id == node.id for one in nodes) == 1
    return Gpu(
        # Parts of one device may have one id.
        id=node.id if node.id and unique else f"{node.bus} node {node.number}",
        bus=node.bus,
        vendor="amd",
        links=None if node.unread and not peers else len(peers),
        unread=node.unread,
        peers=tuple(sorted(buses.get(number, f"node {number}") for number in peers)),
        on_host=len(nodes),
        domain=_count_domain(nodes, gpus, node.number),
    )


def _count_domain(nodes: list[_Node], gpus: set[int], number: int) -> int | None:
    pairs = [(node.number, to) for node in nodes for to in node.links if to in gpus]
    domain = next(found for found in find_components(gpus, pairs) if number in found)
    # The links of an unreadable GPU are unknown, and so is the extent of its domain.
    readable = {node.number for node in nodes if not node.unread}
    return len(domain) if readable.issuperset(domain) else None


def _read_nodes(root: Path) -> tuple[list[_Node], set[int]]:
    """GPUs that this process may use, by number; and numbers of nodes that it may not read."""
    numbers = [int(entry.name) for entry in (root / "nodes").iterdir() if entry.name.isdecimal()]
    nodes, hidden = [], set()
    for number in sorted(numbers)[:_MAX_NODES]:
        folder = root / "nodes" / str(number)
        try:
            gpu_id = folder.joinpath("gpu_id").read_text(encoding="ascii", errors="replace")
            properties = _read_properties(folder)
        except OSError:
            hidden.add(number)
            continue
        # A CPU has 0.
        if gpu_id.strip() not in ("", "0"):
            links, unread = _read_links(folder)
            unique, at = properties.get("unique_id", 0), properties.get("location_id", 0)
            bus = f"{properties.get('domain', 0):04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}"
            name = f"GPU-{unique:016x}" if unique else ""
            nodes.append(_Node(number, name, f"{bus}.{at & 7}", links, unread))
    return nodes, hidden


def _read_links(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes that xGMI leads to, and numbers of the unreadable links."""
    try:
        entries = [e for e in (folder / "io_links").iterdir() if e.name.isdecimal()]
    except OSError:
        return (), (0,)
    found, unread = set(), []
    for entry in sorted(entries, key=lambda e: int(e.name))[:_MAX_LINKS]:
        try:
            link = _read_properties(entry)
        except OSError:
            unread.append(int(entry.name))
            continue
        if link.get("type") == _XGMI and "node_to" in link:
            found.add(link["node_to"])
    return tuple(sorted(found - {int(folder.name)})), tuple(unread)


def _read_properties(folder: Path) -> dict[str, int]:
    with (folder / "properties").open(encoding="ascii", errors="replace") as file:
        words = [line.split() for line in file.read(_MAX_BYTES).splitlines()]
    # No number is longer than 64 bits.
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and _NUMBER.fullmatch(w[1])}
