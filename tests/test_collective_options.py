"""What deterministic collectives refuse, before any process group is looked at."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from meshplan import (
    Contract,
    collectives,
    deterministic_all_gather,
    deterministic_all_gather_coalesced,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
    deterministic_reduce_scatter,
    deterministic_reduce_scatter_coalesced,
)
from meshplan.collectives import functional
from meshplan.collectives._options import check_destination
from tests.processes import run_ranks
from tests.refusals import refusal

COLLECTIVES = (
    deterministic_all_gather,
    deterministic_all_gather_coalesced,
    deterministic_all_reduce,
    deterministic_all_reduce_coalesced,
    deterministic_reduce_scatter,
    deterministic_reduce_scatter_coalesced,
)
FUNCTIONAL = (functional.all_gather, functional.all_reduce, functional.reduce_scatter)
# A gather has a gradient, which is reduced.
REDUCING = (deterministic_all_reduce, deterministic_reduce_scatter, *FUNCTIONAL)
SHARED = {"path": "auto", "contract": None, "group": None, "strict": False, "debug": False}


def test_all_collectives_have_the_same_keyword_arguments() -> None:
    for function in (*COLLECTIVES, *FUNCTIONAL):
        wanted: dict[str, object] = dict(SHARED)
        if function in COLLECTIVES:
            wanted |= {"out": None, "async_op": False}
        if "all_gather" not in function.__name__:
            wanted["op"] = "sum"
        if function.__name__ in ("deterministic_all_reduce", "deterministic_reduce_scatter"):
            wanted["verify"] = None
        if "all_reduce" not in function.__name__:
            wanted |= {"dim": 0, "sizes": None}
        _, *keywords = inspect.signature(function).parameters.values()
        assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in keywords)
        assert {one.name: one.default for one in keywords} == wanted, function.__name__


class TestRefusals(TestCase):
    def test_argument_that_is_no_tensor_is_refused(self) -> None:
        self.assertExpectedInline(
            refusal(TypeError, deterministic_all_reduce, [1.0]),
            """MP412: tensor must be a torch.Tensor, got list; for a list of tensors call the _coalesced function""",
        )

    def test_unknown_path_is_refused(self) -> None:
        said = {refusal(ValueError, run, torch.ones(1), path="ring") for run in REDUCING}
        self.assertExpectedInline(
            "\n".join(said),
            """MP402: no path 'ring'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'""",
        )

    def test_unsupported_op_is_refused(self) -> None:
        for op, name in (
            ("mean", "'mean'"),
            ("SUM", "'SUM'"),
            (dist.ReduceOp.BXOR, "'BXOR'"),
            (dist.ReduceOp.PREMUL_SUM, "'PREMUL_SUM'"),
            (None, "None"),
        ):
            for run in (deterministic_all_reduce, deterministic_reduce_scatter):
                assert refusal(ValueError, run, torch.ones(1), op=op) == (
                    f"MP411: unsupported op: {name}; use one of 'sum', 'avg', 'max', 'min', "
                    "'product', or the torch.distributed.ReduceOp of that name"
                )

    def test_average_of_integers_is_refused(self) -> None:
        for dtype in (torch.int32, torch.uint8, torch.bool):
            one = torch.ones(1, dtype=dtype)
            for path in ("native", "reference", "auto"):
                said = refusal(TypeError, deterministic_all_reduce, one, path=path, op="avg")
                assert "op='avg' requires a floating-point or complex tensor" in said
        self.assertExpectedInline(
            said,
            """MP412: op='avg' requires a floating-point or complex tensor, got torch.bool; pass op='sum' and divide as you need, or convert the tensor""",
        )

    def test_unusable_contracts_are_refused(self) -> None:
        said = []
        for how in (
            {"path": "native", "contract": Contract("rank")},
            {"path": "native", "contract": Contract(accumulate="float64")},
            {"contract": "tree"},
        ):
            (text,) = {refusal(ValueError, run, torch.ones(1), **how) for run in REDUCING}
            said.append(text)
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP411: path='native' adds in the backend's own order, got contract=v1/rank/wide/once; leave contract out, or pass another path, such as path='auto'
MP411: path='native' adds in the backend's own order, got contract=v1/tree/float64/once; leave contract out, or pass another path, such as path='auto'
MP411: contract='tree' is not a contract; pass contract=meshplan.Contract()""",
        )

    def test_invalid_outputs_are_refused(self) -> None:
        leaf = torch.ones(2, requires_grad=True)
        one = torch.ones(2)
        said = [
            refusal(kind, run, one, out=out)
            for kind, run, out in (
                (TypeError, deterministic_all_reduce, [1.0]),
                (TypeError, deterministic_all_reduce, torch.ones(2, dtype=torch.bfloat16)),
                (ValueError, deterministic_all_gather, torch.ones(3)),
                (ValueError, deterministic_reduce_scatter, torch.ones(2, 1)),
                (ValueError, deterministic_all_reduce, torch.ones(1).expand(2)),
                (RuntimeError, deterministic_all_reduce, leaf),
            )
        ]
        said.append(refusal(RuntimeError, deterministic_all_reduce, leaf, out=one))
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP412: out must be a torch.Tensor, got list
MP412: out= has torch.bfloat16 on cpu, and the tensor torch.float32 on cpu; pass an out= of the same dtype and device
MP411: out= has shape (3,), and the result of this rank has (2,); pass an out= of the result's shape
MP411: out= has shape (2, 1), and the result of this rank has (2,); pass an out= of the result's shape
MP411: the result is written in place, and elements of the tensor may share memory: shape (2,), strides (0,); pass tensor.contiguous()
MP413: the result is written in place of a tensor that requires a gradient, which it would cut off; call meshplan.collectives.functional.all_reduce, or use torch.no_grad()
MP413: the result of deterministic_all_reduce has no gradient, and the tensor requires one; call meshplan.collectives.functional.all_reduce, or use torch.no_grad()""",
        )

    def test_invalid_tensor_lists_are_refused(self) -> None:
        one, two = torch.ones(2), torch.ones(2)
        pair = [one, two]
        said = [
            refusal(ValueError, deterministic_all_reduce_coalesced, [one, one]),
            refusal(ValueError, deterministic_all_reduce_coalesced, pair, out=[one]),
            refusal(ValueError, deterministic_all_gather_coalesced, pair, out=[one, one]),
            refusal(ValueError, deterministic_all_gather_coalesced, pair, sizes=[[2]]),
            refusal(ValueError, deterministic_reduce_scatter_coalesced, pair, sizes=[2, 2]),
        ]
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP411: 2 tensors to write to, and one of them is in the list twice; pass each tensor once
MP411: out= has length 1 for 2 tensors; pass one out= for each
MP411: 2 tensors to write to, and one of them is in the list twice; pass each tensor once
MP411: sizes=[[2]] for 2 tensors; pass one list, or None, for each tensor
MP411: sizes=[2, 2] for 2 tensors; pass one list, or None, for each tensor""",
        )

    def test_invalid_groups_are_refused(self) -> None:
        def ranks(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
            plain, part = init_device_mesh("cpu", (1, 2)), DeviceMesh("cpu", [1])
            said = []
            for kind, group in (
                (ValueError, mesh),
                (ValueError, (mesh, "pp")),
                (ValueError, (plain, 2)),
                (ValueError, (plain, "dp")),
                (RuntimeError, (mesh, "dp", "tp")),
                (RuntimeError, [0, 1]),
                (RuntimeError, part if rank == 0 else "world"),
            ):
                calls = (deterministic_all_reduce, deterministic_all_gather, *FUNCTIONAL)
                (text,) = {refusal(kind, run, torch.ones(1), group=group) for run in calls}
                said.append(text)
            return said

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 2)[0]),
            """\
