"""The facts of one AMD GPU, from what the kernel's driver says in /sys.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux, and libhsakmt of ROCm for which nodes a
process may use and in which order. Files are small lists of ``name value``. Nothing of ROCm is
needed, and nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshplan.topology._place import Gpu
from meshplan.topology._reading import components
from meshplan.topology._visible import choice, visible

__all__ = ["KFD_ROOT", "amd_gpu"]

KFD_ROOT = Path("/sys/class/kfd/kfd/topology")

_NUMBER = re.compile(r"\d{1,20}", re.ASCII)
_XGMI = 11  # HSA_IOLINK_TYPE_XGMI
_MAX_NODES, _MAX_LINKS, _MAX_BYTES = 4096, 4096, 1 << 16


@dataclass(frozen=True, slots=True)
class _Node:
    """A GPU that this process may use. ``id`` is as ``ROCR_VISIBLE_DEVICES`` names it."""

    number: int
    id: str
    bus: str
    links: tuple[int, ...]
    unread: tuple[int, ...]


def amd_gpu(environ: Mapping[str, str], index: int, root: Path = KFD_ROOT) -> Gpu | str:
    """The GPU that this process calls number ``index``; or why it is not known.

    Args:
        environ: ``ROCR_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES``, ``CUDA_VISIBLE_DEVICES``.
        index: as HIP counts; of no meaning where one GPU is visible.
        root: the directory that holds ``nodes``.
    """
    try:
        nodes, hidden = _nodes(root)
    except OSError as error:
        return f"{root}: {error.strerror or error}"
    if not nodes:
        return f"{root} shows no GPU"
    # First ROCm's runtime chooses, then HIP among those.
    chosen = list(nodes)
    for text in (
        choice(environ, "ROCR_VISIBLE_DEVICES"),
        choice(environ, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ):
        picked = visible(text, [node.id for node in chosen])
        chosen = [chosen[one] for one in picked if isinstance(one, int)]
    # Launchers that give each process one GPU count their processes all the same.
    index = 0 if len(chosen) == 1 else index
    if not 0 <= index < len(chosen):
        count = f"{len(chosen)} GPU{'' if len(chosen) == 1 else 's'}"
        return f"no GPU {index} among {count} that are visible here"
    node = chosen[index]
    by_number = {one.number: one for one in nodes}
    gpus = {*by_number, *hidden}
    peers = [number for number in node.links if number in gpus]
    alone = sum(one.id == node.id for one in nodes) == 1
    return Gpu(
        # Parts of one device may have one id.
        id=node.id if node.id and alone else f"{node.bus} node {node.number}",
        bus=node.bus,
        vendor="amd",
        links=None if node.unread and not peers else len(peers),
        unread=node.unread,
        peers=tuple(sorted(_name(number, by_number) for number in peers)),
        on_host=len(nodes),
        domain=None if node.unread else _size_of_domain(nodes, gpus, node.number),
    )


def _nodes(root: Path) -> tuple[list[_Node], set[int]]:
    """GPUs that this process may use, by number; and numbers of nodes that it may not read."""
    numbers = [int(entry.name) for entry in (root / "nodes").iterdir() if entry.name.isdecimal()]
    nodes, hidden = [], set()
    for number in sorted(numbers)[:_MAX_NODES]:
        folder = root / "nodes" / str(number)
        try:
            gpu_id = folder.joinpath("gpu_id").read_text(encoding="ascii", errors="replace")
            properties = _properties(folder / "properties")
        except OSError:
            hidden.add(number)
            continue
        # A CPU has 0.
        if gpu_id.strip() not in ("", "0"):
            links, unread = _links(folder)
            unique = properties.get("unique_id", 0)
            name = f"GPU-{unique:016x}" if unique else ""
            nodes.append(_Node(number, name, _bus(properties), links, unread))
    return nodes, hidden


def _links(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes that xGMI leads to, and numbers of the links that cannot be read."""
    try:
        entries = [e for e in (folder / "io_links").iterdir() if e.name.isdecimal()]
    except OSError:
        return (), (0,)
    found, unread = set(), []
    for entry in sorted(entries, key=lambda e: int(e.name))[:_MAX_LINKS]:
        try:
            link = _properties(entry / "properties")
        except OSError:
            unread.append(int(entry.name))
            continue
        if link.get("type") == _XGMI and "node_to" in link:
            found.add(link["node_to"])
    found.discard(int(folder.name))
    return tuple(sorted(found)), tuple(unread)


def _properties(path: Path) -> dict[str, int]:
    with path.open(encoding="ascii", errors="replace") as file:
        words = [line.split() for line in file.read(_MAX_BYTES).splitlines()]
    # No number is longer than 64 bits.
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and _NUMBER.fullmatch(w[1])}


def _bus(properties: Mapping[str, int]) -> str:
    where = properties.get("location_id", 0)
    device, function = where >> 3 & 0x1F, where & 7
    return f"{properties.get('domain', 0):04x}:{where >> 8 & 0xFF:02x}:{device:02x}.{function}"


def _name(number: int, nodes: Mapping[int, _Node]) -> str:
    return nodes[number].bus if number in nodes else f"node {number}"


def _size_of_domain(nodes: Sequence[_Node], gpus: set[int], number: int) -> int | None:
    pairs = [(node.number, to) for node in nodes for to in node.links if to in gpus]
    domain = next(found for found in components(gpus, pairs) if number in found)
    known = {node.number for node in nodes if not node.unread}
    # How far a GPU reaches that cannot be read is not known.
    return len(domain) if known.issuperset(domain) else None
