"""Everything that runs as less than was asked for is a fallback in the report, and an error under
``strict`` before anything of it is sent. A path or a gather: test_shared_memory_paths.py, test_peers.py,
test_shard_order.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._ops._math_ops import _NormPartial

import meshplan
from meshplan.dtensor import _routes
from meshplan.errors import FallbackRefusedError, PolicyError
from tests.processes import run_ranks
from tests.traffic import Issued

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard


class Mine(Partial):
    """A user's own."""


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def from_local(local: Tensor, src: Any) -> DTensor:
    return DTensor.from_local(local, mesh_of_four(), src, run_check=False)


def refused(function: Callable[[], object], **options: Any) -> str:
    """It goes through as a fallback, and under ``strict`` is an error and sends nothing."""
    meshplan.clear_report()
    with meshplan.installed(**options):
        function()
    assert meshplan.report().fallbacks
    with (
        meshplan.installed(strict=True, **options),
        Issued() as sent,
        pytest.raises(FallbackRefusedError) as caught,
    ):
        function()
    assert sent.total == 0
    return str(caught.value)


class TestRefusals(TestCase):
    def test_unsupported_dtypes_are_refused(self) -> None:
        def ranks(rank: int) -> list[str]:
            truths = torch.ones(4, dtype=torch.bool)
            messages = []
            for dst in ((R, R), (S(0), R)):
                d = from_local(truths, [Partial("max")] * 2)
                messages.append(refused(lambda d=d, dst=dst: d.redistribute(None, dst)))
            return messages

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 4)[0]),
            """\
MP701: (P(max), P(max)) -> (R, R) on (a=2, b=2): torch.bool would run on the backend's own max, in its own order; convert the tensor, or pass strict=False
MP701: (P(max), P(max)) -> (S(0), R) on (a=2, b=2): torch.bool would run on the backend's own max, in its own order; convert the tensor, or pass strict=False""",
        )

    def test_native_path_is_refused(self) -> None:
        def ranks(rank: int) -> str:
            d = from_local(torch.ones(4), (P, P))
            return refused(d.full_tensor, path="native")

        self.assertExpectedInline(
            run_ranks(ranks, 4)[0],
            """MP701: (P(sum), P(sum)) -> (R, R) on (a=2, b=2): path native is outside the contract; pass another path, or strict=False""",
        )

    def test_custom_placements_are_refused(self) -> None:
        def ranks(rank: int) -> list[str]:
            two, three = _NormPartial(2), _NormPartial(3)
            messages = []
            for src, dst in (
                ((Mine("sum"), R), (R, R)),
                ((Mine("sum"), P), (S(0), R)),
                ((two, three), (R, R)),
                ((two, R), (S(0), R)),
            ):
                d = from_local(torch.ones(4), src)
                messages.append(refused(lambda d=d, dst=dst: d.redistribute(None, dst)))
                # The same once more: what was refused is not remembered as right.
                messages.append(refused(lambda d=d, dst=dst: d.redistribute(None, dst)))
            assert messages[::2] == messages[1::2]
            return messages[::2]

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 4)[0]),
            """\
MP701: (P(sum), R) -> (R, R) on (a=2, b=2): policy deterministic requires the contract, and this reduction would fall through to PyTorch: torch P(sum) -> R over (a): P(sum) has its own arithmetic; redistribute to Replicate on every axis at once, without another sum, use plain Partial, or pass strict=False
MP701: (P(sum), P(sum)) -> (S(0), R) on (a=2, b=2): policy deterministic requires the contract, and this reduction would fall through to PyTorch: torch P(sum) -> S(0) over (a): P(sum) has its own arithmetic; redistribute to Replicate on every axis at once, without another sum, use plain Partial, or pass strict=False
MP701: (_NormP(2), _NormP(3)) -> (R, R) on (a=2, b=2): policy deterministic requires the contract, and this reduction would fall through to PyTorch: torch _NormP(2) -> R over (a): _NormP(2) has its own arithmetic; redistribute to Replicate on every axis at once, without another sum, use plain Partial, or pass strict=False
MP701: (_NormP(2), R) -> (S(0), R) on (a=2, b=2): policy deterministic requires the contract, and this reduction would fall through to PyTorch: torch _NormP(2) -> S(0) over (a): _NormP(2) has its own arithmetic; redistribute to Replicate on every axis at once, without another sum, use plain Partial, or pass strict=False""",
        )


