"""``nvidia-smi topo -m``: the connection of each pair of GPUs of one host, and each GPU and NIC.

Source: the command's own legend. ``NV4`` is 4 bonded NVLinks; all other words are ways over PCIe.
Through NVSwitch each pair shows all links of a GPU, and the switch itself is not visible. MIG
devices are not listed, and ``CUDA_VISIBLE_DEVICES`` is ignored. Of a rack that NVLink joins, only
the GPUs of this host are listed. ``topo -mp`` prints the same without NVLink.

A row may begin anywhere in its line, so prefixes of launchers and quote marks do not matter. A copy
may lack the header, rows and ends of rows: the column of a GPU replaces its row. Other damage is
refused with its line.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshplan._message_text import format_first
from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Groups, Note, Reading, find_components

Pair = tuple[int, int]

# Characters of a text that are enough to recognise it.
_HEAD = 2**18
# More GPUs and cells than any host has; they keep the time bounded.
_MOST_GPUS = 4096
_MOST_CELLS = 2**17
_MOST_LINES = 2**18
_MOST_NOTES = 8

_COLOR = re.compile(r"\x1b?\[[\d;]{0,20}[mK]|\x1b\(B")  # K: of grep --color
# A number that is glued to a list of CPUs cannot be separated from it. SOC and PSB: old drivers.
_CELL = re.compile(r"NV\d{1,3}(?![\d,-])|(?:X|PIX|PXB|PHB|NODE|SYS|SOC|PSB)(?![a-z_])")
_ROW = re.compile(
    r"(?<![\w.-])(?:GPU(\d{1,7})|(NIC\d{1,5}|[a-z][a-z_.-]{0,40}\d[\w.-]{0,40}+))"
    rf"((?:\s*+(?:{_CELL.pattern}))++)"
)
_COLUMNS = re.compile(r"((?:GPU\d{1,7}\s*+)++)(?=$|NIC|[a-z]\w{0,32}\d|CPU|NUMA|GPU NUMA)")
_NIC_COLUMN = re.compile(r"NIC\d{1,5}|mlx\d{1,2}_(?:bond_)?\d{1,4}|[a-z]\w{0,32}\d")
_NOT_NIC = re.compile(r"CPU Aff|NUMA Aff|GPU NUMA")


def _split_lines(text: str) -> list[str]:
    # Alone, a carriage return ends a line only in a text without line feeds.
    text = text if "\n" in text else text.replace("\r", "\n")
    return _COLOR.sub("", text.replace("|", " ")).split("\n")


@dataclass(slots=True)
class _Row:
    line: int
    cells: list[str]
    tail: str  # the text after the cells


class _Table:
    """The header and one row of each GPU; refused if they contradict each other."""

    def __init__(self, text: str) -> None:
        self.gpus: list[int] = []  # of the columns
        self.header: int | None = None  # its line
        self.nics = 0  # columns of NICs
        self.rows: dict[int, _Row] = {}
        self.nic_rows: dict[str, _Row] = {}
        self.cells = 0
        lines = _split_lines(text)
        if len(lines) > _MOST_LINES:
            raise TopologyInputError(f"{len(lines)} lines; pass only the output of the command")
        for number, line in enumerate(lines, 1):
            if found := _ROW.search(line):
                self._add_row(found, line, number)
            elif header := _COLUMNS.match(line, max(line.find("GPU"), 0)):
                self._add_header(header, line, number)
        if not self.rows:
            raise TopologyInputError(
                "no row of a GPU with cells found; pass the whole output of the command"
            )
        # Only GPUs have NVLink, so the last NV is no NIC: it reveals a lost last row, or a cut
        # header.
        links = [
            at
            for row in self.rows.values()
            for at, cell in enumerate(row.cells)
            if cell.startswith("NV")
        ]
        if not self.rows.keys() <= {*self.gpus} or max(links, default=0) >= len(self.gpus):
            self.header = None
        if self.header is None:
            self.gpus = list(range(max([*self.rows, *links]) + 1))
        position = {gpu: at for at, gpu in enumerate(self.gpus)}
        for gpu, row in self.rows.items():
            own = position.get(gpu, -1)
            at = [at for at, cell in enumerate(row.cells[: len(self.gpus)]) if cell == "X"]
            if at != [own] and (at or own < 0 or len(row.cells) > own):
                raise TopologyInputError(
                    f"the X of GPU{gpu} is not in its own column: cells are missing, or the header "
                    "is wrapped; pass the output as the command prints it",
                    line=row.line,
                )

    def _add_header(self, found: re.Match[str], line: str, number: int) -> None:
        gpus = [int(gpu) for gpu in re.findall(r"\d+", found[1])]
        end = _NOT_NIC.search(line, found.end())
        nics = {*_NIC_COLUMN.findall(line[found.end() : end.start() if end else len(line)])}
        # A single name is the label of a row, unless names of other columns follow it.
        if len(gpus) == 1 and not nics and not end:
            return
        if self.header is not None and gpus != self.gpus:
            raise TopologyInputError(
                "this header lists other GPUs; pass the output of one host, without wrapped lines",
                line=number,
            )
        self._count(len(gpus) + len(nics), gpus, number)
        self.gpus, self.nics = gpus, max(self.nics, len(nics))
        self.header = self.header or number

    def _add_row(self, found: re.Match[str], line: str, number: int) -> None:
        row = _Row(number, _CELL.findall(found[3]), line[found.end() :])
        if found[1] is None:
            self._count(len(row.cells), (), number)
            self.nic_rows.setdefault(found[2], row)
            return
        gpu = int(found[1])
        self._count(len(row.cells), [gpu], number)
        kept = self.rows.get(gpu, row)
        # Outputs of several ranks of one host repeat the table; of several hosts, they differ.
        known = len(self.gpus) or None  # cells of NICs are those of a host's slots
        pairs = zip(kept.cells[:known], row.cells[:known], strict=False)
        if any(one != other for one, other in pairs):
            raise TopologyInputError(
                f"GPU{gpu} differs from its row in line {kept.line}; pass the output of one host",
                line=number,
            )
        self.rows[gpu] = max(kept, row, key=lambda one: len(one.cells))

    def _count(self, cells: int, gpus: Iterable[int], number: int) -> None:
        self.cells += cells
        if self.cells > _MOST_CELLS or max(gpus, default=0) >= _MOST_GPUS:
            raise TopologyInputError(
                f"more than {_MOST_GPUS} GPUs or {_MOST_CELLS} cells; pass the output of one host",
                line=number,
            )

    @property
    def width(self) -> int:
        return max(
            [
                len(self.gpus) + self.nics,
                *(len(row.cells) for row in self.rows.values()),
            ]
        )

    def find_pairs(self) -> dict[Pair, tuple[str, str]]:
        """(lower, higher) to the cell in the row of the lower and in that of the higher one; the
        same cell twice if only one of them is readable.
        """
        found: dict[Pair, str] = {}
        width = self.width
        for gpu, row in self.rows.items():
            # NV1 at the end of a truncated row may have been NV18.
            cells = row.cells if len(row.cells) == width else row.cells[:-1]
            found |= {(gpu, other): cell for other, cell in zip(self.gpus, cells, strict=False)}
        pairs = {(min(pair), max(pair)) for pair in found if pair[0] != pair[1]}
        return {
            (one, other): (
                found.get((one, other)) or found[other, one],
                found.get((other, one)) or found[one, other],
            )
            for one, other in pairs
        }

    def list_missing(self) -> Iterator[Note]:
        if len(self.rows) < len(self.gpus):
            yield Note(
                f"{len(self.rows)} of {len(self.gpus)} rows of GPUs; "
                "the columns replace the missing rows"
            )
        width = self.width
        cut = [(gpu, row) for gpu, row in self.rows.items() if len(row.cells) < width]
        for gpu, row in cut[:_MOST_NOTES]:
            message = f"GPU{gpu}: {len(row.cells)} of {width} cells can be read"
            yield Note(message, line=row.line)
        if len(cut) > _MOST_NOTES:
            yield Note(f"{len(cut) - _MOST_NOTES} more rows with cells that cannot be read")
        nics = sum(len(row.cells) >= width for row in self.nic_rows.values())
        # Without a header, only a square table shows that no column, and so no GPU, is missing.
        expected = width - len(self.gpus)
        if nics < expected or (nics > expected and self.header is None):
            yield Note(f"{nics} of {expected} rows of NICs")


def _join_groups(
    gpus: Iterable[int], joined: Iterable[Pair], known: Iterable[Pair]
) -> Groups | None:
    """Connected components; ``None`` if an unknown pair could join two of them."""
    groups = find_components(gpus, joined)
    where = {gpu: number for number, group in enumerate(groups) for gpu in group}
    across = (len(where) ** 2 - sum(len(group) ** 2 for group in groups)) // 2
    seen = sum(where[one] != where[other] for one, other in known)
    return groups if seen == across else None


_CPUS = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_COMMAND = re.compile(r"nvidia-smi\s{1,8}topo\s{1,8}(-mp?|--matrix(?:_pci)?)(?![\w-])")
_PCI_LEGEND = re.compile(r"PIX\s{1,8}= ")
_NV_LEGEND = re.compile(r"NV#\s{1,8}= ")
# Cores of one Grace. It has one thread for each core, so its list of CPUs is one range.
_GRACE_CORES = 72


def recognises(text: str) -> bool:
    rows = (_ROW.search(line) for line in _split_lines(text[:_HEAD]) if "GPU" in line)
    return any(
        {*_CELL.findall(row[3])} - {"X"} or _CPUS.match(row.string[row.end() :].strip())
        for row in rows
        if row is not None and row[1] is not None
    )


def read(text: str) -> Reading:
    """GPUs joined by NVLink, and the number of links of each pair. Hosts are unknown."""
    table = _Table(text)
    notes = list(table.list_missing())
    complete = not notes
    if table.header is None:
        notes.append(Note("no header: columns are taken in the order of the rows"))
    pairs = table.find_pairs()
    # A link that only one of the two reports cannot be used.
    counts = {pair: min(map(_count_links, cells)) for pair, cells in pairs.items()}
    links = {pair: count for pair, count in counts.items() if count}
    domains = _join_groups(table.gpus, links, counts)
    if not links and _lacks_nvlink(text):
        domains = None
        notes.append(Note("nvidia-smi topo -mp leaves NVLink out; run nvidia-smi topo -m"))
    elif domains is None:
        notes.append(Note("too many pairs are missing: domains are unknown"))
    odd = sorted(pair for pair, cells in pairs.items() if cells[0] != cells[1])
    for one, other in odd[:_MOST_NOTES]:
        there, back = pairs[one, other]
        # Ways over PCIe may differ by direction in a virtual machine; links may not.
        code = "MP201" if any(map(_count_links, (there, back))) else ""
        message = f"GPU{one} to GPU{other} is {there}, back it is {back}"
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
        "nvidia-smi topo -m",
        domains=domains,
        complete=complete and len(counts) == math.comb(len(table.gpus), 2),
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
    )


def _lacks_nvlink(text: str) -> bool:
    """True if the table may be of ``-mp``: by its command, or by a legend without ``NV#``."""
    command = _COMMAND.search(text)
    if command is not None:
        return command[1] in ("-mp", "--matrix_pci")
    return _PCI_LEGEND.search(text) is not None and _NV_LEGEND.search(text) is None


