"""``nvidia-smi topo -m``: the connection of each pair of GPUs of one host, and each GPU and NIC.

Source: the command's own legend. ``NV4`` is 4 bonded NVLinks; all other words are ways over PCIe.
Through NVSwitch each pair shows all links of a GPU, and the switch itself is not visible. MIG
devices are not listed, and ``CUDA_VISIBLE_DEVICES`` is ignored. Of a rack that NVLink joins, only
the GPUs of this host are listed. ``topo -mp`` prints the same without NVLink.

Copies of such tables lose headers, tabs, rows and the ends of rows. So cells are read from the left
while they are words of the table, and the column of a GPU replaces a missing row.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Groups, Note, Reading, find_components

# Removes the additions of terminals, launchers and web pages from the lines of an output.
#
# Line numbers stay those of the input, so that notes and errors point at lines of the file.

# Characters of a text that are enough to recognise it.
_HEAD = 2**18
# Far above any output of a host about its links. They keep the time bounded.
_MOST_CHARACTERS = 2**26
_MOST_LINES = 2**18
_MOST_ESCAPES = 2**18

# Colours and underlines, titles, and the charset that `tput sgr0` selects.
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)?|[()][0-9A-Za-z])"
)
# mpirun --tag-output, torchrun --tee and the interpreter's own prefix, srun --label.
_LAUNCHER = re.compile(
    r"[ \t]{0,8}(?:"
    r"\[\d{1,7},[^\]\n]{1,64}\]<std(?:out|err|diag)>:"
    r"|\[(?:rank|default|trainer|worker)\d{1,7}(?:\|\d{1,7})?\]:"
    r"|\d{1,7}:(?: |$)"
    r")"
)
_QUOTED = re.compile(r"[ \t]{0,3}(?:> ?){1,8}")
_FENCE = re.compile(r"[ \t]{0,8}(?:```|~~~)[^`]{0,64}$")
_RULE = re.compile(r"[ \t:|-]{3,}+$")
_FIRST = frozenset("[0123456789>`~|")


def clean_lines(text: str) -> list[tuple[int, str]]:
    """Each line with its number from 1 up, blank ones too. Without escape sequences, carriage
    returns, prefixes of launchers, quote marks, fences, and the pipes of a Markdown table (each
    becomes a tab).
    """
    for what, count, most in (
        ("characters", len(text), _MOST_CHARACTERS),
        ("lines", max(text.count("\n"), text.count("\r")), _MOST_LINES),
        ("escape sequences", text.count("\x1b"), _MOST_ESCAPES),
    ):
        if count > most:
            raise TopologyInputError(
                f"{count} {what}, at most {most} are read; pass only the output of the command"
            )
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        # Alone it ends a line only in a text without line feeds: progress counters use it too.
        text = text.replace("\r", " " if "\n" in text else "\n")
    return [
        (number, _clean_line(line) if line[:16].lstrip()[:1] in _FIRST else line)
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    ]


def _clean_line(line: str) -> str:
    # A launcher may have started another one.
    for _ in range(3):
        prefix = _LAUNCHER.match(line) or _QUOTED.match(line)
        if prefix is None:
            break
        line = line[prefix.end() :]
    if _FENCE.match(line):
        return ""
    # Only the tables: elsewhere a pipe may be part of the format.
    if line[:16].lstrip().startswith("|"):
        return "" if _RULE.match(line) else line.replace("|", "\t")
    return line


Pair = tuple[int, int]

# More GPUs and cells than any host has; they keep the time bounded.
_MOST_GPUS = 4096
_MOST_CELLS = 2**17
_LONGEST_LINE = 2**17
_MOST_ROWS = 2**16

_COLUMNS = re.compile(
    r"\W{0,64}(?:\d{0,2}m)?((?:GPU\d{1,7}\s*+)++)(?=$|[a-zNC\x1b\[]|GPU NUMA|\W*$)"
)
_LABEL = re.compile(r"\s{0,64}(?:GPU(\d{1,7})|(NIC\d{1,5}|(?=[^\s\d]{1,40}\d)[a-z][\w.-]{1,40}))")
_NIC_COLUMN = re.compile(r"NIC\d{1,5}|mlx\d{1,2}_(?:bond_)?\d{1,4}|[a-z]\w{0,32}\d")
_NOT_NIC = re.compile(r"CPU Aff|NUMA Aff|GPU NUMA")


@dataclass(slots=True)
class Row:
    """One row: ``gpu`` is ``None`` for a NIC; ``tail`` is the text after the cells."""

    gpu: int | None
    name: str
    line: int
    cells: list[str]
    tail: str


# A number that is glued to a list of CPUs cannot be separated from it. SOC and PSB: old drivers.
_CELL = re.compile(r"NV\d{1,3}(?![\d,-])|(?:X|PIX|PXB|PHB|NODE|SYS|SOC|PSB)(?![a-z_])")
_CELLS = re.compile(rf"(?:\s*+(?:{_CELL.pattern}))*+")


def _split_cells(text: str) -> tuple[list[str], str]:
    run = _CELLS.match(text)
    assert run is not None
    return _CELL.findall(run[0]), text[run.end() :]


def _read_row(line: str, number: int) -> Row | None:
    label = _LABEL.match(line)
    if label is None:
        return None
    cells, tail = _split_cells(line[label.end() :])
    gpu = None if label[1] is None else int(label[1])
    # A GPU alone is a row of which the rest is lost.
    if not cells and (gpu is None or tail.strip()):
        return None
    return Row(gpu, label[0].strip(), number, cells, tail)


class _Parser:
    """Collects header and rows. Each row of a GPU is kept once.

    Raises ``TopologyInputError`` if there is no row of a GPU, or more than one host can have.
    """

    def __init__(self, text: str) -> None:
        self.header: list[int] = []
        self.nics: list[str] = []
        self.rows: dict[int, Row] = {}
        self.repeats: list[Row] = []
        self.nic_rows: dict[str, Row] = {}
        self.first_header: list[int] = []
        self.header_line = self.last_line = self.cells = 0
        self.last: Row | None = None
        for number, line in clean_lines(text):
            self.add(number, line[:_LONGEST_LINE].replace("|", " "))
        if not any(row.cells for row in self.rows.values()):
            raise TopologyInputError(
                "no row of a GPU with cells found; pass the whole output of the command"
            )

    def add(self, number: int, line: str) -> None:
        if "GPU" in line and self.add_header(number, line):
            return
        if not self.rows and self.header_line and self.header_line == number - 1:
            # The header was wrapped between two NICs.
            self.add_nics(line if line.lstrip().startswith(("NIC", "mlx")) else "")
        row = _read_row(line, number)
        if row is None:
            self.add_wrapped(number, line)
            return
        self.last, self.last_line = row, number
        self.count(len(row.cells) + 1, number)
        if row.gpu is None:
            self.nic_rows.setdefault(row.name, row)
        elif row.gpu in self.rows:
            self.repeats.append(row)
        else:
            self.check_gpus([row.gpu], number)
            self.rows[row.gpu] = row

    def add_header(self, number: int, line: str) -> bool:
        """False if the line is not a header."""
        found = _COLUMNS.match(line)
        if found is None:
            return False
        gpus = [int(gpu) for gpu in re.findall(r"\d+", found[1])]
        rest = line[found.end() :]
        # A single name is the label of a row, unless names of other columns follow it.
        if len(gpus) == 1 and not (_NIC_COLUMN.match(rest) or _NOT_NIC.search(rest)):
            return False
        self.count(len(gpus), number)
        self.check_gpus(gpus, number)
        if gpus[0] == 0:
            if self.first_header and gpus != self.first_header:
                raise TopologyInputError(
                    "this header lists other GPUs; pass the output of one host",
                    line=number,
                )
            repeated, self.first_header = bool(self.first_header), gpus
            if repeated:
                return True
        seen = set(self.header)
        self.header += [gpu for gpu in dict.fromkeys(gpus) if gpu not in seen]
        self.header_line = number
        self.add_nics(rest)
        return True

    def add_nics(self, text: str) -> None:
        end = _NOT_NIC.search(text)
        names = _NIC_COLUMN.findall(text[: end.start()] if end else text)
        self.count(len(names), self.header_line)
        seen = set(self.nics)
        self.nics += [name for name in dict.fromkeys(names) if name not in seen]

    def add_wrapped(self, number: int, line: str) -> None:
        row = self.last
        if row is None or number != self.last_line + 1 or row.tail.strip():
            return
        cells, tail = _split_cells(line)
        # "X = Self" is a line of the legend.
        if cells and tail.lstrip()[:1] != "=":
            self.count(len(cells), number)
            row.cells += cells
            row.tail, self.last_line = tail, number

    def find_columns(self) -> list[int]:
        most = max(self.rows)
        if self.header and set(self.header) >= set(self.rows):
            return self.header
        if not self.header:
            # Only GPUs have NVLink, so the last NV is no NIC: it reveals a lost last row.
            for gpu, row in self.rows.items():
                if row.cells[gpu : gpu + 1] == ["X"]:
                    at = [i for i, cell in enumerate(row.cells) if cell.startswith("NV")]
                    most = max([most, *at[-1:]])
        return list(range(max([most, *self.header]) + 1))

    def check_repeats(self, size: int) -> None:
        """Outputs of several ranks of one host repeat the table; of several hosts, they differ."""
        for row in self.repeats:
            assert row.gpu is not None
            kept = self.rows[row.gpu]
            both = min(size, len(kept.cells), len(row.cells))
            if kept.cells[:both] != row.cells[:both]:
                raise TopologyInputError(
                    f"{row.name} differs from its row in line {kept.line}; "
                    "pass the output of one host",
                    line=row.line,
                )
            if len(row.cells) > len(kept.cells):
                self.rows[row.gpu] = row

    def check_gpus(self, gpus: Iterable[int], number: int) -> None:
        for gpu in gpus:
            if gpu >= _MOST_GPUS:
                message = f"GPU{gpu}, but a host has at most {_MOST_GPUS} GPUs here"
                raise TopologyInputError(message, line=number)

    def count(self, more: int, number: int) -> None:
        self.cells += more
        if self.cells > _MOST_CELLS or len(self.repeats) > _MOST_ROWS:
            raise TopologyInputError(
                f"more than {_MOST_CELLS} cells; pass the output of one host",
                line=number,
            )


@dataclass(slots=True)
class GpuTable:
    """The usable part of a table."""

    gpus: tuple[int, ...] = ()  # of the columns, ascending
    rows: dict[int, Row] = field(default_factory=dict)  # usable rows, by GPU
    # (lower, higher) to the cell in the row of the lower and in that of the higher one;
    # the same cell twice if only one of them is readable.
    pairs: dict[Pair, tuple[str, str]] = field(default_factory=dict)
    # Pairs whose only cell is the last one of a truncated row.
    doubtful: set[Pair] = field(default_factory=set)
    complete: bool = True  # whether no row is missing or truncated
    notes: list[Note] = field(default_factory=list)  # on missing parts

    @classmethod
    def read(cls, text: str) -> GpuTable:
        # Header and rows first, then the width of a full row, then the rows that are usable: a row
        # whose X is not in its own column was shifted by a lost cell.
        parser = _Parser(text)
        table: GpuTable = cls()
        columns = parser.find_columns()
        table.gpus = tuple(sorted(columns))
        parser.check_repeats(len(columns))
        width = max(
            [
                len(columns) + len(parser.nics),
                *(len(row.cells) for row in parser.rows.values()),
            ]
        )
        position = {gpu: at for at, gpu in enumerate(columns)}
        for gpu, row in parser.rows.items():
            own = [at for at, cell in enumerate(row.cells[: len(columns)]) if cell == "X"]
            if own == [position[gpu]] or (not own and len(row.cells) <= position[gpu]):
                table.rows[gpu] = row
            else:
                table._note_missing("its X is not in its own column: the row is not used", row)
        cut = [row for row in table.rows.values() if len(row.cells) < width]
        table._fill(columns, {row.name for row in cut})
        table._check(parser, cut, width)
        return table

    def _fill(self, columns: list[int], cut: set[str]) -> None:
        # Both directions of a pair, from two rows. Certain cells go before the last cell of a
        # truncated row, which may be truncated itself.
        sure: dict[Pair, str] = {}
        last: dict[Pair, str] = {}
        for gpu, row in self.rows.items():
            for place, (other, cell) in enumerate(zip(columns, row.cells, strict=False), 1):
                # NV1 at the end of a truncated row may have been NV18.
                doubt = row.name in cut and place == len(row.cells)
                (last if doubt else sure)[gpu, other] = cell
        for gpu, other in (*sure, *last):
            pair = (gpu, other) if gpu < other else (other, gpu)
            if gpu == other or pair in self.pairs:
                continue
            there, back = sure.get(pair), sure.get(pair[::-1])
            if there is None and back is None:
                self.doubtful.add(pair)
            cell = there or back or last[gpu, other]
            self.pairs[pair] = (there or cell, back or cell)

    def _check(self, parser: _Parser, cut: list[Row], width: int) -> None:
        if len(self.rows) < len(self.gpus):
            self._note_missing(
                f"{len(self.rows)} of {len(self.gpus)} rows of GPUs; "
                "the columns replace the missing rows"
            )
        for row in cut[:8]:
            self._note_missing(f"{len(row.cells)} of {width} cells can be read", row)
        if len(cut) > 8:
            self._note_missing(f"{len(cut) - 8} more rows with cells that cannot be read")
        nics = parser.nic_rows.values()
        expected = max(len(parser.nics), width - len(self.gpus))
        if parser.header and len(nics) < expected:
            self._note_missing(f"{len(nics)} of {expected} rows of NICs")
        for row in [row for row in nics if len(row.cells) < width][:8]:
            self._note_missing(f"{len(row.cells)} of {width} cells can be read", row)
        if not parser.header:
            # Only a square table shows that no column, and so no GPU, is missing.
            self.complete &= width == len(self.gpus) + len(nics)
            self.notes.append(Note("no header: columns are taken in the order of the rows"))

    def _note_missing(self, message: str, row: Row | None = None) -> None:
        self.complete = False
        name = "" if row is None else f"{row.name}: "
        self.notes.append(Note(name + message, line=None if row is None else row.line))


def format_gpus(gpus: Iterable[int]) -> str:
    """``GPU0, GPU3``; a bounded text for any number of GPUs."""
    names = [f"GPU{gpu}" for gpu in gpus]
    more = len(names) - 8
    return ", ".join(names[:8]) + (f" and {more} more" if more > 0 else "")


def join_groups(
    gpus: Iterable[int], joined: Iterable[Pair], known: Iterable[Pair]
) -> Groups | None:
    """Connected components; ``None`` if an unknown pair could join two of them."""
    groups = find_components(gpus, joined)
    where = {gpu: number for number, group in enumerate(groups) for gpu in group}
    across = (len(where) ** 2 - sum(len(group) ** 2 for group in groups)) // 2
    seen = sum(where[one] != where[other] for one, other in known)
    return groups if seen == across else None


_KIND = "nvidia-smi topo -m"
_CPUS = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_COMMAND = re.compile(r"nvidia-smi\s{1,8}topo\s{1,8}(-mp?|--matrix(?:_pci)?)(?![\w-])")
_PCI_LEGEND = re.compile(r"PIX\s{1,8}= ")
_NV_LEGEND = re.compile(r"NV#\s{1,8}= ")
# Cores of one Grace. It has one thread for each core, so its list of CPUs is one range.
_GRACE_CORES = 72
_MOST_NOTES = 8


def recognises(text: str) -> bool:
    rows = (
        _read_row(line[:_LONGEST_LINE].replace("|", " "), number)
        for number, line in clean_lines(text[:_HEAD])
        if "GPU" in line
    )
    return any(
        {*row.cells} - {"X"} or (row.cells and _CPUS.match(row.tail.strip()))
        for row in rows
        if row is not None and row.gpu is not None
    )


def read(text: str) -> Reading:
    """GPUs joined by NVLink, and the number of links of each pair. Hosts are unknown."""
    table = GpuTable.read(text)
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
    odd = sorted(pair for pair, cells in table.pairs.items() if cells[0] != cells[1])
    for one, other in odd[:_MOST_NOTES]:
        there, back = table.pairs[one, other]
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
        _KIND,
        domains=domains,
        complete=table.complete and len(counts) == math.comb(len(table.gpus), 2),
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
