from __future__ import annotations

import pytest

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.rocm_smi import read, recognises

# In the order of amd-smi, which is not that of the addresses.
GPUS = ["0001:9f:00.0", "0000:0A:00.0", "0000:3c:00.0"]


def table(heading: str, cells: list[str]) -> str:
    text = f"{heading} TABLE:\n{'':12} {' '.join(GPUS)}\n"
    return text + "".join(f"{gpu} {row}\n" for gpu, row in zip(GPUS, cells, strict=True)) + "\n"


TEXT = table("HOPS", ["0 1 1", "1 0 1", "1 1 0"]) + table(
    "LINK TYPE", ["SELF PCIE XGMI", "PCIE SELF PCIE", "XGMI PCIE SELF"]
)


def test_gpus_are_joined_by_link_type() -> None:
    found = read(TEXT)
    assert found.kind == "amd-smi topology"
    assert found.domains == ((0, 2), (1,))
    assert found.nodes == ((0, 1, 2),)
    assert [name.lower() for name in found.names] == [gpu.lower() for gpu in GPUS]
    assert found.complete
    assert read(TEXT.replace("\n", "\r\n")) == found
    assert read(TEXT + table("NUMA BW", ["N/A 1-1 1-1"] * 3)) == found


def test_missing_link_table_leaves_domains_unknown() -> None:
    found = read(table("HOPS", ["0 1 1", "1 0 1", "1 1 0"]))
    assert (found.domains, found.complete) == (None, False)
    assert "run amd-smi topology" in found.notes[0].message


def test_one_way_link_is_reported() -> None:
    found = read(TEXT.replace("XGMI PCIE SELF", "PCIE PCIE SELF"))
    assert [str(note)[:14] for note in found.notes] == ["line 9: MP201:"]
    assert found.domains == ((0, 2), (1,))


def test_unreported_links_stay_unknown() -> None:
    assert read(TEXT.replace("PCIE SELF PCIE", "N/A SELF PCIE")).domains is None


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("XGMI", "NVLINK", 9),
        ("PCIE SELF PCIE", "PCIE SELF", 10),
        ("LINK TYPE TABLE:\n", "LINK TYPE TABLE:\nno\n", 8),
    ],
)
def test_invalid_texts_are_refused(old: str, new: str, line: int) -> None:
    with pytest.raises(TopologyInputError) as error:
        read(TEXT.replace(old, new, 1))
    assert error.value.line == line


def test_format_is_recognised() -> None:
    assert recognises(TEXT)
    assert not recognises("TABLE: no\n")
    with pytest.raises(TopologyInputError, match="no table"):
        read("")
