"""The guards on torch's merges, without processes: which runs reach torch's own function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._redistribute import _TransformInfo
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshplan._chunks import chunk_sizes, nested_chunk_sizes
from meshplan.dtensor._guards import split_runs
from meshplan.layout import Layout

R, P, S = Replicate(), Partial(), Shard


def info(axis: int, src: Placement, dst: Placement, size: int = 8) -> _TransformInfo:
    return _TransformInfo(mesh_dim=axis, src_dst_placements=(src, dst), logical_shape=(size, 3))


def list_runs_of_torch(
    infos: list[_TransformInfo], layout: Layout, rank: int = 0, flattened: bool = True
) -> tuple[list[list[int]], list[str]]:
    runs, reasons = split_runs(infos, layout, rank, flattened, traced=False)
    assert [step for run in runs for step in run] == infos
    return [[i.mesh_dim for i in run] for run in runs if len(run) > 1], reasons


def test_even_gathers_are_merged_and_uneven_ones_are_not() -> None:
    square = Layout.of(a=2, b=2)

    def gather(size: int) -> list[_TransformInfo]:
        return [info(1, S(0), R, -(-size // 2)), info(0, S(0), R, size)]

    for size in (1, 4, 7, 8):
        assert list_runs_of_torch(gather(size), square) == ([[1, 0]], [])
    for size in (5, 6):
        assert list_runs_of_torch(gather(size), square) == (
            [],
            [f"all_gather over (a, b) is not merged: {size} does not split evenly on dim 0"],
        )


def test_runs_without_merges_are_not_split() -> None:
    uneven = [info(1, S(0), R, 3), info(0, S(0), R, 5)]
    # The next decision may differ.
    reasons = ["all_gather over (a, b) is not merged: 5 does not split evenly on dim 0"]
    assert list_runs_of_torch(uneven, Layout.of(a=2, b=2), flattened=False) == ([[1, 0]], reasons)


def test_ranks_that_do_not_ascend_are_not_merged() -> None:
    shuffled = Layout(sizes=(2, 2), names=("a", "b"), ranks=(0, 2, 1, 3))
    gather = [info(1, S(0), R, 4), info(0, S(0), R, 8)]
    scatter = [info(0, P, S(0), 8), info(1, P, S(0), 4)]
    for run, kind in ((gather, "all_gather"), (scatter, "reduce_scatter")):
        assert list_runs_of_torch(run, shuffled) == (
            [],
            [f"{kind} over (a, b) is not merged: the ranks do not ascend with the coordinate"],
        )
    # An all-reduce does not care for the order of ranks.
    reduce = [info(0, P, R), info(1, P, R)]
    assert list_runs_of_torch(reduce, shuffled) == ([[0, 1]], [])


def test_merges_are_decided_by_the_group_of_this_rank() -> None:
    """Each group is a merge of its own; its members all see the same ranks."""
    layout = Layout(sizes=(2, 2, 2), ranks=(0, 1, 2, 3, 6, 5, 4, 7))
    gather = [info(2, S(0), R, 4), info(1, S(0), R, 8)]
    assert list_runs_of_torch(gather, layout, rank=3)[0] == [[2, 1]]
    for rank in (4, 5, 6, 7):
        assert list_runs_of_torch(gather, layout, rank=rank)[0] == []


def test_norms_and_sums_are_separate_runs() -> None:
    square = Layout.of(a=2, b=2)
    norm = _NormPartial(2)
    for first, second in ((norm, P), (P, norm), (norm, _NormPartial(3))):
        assert list_runs_of_torch([info(0, first, R), info(1, second, R)], square) == ([], [])
    assert list_runs_of_torch([info(0, norm, R), info(1, norm, R)], square) == ([[0, 1]], [])
    both = [info(0, P, R), info(1, Partial("avg"), R)]
    assert list_runs_of_torch(both, square) == ([[0, 1]], [])
    unlike = [info(0, Partial("max"), R), info(1, Partial("min"), R)]
    assert list_runs_of_torch(unlike, square) == ([], [])


def test_runs_match_torch() -> None:
    cube = Layout.of(a=2, b=2, c=2)
    steps = [info(0, P, R), info(1, P, R), info(2, S(0), R)]
    assert list_runs_of_torch(steps, cube) == ([[0, 1]], [])
    steps = [info(0, P, R), info(2, S(0), S(1)), info(1, P, R)]
    assert list_runs_of_torch(steps, cube) == ([], [])


@given(size=st.integers(0, 40), axes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_chunks_match_shard(size: int, axes: list[int]) -> None:
    def lengths(length: int, axes: list[int]) -> list[int]:
        if not axes:
            return [length]
        parts = [Shard.local_shard_size_and_offset(length, axes[0], i)[0] for i in range(axes[0])]
        return [n for part in parts for n in lengths(part, axes[1:])]

    assert nested_chunk_sizes(size, axes) == lengths(size, axes)
    assert chunk_sizes(size, axes[0]) == lengths(size, axes[:1])