def test_contract_and_policy_reductions_are_accepted() -> None:
    """Reductions as exact as the contract, or falling through to PyTorch by the policy."""

    def ranks(rank: int) -> list[str]:
        mesh = mesh_of_four()
        meshplan.clear_report()
        with meshplan.installed(strict=True):
            # At most one summand of an embedding is not zero.
            weights = distribute_tensor(torch.arange(16.0).view(8, 2), mesh, (S(0), R))
            places = distribute_tensor(torch.tensor([0, 3, 5, 7]), mesh, (R, R))
            rows = nn.functional.embedding(places, weights).full_tensor()
            assert rows[:, 0].tolist() == [0.0, 6.0, 10.0, 14.0]
            # Equal norms.
            norm = torch.linalg.vector_norm(distribute_tensor(torch.ones(8), mesh, (S(0), S(0))))
            assert norm.full_tensor().item() == pytest.approx(8**0.5)  # type: ignore[attr-defined]
            from_local(torch.ones(2, 2), (S(0), S(0))).full_tensor()
            from_local(torch.ones(4, dtype=torch.complex64), (P, P)).full_tensor()
            from_local(torch.ones(0), (P, P)).full_tensor()
        with meshplan.installed(strict=True, policy="fast"):
            from_local(torch.ones(4), (P, P)).full_tensor()
            from_local(torch.ones(4), (P, R)).redistribute(mesh, (S(0), R))
            from_local(torch.ones(4), (Mine("sum"), R)).full_tensor()
            from_local(torch.ones(4, dtype=torch.bool), [Partial("max")] * 2).full_tensor()
        with meshplan.installed(strict=True), meshplan.policy("fast"):
            from_local(torch.ones(4), (P, P)).full_tensor()
        assert not meshplan.report().fallbacks
        return [entry["ran"] for entry in meshplan.report().entries]

    ran = run_ranks(ranks, 4)[0]
    assert {"one_shot", "native", "torch"} == set(ran)


def test_unpinned_reduce_scatters_are_refused() -> None:
    """Refused, with the reason."""

    def ranks(rank: int) -> None:
        mesh = mesh_of_four()
        d = from_local(torch.ones(4), (P, R))

        def scattered() -> None:
            d.redistribute(mesh, (S(0), R))

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_ALGO", "allreduce:tree")
            # The backend is gloo.
            with meshplan.installed(policy="fast"):
                scattered()
            patch.setattr(_routes, "_reduces_over_nccl", lambda mesh: True)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("c", "d"))
            d = DTensor.from_local(torch.ones(4), mesh, (P, R), run_check=False)
            with meshplan.installed(policy="fast"):
                for _ in range(2):
                    with Issued() as sent, pytest.raises(PolicyError, match="NCCL_ALGO"):
                        scattered()
                    assert sent.total == 0
                d.redistribute(mesh, (R, R))
            # The contract does not use it.
            with meshplan.installed():
                scattered()
            patch.setenv("NCCL_ALGO", "ring,tree;allreduce:tree")
            with meshplan.installed(policy="fast"):
                scattered()

    run_ranks(ranks, 4)


@pytest.mark.parametrize(
    ("device", "backend", "found"),
    [
        ("cuda", "cuda:nccl", True),
        ("cuda", "cpu:gloo,cuda:nccl", True),
        ("cpu", "cpu:gloo,cuda:nccl", False),
        ("cuda", "cuda:gloo", False),
    ],
)
def test_nccl_backend_of_a_mesh_is_detected(
    device: str, backend: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mesh:
        device_type = device

        def get_coordinate(self) -> list[int]:
            return [0]

        def get_group(self, axis: int) -> int:
            return axis

    monkeypatch.setattr(_routes.c10d, "get_backend_config", lambda group: backend)
    assert _routes._reduces_over_nccl(Mesh()) is found  # type: ignore[arg-type]
    monkeypatch.setattr(Mesh, "get_coordinate", lambda self: None)
    assert _routes._reduces_over_nccl(Mesh()) is False  # type: ignore[arg-type]
