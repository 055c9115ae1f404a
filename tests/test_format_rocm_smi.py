from __future__ import annotations

import pytest
from expecttest import TestCase

from meshplan.errors import TopologyInputError
from meshplan.topology.formats.rocm_smi import read, recognises
from tests.test_format_amd_smi import TEXT as AMD_SMI


def table(heading: str, cells: list[str], rows: list[int] | None = None) -> str:
    size = len(cells)
    text = (
        f"{f' {heading} ':=^80}\n"
        + "       "
        + "".join(f"{f'GPU{gpu}':13}" for gpu in range(size))
        + "\n"
    )
    for gpu in range(size) if rows is None else rows:
        text += f"GPU{gpu}   " + "".join(f"{cell:13}" for cell in cells[gpu].split()) + "\n"
    return text + "\n"


LINK = "Link Type between two GPUs"
PAIRS = ["0 XGMI PCIE PCIE", "XGMI 0 PCIE PCIE", "PCIE PCIE 0 XGMI", "PCIE PCIE XGMI 0"]
BANNER = f"{' ROCm System Management Interface ':=^80}\n"
END = f"{' End of ROCm SMI Log ':=^80}\n"
HOPS = table("Hops between two GPUs", ["0 1 1 1", "1 0 1 1", "1 1 0 1", "1 1 1 0"])


def test_gpus_are_joined_by_link_type_not_hops() -> None:
    found = read(BANNER + HOPS + table(LINK, PAIRS) + END)
    assert found.kind == "rocm-smi --showtopo"
    assert found.domains == ((0, 1), (2, 3))
    assert found.nodes == ((0, 1, 2, 3),)
    assert (found.complete, found.notes) == (True, ())
    windows = (BANNER + HOPS + table(LINK, PAIRS) + END).replace("\n", "\r\n")
    assert read(windows) == found


@pytest.mark.parametrize(("text", "kind"), [
    (BANNER + HOPS, "rocm-smi --showtopo"),
    (BANNER + "GPU 0 : (Topology) Numa Node: 0\n" + END, "rocm-smi --showtoponuma"),
])  # fmt: skip
def test_missing_links_mean_single_gpu_domains(text: str, kind: str) -> None:
    found = read(text)
    assert (found.kind, found.domains, found.nodes, found.complete) == (kind, None, None, False)
    assert "run rocm-smi --showtopo" in found.notes[0].message


class TestReadings(TestCase):
    def test_odd_cells_are_reported(self) -> None:
        cells = ["0 XGMI PCIE PCIE", "PCIE XGMI PCIE PCIE", "N/A PCIE 0 XGMI", "PCIE PCIE XGMI 0"]
        found = read(BANNER + table(LINK, cells))
        self.assertExpectedInline(
            "\n".join(map(str, (found.domains, *found.notes))),
            """\
None
line 2: MP202: cells that could join GPUs are missing; domains are unknown
line 4: MP201: GPU0 has xGMI to GPU1, which has none back
line 5: GPU1 has a link to itself""",
        )


def test_missing_rows_leave_domains_unknown() -> None:
    one = read(BANNER + table(LINK, PAIRS, [0, 1, 3]))
    assert one.domains == ((0, 1), (2, 3))
    assert not one.complete
    assert [note.code for note in one.notes] == ["MP202"]
    # Whether xGMI joins 1 and 3 is unknown ...
    assert read(BANNER + table(LINK, PAIRS, [0, 2])).domains is None
    # ... unless others join them.
    whole = ["0 XGMI XGMI", "XGMI 0 XGMI", "XGMI XGMI 0"]
    assert read(BANNER + table(LINK, whole, [0])).domains == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("XGMI", "NVLINK", 4),
        ("GPU1   XGMI", "GPU1", 5),
        ("GPU1   XGMI", "GPU0   XGMI", 5),
        ("GPU1         GPU2", "GPU1   GPU1", 3),
    ],
)
def test_invalid_texts_are_refused(old: str, new: str, line: int) -> None:
    text = (BANNER + table(LINK, PAIRS)).replace(old, new, 1)
    with pytest.raises(TopologyInputError) as error:
        read(text)
    assert error.value.line == line
    assert "\n" not in str(error.value)


def test_format_is_recognised() -> None:
    assert recognises(END)
    assert not recognises("GPU0 GPU1 NV4\n=====\n")
    with pytest.raises(TopologyInputError, match="no table"):
        read("")
    with pytest.raises(TopologyInputError, match="no table"):
        read(f"{f' {LINK} ':=^80}\n")


# For tests/test_formats.py.
SAMPLES = (BANNER + HOPS + table(LINK, PAIRS) + END, AMD_SMI)
