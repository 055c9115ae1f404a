"""Reductions that ``install`` does not reach: one warning that names the backend, or an error."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan._observing import OBSERVING
from meshplan._torch import c10d_operators
from meshplan.dtensor import UncoveredReductionWarning, _install
from meshplan.errors import FallbackRefusedError
from tests.processes import common_result, run_ranks, warm_compiler

pytestmark = pytest.mark.processes


def warned(function: Callable[[], object]) -> list[str]:
    """The warnings of ``function``, as in a process that has had none."""
    _install._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    kinds = (one for one in found if one.category is UncoveredReductionWarning)
    return [without_lines(one.message) for one in kinds]


def without_lines(message: object) -> str:
    return re.sub(r":\d+ ", " ", str(message))


def refused(function: Callable[[], object]) -> str:
    """The error under ``strict``; no reduction was sent before it."""
    with meshplan.installed(strict=True), meshplan.coverage() as sent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FallbackRefusedError) as caught:
            function()
    assert not [row for step in sent.steps for row in step.rows if row["kind"] == "outside"]
    return without_lines(caught.value)


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Sum())


def sharded(mesh: DeviceMesh, **options: Any) -> Any:
    model = layers()
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model: nn.Module) -> None:
    model(torch.randn(2, 4)).sum().backward()


class TestFSDPMessages(TestCase):
    maxDiff = None

    def test_messages(self) -> None:
        def run(rank: int) -> list[str]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
            flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
            replicas = layers()
            replicate(replicas, mesh=flat)
            said = []
            # Wrapped before and after install.
            model = sharded(mesh)
            with meshplan.installed():
                for one in (model, sharded(flat), replicas):
                    (text,) = warned(lambda one=one: step(one))
                    said.append(text)
            said.append(refused(lambda: step(sharded(mesh))))
            return said

        found = run_ranks(run, 4)
        assert all(one == found[0] for one in found)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
meshplan: tests/test_uncovered.py step (backward, FSDP2): reduce_scatter avg over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only
meshplan: tests/test_uncovered.py step (backward, FSDP2): reduce_scatter avg over gloo, 4 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only
meshplan: tests/test_uncovered.py step (backward, FSDP2): all_reduce avg over gloo, 4 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only
MP701: tests/test_uncovered.py step (backward, FSDP2): reduce_scatter avg over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only; or pass strict=False to it""",
        )


def test_fsdp_warns_once_when_it_reduces() -> None:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        ones = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ddp", "fsdp"))
        names = ("replicas", "shards")
        covered = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=names, backend_override=dict.fromkeys(names, "meshplan")
        )
        model = sharded(mesh)
        assert warned(lambda: step(model)) == []
        with meshplan.installed():
            assert len(warned(lambda: [step(model) for _ in range(3)])) == 1
            # Once for each process, also where meshplan is installed again.
            with meshplan.installed(debug=True), warnings.catch_warnings():
                warnings.simplefilter("error")
                step(model)
            model.set_requires_gradient_sync(False)
            assert warned(lambda: step(model)) == []
            model.set_requires_gradient_sync(True)
            assert len(warned(lambda: step(model))) == 1
            frozen = sharded(mesh)
            for parameter in frozen.parameters():
                parameter.requires_grad_(False)

            def without_gradients() -> None:
                x = torch.randn(2, 4, requires_grad=True)
                frozen(x).sum().backward()

            assert warned(without_gradients) == []
            assert warned(lambda: step(sharded(ones["fsdp"]))) == []
            with meshplan.policy("fast"):
                assert warned(lambda: step(model)) == []
        with meshplan.installed(strict=True, policy="fast"):
            step(sharded(mesh))
            # No operator is looked at, of which each would take tens of microseconds.
            assert c10d_operators._watch is None
            with meshplan.installed(strict=True):
                assert c10d_operators._watch is not None
            assert c10d_operators._watch is None
            # Until a block requests the contract.
            with (
                meshplan.policy("deterministic"),
                pytest.raises(FallbackRefusedError, match="reduce_scatter avg over gloo"),
            ):
                step(sharded(mesh))
        with meshplan.installed(path="native"):
            assert warned(lambda: step(sharded(mesh))) == []
        with meshplan.installed(strict=True):
            # One module over another backend is enough.
            step(sharded(covered))
            half = layers()
            fully_shard(half[0], mesh=covered)
            fully_shard(half[1], mesh=mesh)
            with pytest.raises(FallbackRefusedError, match="reduce_scatter avg over gloo, 2 ranks"):
                step(half)

    run_ranks(run, 4)


