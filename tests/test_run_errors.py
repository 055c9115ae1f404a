"""Errors of the backend name the reduction."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from expecttest import TestCase
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.errors import CollectiveError, GroupStateError
from meshplan.execute import _run
from tests.processes import run_ranks

pytestmark = pytest.mark.processes


def raised(error: Exception, expected: type[Exception]) -> list[tuple[str, list[str]]]:
    """The text and the notes on each of two ranks, where a reduction raises ``error``."""

    def ranks(rank: int) -> tuple[str, list[str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        d = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with (
            meshplan.installed(path="exchange"),
            mock.patch.object(_run, "_reduced", side_effect=error),
            pytest.raises(expected) as caught,
        ):
            d.redistribute(mesh, [Replicate()])
        return str(caught.value), getattr(caught.value, "__notes__", [])

    return run_ranks(ranks, 2)


def test_errors_of_meshplan_are_passed_on() -> None:
    assert raised(GroupStateError("closed"), GroupStateError) == [("MP503: closed", [])] * 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["gpu", "cpu"],
)
def test_out_of_memory_is_raised_as_in_torch(error: RuntimeError) -> None:
    for text, (note,) in raised(error, type(error)):
        assert text == str(error)
        assert note.startswith("meshplan: in (P(sum)) -> (R) on (dp=2), ")


def test_unsupported_backend_dtype_blames_no_rank() -> None:
    """It is raised before anything is sent, and the groups remain usable."""

    def ranks(rank: int) -> tuple[str, str]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        given = torch.ones(4, dtype=torch.uint16)
        d = DTensor.from_local(given, mesh, [Partial()], run_check=False)
        with meshplan.installed(path="exchange"):
            with pytest.raises(RuntimeError) as caught:
                d.redistribute(mesh, [Shard(0)])
            d = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
            assert d.redistribute(mesh, [Shard(0)]).to_local().tolist() == [2.0, 2.0]
        return str(caught.value), caught.value.__notes__[0]

    for text, note in run_ranks(ranks, 2):
        assert text == "Invalid scalar type"
        assert note.startswith("meshplan: in (P(sum)) -> (S(0)) on (dp=2), ")


class TestMessages(TestCase):
    def test_backend_failure_on_all_ranks_is_reported(self) -> None:
        """What gloo says of the other transfers, where one took too long, does not name gloo."""
        error = RuntimeError("Application timeout caused pair closure")
        first, second = raised(error, CollectiveError)
        assert first[1] == second[1]
        texts = [re.sub(r"waited \d+\.\d s", "waited N s", text) for text, _ in (first, second)]
        assert texts[0] == texts[1].replace("on rank 1", "on rank 0")
        self.assertExpectedInline(
            texts[0],
            """MP504: a reduction over default group 0 of 2 ranks: 0, 1 failed on rank 0: Application timeout caused pair closure; all of its ranks report it: look for a late rank or a failing network. This rank waited N s. These groups are unusable: call meshplan.shutdown() and destroy_process_group(), then init_process_group() with the ranks that are left""",
        )
        self.assertExpectedInline(
            first[1][0],
            """meshplan: in (P(sum)) -> (R) on (dp=2), all_reduce sum over (dp), groups of 2, exchange, contract v1/tree/wide/once: one axis, in one order for all siblings, on default group 0 of 2 ranks: 0, 1""",
        )