MP112: the mesh of group= has 2 axes; pass group=(mesh, axis) with one of the axes 'dp', 'tp'
MP112: the mesh of group= has no axis 'pp'; pass group=(mesh, axis) with one of the axes 'dp', 'tp'
MP112: the mesh of group= has no axis 2; pass group=(mesh, axis) with one of the axes 0, 1
MP112: the mesh of group= has no axis 'dp'; pass group=(mesh, axis) with one of the axes 0, 1
MP503: group=(DeviceMesh((dp=2, tp=1), 'cpu', stride=(1, ())), 'dp', 'tp') is not a process group; pass a ProcessGroup, a DeviceMesh of one axis or (mesh, axis), or leave it out for all ranks
MP503: group=[0, 1] is not a process group; pass a ProcessGroup, a DeviceMesh of one axis or (mesh, axis), or leave it out for all ranks
MP503: rank 0 is not in the group; call this on its members only""",
        )

    def test_dtypes_outside_the_contract_are_refused(self) -> None:
        for path in ("reference", "auto", "one_shot", "two_shot", "exchange"):
            for dtype, op in (
                (torch.bool, "sum"),
                (torch.float8_e4m3fn, "sum"),
                (torch.complex64, "product"),
                (torch.complex64, "max"),
            ):
                one = torch.zeros(1, dtype=dtype)
                said = refusal(TypeError, deterministic_all_reduce, one, path=path, op=op)
                assert said.startswith("MP412")
        self.assertExpectedInline(
            said,
            """MP412: torch.complex64 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8""",
        )

    def test_unsupported_tensors_are_refused(self) -> None:
        sparse = torch.ones(2, 2).to_sparse()
        self.assertExpectedInline(
            refusal(TypeError, deterministic_all_reduce, sparse),
            """MP412: tensor is torch.sparse_coo; pass a dense one, e.g. tensor.to_dense()""",
        )

    def test_tensors_with_gradient_are_refused(self) -> None:
        leaf = torch.ones(2, requires_grad=True)
        self.assertExpectedInline(
            refusal(RuntimeError, deterministic_all_reduce, leaf),
            """MP413: the result is written in place of a tensor that requires a gradient, which it would cut off; call meshplan.collectives.functional.all_reduce, or use torch.no_grad()""",
        )
        for name in ("reduce_scatter", "all_gather"):
            function = getattr(collectives, f"deterministic_{name}")
            assert refusal(RuntimeError, function, leaf) == (
                f"MP413: the result of deterministic_{name} has no gradient, and the tensor requires "
                f"one; call meshplan.collectives.functional.{name}, or use torch.no_grad()"
            )
        with torch.no_grad():
            assert deterministic_all_reduce(leaf) is leaf
        self.assertExpectedInline(
            refusal(RuntimeError, functional.all_reduce, leaf, op="max"),
            """MP413: op='max' over ranks has no derivative, and the tensor requires a gradient; pass op='sum' or 'avg', or reduce tensor.detach()""",
        )

    def test_invalid_sizes_are_refused(self) -> None:
        two = torch.ones(2, 3)
        said = [
            refusal(ValueError, deterministic_reduce_scatter, two, sizes=[1]),
            refusal(ValueError, deterministic_reduce_scatter, two, sizes=[1, 1]),
            refusal(ValueError, deterministic_reduce_scatter, two, dim=2),
            refusal(ValueError, deterministic_reduce_scatter, torch.ones(())),
            refusal(ValueError, deterministic_all_gather, two, sizes=[3]),
            refusal(ValueError, deterministic_all_gather, two, dim=-3),
        ]
        self.assertExpectedInline(
            "\n".join(said),
            """\
