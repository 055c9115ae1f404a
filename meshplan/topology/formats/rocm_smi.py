"""Output of ``rocm-smi --showtopo``: tables of weights, hops and link types between AMD GPUs.

Source: ``rocm_smi.py`` of ROCm. Only the table of link types is read: hops are 1 over xGMI even
where the way leads over another GPU, and weights differ between machines. Without that table, as
with ``--showtoponuma`` or with no option at all, nothing is known about links.
"""

from __future__ import annotations

import re

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats._amd_table import ASK, read_table

__all__ = ["read", "recognises"]

_BANNER = re.compile(
    r"^=+ {1,4}(?:ROCm System Management Interface|End of ROCm SMI Log"
    r"|(?:Weight|Hops|Link Type) between two GPUs|Numa Nodes) {1,4}=+\s*$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^=+ {1,4}(Weight|Hops|Link Type) between two GPUs {1,4}=+", re.MULTILINE)
_GPU = re.compile(r"GPU(\d{1,6})", re.ASCII)
_ASK = ASK.format("rocm-smi --showtopo")


def recognises(text: str) -> bool:
    """Whether one of the headings of rocm-smi is in ``text``."""
    return _BANNER.search(text) is not None


def read(text: str) -> Reading:
    """Domains by the table of link types; one host, so its GPUs are one node.

    Args:
        text: what ``rocm-smi --showtopo`` printed.

    Raises:
        TopologyInputError: no heading of rocm-smi, a link type that is not known, or a row that
            does not fit the table.
    """
    if not recognises(text):
        raise TopologyInputError(f"no heading of rocm-smi found; {_ASK}")
    tables = {match[1]: match for match in _TABLE.finditer(text)}
    if "Link Type" not in tables:
        kind = "rocm-smi --showtopo" if tables else "rocm-smi --showtoponuma"
        return Reading(kind, notes=(Note(f"no table of link types in this output; {_ASK}"),))
    return read_table(text, tables["Link Type"].end(), "rocm-smi --showtopo", _GPU)
