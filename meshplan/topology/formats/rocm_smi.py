"""Output of ``rocm-smi --showtopo`` and ``amd-smi topology``: tables of weights, hops, link types
and more between AMD GPUs.

Source: ``rocm_smi.py`` and ``amdsmi_commands.py`` of ROCm. Only the table of link types is read:
hops are 1 over xGMI even where the way leads over another GPU, and weights differ between machines.
Without that table, as with ``--showtoponuma`` or with no option at all, nothing is known about
links. amd-smi names GPUs by their PCI address; their index is the position among the columns.
"""

from __future__ import annotations

import re
from io import StringIO
from itertools import combinations

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Groups, Note, Reading, find_components

_ASK = "run {} on the host and pass its output"

_MOST_GPUS = 1024  # of one host
_BANNER = re.compile(
    r"^=+ {1,4}(?:ROCm System Management Interface|End of ROCm SMI Log"
    r"|(?:Weight|Hops|Link Type) between two GPUs|Numa Nodes) {1,4}=+\s*$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^=+ {1,4}(Weight|Hops|Link Type) between two GPUs {1,4}=+", re.MULTILINE)
_GPU = re.compile(r"GPU(\d{1,6})", re.ASCII)
_AMD_SMI_TABLE = re.compile(
    r"^[ \t]{0,8}(ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW|CACHE COHERENCY|ATOMICS"
    r"|DMA|BI-DIRECTIONAL|P2P) TABLE:[ \t\r]*$",
    re.MULTILINE,
)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
# Line and cells of each row, by name of its GPU.
_Rows = dict[str, tuple[int, list[str]]]


def recognises(text: str) -> bool:
    return (_BANNER.search(text) or _AMD_SMI_TABLE.search(text)) is not None


def read(text: str) -> Reading:
    kind, heading, link, name = "rocm-smi --showtopo", _TABLE, "Link Type", _GPU
    note = Note(f"no table of link types in this output; {_ASK.format(kind)}")
    if not _BANNER.search(text):
        kind, heading, link, name = "amd-smi topology", _AMD_SMI_TABLE, "LINK TYPE", _ADDRESS
        note = Note(f"no LINK TYPE TABLE in this output; {_ASK.format(kind)}", "MP202")
    tables = {match[1]: match.end() for match in heading.finditer(text)}
    if link in tables:
        return _read_table(text, tables[link], kind, name)
    if not recognises(text):
        raise TopologyInputError(f"no table of {kind} found; {_ASK.format(kind)}")
    return Reading(kind if tables else "rocm-smi --showtoponuma", notes=(note,))


def _read_table(text: str, begin: int, kind: str, name: re.Pattern[str]) -> Reading:
    """Domains by the table of link types whose heading ends at ``begin``; one host, so its GPUs are
    one node. ``name`` matches a GPU, whose index is the first group, or else its position.
    """
    first = text.count("\n", 0, begin) + 1
    columns, rows = _split_rows(text, begin, first, kind, name)
    links, unknown, notes = _find_links(columns, rows)
    missing = [column for column in columns if column not in rows]
    if missing:
        some = ", ".join(missing[:4]) + ", ..." * (len(missing) > 4)
        notes.append(
            Note(
                f"{len(rows)} of {len(columns)} rows: no row of {some}",
                "MP202",
                first,
            )
        )
        # One row is enough for both directions of a pair.
        unknown += combinations([columns[one] for one in missing], 2)
    domains: Groups | None = find_components(columns.values(), links)
    group = {gpu: number for number, gpus in enumerate(domains or ()) for gpu in gpus}
    if any(group[one] != group[other] for one, other in unknown):
        domains = None
        message = "cells that could join GPUs are missing; domains are unknown"
        notes.append(Note(message, "MP202", first))
    return Reading(
        kind,
        domains=domains,
        nodes=(tuple(sorted(columns.values())),),
        complete=not missing and not unknown,
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
        names=tuple(columns),
    )


def _split_rows(
    text: str, begin: int, first: int, kind: str, name: re.Pattern[str]
) -> tuple[dict[str, int], _Rows]:
    columns: dict[str, int] = {}
    rows: _Rows = {}
    for line, content in enumerate(StringIO(text[begin:]), first):
        words = content.strip("= \t\r\n").upper().split()
        if not columns:
            columns = _number_columns(words, line, name) if words else {}
        elif not words or not name.fullmatch(words[0]):
            break
        elif len(words) != len(columns) + 1:
            raise TopologyInputError(
                f"{words[0]} has {len(words) - 1} cells for {len(columns)} columns",
                line=line,
            )
        elif words[0] not in columns or words[0] in rows:
            raise TopologyInputError(f"a second row, or no column, of {words[0]}", line=line)
        else:
            rows[words[0]] = (line, words[1:])
    if not columns:
        raise TopologyInputError(f"no table of link types; {_ASK.format(kind)}", line=first)
    return columns, rows


def _number_columns(words: list[str], line: int, name: re.Pattern[str]) -> dict[str, int]:
    gpus = [name.fullmatch(word) for word in words[: _MOST_GPUS + 1]]
    if len(gpus) > _MOST_GPUS or not all(gpus):
        raise TopologyInputError("expected the GPUs as the columns of the table", line=line)
    columns = {gpu[0]: int(gpu[1]) if name.groups else i for i, gpu in enumerate(gpus) if gpu}
    if len(set(columns.values())) < len(gpus):
        raise TopologyInputError("a GPU has two columns", line=line)
    return columns


def _find_links(
    columns: dict[str, int], rows: _Rows
) -> tuple[set[tuple[int, int]], list[tuple[int, int]], list[Note]]:
    links: set[tuple[int, int]] = set()
    unknown: list[tuple[int, int]] = []
    notes: list[Note] = []
    position = {name: index for index, name in enumerate(columns)}
    for name, (line, cells) in rows.items():
        gpu = columns[name]
        for (far, other), cell in zip(columns.items(), cells, strict=True):
            if other == gpu:
                if cell == "XGMI":
                    notes.append(Note(f"{name} has a link to itself", line=line))
            elif cell == "XGMI":
                links.add((min(gpu, other), max(gpu, other)))
                if far in rows and rows[far][1][position[name]] != "XGMI":
                    message = f"{name} has xGMI to {far}, which has none back"
                    notes.append(Note(message, "MP201", line))
            elif cell in {"N/A", "UNKNOWN", "XXXX"}:
                unknown.append((gpu, other))
            elif cell != "PCIE":
                raise TopologyInputError(
                    f"unknown link type {cell[:20]!r} of {name} and {far}; expected XGMI or PCIE",
                    line=line,
                )
    return links, unknown, notes
