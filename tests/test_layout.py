"""Groups in mesh-coordinate order, siblings, normalisation of ranks, messages."""

from __future__ import annotations

import itertools
import math

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.errors import AxisNameError, LayoutError
from meshplan.layout import Layout, signature
from tests.refusals import refusal

PERMUTED = Layout.of([0, 3, 2, 1], dp=2, tp=2)


def test_axes_are_found_by_name_and_position() -> None:
    layout = Layout.of(ddp=8, fsdp=5, tp=1)
    assert (layout.sizes, layout.axes, layout.world_size) == ((8, 5, 1), ("ddp", "fsdp", "tp"), 40)
    assert layout.axis_indices(["tp", 0, "ddp", -1]) == (0, 2)
    unnamed = Layout((2, 2))
    assert unnamed.axes == ("axis0", "axis1")
    assert unnamed.axis_index("axis1") == unnamed.axis_index(-1) == 1
    assert unnamed.siblings(["axis0"]).tolist() == [[0, 2], [1, 3]]


def test_sub_mesh_keeps_its_ranks() -> None:
    sub = Layout((2, 2), ("dp", "tp"), (4, 6, 5, 7))
    assert sub.coordinate(6) == (0, 1)
    assert sub.coordinate(0) is None
    assert sub.group_of(7, ["dp"]) == (6, 7)
    assert sub.group_of(0, ["dp"]) is None


def test_consecutive_ranks_become_a_range() -> None:
    assert Layout((3,)).ranks == range(3)
    for ranks in ((0, 1, 2), range(3), [0, 1, 2]):
        assert isinstance(Layout((3,), None, ranks).ranks, range)
    assert Layout((3,), None, (4, 5, 6)).ranks == range(4, 7)
    assert Layout((3,), None, range(4, 7)).ranks == range(4, 7)
    assert Layout((3,), None, range(0, 6, 2)).ranks == (0, 2, 4)
    assert Layout((3,), None, range(2, -1, -1)).ranks == (2, 1, 0)
    assert Layout((1,), None, (5,)).ranks == range(5, 6)


def test_empty_rank_list_is_refused() -> None:
    with pytest.raises(LayoutError):
        Layout.of([], a=2)


def test_equality_and_hash_are_by_value() -> None:
    same = [
        Layout.of(dp=2, tp=2),
        Layout([2, 2], ["dp", "tp"]),  # type: ignore[arg-type]
        Layout.of([0, 1, 2, 3], dp=2, tp=2),
        Layout((2, 2), ("dp", "tp")),
    ]
    assert len(set(same)) == 1
    _ = same[0].grid  # a cached value must not enter the comparison
    assert same[0] == same[1]
    others = [Layout((2, 2)), Layout.of(tp=2, dp=2), PERMUTED, Layout.of(range(1, 5), dp=2, tp=2)]
    assert len({*same, *others}) == 5


def test_text_names_axes_and_ranks() -> None:
    layouts = [
        Layout.of(ddp=8, fsdp=5, tp=1),
        Layout((2, 3)),
        Layout.of(range(4, 8), dp=2, tp=2),
        PERMUTED,
        Layout.of(range(9, -1, -1), dp=5, tp=2),
    ]
    assert_expected_inline(
        "\n".join(map(str, layouts)),
        """\
(ddp=8, fsdp=5, tp=1)
(axis0=2, axis1=3)
(dp=2, tp=2; ranks 4..7)
(dp=2, tp=2; ranks 0, 3, 2, 1)
(dp=5, tp=2; ranks 9, 8, 7, 6, 5, 4, 3, 2, ...)""",
    )


def test_invalid_layouts_are_refused() -> None:
    layout = Layout.of(ddp=8, fsdp=5)
    rows = []
    for error, act in (
        (LayoutError, lambda: Layout(())),
        (LayoutError, lambda: Layout.of(dp=0)),
        (LayoutError, lambda: Layout((2, 2), ("dp",))),
        (LayoutError, lambda: Layout((2, 2), ("dp", "dp"))),
        (LayoutError, lambda: Layout.of([0, 1, 1, 3], dp=4)),
        (LayoutError, lambda: Layout.of([0, -1], dp=2)),
        (LayoutError, lambda: Layout.of(range(10), dp=4)),
        (AxisNameError, lambda: layout.axis_index(2)),
        (AxisNameError, lambda: layout.axis_index(-3)),
        (AxisNameError, lambda: layout.siblings(["fsp"])),
        (AxisNameError, lambda: layout.group_of(0, ["model"])),
    ):
        rows.append(refusal(error, act))
    assert_expected_inline(
        "\n".join(rows),
        """\
MP111: a mesh needs axes of size 1 or more, got sizes []; pass for example Layout.of(ddp=8, fsdp=5)
MP111: a mesh needs axes of size 1 or more, got sizes [0]; pass for example Layout.of(ddp=8, fsdp=5)
MP111: axis names must be unique and one for each of the 2 axes, got ['dp']; pass one name per axis, or names=None
MP111: axis names must be unique and one for each of the 2 axes, got ['dp', 'dp']; pass one name per axis, or names=None
MP111: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 4: 0, 1, 1, 3; pass the global rank at each coordinate, row-major
MP111: a mesh of 2 coordinates needs 2 different ranks from 0 up, got 2: 0, -1; pass the global rank at each coordinate, row-major
MP111: a mesh of 4 coordinates needs 4 different ranks from 0 up, got 10: 0, 1, 2, 3, 4, 5, 6, 7, ...; pass the global rank at each coordinate, row-major
MP112: no axis 2 in a mesh of 2 axes; pass a position from 0 to 1
MP112: no axis -3 in a mesh of 2 axes; pass a position from 0 to 1
MP112: no axis 'fsp' in the mesh, it has ddp, fsdp (did you mean 'fsdp'?)
MP112: no axis 'model' in the mesh, it has ddp, fsdp""",
    )


