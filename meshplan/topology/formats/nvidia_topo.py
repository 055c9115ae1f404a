"""``nvidia-smi topo -m``: the connection of each pair of GPUs of one host, and each GPU and NIC.

Source: the command's own legend. ``NV4`` is 4 bonded NVLinks; all other words are ways over PCIe.
Through NVSwitch each pair shows all links of a GPU, and the switch itself is not visible. MIG
devices are not listed, and ``CUDA_VISIBLE_DEVICES`` is ignored. Of a rack that NVLink joins, only
the GPUs of this host are listed. ``topo -mp`` prints the same without NVLink.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from meshplan.topology._reading import Groups, Note, Reading, find_components
from meshplan.topology.formats._gpu_table import (
    CellWords,
    GpuTable,
    Pair,
    Row,
    format_gpus,
    join_groups,
)

_KIND = "nvidia-smi topo -m"
# A number that is glued to a list of CPUs cannot be separated from it. SOC and PSB: old drivers.
_WORDS = CellWords(r"NV\d{1,3}(?![\d,-])|(?:X|PIX|PXB|PHB|NODE|SYS|SOC|PSB)(?![a-z_])")
_CPUS = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_COMMAND = re.compile(r"nvidia-smi\s{1,8}topo\s{1,8}(-mp?|--matrix(?:_pci)?)(?![\w-])")
_PCI_LEGEND = re.compile(r"PIX\s{1,8}= ")
_NV_LEGEND = re.compile(r"NV#\s{1,8}= ")
# Cores of one Grace. It has one thread for each core, so its list of CPUs is one range.
_GRACE_CORES = 72
_MOST_NOTES = 8


def recognises(text: str) -> bool:
    """Whether near the beginning of ``text`` there is a row of such a table. Never raises."""
    return any(
        set(row.cells) - {"X"} or (row.cells and _CPUS.match(row.tail.strip()))
        for row in _WORDS.read_rows(text)
    )


def read(text: str) -> Reading:
    """GPUs joined by NVLink, and the number of links of each pair. Hosts are unknown."""
    table = GpuTable.read(text, _WORDS)
    notes = list(table.notes)
    # A link that only one of the two reports cannot be used.
    counts = {
        pair: min(map(_count_links, cells))
        for pair, cells in table.pairs.items()
        if cells != ("X", "X")
    }
    links = {pair: count for pair, count in counts.items() if count}
    domains = join_groups(table.gpus, links, counts)
    if not links and _lacks_nvlink(text):
        domains = None
        notes.append(Note("nvidia-smi topo -mp leaves NVLink out; run nvidia-smi topo -m"))
    elif domains is None:
        notes.append(Note("too many pairs are missing: domains are unknown"))
    odd = table.find_asymmetric()
    for one, other, message in odd[:_MOST_NOTES]:
        # Ways over PCIe may differ by direction in a virtual machine; links may not.
        code = "MP201" if any(map(_count_links, table.pairs[one, other])) else ""
        notes.append(Note(message, code, table.rows[other].line))
    if len(odd) > _MOST_NOTES:
        notes.append(Note(f"{len(odd) - _MOST_NOTES} more pairs differ by direction"))
    notes += _find_fewer(table, counts)
    if _is_tray(table, counts):
        message = (
            "4 GPUs with NV18 each to each, as in one tray of a rack that NVLink joins; the other "
            "trays are never listed here, so ranks in them may be in the same domain"
        )
        notes.append(Note(message, "MP203"))
    notes += _find_partial(domains or (), counts)
    return Reading(
        _KIND,
        domains=domains,
        complete=table.is_complete(len(counts)),
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
        links=tuple((one, other, count) for (one, other), count in sorted(links.items())),
    )


def _lacks_nvlink(text: str) -> bool:
    """True if the table may be of ``-mp``: by its command, or by a legend without ``NV#``."""
    command = _COMMAND.search(text)
    if command is not None:
        return command[1] in ("-mp", "--matrix_pci")
    return _PCI_LEGEND.search(text) is not None and _NV_LEGEND.search(text) is None


def _count_links(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _find_fewer(table: GpuTable, counts: dict[Pair, int]) -> Iterator[Note]:
    """GPUs with fewer links than others that are joined each to each. Where links go directly from
    GPU to GPU, as in a V100 cube mesh or over bridges, healthy GPUs have different numbers.
    """
    sure = {pair: count for pair, count in counts.items() if pair not in table.doubtful}
    numbers = Counter(count for count in sure.values() if count)
    if not numbers:
        return
    usual = max(numbers, key=lambda count: (numbers[count], count))
    equal = [pair for pair, count in sure.items() if count == usual]
    groups = [group for group in find_components(table.gpus, equal) if len(group) > 1]
    full = sum(len(group) * (len(group) - 1) // 2 for group in groups) == len(equal)
    if not full or any(len(group) < 3 for group in groups):
        return
    seen = Counter(gpu for pair in sure for gpu in pair)
    most: Counter[int] = Counter()
    for pair, count in sure.items():
        for gpu in pair:
            most[gpu] = max(most[gpu], count)
    fine = {gpu for group in groups for gpu in group}
    found = [gpu for gpu in table.gpus if gpu not in fine and seen[gpu] == len(table.gpus) - 1]
    for gpu in found[:_MOST_NOTES]:
        row = table.rows.get(gpu)
        has = f"at most NV{most[gpu]}" if most[gpu] else "no NVLink"
        yield Note(
            f"GPU{gpu} has {has} to the others, which have NV{usual} each to each: links may be "
            "down, or it is another model",
            "MP201",
            None if row is None else row.line,
        )
    if len(found) > _MOST_NOTES:
        yield Note(f"{len(found) - _MOST_NOTES} more GPUs have fewer links", "MP201")


def _is_tray(table: GpuTable, counts: dict[Pair, int]) -> bool:
    if len(table.gpus) != 4 or len(counts) != 6 or set(counts.values()) != {18}:
        return False
    hosts = [_is_grace(row) for row in table.rows.values()]
    # Without a list of CPUs nothing contradicts it. Elsewhere 4 GPUs may be of a larger host.
    return False not in hosts or True in hosts


def _is_grace(row: Row) -> bool | None:
    words = row.tail.split()
    # CPU Affinity, NUMA Affinity, GPU NUMA ID: the third exists only if CPUs reach GPU memory.
    if len(words) == 3 and words[2].isdecimal():
        return True
    cpus = words[0] if words and _CPUS.fullmatch(words[0]) else ""
    if not cpus or "-" not in cpus:
        return None
    first, _, last = cpus.partition("-")
    if not last.isdecimal():
        return False
    return int(first) % _GRACE_CORES == 0 and int(last) - int(first) == _GRACE_CORES - 1


def _find_partial(domains: Groups, counts: dict[Pair, int]) -> Iterator[Note]:
    where = {gpu: number for number, group in enumerate(domains) for gpu in group}
    # Unknown pairs count for neither.
    linked: Counter[int] = Counter()
    pairs: Counter[int] = Counter()
    for (one, other), count in counts.items() if domains else ():
        if where[one] == where[other]:
            pairs[where[one]] += 1
            linked[where[one]] += count > 0
    for number, group in enumerate(domains):
        if linked[number] < pairs[number]:
            yield Note(
                f"{format_gpus(group)} are joined by NVLink, but not each to each: "
                f"{linked[number]} of {pairs[number]} pairs have links of their own"
            )
