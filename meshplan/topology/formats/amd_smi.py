"""Output of ``amd-smi topology``: tables of access, weight, hops, link type and NUMA bandwidth.

Source: ``amdsmi_commands.py`` of ROCm. GPUs are named by their PCI address; their index is the
position among the columns, as amd-smi lists them. Only the table of link types is read: hops are 1
over xGMI even where the way leads over another GPU.
"""

from __future__ import annotations

import re

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Note, Reading
from meshplan.topology.formats.rocm_smi import ASK, read_table

_TABLE = re.compile(
    r"^[ \t]{0,8}(ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW|CACHE COHERENCY|ATOMICS"
    r"|DMA|BI-DIRECTIONAL|P2P) TABLE:[ \t\r]*$",
    re.MULTILINE,
)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_ASK = ASK.format("amd-smi topology")


def recognises(text: str) -> bool:
    return _TABLE.search(text) is not None


def read(text: str) -> Reading:
    tables = {match[1]: match.end() for match in _TABLE.finditer(text)}
    if not tables:
        raise TopologyInputError(f"no table of amd-smi topology found; {_ASK}")
    if "LINK TYPE" not in tables:
        note = Note(f"no LINK TYPE TABLE in this output; {_ASK}", "MP202")
        return Reading("amd-smi topology", notes=(note,))
    return read_table(text, tables["LINK TYPE"], "amd-smi topology", _ADDRESS)
