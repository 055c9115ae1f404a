"""What is told of replicas that differ."""

from __future__ import annotations

import torch
from expecttest import TestCase

from meshplan.errors import ReplicaDivergenceError
from meshplan.layout import Layout
from meshplan.replicas import Divergence, Elements, ReplicaReport
from meshplan.replicas._divergence import message
from meshplan.replicas._elements import Difference, index_of

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
        coordinates=tuple(tuple(index_of(r, MESH.sizes) for r in part) for part in classes),
        elements=elements,
    )


class TestTexts(TestCase):
    def test_messages(self) -> None:
        half = Elements.of(
            5,
            Difference(2, 7, theirs=(0x3F800000, 0), mine=(0x3F800001, 0), ulps=1),
            (3, 4),
            torch.float32,
        )
        shapes = Elements(6, 0, None, "", "", None, 12, ((3, 4), (4, 3)))
        again = Elements.of(7, Difference(), (3, 4), torch.float32)
        texts = []
        for found, groups, step in (
            ((divergence((0, 1, 2, 3, 4, 6, 7), (5,), elements=(half,)),), 1, 300),
            ((divergence((0, 1, 2, 3), (4, 5, 6, 7), axes=("ddp",)),), 9, None),
            ((divergence((0, 1), (6,), (7,), elements=(shapes, again)),), 1, None),
            ((divergence(*((r,) for r in range(8))),), 1, 0),
        ):
            texts.append(message(MESH, found, tensors=1, compared=7, groups=groups, step=step))
        error = ReplicaDivergenceError(texts[0], divergences=(), tensors=1, step=300)
        self.assertExpectedInline(
            "\n".join([str(error), *texts[1:]]),
            """\
MP705: replicas differ at step 300 in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1), rank 2 (ddp=0, fsdp=2), rank 3 (ddp=0, fsdp=3) and 3 more: the reference
    rank 5 (ddp=1, fsdp=1): 2 of 12 elements differ, first at index (1, 3): 1.0000001192092896 (0x3f800001), on rank 0 1.0 (0x3f800000), at most 1 ulps apart
go back to a checkpoint from before; if it is one rank that differs test its hardware, if many do reduce in one order (meshplan.install()) and start from one set of weights
replicas differ in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, though replicated along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1), rank 2 (ddp=0, fsdp=2), rank 3 (ddp=0, fsdp=3): the reference
    rank 4 (ddp=1, fsdp=0), rank 5 (ddp=1, fsdp=1), rank 6 (ddp=1, fsdp=2), rank 7 (ddp=1, fsdp=3)
  and 8 more groups of replicas
go back to a checkpoint from before; if it is one rank that differs test its hardware, if many do reduce in one order (meshplan.install()) and start from one set of weights
replicas differ in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0), rank 1 (ddp=0, fsdp=1): the reference
    rank 6 (ddp=1, fsdp=2): its local shape is [3, 4], that of rank 0 [4, 3]
    rank 7 (ddp=1, fsdp=3): a second look found no difference: the tensor is being changed while it is compared; wait for whatever writes to it
go back to a checkpoint from before; if it is one rank that differs test its hardware, if many do reduce in one order (meshplan.install()) and start from one set of weights
replicas differ at step 0 in 1 of 7 tensors, on mesh (ddp=2, fsdp=4)
  w: float32[3]: differs along ddp, fsdp
    rank 0 (ddp=0, fsdp=0): the reference
    rank 1 (ddp=0, fsdp=1)
    rank 2 (ddp=0, fsdp=2)
    rank 3 (ddp=0, fsdp=3)
    rank 4 (ddp=1, fsdp=0)
    and 3 more different replicas
go back to a checkpoint from before; if it is one rank that differs test its hardware, if many do reduce in one order (meshplan.install()) and start from one set of weights""",
        )

    def test_attributes(self) -> None:
        one = divergence((1, 3), (2,), (0, 5))
        assert (one.reference, one.ranks) == (1, (2, 0, 5))

    def test_report(self) -> None:
        report = ReplicaReport(
            tensors=3,
            elements=10,
            nbytes=40,
            by_axes=((("ddp",), 2), (("ddp", "fsdp"), 1)),
            cut=("w",),
            step=100,
            seconds=0.0123,
        )
        nothing = ReplicaReport(0, 0, 0, (), (), None, 0.5)
        self.assertExpectedInline(
            f"{report}\n{nothing}",
            """\
step 100: 3 tensors, 40 bytes, agree on all ranks (2 along ddp; 1 along ddp, fsdp); 1 have one replica each, in 0.012 s
0 tensors, 0 bytes, agree on all ranks, in 0.500 s""",
        )
