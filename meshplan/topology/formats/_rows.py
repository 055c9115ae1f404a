"""The lines of a text that belong to a table of GPUs by GPUs: its header and its rows.

Copies of such tables lose headers, tabs, rows and the ends of rows. So cells are read from the left
as long as they are words of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshplan.errors import TopologyInputError
from meshplan.topology.formats._clean import HEAD, lines

__all__ = ["Row", "Rows", "Words"]

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


class Words:
    """The words that stand in the cells of one kind of table."""

    def __init__(self, pattern: str) -> None:
        self.one = re.compile(pattern)
        self.run = re.compile(rf"(?:\s*+(?:{pattern}))*+")

    def split(self, text: str) -> tuple[list[str], str]:
        """The cells that ``text`` starts with, glued ones too, and what comes behind them."""
        run = self.run.match(text)
        assert run is not None
        return self.one.findall(run[0]), text[run.end() :]

    def rows(self, text: str) -> Iterator[Row]:
        """Rows near the beginning of a text: to recognise it."""
        for number, line in lines(text[:HEAD]):
            if "GPU" in line:
                row = _row(line[:_LONGEST_LINE].replace("|", " "), number, self)
                if row is not None and row.gpu is not None:
                    yield row


@dataclass(slots=True)
class Row:
    """One row: ``gpu`` is ``None`` for a NIC; ``tail`` is what stands behind the cells."""

    gpu: int | None
    name: str
    line: int
    cells: list[str]
    tail: str


class Rows:
    """Header and rows as found. Each row of a GPU is kept once.

    Raises ``TopologyInputError`` if there is no row of a GPU, or more than can be one host.
    """

    def __init__(self, text: str, words: Words) -> None:
        self.words = words
        self.header: list[int] = []
        self.nics: list[str] = []
        self.rows: dict[int, Row] = {}
        self.repeats: list[Row] = []
        self.nic_rows: dict[str, Row] = {}
        self._first: list[int] = []
        self._header_line = 0
        self._last: Row | None = None
        self._last_line = 0
        self._cells = 0
        for number, line in lines(text):
            self._add(number, line[:_LONGEST_LINE])
        if not any(row.cells for row in self.rows.values()):
            raise TopologyInputError(
                "no row of a GPU with cells found; give all that the command printed"
            )

    def _add(self, number: int, line: str) -> None:
        line = line.replace("|", " ")
        if "GPU" in line and self._is_header(number, line):
            return
        if not self.rows and self._header_line and self._header_line == number - 1:
            # The header was wrapped between two NICs.
            self._add_nics(line if line.lstrip().startswith(("NIC", "mlx")) else "")
        row = _row(line, number, self.words)
        if row is None:
            self._wrapped(number, line)
            return
        self._last, self._last_line = row, number
        self._count(len(row.cells) + 1, number)
        if row.gpu is None:
            self.nic_rows.setdefault(row.name, row)
        elif row.gpu in self.rows:
            self.repeats.append(row)
        else:
            self._check_gpu(row.gpu, number)
            self.rows[row.gpu] = row

    def _is_header(self, number: int, line: str) -> bool:
        found = _COLUMNS.match(line)
        if found is None:
            return False
        gpus = [int(gpu) for gpu in re.findall(r"\d+", found[1])]
        rest = line[found.end() :]
        # A single name is the label of a row, unless names of other columns follow it.
        if len(gpus) == 1 and not (_NIC_COLUMN.match(rest) or _NOT_NIC.search(rest)):
            return False
        self._count(len(gpus), number)
        for gpu in gpus:
            self._check_gpu(gpu, number)
        if gpus[0] == 0:
            if self._first and gpus != self._first:
                raise TopologyInputError(
                    "another header with other GPUs; give the output of one host", line=number
                )
            repeated, self._first = bool(self._first), gpus
            if repeated:
                return True
        seen = set(self.header)
        self.header += [gpu for gpu in dict.fromkeys(gpus) if gpu not in seen]
        self._header_line = number
        self._add_nics(rest)
        return True

    def _add_nics(self, text: str) -> None:
        end = _NOT_NIC.search(text)
        names = _NIC_COLUMN.findall(text[: end.start()] if end else text)
        self._count(len(names), self._header_line)
        seen = set(self.nics)
        self.nics += [name for name in dict.fromkeys(names) if name not in seen]

    def _wrapped(self, number: int, line: str) -> None:
        row = self._last
        if row is None or number != self._last_line + 1 or row.tail.strip():
            return
        cells, tail = self.words.split(line)
        # "X = Self" is a line of the legend.
        if cells and tail.lstrip()[:1] != "=":
            self._count(len(cells), number)
            row.cells += cells
            row.tail, self._last_line = tail, number

    def columns(self) -> list[int]:
        """GPUs by the place of their column."""
        most = max(self.rows)
        if self.header and set(self.header) >= set(self.rows):
            return self.header
        if not self.header:
            # Only GPUs have NVLink, so the last NV is no NIC: a lost last row is told by this.
            for gpu, row in self.rows.items():
                if row.cells[gpu : gpu + 1] == ["X"]:
                    places = [i for i, cell in enumerate(row.cells) if cell.startswith("NV")]
                    most = max([most, *places[-1:]])
        return list(range(max([most, *self.header]) + 1))

    def check_repeats(self, size: int) -> None:
        """Outputs of several ranks of one host repeat the table; of several hosts, they differ."""
        for row in self.repeats:
            assert row.gpu is not None
            kept = self.rows[row.gpu]
            both = min(size, len(kept.cells), len(row.cells))
            if kept.cells[:both] != row.cells[:both]:
                raise TopologyInputError(
                    f"{row.name} again, and not as in line {kept.line}; "
                    "give the output of one host",
                    line=row.line,
                )
            if len(row.cells) > len(kept.cells):
                self.rows[row.gpu] = row

    def _check_gpu(self, gpu: int, number: int) -> None:
        if gpu >= _MOST_GPUS:
            raise TopologyInputError(
                f"GPU{gpu}, but a host has at most {_MOST_GPUS} GPUs here", line=number
            )

    def _count(self, more: int, number: int) -> None:
        self._cells += more
        if self._cells > _MOST_CELLS or len(self.repeats) > _MOST_ROWS:
            raise TopologyInputError(
                f"more than {_MOST_CELLS} cells; give the output of one host", line=number
            )


def _row(line: str, number: int, words: Words) -> Row | None:
    label = _LABEL.match(line)
    if label is None:
        return None
    cells, tail = words.split(line[label.end() :])
    gpu = None if label[1] is None else int(label[1])
    # A GPU alone is a row of which everything else was cut.
    if not cells and (gpu is None or tail.strip()):
        return None
    return Row(gpu, label[0].strip(), number, cells, tail)
