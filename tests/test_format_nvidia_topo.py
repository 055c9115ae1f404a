"""The table of ``nvidia-smi topo -m``, as it is printed and as it is pasted."""

from __future__ import annotations

import json
import re

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import TopologyInputError
from meshplan.topology._reading import Reading
from meshplan.topology.formats.nvidia_topo import read, recognises


def format_reading(reading: Reading) -> str:
    rows = json.dumps(reading.to_json(), indent=1)
    return re.sub(r"\[\s+(\d[\d,\s]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", rows)


def codes(reading: Reading) -> list[str]:
    return [note.code for note in reading.notes if note.code]


def table(
    *rows: str,
    nics: tuple[str, ...] = (),
    behind: str = "\t0-15\t0\t\tN/A",
    affinity: str = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID",
) -> str:
    """As it is printed; each row is given by its cells."""
    count = len(rows) - len(nics)
    labels = [f"GPU{gpu}" for gpu in range(count)] + list(nics)
    printed = ["\t" + "\t".join(labels) + affinity]
    for place, (label, row) in enumerate(zip(labels, rows, strict=True)):
        cells = ["\t X " if cell == "X" else f"\t{cell}" for cell in row.split()]
        printed.append(label + "".join(cells) + (behind if place < count else ""))
    return "\n".join(printed) + "\n"


def even(count: int, word: str) -> list[str]:
    """Each pair has the same cell."""
    return [" ".join("X" if i == j else word for j in range(count)) for i in range(count)]