class TestDDPMessages(TestCase):
    maxDiff = None

    def test_messages(self) -> None:
        def run(rank: int) -> list[str]:
            model = DistributedDataParallel(layers())
            hooked = DistributedDataParallel(layers())
            hooked.register_comm_hook(None, allreduce_hook)
            said = []
            with meshplan.installed():
                for one in (model, hooked):
                    (text,) = warned(lambda one=one: step(one))
                    said.append(text)
            said.append(refused(lambda: step(model)))
            return said

        self.assertExpectedInline(
            "\n".join(common_result(run, 2)),
            """\
meshplan: tests/test_uncovered.py step (backward, C++, such as DDP's reducer): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only
meshplan: tests/test_uncovered.py step (backward, DDP hook): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only
MP701: tests/test_uncovered.py step (backward, C++, such as DDP's reducer): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"): meshplan.install() covers redistributions of DTensors only; or pass strict=False to it""",
        )


def test_ddp_warns_once_when_it_reduces() -> None:
    def run(rank: int) -> None:
        alone = [dist.new_group([r]) for r in range(2)][rank]
        model = DistributedDataParallel(layers())
        single = DistributedDataParallel(layers(), process_group=alone)
        assert warned(lambda: step(model)) == []

        def without_gradients() -> None:
            with torch.no_grad():
                model(torch.randn(2, 4))

        with meshplan.installed():
            assert len(warned(lambda: [step(model) for _ in range(3)])) == 1
            assert warned(without_gradients) == []
            with model.no_sync():
                assert warned(lambda: step(model)) == []
            assert len(warned(lambda: step(model))) == 1
            assert warned(lambda: step(single)) == []
            with meshplan.policy("fast"):
                assert warned(lambda: step(model)) == []

        with meshplan.installed(strict=True):
            step(
                DistributedDataParallel(layers(), process_group=dist.new_group(backend="meshplan"))
            )

    run_ranks(run, 2)


def test_compiled_ddp_warns() -> None:
    def run(rank: int) -> None:
        model = DistributedDataParallel(layers())
        compiled = torch.compile(model, backend="aot_eager")
        covered = DistributedDataParallel(
            layers(), process_group=dist.new_group(backend="meshplan")
        )
        with meshplan.installed():
            assert len(warned(lambda: step(compiled))) == 1
            assert warned(lambda: step(torch.compile(covered, backend="aot_eager"))) == []
        with meshplan.installed(strict=True), warnings.catch_warnings():
            # Dynamo reads the gradient of a tensor that has none.
            warnings.simplefilter("ignore")
            with pytest.raises(FallbackRefusedError):
                step(compiled)

    warm_compiler()
    run_ranks(run, 2)


def test_reductions_are_followed_while_installed() -> None:
    """And by whoever counts before, meanwhile and after."""
    before = {name: vars(kind).get("allreduce") for name, kind in of_python().items()}

    def followed() -> bool:
        return c10d_operators._watch is not None

    with meshplan.installed(), meshplan.installed(strict=True):
        assert followed()
        assert OBSERVING.observer is None
        with meshplan.coverage() as counted:
            assert OBSERVING.observer is not None
            meshplan.uninstall()
            assert followed()
        assert counted.steps
        assert not followed()
    assert not followed()
    assert before == {name: vars(kind).get("allreduce") for name, kind in of_python().items()}


def of_python() -> dict[str, type]:
    return {kind.__name__: kind for kind in dist.ProcessGroup.__subclasses__()}


def test_other_reductions_are_not_reported() -> None:
    """Those of the job itself, of other dtypes, of DTensors, and of dtypes without a contract."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        ours = dist.new_group(backend="meshplan")
        model = DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64), process_group=ours)
        with meshplan.installed(strict=True):
            dist.all_reduce(torch.ones(2))
            dist.reduce(torch.ones(2), 0)
            DTensor.from_local(torch.ones(2), mesh, [Partial()]).full_tensor()
            model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()

    run_ranks(run, 2)
