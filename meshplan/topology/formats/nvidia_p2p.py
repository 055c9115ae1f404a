"""``nvidia-smi topo -p2p r|w|n|a|p``: whether each pair of GPUs can read, write, ... each other.

Source: the command's help and legend. The letter asks for reads, writes, NVLink, atomics or a
property of PCIe. Table and legend are the same for all of them; only the command line tells which
it was, if it was copied too. Of these only NVLink (``n``) says which GPUs are joined.
"""

from __future__ import annotations

import re

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats._clean import lines
from meshplan.topology.formats._matrix import Matrix, gpu_names, joined_groups
from meshplan.topology.formats._rows import Words

__all__ = ["recognises", "read"]

_KIND = "nvidia-smi topo -p2p"
_WORDS = Words(r"(?:X|OK|CNS|GNS|TNS|NS|DR|U)(?![a-z_])")
_COMMAND = re.compile(
    r"nvidia-smi\s{1,8}topo\s{1,8}(?:[^\n]{0,64}\s)?(?:-p2p|--p2pstatus)[ =]\s{0,8}([rwnap])\b"
)


def recognises(text: str) -> bool:
    """Whether near the beginning of ``text`` there is a row of such a table. Never raises."""
    # X alone could be a row of `topo -m` for one GPU.
    return any(set(row.cells) - {"X"} for row in _WORDS.rows(text))


def read(text: str) -> Reading:
    """GPUs joined by NVLink if the table is of NVLink; otherwise that this is not known.

    Args:
        text: what ``nvidia-smi topo -p2p n`` printed.

    Raises:
        TopologyInputError: no such table, tables of several hosts or letters, or more than can be
            one host.
    """
    matrix = Matrix.read(text, _WORDS)
    letter = _letter(text)
    kind = f"{_KIND} {letter}" if letter else _KIND
    notes = list(matrix.notes)
    known = {
        pair: cells == ("OK", "OK")
        for pair, cells in matrix.pairs.items()
        # U: the driver does not know it either. X is the cell of a GPU with itself.
        if "U" not in cells and "X" not in cells and pair not in matrix.doubtful
    }
    odd = sorted(pair for pair, (there, back) in matrix.pairs.items() if there != back)
    for one, other in odd[:8]:
        there, back = matrix.pairs[one, other]
        message = f"GPU{one} to GPU{other} is {there}, back it is {back}"
        code = "MP201" if letter == "n" else ""
        notes.append(Note(message, code, matrix.rows[other].line))
    domains = None
    links = []
    if letter == "n":
        links = sorted(pair for pair, joined in known.items() if joined)
        domains = joined_groups(matrix.gpus, links, known)
        if domains is None:
            notes.append(
                Note("of too many pairs nothing is said: which GPUs are joined is not known")
            )
    else:
        notes.append(
            Note(
                ("this table is not about NVLink" if letter else "nothing tells if this is NVLink")
                + "; run nvidia-smi topo -m, or nvidia-smi topo -p2p n and keep its command line"
            )
        )
    without = [gpu for gpu in matrix.gpus if letter == "n" and domains and (gpu,) in domains]
    if links and without:
        notes.append(Note(f"no NVLink to the others: {gpu_names(without)}"))
    pairs = len(matrix.gpus) * (len(matrix.gpus) - 1) // 2
    return Reading(
        kind,
        domains=domains,
        complete=matrix.complete and len(matrix.pairs) == pairs,
        notes=tuple(sorted(notes, key=lambda note: note.line or 0)),
    )


def _letter(text: str) -> str:
    found: dict[str, int] = {}
    for number, line in lines(text) if "nvidia-smi" in text else ():
        command = _COMMAND.search(line[:4096]) if "nvidia-smi" in line else None
        if command is not None:
            found.setdefault(command[1], number)
    if len(found) > 1:
        raise TopologyInputError(
            f"tables of -p2p {' and '.join(sorted(found))}; give that of -p2p n alone",
            line=max(found.values()),
        )
    return next(iter(found), "")
