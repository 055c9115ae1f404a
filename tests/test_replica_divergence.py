"""Grouping of ranks by their digests, and messages about replicas that differ."""

from __future__ import annotations

import torch
from expecttest import TestCase

from meshplan._bits import element_index
from meshplan.errors import ReplicaDivergenceError
from meshplan.layout import Layout
from meshplan.replicas import Divergence, Elements, ReplicaReport
from meshplan.replicas._comparison import (
    find_differing_groups,
    format_divergences,
    group_positions,
    split_by_digest,
)

MESH = Layout.of(ddp=2, fsdp=4)


def divergence(
    *classes: tuple[int, ...],
    axes: tuple[str, ...] = MESH.axes,
    elements: tuple[Elements, ...] = (),
) -> Divergence:
    return Divergence(
        name="w",
        what="w: float32[3]",
        replicated=MESH.axes,
        axes=axes,
        classes=classes,
        coordinates=tuple(tuple(element_index(r, MESH.sizes) for r in part) for part in classes),
        elements=elements,
    )


class TestTexts(TestCase):
    def test_messages_name_ranks_and_elements(self) -> None:
        half = Elements(5, 2, (1, 3), "1.0000001192092896 (0x3f800001)", "1.0 (0x3f800000)", 1, 12)
        shapes = Elements(6, 0, None, "", "", None, 12, ((3, 4), (4, 3)))
        again = Elements(7, 0, None, "", "", None, 12)
        texts = []
        for found, groups, step in (
            ((divergence((0, 1, 2, 3, 4, 6, 7), (5,), elements=(half,)),), 1, 300),
            ((divergence((0, 1, 2, 3), (4, 5, 6, 7), axes=("ddp",)),), 9, None),
            ((divergence((0, 1), (6,), (7,), elements=(shapes, again)),), 1, None),
            ((divergence(*((r,) for r in range(8))),), 1, 0),
        ):
            texts.append(
                format_divergences(
                    MESH, found, tensors=1, compared=7, groups=groups, step=step, order="sort them"
                )
            )
        error = ReplicaDivergenceError(texts[0], divergences=(), tensors=1, step=300)
        self.assertExpectedInline(
            "\n".join([str(error), *texts[1:]]),
            """\
MP705: replicas differ at step 300 in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1), rank 2 (ddp=0, fsdp=2), rank 3 (ddp=0, fsdp=3) and 3 more: the reference
    rank 5 (ddp=1, fsdp=1): 2 of 12 elements differ, first at index (1, 3): 1.0000001192092896 (0x3f800001), on rank 0 1.0 (0x3f800000), at most 1 ulp apart
only rank 5 differs: test its hardware and memory, and go back to an earlier checkpoint
replicas differ in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, though replicated along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1), rank 2 (ddp=0, fsdp=2), rank 3 (ddp=0, fsdp=3): the reference
    rank 4 (ddp=1, fsdp=0), rank 5 (ddp=1, fsdp=1), rank 6 (ddp=1, fsdp=2), rank 7 (ddp=1, fsdp=3)
  and 8 more groups of replicas
pass details=4 to compare elements, which shows the reason; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas differ in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1): the reference
    rank 6 (ddp=1, fsdp=2): its local shape is [3, 4], that of rank 0 [4, 3]
    rank 7 (ddp=1, fsdp=3): a second comparison found no difference: the tensor changes while it is compared; wait for the code that writes to it
go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas differ at step 0 in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0): the reference
    rank 1 (ddp=0, fsdp=1)
    rank 2 (ddp=0, fsdp=2)
    rank 3 (ddp=0, fsdp=3)
    rank 4 (ddp=1, fsdp=0)
    and 3 more different replicas
pass details=4 to compare elements, which shows the reason; go back to an earlier checkpoint, or call meshplan.repair_replicas""",
        )

    def test_reference_and_differing_ranks(self) -> None:
        one = divergence((1, 3), (2,), (0, 5))
        assert (one.reference, one.ranks) == (1, (2, 0, 5))

    def test_report_is_printed(self) -> None:
        report = ReplicaReport(
            tensors=3,
            elements=10,
            nbytes=40,
            by_axes=((("ddp",), 2), (("ddp", "fsdp"), 1)),
            unreplicated=("w",),
            step=100,
            seconds=0.0123,
        )
        nothing = ReplicaReport(0, 0, 0, (), (), None, 0.5)
        self.assertExpectedInline(
            f"{report}\n{nothing}",
            """\
step 100: 3 tensors, 40 bytes, agree on all ranks (2 along ddp; 1 along ddp, fsdp); 1 have one replica each, in 0.012 s
nothing was compared, in 0.500 s""",
        )

    def test_evidence_chooses_the_advice(self) -> None:
        def advice(*found: Divergence, order: str = "use the backend") -> str:
            text = format_divergences(
                MESH, found, tensors=1, compared=1, groups=1, step=None, order=order
            )
            return text.split("\n")[-1]

        def elements(rank: int, count: int, unrelated: int) -> Elements:
            return Elements(rank, count, (0,), "1.0", "2.0", 9, 100, unrelated=unrelated)

        pair = ((0, 1, 2, 3), (4, 5, 6, 7))
        one = ((0, 1, 2, 3, 4, 6, 7), (5,))
        other = divergence((0, 1, 2, 3, 4, 5, 7), (6,), elements=(elements(6, 1, 1),))
        texts = [
            advice(divergence(*pair, axes=("ddp",), elements=(elements(4, 100, 75),))),
            advice(divergence(*one, elements=(elements(5, 95, 60),)), order=""),
            advice(divergence(*one, elements=(elements(5, 1, 1),))),
            advice(divergence(*one)),
            # Many elements by little, and a few of those near zero by much.
            advice(divergence(*pair, elements=(elements(4, 100, 3),))),
            advice(divergence(*pair, elements=(elements(4, 2, 0),)), order=""),
            advice(divergence(*one, elements=(elements(5, 1, 1),)), other),
            # One element by far, and by little.
            advice(divergence(*pair, elements=(Elements(4, 1, (0,), "", "", 1 << 20, 100),))),
            advice(divergence(*pair, elements=(elements(4, 1, 0),)), order=""),
            # Of two replicas, either may be wrong.
            advice(divergence((0,), (4,), elements=(elements(4, 1, 1),))),
            advice(divergence(*pair)),
            advice(divergence(*pair, elements=(Elements(4, 0, None, "", "", None, 12),))),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
75 of 100 elements differ in sign or by more than a factor of 2, so these replicas never held the same weights: initialise them with one seed, broadcast them from one rank, or load one checkpoint, and use the backend; if ranks along ddp hold other parameters, such as experts, name these axes in distinct=
60 of 100 elements differ in sign or by more than a factor of 2, so these replicas never held the same weights: initialise them with one seed, broadcast them from one rank, or load one checkpoint; if ranks along ddp, fsdp hold other parameters, such as experts, name these axes in distinct=
only rank 5 differs: test its hardware and memory, and go back to an earlier checkpoint
only rank 5 differs: test its hardware and memory, and go back to an earlier checkpoint
replicas that drift apart are reduced in different orders: use the backend; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: meshplan.coverage() lists the reductions that are not in one order; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: use the backend; go back to an earlier checkpoint, or call meshplan.repair_replicas
one element differs by far, as by a flipped bit: test the hardware; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: meshplan.coverage() lists the reductions that are not in one order; go back to an earlier checkpoint, or call meshplan.repair_replicas
replicas that drift apart are reduced in different orders: use the backend; go back to an earlier checkpoint, or call meshplan.repair_replicas
pass details=4 to compare elements, which shows the reason; go back to an earlier checkpoint, or call meshplan.repair_replicas
go back to an earlier checkpoint, or call meshplan.repair_replicas""",
        )


SMALL = Layout.of(a=2, b=3)


def digests(*values: int) -> torch.Tensor:
    """One row; the second word decides."""
    return torch.tensor([[[7, value]] for value in values])


def test_groups_that_differ_are_found_by_row() -> None:
    rows = torch.cat(
        [digests(1, 1, 1, 2, 2, 2), digests(1, 1, 1, 1, 1, 1), digests(1, 2, 3, 1, 2, 0)], 1
    )
    assert find_differing_groups(rows, group_positions(SMALL, (1,))) == [(2, 0), (2, 1)]
    assert find_differing_groups(rows, group_positions(SMALL, (0,))) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (2, 2),
    ]
    assert find_differing_groups(rows, group_positions(SMALL, (0, 1))) == [(0, 0), (2, 0)]
    first = rows.flip(2)
    assert find_differing_groups(first, group_positions(SMALL, (1,))) == [(2, 0), (2, 1)]


def test_one_rank_differs_along_all_axes() -> None:
    found = split_by_digest(SMALL, range(6), digests(1, 1, 1, 1, 9, 1)[:, 0], (0, 1))
    assert found == (((0, 1, 2, 3, 5), (4,)), (0, 1))


def test_differing_row_is_found_along_one_axis() -> None:
    assert split_by_digest(SMALL, range(6), digests(1, 1, 1, 2, 2, 2)[:, 0], (0, 1)) == (
        ((0, 1, 2), (3, 4, 5)),
        (0,),
    )
    assert split_by_digest(SMALL, range(6), digests(1, 2, 1, 1, 2, 1)[:, 0], (0, 1)) == (
        ((0, 2, 3, 5), (1, 4)),
        (1,),
    )


def test_reference_is_of_the_largest_class_then_lowest_coordinate() -> None:
    def classes(*values: int) -> tuple[tuple[int, ...], ...]:
        return split_by_digest(SMALL, range(6), digests(*values)[:, 0], (0, 1))[0]

    assert classes(5, 1, 1, 2, 2, 2) == ((3, 4, 5), (1, 2), (0,))
    assert classes(2, 2, 1, 1, 0, 0) == ((0, 1), (2, 3), (4, 5))
    assert classes(6, 5, 4, 3, 2, 1) == ((0,), (1,), (2,), (3,), (4,), (5,))