MP411: sizes=[1] do not split dim 0 of 2 elements for a group of 1; pass one size for each rank, whose sum is the length
MP411: sizes=[1, 1] do not split dim 0 of 2 elements for a group of 1; pass one size for each rank, whose sum is the length
MP411: dim=2 of a tensor with 2 dimensions; pass one of its dimensions
MP411: dim=0 of a tensor with 0 dimensions; pass one of its dimensions
MP411: sizes=[3] for a group of 1, of which this is rank 0, and its tensor has 2 elements along dim 0; pass one size for each rank
MP411: dim=-3 of a tensor with 2 dimensions; pass one of its dimensions""",
        )

    def test_dtensor_is_refused(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (1,))
            tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
            return refusal(TypeError, deterministic_all_reduce, tensor)

        self.assertExpectedInline(
            run_ranks(ranks, 1)[0],
            """MP412: tensor is a DTensor, which is reduced by its placements; call redistribute on it, or pass tensor.to_local()""",
        )


def test_arguments_are_validated_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with one rank, and without a process group."""
    for size in ("1", "4"):
        monkeypatch.setenv("WORLD_SIZE", size)
        hows: list[dict[str, Any]] = [
            {"path": "ring"},
            {"op": "median"},
            {"path": "native", "contract": Contract("rank")},
        ]
        for how in hows:
            with pytest.raises(ValueError, match=r"use|pass"):
                deterministic_all_reduce(torch.ones(1), **how)
        with pytest.raises(TypeError):
            deterministic_all_reduce(torch.ones(1, dtype=torch.int32), op="avg")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 6)[:, ::2],
        torch.ones(4, 6).t(),
        torch.ones(4, 1, 6).expand(4, 1, 6),
        torch.ones(2, 3, 4).permute(2, 0, 1),
        torch.ones(6).as_strided((2, 2), (3, 2)),
        torch.ones(0, 4).expand(5, 0, 4),
        torch.ones(()),
    ],
)
def test_strides_without_overlap_are_writable(tensor: torch.Tensor) -> None:
    check_destination(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()).expand(2),
        torch.ones(6).as_strided((4, 3), (1, 1)),
        torch.ones(9).unfold(0, 3, 2),
    ],
)
def test_overlapping_strides_are_not_writable(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="share memory"):
        check_destination(tensor)
