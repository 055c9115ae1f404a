"""The table of GPUs by GPUs of ``nvidia-smi topo``, also from a damaged copy.

Copies of such tables lose headers, tabs, rows and the ends of rows. So cells are read from the left
while they are words of the table, and the column of a GPU replaces a missing row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Groups, Note, find_components

# Removes the additions of terminals, launchers and web pages from the lines of an output.
#
# Line numbers stay those of the input, so that notes and errors point at lines of the file.

# Characters of a text that are enough to recognise it.
HEAD = 2**18
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


class CellWords:
    def __init__(self, pattern: str) -> None:
        self.one = re.compile(pattern)
        self.run = re.compile(rf"(?:\s*+(?:{pattern}))*+")

    def split(self, text: str) -> tuple[list[str], str]:
        run = self.run.match(text)
        assert run is not None
        return self.one.findall(run[0]), text[run.end() :]

    def read_row(self, line: str, number: int) -> Row | None:
        label = _LABEL.match(line)
        if label is None:
            return None
        cells, tail = self.split(line[label.end() :])
        gpu = None if label[1] is None else int(label[1])
        # A GPU alone is a row of which the rest is lost.
        if not cells and (gpu is None or tail.strip()):
            return None
        return Row(gpu, label[0].strip(), number, cells, tail)

    def read_rows(self, text: str) -> Iterator[Row]:
        """Rows of GPUs near the beginning of a text: to recognise it."""
        for number, line in clean_lines(text[:HEAD]):
            if "GPU" in line:
                row = self.read_row(line[:_LONGEST_LINE].replace("|", " "), number)
                if row is not None and row.gpu is not None:
                    yield row


class _Parser:
    """Collects header and rows. Each row of a GPU is kept once.

    Raises ``TopologyInputError`` if there is no row of a GPU, or more than one host can have.
    """

    def __init__(self, text: str, words: CellWords) -> None:
        self.words = words
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
        row = self.words.read_row(line, number)
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
                    "another header with other GPUs; pass the output of one host",
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
        cells, tail = self.words.split(line)
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
    def read(cls, text: str, words: CellWords) -> GpuTable:
        # Header and rows first, then the width of a full row, then the rows that are usable: a row
        # whose X is not in its own column was shifted by a lost cell.
        parser = _Parser(text, words)
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

    def is_complete(self, known: int) -> bool:
        """True if nothing is missing and ``known`` counts all pairs."""
        return self.complete and known == len(self.gpus) * (len(self.gpus) - 1) // 2

    def find_asymmetric(self) -> list[tuple[int, int, str]]:
        """Pairs whose two cells differ, with a text about them."""
        odd = sorted((pair, cells) for pair, cells in self.pairs.items() if cells[0] != cells[1])
        return [
            (one, other, f"GPU{one} to GPU{other} is {there}, back it is {back}")
            for (one, other), (there, back) in odd
        ]

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
            self._note_missing(f"{len(cut) - 8} more rows of which not all cells can be read")
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
