"""A planned reduction that torch does not run is an error, and nothing else is."""

from __future__ import annotations

import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as rd
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._debug_mode import DebugMode

import meshplan
from meshplan.dtensor import _partial
from meshplan.errors import PlanNotRunError
from meshplan.execute import BoundReduction

P, R = Partial(), Replicate()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with meshplan.installed():
            yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        _partial.THREAD.state.waiting = None
    finally:
        dist.destroy_process_group()


def summand(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.ones(4), mesh, [P, P], run_check=False)


def total(mesh: DeviceMesh) -> Tensor:
    return summand(mesh).redistribute(mesh, [R, R]).to_local()


def executor(*pairs: tuple[str, str]) -> Any:
    """Torch's executor from changed source, over the globals of its module."""
    source = inspect.getsource(rd.redistribute_local_tensor)
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    before = rd.redistribute_local_tensor
    exec(source, vars(rd))
    changed, rd.redistribute_local_tensor = rd.redistribute_local_tensor, before
    return mock.patch.object(rd, "redistribute_local_tensor", changed)


_REDUCE = "partial_spec._reduce_value(\n                        local_tensor, mesh_to_use, i\n"
_SKIPS = (_REDUCE, "(\n                        local_tensor\n")
_IGNORES = ("in optimized_transform_infos:", "in transform_infos:")


class TestMessages(TestCase):
    maxDiff = None

    def setUp(self) -> None:
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)

    def test_executor_skipping_a_reduction_is_an_error(self) -> None:
        with meshplan.installed():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            total(mesh)
            with executor(_SKIPS), pytest.raises(PlanNotRunError) as caught:
                total(mesh)
            # It was raised where it happened, and not again.
            total(mesh)
        self.assertExpectedInline(
            str(caught.value),
            """MP603: torch was given the plan of (P(sum), P(sum)) -> (R, R) on (a=2, b=2) and has not run its reduction. Do not use the result, which is not reduced; undo whatever replaced torch.distributed.tensor._redistribute.redistribute_local_tensor since meshplan.install, or use a tested torch version""",
        )


def test_ignored_plan_is_found_at_the_next_entry(mesh: DeviceMesh) -> None:
    with executor(_IGNORES):
        total(mesh)
        with pytest.raises(PlanNotRunError, match="has not run its reduction"):
            total(mesh)
    total(mesh)
    total(mesh)


def test_the_next_entry_need_not_reduce(mesh: DeviceMesh) -> None:
    with executor(_IGNORES):
        total(mesh)
    whole = DTensor.from_local(torch.ones(4), mesh, [R, R], run_check=False)
    with pytest.raises(PlanNotRunError):
        whole.redistribute(mesh, [Shard(0), R])


def test_other_threads_are_not_blamed(mesh: DeviceMesh) -> None:
    with executor(_IGNORES):
        total(mesh)
    wrong: list[BaseException] = []

    def other() -> None:
        try:
            total(mesh)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert wrong == []
    with pytest.raises(PlanNotRunError):
        total(mesh)


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("before the loop", "debug_mode = get_active_debug_mode()"),
        ("in the loop", "num_chunks = mesh_to_use.size(mesh_dim=i)"),
        ("after the loop", "return new_local_tensor\n"),
    ],
)
def test_raising_executor_leaves_nothing_behind(mesh: DeviceMesh, name: str, old: str) -> None:
    rd._Broken = Broken  # type: ignore[attr-defined]
    broken = (old, "raise _Broken()\n") if name == "after the loop" else (old, "raise _Broken()")
    with executor(broken):
        for _ in range(3):
            with pytest.raises(Broken):
                total(mesh)
    total(mesh)
    total(mesh)


def test_raising_reduction_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    with mock.patch.object(BoundReduction, "start", side_effect=Broken):
        for _ in range(3):
            with pytest.raises(Broken):
                total(mesh)
            # The error may be of this rank alone, so the group has stopped.
            meshplan.shutdown()
    total(mesh)


def test_raising_step_leaves_nothing_behind(mesh: DeviceMesh) -> None:
    with (
        meshplan.installed(policy="fast"),
        mock.patch.object(Shard, "_to_replicate_tensor", side_effect=Broken),
    ):
        d = DTensor.from_local(torch.ones(4), mesh, [Shard(0), P], run_check=False)
        for _ in range(3):
            with pytest.raises(Broken):
                d.redistribute(mesh, [R, R])
    total(mesh)


def test_plan_made_for_inspection_is_not_expected_to_run(mesh: DeviceMesh) -> None:
    d = summand(mesh)
    target = d.redistribute(mesh, [R, R])._spec
    infos = rd._gen_transform_infos(d._spec, target, None)
    steps = rd._optimize_transform_infos(infos, mesh, d._spec.placements, target.placements)
    assert type(steps) is list
    assert redistribute_cost(d._spec, target) > 0
    total(mesh)


def test_debug_mode_runs_the_planned_steps(mesh: DeviceMesh) -> None:
    with DebugMode() as debug:
        total(mesh)
        total(mesh)
    assert "redistribute_input" in debug.debug_string() or "Planned" in debug.debug_string()
    with (
        mock.patch.object(
            rd.DTensorRedistributePlanner, "stringify_transform_infos", side_effect=Broken
        ),
        DebugMode(),
    ):
        for _ in range(2):
            with pytest.raises(Broken):
                total(mesh)
    total(mesh)


def test_nested_redistributions_are_tracked(mesh: DeviceMesh) -> None:
    """Before the outer reduction, in it and after it."""
    inner: list[float] = []
    own = BoundReduction.start

    def nested(*given: Any, **options: Any) -> Tensor:
        if len(inner) < 3:
            inner.append(0.0)
            total(mesh)
        return own(*given, **options)

    with mock.patch.object(BoundReduction, "start", nested):
        total(mesh)
    assert len(inner) == 3
    deeper = [True]

    def before_the_loop() -> None:
        if deeper.pop():
            deeper.append(False)
            total(mesh)
        deeper.append(True)

    rd._nested = before_the_loop  # type: ignore[attr-defined]
    with executor(("debug_mode = get", "_nested(); debug_mode = get")):
        total(mesh)
        total(mesh)


def test_traced_plans_are_run_when_they_are_traced(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: x.redistribute(mesh, [R, R]).to_local() * 2,
                                 backend="aot_eager")  # fmt: skip
        with torch.no_grad():
            for _ in range(2):
                compiled(summand(mesh))
                total(mesh)
    with torch._subclasses.FakeTensorMode():
        total(mesh)
    total(mesh)


def test_redistributions_leave_no_references(mesh: DeviceMesh) -> None:
    local = torch.ones(4)
    kept = weakref.ref(local)
    DTensor.from_local(local, mesh, [P, P], run_check=False).redistribute(mesh, [R, R])
    rd._Broken = Broken  # type: ignore[attr-defined]
    loop = "num_chunks = mesh_to_use.size(mesh_dim=i)"
    with executor((loop, "raise _Broken()")), pytest.raises(Broken):
        DTensor.from_local(local, mesh, [P, P], run_check=False).redistribute(mesh, [R, R])
    del local
    gc.collect()
    assert kept() is None