def test_signature_counts_ranks_per_node() -> None:
    node = [0, 0, 0, 1, 1, 1, 2]
    assert signature([0, 1, 2, 3, 4], node) == (3, 2)
    assert signature([3, 0, 1, 4, 6], node) == (2, 2, 1)
    assert signature([], node) == ()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    count = math.prod(sizes)
    names = tuple("abcd"[: len(sizes)]) if draw(st.booleans()) else None
    first = draw(st.integers(0, 5))
    ranks = range(first, first + count)
    if draw(st.booleans()):
        ranks = tuple(draw(st.permutations(range(first, first + 2 * count, 2))))
    return Layout(sizes, names, ranks)


@pytest.mark.soak
@given(layout=layouts(), data=st.data())
def test_siblings_partition_the_mesh_and_agree_with_brute_force(
    layout: Layout, data: st.DataObject
) -> None:
    axes = data.draw(st.lists(st.sampled_from(layout.axes), unique=True))
    chosen = [layout.axes.index(axis) for axis in axes]
    coordinates = list(itertools.product(*map(range, layout.sizes)))
    rank_at = dict(zip(coordinates, layout.ranks, strict=True))

    groups: dict[tuple[int, ...], list[int]] = {}
    for coordinate in coordinates:
        others = tuple(c for i, c in enumerate(coordinate) if i not in chosen)
        groups.setdefault(others, []).append(rank_at[coordinate])
    found = layout.siblings(axes).tolist()
    assert found == list(groups.values())
    assert sorted(itertools.chain(*found)) == sorted(layout.ranks)
    for row in found:
        for rank in row:
            assert layout.group_of(rank, axes) == tuple(row)
    for coordinate, rank in rank_at.items():
        assert layout.coordinate(rank) == coordinate
        assert int(layout.grid[coordinate]) == rank


def test_million_ranks_are_grouped_quickly() -> None:
    layout = Layout.of(dp=1000, fsdp=125, tp=8)
    assert isinstance(layout.ranks, range)
    rows = layout.siblings(["dp", "tp"])
    assert tuple(rows.shape) == (125, 8000)
    assert rows[124, -1].item() == layout.world_size - 1 == 999_999
    assert layout.coordinate(999_999) == (999, 124, 7)
    reverse = Layout.of(range(999_999, -1, -1), dp=1000, fsdp=125, tp=8)
    assert reverse.siblings(["tp"])[0].tolist() == list(range(999_999, 999_991, -1))
    assert hash(reverse) != hash(layout)


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_device_mesh_is_read() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    layout = Layout.from_mesh(mesh)
    assert layout == Layout.of(pp=2, dp=2, tp=2)
    assert all(isinstance(size, int) for size in layout.sizes)
    # The sub-mesh of rank 0.
    assert Layout.from_mesh(mesh["pp", "tp"]) == Layout.of([0, 1, 4, 5], pp=2, tp=2)
    assert Layout.from_mesh(mesh["dp"]) == Layout.of([0, 2], dp=2)


@pytest.mark.usefixtures("fake_world")
def test_permuted_and_unnamed_mesh_is_read() -> None:
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]])
    layout = Layout.from_mesh(mesh)
    assert layout == Layout((2, 2), None, (0, 3, 2, 1))
    assert layout.siblings(["axis1"]).tolist() == [[0, 3], [2, 1]]


def test_grid_is_real_while_tracing() -> None:
    layout = Layout.of([1, 0, 3, 2], a=2, b=2)
    with FakeTensorMode():
        assert layout.grid.shape == (2, 2)
    assert layout.siblings("a").tolist() == [[1, 3], [0, 2]]


def test_ascending_ranks_are_detected() -> None:
    assert Layout.of(a=2, b=3).ascends((0, 1))
    dealt = Layout.of([0, 2, 1, 3], a=2, b=2)
    assert dealt.ascends("a")
    assert dealt.ascends("b")
    assert not dealt.ascends(("a", "b"))
    turned = Layout.of([1, 0, 3, 2], a=2, b=2)
    assert turned.ascends("a")
    assert not turned.ascends("b")
    # One group out of order is enough, and a single rank is in order.
    assert not Layout.of([0, 1, 3, 2], a=2, b=2).ascends("b")
    assert Layout.of([3, 1], a=1, b=2).ascends("a")
