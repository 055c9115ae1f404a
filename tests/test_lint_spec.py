"""Meshes as a person writes them."""

from __future__ import annotations

import time

import pytest
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import LayoutError
from meshplan.layout import Layout
from meshplan.lint._spec import flatten_ranks, format_mesh, parse_mesh
from tests.refusals import refusal

JAGGED = Layout.of(ddp=8, fsdp=5, tp=1)


@pytest.mark.parametrize(
    "text",
    [
        "ddp=8,fsdp=5,tp=1",
        " ddp = 8 , fsdp= 5, tp =1 ",
        "ddp:8 x fsdp:5 x tp:1",
        "ddp=8 fsdp=5 tp=1",
        "(ddp=8, fsdp=5, tp=1)",
        "[ddp=8,fsdp=5,tp=1,]",
        "ddp=08 \u00d7 fsdp=5 * tp=1",
    ],
)
def test_every_notation_is_parsed(text: str) -> None:
    assert parse_mesh(text) == JAGGED


@pytest.mark.parametrize("text", ["8x5x1", "8,5,1", "(8, 5, 1)", "8 5 1", "8*5x1", "8 x 5 x 1"])
def test_unnamed_axes_are_parsed(text: str) -> None:
    assert parse_mesh(text) == Layout((8, 5, 1))


def test_smallest_and_largest_meshes_are_parsed() -> None:
    assert parse_mesh("1") == Layout((1,))
    assert parse_mesh("dp=1") == Layout.of(dp=1)
    assert parse_mesh("dp=2048,tp=2048").world_size == 1 << 22


@pytest.mark.parametrize("ranks", [[[0, 2], [1, 3]], ((0, 2), (1, 3)), [0, 2, 1, 3]])
def test_permuted_ranks_are_parsed(ranks: object) -> None:
    layout = parse_mesh("dp=2,tp=2", ranks)
    assert layout == Layout.of([0, 2, 1, 3], dp=2, tp=2)
    assert layout.group_of(0, "tp") == (0, 2)


def test_flat_ranks_are_parsed() -> None:
    assert flatten_ranks([[[5], [6]], [[8], [7]]]) == ((2, 2, 1), (5, 6, 8, 7))


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
        st.integers(1, 9),
        min_size=1,
        max_size=5,
    )
)
def test_printed_mesh_is_parsed_back(axes: dict[str, int]) -> None:
    layout = Layout.of(**axes) if "self" not in axes else Layout.of(a=2)
    assert parse_mesh(format_mesh(layout)) == layout
    assert parse_mesh(str(layout)) == layout
    unnamed = Layout(layout.sizes)
    assert parse_mesh(format_mesh(unnamed)) == unnamed


class TestRefusals(TestCase):
    def test_invalid_meshes_are_refused(self) -> None:
        found = []
        for text in (
            "",
            "()",
            "ddp",
            "ddp=8,fsdp",
            "ddp=8,,fsdp=5",
            "ddp=0",
            "ddp=-1,tp=2",
            "ddp=8.5",
            "ddp=" + "9" * 5000,
            "ddp=" + "9" * 500,
            "ddp=99999999999,tp=99999999999",
            "ddp=4097,fsdp=4096",
            "ddp=8,ddp=5",
            "8,tp=2",
            "8d=4",
            "=4",
            "1x" * 40 + "1",
        ):
            found.append(refusal(LayoutError, parse_mesh, text) + "\n")
        self.assertExpectedInline(
            "".join(found),
            """\
MP111: an axis is missing in ''; use, for example, ddp=8,fsdp=5,tp=1
MP111: an axis is missing in '()'; use, for example, ddp=8,fsdp=5,tp=1
MP111: no size in 'ddp'; use, for example, ddp=8
MP111: no size in 'fsdp'; use, for example, fsdp=8
MP111: an axis is missing after 'ddp=8' in 'ddp=8,,fsdp=5'; use, for example, ddp=8,fsdp=5,tp=1
MP111: the size of axis 'ddp' must be a positive integer, got '0'; use, for example, ddp=8
MP111: the size of axis 'ddp' must be a positive integer, got '-1'; use, for example, ddp=8
MP111: the size of axis 'ddp' must be a positive integer, got '8.5'; use, for example, ddp=8
MP111: a mesh description has at most 2000 characters, got 5004; use, for example, ddp=8,fsdp=5,tp=1
MP111: the size of axis 'ddp' must be a positive integer, got '999999999999999999999999999999999999999999999999999999999...'; use, for example, ddp=8
MP111: a mesh has at most 4194304 ranks, got axes of 99999999999 x 99999999999; is a size wrong?
MP111: a mesh has at most 4194304 ranks, got axes of 4097 x 4096; is a size wrong?
MP111: axis 'ddp' appears twice in 'ddp=8,ddp=5'; name it once
MP111: '8' has no axis name and others have one in '8,tp=2'; name all axes, or none
MP111: '8d' in '8d=4' is not a valid axis name; use letters, digits and underscores, e.g. ddp=8
MP111: '' in '=4' is not a valid axis name; use letters, digits and underscores, e.g. ddp=8
MP111: a mesh has at most 32 axes, got 41; leave out axes of size 1
""",
        )

    def test_invalid_ranks_are_refused(self) -> None:
        found = []
        for ranks in (
            [[0, 1], [2]],
            [[0, 1, 2, 3]],
            [0, 1, 2],
            [[0, 1], [1, 2]],
            [[0, "a"], [1, 2]],
            [[0, True], [1, 2]],
            [],
            "0,1",
            [[0, 1], [2, 1 << 60]],
            [[0, 1], [2, -1]],
        ):
            found.append(refusal(LayoutError, parse_mesh, "dp=2,tp=2", ranks) + "\n")
        self.assertExpectedInline(
            "".join(found),
            """\
MP111: lists of ranks on one level must have one length, got lengths 1, 2; use, for example, [[0, 2], [1, 3]]
MP111: ranks of shape 1 x 4 do not fit axes of 2 x 2; use one list for each coordinate of the outer axes
MP111: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 3: 0, 1, 2; pass the global rank at each coordinate, row-major
MP111: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 4: 0, 1, 1, 2; pass the global rank at each coordinate, row-major
MP111: ranks must be integers in nested lists, got [[0, 'a'], [1, 2]]; use, for example, [[0, 2], [1, 3]]
MP111: ranks must be integers in nested lists, got [[0, True], [1, 2]]; use, for example, [[0, 2], [1, 3]]
MP111: ranks must be integers in nested lists, got []; use, for example, [[0, 2], [1, 3]]
MP111: ranks must be integers in nested lists, got '0,1'; use, for example, [[0, 2], [1, 3]]
MP111: ranks must be 0 to 4194303, got 1152921504606846976
MP111: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 4: 0, 1, 2, -1; pass the global rank at each coordinate, row-major
""",
        )


@given(st.text(max_size=80) | st.text(alphabet="dpt=:,x 0189()[]-*", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    started = time.process_time()
    said = ""
    try:
        assert parse_mesh(text).world_size >= 1
    except LayoutError as error:
        said = str(error)
    assert "\n" not in said
    assert time.process_time() - started < 30