def _count_links(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _find_fewer(table: _Table, counts: dict[Pair, int]) -> Iterator[Note]:
    """GPUs with fewer links than others that are joined each to each. Where links go directly from
    GPU to GPU, as in a V100 cube mesh or over bridges, healthy GPUs have different numbers.
    """
    numbers = Counter(count for count in counts.values() if count)
    if not numbers:
        return
    usual = max(numbers, key=lambda count: (numbers[count], count))
    equal = [pair for pair, count in counts.items() if count == usual]
    groups = [group for group in find_components(table.gpus, equal) if len(group) > 1]
    full = sum(len(group) * (len(group) - 1) // 2 for group in groups) == len(equal)
    if not full or any(len(group) < 3 for group in groups):
        return
    seen = Counter(gpu for pair in counts for gpu in pair)
    most: Counter[int] = Counter()
    for pair, count in counts.items():
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


def _is_tray(table: _Table, counts: dict[Pair, int]) -> bool:
    if len(table.gpus) != 4 or len(counts) != 6 or set(counts.values()) != {18}:
        return False
    hosts = [_is_grace(row) for row in table.rows.values()]
    # Without a list of CPUs nothing contradicts it. Elsewhere 4 GPUs may be of a larger host.
    return False not in hosts or True in hosts


def _is_grace(row: _Row) -> bool | None:
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
            names = format_first([f"GPU{gpu}" for gpu in group], 8)
            yield Note(
                f"{names} are joined by NVLink, but not each to each: "
                f"{linked[number]} of {pairs[number]} pairs have links of their own"
            )
