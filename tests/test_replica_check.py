"""Steps at which ReplicaCheck compares; one rank, so that nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshplan.errors import GroupStateError, PolicyError, ReplicaInputError
from meshplan.replicas import ReplicaCheck, verify_replicas
from tests.refusals import refusal


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield DeviceMesh("cpu", [0], mesh_dim_names=("a",))
    dist.destroy_process_group()


def test_check_compares_at_multiples_of_every(mesh: DeviceMesh) -> None:
    check = ReplicaCheck(nn.Linear(2, 2), mesh, every=3)
    assert [check() is not None for _ in range(7)] == [*([False, False, True] * 2), False]
    assert check.last is not None
    assert (check.step, check.last.step) == (7, 6)
    assert [check(step) is not None for step in (0, 8, 9)] == [True, False, True]
    assert check() is None
    assert check.step == 10


def test_invalid_arguments_are_errors(mesh: DeviceMesh) -> None:
    messages = []
    for function in (
        lambda: ReplicaCheck(torch.ones(1), every=0),
        lambda: verify_replicas(torch.ones(1), mesh, details=-1),
        lambda: verify_replicas(torch.ones(1, device="meta"), mesh),
        lambda: verify_replicas(torch.ones(1), DeviceMesh("cpu", [0, 1])),
    ):
        messages.append(refusal((PolicyError, ReplicaInputError, GroupStateError), function))
    assert_expected_inline(
        "\n".join(messages),
        """\
MP402: every=0 is invalid; pass an integer of 1 or more
MP402: details=-1 is invalid; pass an integer of 0 or more
MP421: tensor is on the meta device, so it has no elements of its own to compare; pass the module after to_empty and its first values
MP503: the mesh is on the 'fake' backend, which sends nothing, so there are no replicas to compare; initialise the process group with a real backend""",
    )


def test_missing_default_group_is_an_error() -> None:
    assert_expected_inline(
        refusal(GroupStateError, verify_replicas, torch.ones(1)),
        """MP503: replicas are compared over all ranks, and there is no default group; call torch.distributed.init_process_group first, or pass a mesh""",
    )
