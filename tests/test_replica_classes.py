"""Who differs from whom, out of the digests of all ranks."""

from __future__ import annotations

import torch

from meshplan.layout import Layout
from meshplan.replicas._classes import Split, differing, places, split

MESH = Layout.of(a=2, b=3)


def digests(*values: int) -> torch.Tensor:
    """One row; the second word decides."""
    return torch.tensor([[[7, value]] for value in values])


def test_places_are_coordinates_and_not_ranks() -> None:
    shuffled = Layout.of((3, 1, 2, 5, 4, 0), a=2, b=3)
    for layout in (MESH, shuffled):
        assert places(layout, (1,)).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert places(layout, (0,)).tolist() == [[0, 3], [1, 4], [2, 5]]
        assert places(layout, (0, 1)).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_where_groups_differ() -> None:
    rows = torch.cat(
        [digests(1, 1, 1, 2, 2, 2), digests(1, 1, 1, 1, 1, 1), digests(1, 2, 3, 1, 2, 0)], 1
    )
    assert differing(rows, places(MESH, (1,))) == [(2, 0), (2, 1)]
    assert differing(rows, places(MESH, (0,))) == [(0, 0), (0, 1), (0, 2), (2, 2)]
    assert differing(rows, places(MESH, (0, 1))) == [(0, 0), (2, 0)]
    first = rows.flip(2)
    assert differing(first, places(MESH, (1,))) == [(2, 0), (2, 1)]


def test_one_rank_differs_along_all_axes() -> None:
    found = split(MESH, range(6), digests(1, 1, 1, 1, 9, 1)[:, 0], (0, 1))
    assert found == Split(((0, 1, 2, 3, 5), (4,)), (0, 1))


def test_a_row_of_ranks_differs_along_one_axis() -> None:
    assert split(MESH, range(6), digests(1, 1, 1, 2, 2, 2)[:, 0], (0, 1)) == Split(
        ((0, 1, 2), (3, 4, 5)), (0,)
    )
    assert split(MESH, range(6), digests(1, 2, 1, 1, 2, 1)[:, 0], (0, 1)) == Split(
        ((0, 2, 3, 5), (1, 4)), (1,)
    )


def test_the_reference_is_of_the_largest_class_then_of_the_lowest_coordinate() -> None:
    def classes(*values: int) -> tuple[tuple[int, ...], ...]:
        return split(MESH, range(6), digests(*values)[:, 0], (0, 1)).classes

    assert classes(5, 1, 1, 2, 2, 2) == ((3, 4, 5), (1, 2), (0,))
    assert classes(2, 2, 1, 1, 0, 0) == ((0, 1), (2, 3), (4, 5))
    assert classes(6, 5, 4, 3, 2, 1) == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_only_the_group_counts() -> None:
    found = split(MESH, (1, 4), digests(8, 1, 7, 6, 2, 5)[:, 0], (0,))
    assert found == Split(((1,), (4,)), (0,))