PAIRS = table("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
LEGEND = """
Legend:

  X    = Self
  SYS  = over the sockets
  PIX  = over one bridge
  NV#  = over that many NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def test_two_nvlink_pairs_are_two_domains() -> None:
    reading = read(PAIRS + LEGEND)
    assert_expected_inline(
        format_reading(reading),
        """\
{
 "kind": "nvidia-smi topo -m",
 "domains": [
  [0, 1],
  [2, 3]
 ],
 "nodes": null,
 "complete": true,
 "notes": []
}""",
    )
    assert recognises(PAIRS)


def test_no_nvlink_means_single_gpu_domains() -> None:
    reading = read(table(*even(3, "PHB")))
    assert (reading.domains, reading.complete) == (((0,), (1,), (2,)), True)


def test_single_gpu_is_read() -> None:
    text = table("X")
    assert recognises(text)
    assert read(text).domains == ((0,),)


def test_table_with_hidden_nvlink_leaves_domains_unknown() -> None:
    legend = LEGEND.replace("  NV#  = over that many NVLinks\n", "")
    for text in (
        table(*even(2, "PHB")) + legend,
        "$ nvidia-smi topo -mp\n" + table(*even(2, "PHB")),
    ):
        reading = read(text)
        assert reading.domains is None
        assert "topo -mp leaves NVLink out" in str(reading.notes[-1])
    shown = "$ nvidia-smi topo -m\n" + table(*even(2, "PHB")) + legend
    assert read(shown).domains == ((0,), (1,))


@pytest.mark.parametrize(
    "mangled",
    [
        pytest.param(PAIRS.replace("\n", "\r\n"), id="CRLF"),
        pytest.param(PAIRS.replace("\n", "\r"), id="CR"),
        pytest.param(PAIRS.expandtabs(8), id="blanks"),
        pytest.param("\x1b[4m" + PAIRS.replace("ID\n", "ID\x1b[0m\n"), id="ANSI"),
        pytest.param(PAIRS.replace("\tGPU0", "\t[4mGPU0", 1), id="ANSI without ESC"),
        pytest.param("[1,0]<stdout>:" + PAIRS.replace("\n", "\n[1,0]<stdout>:"), id="mpirun"),
        pytest.param("[default0]:" + PAIRS.replace("\n", "\n[default0]:"), id="torchrun"),
        pytest.param("[rank0]: " + PAIRS.replace("\n", "\n[rank0]: "), id="rank"),
        pytest.param(" 0: " + PAIRS.replace("\n", "\n 0: "), id="srun"),
        pytest.param("> " + PAIRS.replace("\n", "\n> "), id="quoted"),
        pytest.param("```text\n" + PAIRS + "```\n", id="fence"),
        pytest.param("\ufeff" + PAIRS, id="mark at the beginning"),
        pytest.param(" " + PAIRS.replace("\n", "\n "), id="indented"),
        pytest.param(PAIRS.replace("GPU1\tGPU2", "GPU1GPU2"), id="glued header"),
        pytest.param(PAIRS.replace("GPU3\tCPU", "GPU3CPU"), id="header glued to affinity"),
        pytest.param(PAIRS.replace("NV4\tSYS\tSYS", "NV4SYS\tSYS"), id="glued cells"),
        pytest.param(PAIRS.replace("SYS\t0-15", "SYS0-15"), id="cell glued to affinity"),
        pytest.param(PAIRS.replace("\t0-15\t0\t\tN/A", "\t0"), id="empty affinity"),
        pytest.param(PAIRS * 3, id="repeated by other ranks"),
        pytest.param(PAIRS.split("\n", 1)[1], id="no header"),
        pytest.param(PAIRS.replace("\tGPU2\tGPU3\tCPU", "\n", 1), id="header cut on the right"),
        pytest.param(PAIRS.replace("\tGPU0\tGPU1", "", 1), id="header cut on the left"),
        pytest.param(PAIRS.replace("NV4", "\x1b[01;31m\x1b[KNV4\x1b[m\x1b[K"), id="grep --color"),
    ],
)
def test_pasted_and_prefixed_output_is_read(mangled: str) -> None:
    reading = read(mangled)
    assert recognises(mangled)
    assert reading.domains == ((0, 1), (2, 3))
    assert reading.complete


def test_markdown_table_is_read() -> None:
    text = "| | GPU0 | GPU1 |\n|---|:-:|---|\n| GPU0 | X | NV12 |\n| GPU1 | NV12 | X |\n"
    assert recognises(text)
    assert read(text).domains == ((0, 1),)
    assert read(text).complete


@pytest.mark.parametrize("nic", ["NIC{}", "mlx5_{}", "bnxt_re{}"])
def test_nics_are_not_gpus(nic: str) -> None:
    names = (nic.format(0), nic.format(1))
    rows = ("X NV6 PIX SYS", "NV6 X SYS PIX", "PIX SYS X SYS", "SYS PIX SYS X")
    text = table(*rows, nics=names)
    assert (read(text).domains, read(text).complete) == (((0, 1),), True)
    # A glued header and a glued cell of NICs, as on hosts with many of them.
    for before, after in (("\t" + names[1] + "\tCPU", names[1] + "CPU"), ("PIX\tSYS", "PIXSYS")):
        glued = text.replace(before, after, 1)
        assert glued != text
        assert read(glued).domains == ((0, 1),)
        assert read(glued).complete
    # Without their rows something is missing, but not from what is asked for.
    short = "\n".join(text.split("\n")[:3])
    assert (read(short).domains, read(short).complete) == (((0, 1),), False)
    assert "0 of 2 rows of NICs" in str(read(short).notes[0])


def test_missing_rows_are_taken_from_the_columns() -> None:
    text = "\n".join(table(*even(6, "NV6")).split("\n")[:3])
    assert_expected_inline(
        format_reading(read(text)),
        """\
{
 "kind": "nvidia-smi topo -m",
 "domains": [
  [0, 1, 2, 3, 4, 5]
 ],
 "nodes": null,
 "complete": false,
 "notes": [
  "2 of 6 rows of GPUs; the columns replace the missing rows"
 ]
}""",
    )


def test_missing_cells_leave_domains_unknown() -> None:
    text = "\n".join(PAIRS.split("\n")[:2])
    reading = read(text)
    assert reading.domains is None
    assert "domains are unknown" in str(reading.notes[-1])


def test_without_header_and_last_row_the_last_column_with_links_is_a_gpu() -> None:
    rows = table(*even(5, "NV18")).split("\n")[1:5]
    reading = read("\n".join(rows))
    assert reading.domains == ((0, 1, 2, 3, 4),)
    assert not reading.complete


def test_row_truncated_in_its_last_cell_is_read() -> None:
    text = table(*even(4, "NV18"))
    cut = text[: text.rindex("NV18") + 3]
    assert cut.endswith("\tNV1")
    reading = read(cut)
    assert reading.domains == ((0, 1, 2, 3),)
    assert not any("back it is" in note.message for note in reading.notes)
    assert not reading.complete
    assert reading.notes[-1].line == 5
    assert "GPU3: 3 of 4 cells can be read" in str(reading.notes[-1])


def test_gpu_without_links_is_reported_as_degraded() -> None:
    rows = even(5, "NV18")
    rows[2] = "NODE NODE X SYS SYS"
    for i, word in enumerate(("NODE", "NODE", "", "SYS", "SYS")):
        if i != 2:
            cells = rows[i].split()
            cells[2] = word
            rows[i] = " ".join(cells)
    assert_expected_inline(
        format_reading(read(table(*rows))),
        """\
{
 "kind": "nvidia-smi topo -m",
 "domains": [
  [0, 1, 3, 4],
  [2]
 ],
 "nodes": null,
 "complete": true,
 "notes": [
  "line 4: MP201: GPU2 has no NVLink to the others, which have NV18 each to each: links may be down, or it is another model"
 ]
}""",
    )


def test_gpu_with_fewer_links_is_reported_as_degraded() -> None:
    reading = read(
        table("X NV18 NV18 NV17", "NV18 X NV18 NV17", "NV18 NV18 X NV17", "NV17 NV17 NV17 X")
    )
    assert codes(reading) == ["MP201"]
    assert "GPU3 has at most NV17" in str(reading.notes[0])
    assert reading.domains == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(("X NV4 SYS", "NV4 X SYS", "SYS SYS X"), id="a bridge and one GPU"),
        pytest.param(("X NV1 NV2", "NV1 X NV2", "NV2 NV2 X"), id="direct links"),
        pytest.param(even(8, "NV12"), id="switch"),
        pytest.param(
            [f"{row} SYS SYS SYS" for row in even(3, "NV6")]
            + [f"SYS SYS SYS {row}" for row in even(3, "NV6")],
            id="two quads",
        ),
    ],
)
def test_healthy_hosts_are_not_called_degraded(rows: list[str]) -> None:
    assert codes(read(table(*rows))) == []


def test_one_way_link_is_ignored() -> None:
    reading = read(table("X NV4 SYS", "SYS X SYS", "SYS PHB X"))
    assert reading.domains == ((0,), (1,), (2,))
    assert codes(reading) == ["MP201"]
    assert [str(note) for note in reading.notes] == [
        "line 3: MP201: GPU0 to GPU1 is NV4, back it is SYS",
        "line 4: GPU1 to GPU2 is SYS, back it is PHB",
    ]


def test_chain_of_links_is_one_domain() -> None:
    reading = read(table("X NV2 SYS", "NV2 X NV1", "SYS NV1 X"))
    assert reading.domains == ((0, 1, 2),)
    assert [str(note) for note in reading.notes] == [
        "GPU0, GPU1, GPU2 are joined by NVLink, but not each to each: 2 of 3 pairs have links of their own"
    ]


@pytest.mark.parametrize(
    ("behind", "tray"),
    [
        ("\t0-71\t0\t\tN/A", True),
        ("\t72-143\t1\t\tN/A", True),
        ("\t0-3\t0\t4", True),
        ("", True),
        ("\t0-51,104-155\t0\t\tN/A", False),
        ("\t0-95\t0\t\tN/A", False),
    ],
)
def test_rack_tray_is_read(behind: str, tray: bool) -> None:
    reading = read(table(*even(4, "NV18"), behind=behind))
    assert codes(reading) == (["MP203"] if tray else [])
    assert codes(read(table(*even(8, "NV18"), behind=behind))) == []


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("", "no row of a GPU with cells found", None),
        ("GPU0\nGPU1\n", "no row of a GPU with cells found", None),
        ("\tGPU0\tGPU1\tCPU Affinity\n", "no row of a GPU with cells found", None),
        (PAIRS + PAIRS.replace("NV4", "NV3"), "GPU0 differs from its row in line 2", 7),
        (PAIRS + table("X NV4", "NV4 X"), "this header lists other GPUs", 6),
        (PAIRS.replace("\tGPU2\tGPU3", "\n\tGPU2\tGPU3"), "header lists other GPUs", 2),
        (PAIRS.replace("SYS\t X \tNV4", " X \tNV4"), "X of GPU2 is not in its own column", 4),
        ("GPU0\t X \tSYS\nGPU4096\tSYS\n", "more than 4096 GPUs", 2),
    ],
)
def test_invalid_texts_are_refused(text: str, message: str, line: int | None) -> None:
    with pytest.raises(TopologyInputError, match=message) as error:
        read(text)
    assert error.value.line == line
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU0 and GPU1 are used",
        "GPU 0: a GPU\n\t Link 0: 25 GB/s",
        "<gpu>GPU0</gpu>",
        "GPU0\t0\t15\nGPU1\t15\t0",
        " GPU0 X OK\n GPU1 OK X",
    ],
)
def test_other_texts_are_not_recognised(text: str) -> None:
    assert not recognises(text)


@given(st.integers(0, 200))
def test_truncated_rows_never_invent_links(length: int) -> None:
    try:
        reading = read(PAIRS[: len(PAIRS) - length])
    except TopologyInputError:
        return
    assert all({*group} <= {0, 1} or {*group} <= {2, 3} for group in reading.domains or ())


# For tests/test_formats.py.
SAMPLES = (PAIRS, table("X NV6 PIX", "NV6 X SYS", "PIX SYS X", nics=("NIC0",)) + PAIRS + LEGEND)
