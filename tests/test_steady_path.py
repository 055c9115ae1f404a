"""The modules that a repeated reduction uses, and the lifetime of its cached decisions."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as rd
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan import deterministic_all_reduce, deterministic_reduce_scatter
from meshplan._observing import OBSERVING
from meshplan.collectives import _reduction, functional
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.dtensor import _seam
from meshplan.dtensor._partial import THREAD
from meshplan.errors import GroupAgreementError
from meshplan.execute import _run
from tests.backend.test_reductions import bits, summand
from tests.backend.test_steady import Operators
from tests.processes import run_ranks
from tests.traffic import Issued

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard
PACKAGE = Path(meshplan.__file__).parent
MAX_MODULES = 13
# Of these, as many may be above the package that runs a step.
ABOVE = ("collectives", "dtensor", "flatten")
MAX_ABOVE = 5


def modules(call: Callable[[], object]) -> list[str]:
    """Modules of meshplan with a function that a repeated call enters, by whomever it is called."""
    for _ in range(3):
        call()
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    # Python may run a collection at any allocation, and with it finalizers of meshplan for objects
    # that earlier tests have left behind.
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return sorted(entered)


@contextmanager
def fake(world: int = 4) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def redistribution(mesh: DeviceMesh, src: tuple[Placement, ...] = (P, P)) -> Callable[[], DTensor]:
    d = DTensor.from_local(torch.ones(8, 8), mesh, src, run_check=False)
    return lambda: d.redistribute(mesh, (R, R))


def flows(path: str) -> dict[str, list[str]]:
    """The two flows on the groups that there are."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = torch.ones(64)
    with meshplan.installed(path=path):  # type: ignore[arg-type]
        reduced = modules(redistribution(mesh))
    return {
        "redistribution": reduced,
        "all-reduce": modules(lambda: deterministic_all_reduce(tensor, path=path)),
    }


def on_ranks(path: str) -> dict[str, list[str]]:
    return run_ranks(lambda rank: flows(path), 4)[0]


def on_fake() -> dict[str, list[str]]:
    with fake():
        return flows("exchange")


WAYS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "fake": on_fake,
    "gloo": lambda: on_ranks("exchange"),
    "shared memory": lambda: on_ranks("auto"),
}


@pytest.mark.parametrize("way", WAYS)
def test_cached_reduction_uses_few_modules(way: str) -> None:
    """Few in all, and few of them before the step."""
    for flow, found in WAYS[way]().items():
        assert len(found) <= MAX_MODULES, f"{flow}, {len(found)} modules: {', '.join(found)}"
        above = [name for name in found if name.split("/")[0] in ABOVE]
        assert 0 < len(above) <= MAX_ABOVE, f"{flow}, {len(above)} modules: {', '.join(above)}"


@contextmanager
def decided() -> Iterator[list[object]]:
    """One entry for each redistribution that is decided, and not found."""
    found: list[object] = []
    # Asked once in each decision; a wrapper around the decision would stand between it and torch.
    own = _seam._is_untouched

    def noted(*given: object) -> object:
        found.append(given)
        return own(*given)  # type: ignore[arg-type]

    with mock.patch.object(_seam, "_is_untouched", noted):
        yield found


def ran() -> set[str]:
    found = {entry["ran"] for entry in meshplan.report().entries}
    meshplan.clear_report()
    return found


def test_decisions_follow_the_installed_configuration() -> None:
    with fake():
        call = redistribution(init_device_mesh("cpu", (2, 2)))
        with meshplan.installed():
            # From then on it is known where the ranks sit.
            call()
        meshplan.clear_report()
        with decided() as made:
            with meshplan.installed(path="exchange"):
                call()
                call()
                assert (ran(), len(made)) == ({"exchange"}, 1)
                with meshplan.policy("fast"):
                    call()
                    call()
                    assert (ran(), len(made)) == ({"native"}, 2)
                call()
                assert ran() == {"exchange"}
                meshplan.install(path="reference")
                call()
                assert ran() == {"reference"}
            call()
            assert ran() == set()
            with meshplan.installed(contract=Contract("rank"), path="exchange"):
                call()
                (entry,) = meshplan.report().entries
                assert entry["contract"] == "v1/rank/wide/once"
        meshplan.clear_report()


def test_decisions_do_not_outlive_the_default_group() -> None:
    """A mesh may: torch finds its groups by their names, which the next default group has again."""
    with fake():
        mesh = init_device_mesh("cpu", (2, 2))
    call = redistribution(mesh)
    with meshplan.installed(), decided() as made:
        for _ in range(2):
            with fake():
                init_device_mesh("cpu", (2, 2))
                before = len(made)
                call()
                assert len(made) == before + 1
                call()
                settled = len(made)
                call()
                assert len(made) == settled


def test_later_flattened_mesh_is_noticed() -> None:
    """Torch's merges follow, and those that would corrupt data are still not made."""
    with fake():
        for shape, merged in (((8, 8), 1), ((6, 8), 2)):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            local = torch.ones(shape[0] // 2 // 2 + shape[0] // 2 % 2, shape[1])
            d = DTensor.from_local(
                local, mesh, (S(0), S(0)), run_check=False, shape=torch.Size(shape), stride=(8, 1)
            )
            with (
                meshplan.installed(),
                mock.patch.object(
                    Shard,
                    "_to_replicate_tensor",
                    autospec=True,
                    side_effect=Shard._to_replicate_tensor,
                ) as gathers,
            ):
                for expected in (2, merged):
                    for _ in range(2):
                        gathers.reset_mock()
                        d.redistribute(mesh, (R, R))
                        assert gathers.call_count == expected
                    if expected == 2 and "flat" not in mesh._get_root_mesh()._flatten_mapping:
                        mesh["a", "b"]._flatten("flat")


def test_nothing_keeps_a_mesh_alive() -> None:
    with fake(), meshplan.installed():
        kept = THREAD.state.decisions
        kept.clear()
        for _ in range(3):
            mesh = init_device_mesh("cpu", (2, 2))
            for src in ((P, P), (P, R), (S(0), R)):
                redistribution(mesh, src)()
        assert kept
        del mesh
        # Torch remembers placements, and with them meshes.
        for remembered in vars(rd).values():
            getattr(remembered, "cache_clear", int)()
        rd._planner_cache.clear()
        gc.collect()
        assert not kept


def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_seam, "MAX_DECISIONS_PER_THREAD", 3)
    with fake(), meshplan.installed():
        mesh = init_device_mesh("cpu", (2, 2))
        for length in range(1, 9):
            d = DTensor.from_local(torch.ones(length), mesh, (P, P), run_check=False)
            d.redistribute(mesh, (R, R))
            assert len(THREAD.state.decisions) <= 3


def test_each_thread_keeps_its_own_decisions() -> None:
    with fake(), meshplan.installed():
        call = redistribution(init_device_mesh("cpu", (2, 2)))
        for _ in range(2):
            call()
        found: list[int] = []

        def other() -> None:
            found.append(len(THREAD.state.decisions))
            call()
            found.append(len(THREAD.state.decisions))

        with decided() as made:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            call()
        assert (found, len(made)) == ([0, 1], 1)


def test_decisions_depend_on_the_placements() -> None:
    """The same list for another source is decided again."""
    with fake(), meshplan.installed():
        mesh = init_device_mesh("cpu", (2, 2, 1))
        gathers = [
            rd._TransformInfo(mesh_dim=axis, src_dst_placements=(S(0), R), logical_shape=[8, 8])
            for axis in (1, 0)
        ]
        for last in (R, P):
            steps = rd._optimize_transform_infos(gathers, mesh, (S(0), S(0), last), (R, R, last))
            assert [step.src_dst_placements for step in steps] == [(S(0), R), (S(0), R)]
            (kept,) = (one for one in THREAD.state.decisions.values() if one.infos is gathers)
            assert kept.src == (S(0), S(0), last)


def test_nothing_to_plan_depends_on_the_steps_alone() -> None:
    with fake(), meshplan.installed():
        mesh = init_device_mesh("cpu", (2, 2))
        gather = [rd._TransformInfo(mesh_dim=0, src_dst_placements=(S(0), R), logical_shape=[8, 8])]
        before = meshplan.report().untouched
        with decided() as made:
            for last in (R, P):
                assert rd._optimize_transform_infos(gather, mesh, (S(0), last), (R, last)) is gather
        assert len(made) == 1
        assert meshplan.report().untouched == before + 2


def test_torch_switch_disables_its_own_merges_only() -> None:
    """Planned reductions stay under the contract, also those that are found."""

    def collectives() -> list[int]:
        with Issued() as seen:
            d.redistribute(mesh, (R, R, R))
        return [
            sum(n for op, n in seen.counts.items() if kind in op) for kind in ("gather", "to_all")
        ]

    with fake(8), meshplan.installed(path="exchange"):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten()
        d = DTensor.from_local(torch.ones(8, 8), mesh, (P, S(0), S(0)), run_check=False)
        found = [collectives(), collectives()]
        with rd.disable_redistribute_transform_optimization():
            found += [collectives(), collectives()]
        found.append(collectives())
        entries = meshplan.report().entries
    # The reduction is an all-to-all and a gather; the shards are one gather, or two.
    assert found == [[2, 1], [2, 1], [3, 1], [3, 1], [2, 1]]
    assert {one["contract"] for one in entries if one["ran"] != "torch"} == {Contract().id}
    assert not any(one["fallback"] for one in entries)


def test_collectives_vote_again_after_a_shutdown() -> None:
    """All ranks vote, also a rank that had found the group before: otherwise the others wait."""

    def ranks(rank: int) -> tuple[str, list[float]]:
        config: dict[str, Any] = {"path": "exchange", "contract": Contract()}
        for _ in range(2):
            deterministic_all_reduce(torch.ones(3), **config)
        meshplan.shutdown()
        other = {**config, "contract": Contract("rank")}
        with pytest.raises(GroupAgreementError) as caught:
            deterministic_all_reduce(torch.ones(3), **(other if rank else config))
        tensor = torch.ones(3)
        deterministic_all_reduce(tensor, **config)
        return str(caught.value), tensor.tolist()

    for message, value in run_ranks(ranks, 2):
        assert "v1/rank" in message
        assert value == [2.0] * 3


def test_redistributions_vote_again_after_a_shutdown() -> None:
    def ranks(rank: int) -> str:
        call = redistribution(init_device_mesh("cpu", (2, 1)))
        with meshplan.installed(path="exchange"):
            call()
            call()
            meshplan.shutdown()
            if rank:
                meshplan.install(path="exchange", contract=Contract("rank"))
            with pytest.raises(GroupAgreementError) as caught:
                call()
        return str(caught.value)

    assert all("v1/rank" in message for message in run_ranks(ranks, 2))


def test_steps_of_collectives_are_bounded_and_go_with_their_group() -> None:
    with mock.patch.object(_reduction, "MAX_STEPS_PER_GROUP", 2):
        gc.collect()
        before = len(_reduction._BOUND)
        with fake():
            for op in ("sum", "avg", "max", "min"):
                deterministic_all_reduce(torch.ones(3), path="exchange", op=op)  # type: ignore[arg-type]
            steps = _reduction._BOUND[dist.group.WORLD]
            assert len(steps) == 2
        gc.collect()
        assert len(_reduction._BOUND) == before


def count_ordinary() -> Any:
    """A mock around what runs a reduction by more than the kernel's call."""
    return mock.patch.object(_run, "_reduced", side_effect=_run._reduced)


def repeat_each_way(rank: int) -> dict[str, int]:
    """How many of three repeated calls of each way ran the ordinary way; -1 for other bits."""
    mesh, group = init_device_mesh("cpu", (2,)), dist.new_group(backend="meshplan")
    leaves = [summand(place, torch.float32, 60).view(10, 6) for place in range(2)]
    whole, mine = reduce_leaves(leaves, "sum", [2]), leaves[rank]
    flat, block, out = mine.reshape(-1), whole.chunk(2)[rank], torch.empty(10, 6)
    # Each written tensor ends in the middle of a line, at an address that is only aligned to it.
    inside = torch.empty(61)[1:].view(10, 6)
    scatter, reduced = deterministic_reduce_scatter, [R]

    def in_place(x: torch.Tensor, run: Callable[[torch.Tensor], object]) -> torch.Tensor:
        run(x.copy_(mine))
        return x

    def redistribute() -> torch.Tensor:
        d = DTensor.from_local(mine, mesh, [P], run_check=False)
        return d.redistribute(mesh, reduced).to_local()

    wide = torch.empty(10, 12)[:, ::2]
    ways: dict[str, tuple[Callable[[], Any], torch.Tensor]] = {
        "in place": (lambda: in_place(inside, deterministic_all_reduce), whole),
        "out": (lambda: deterministic_all_reduce(mine, out=out), whole),
        "out is the block": (lambda: scatter(mine, out=out[:5]), block),
        "async": (lambda: deterministic_all_reduce(mine.clone(), async_op=True).result(), whole),
        "scatter": (lambda: scatter(mine), block),
        "flat scatter": (lambda: scatter(flat), block.reshape(-1)),
        "uneven": (lambda: scatter(mine, sizes=[3, 7]), whole.split([3, 7])[rank]),
        "empty": (lambda: scatter(mine, sizes=[10, 0]), whole.split([10, 0])[rank]),
        "columns": (lambda: scatter(mine, dim=1), whole.chunk(2, 1)[rank]),
        "strided": (lambda: in_place(wide, deterministic_all_reduce), whole),
        "gradient": (lambda: functional.all_reduce(mine.clone().requires_grad_()), whole),
        "redistribution": (redistribute, whole),
        "backend": (lambda: in_place(inside, lambda x: dist.all_reduce(x, group=group)), whole),
    }
    found = {}
    with meshplan.installed():
        for way, (call, wanted) in ways.items():
            # The group connects, and the kernel's call is prepared.
            call()
            with count_ordinary() as ordinary:
                same = [bits(call()) for _ in range(3)] == [bits(wanted)] * 3
            found[way] = ordinary.call_count if same else -1
    return found


def test_repeated_calls_of_each_way_have_the_bits_and_run_the_kernel_alone() -> None:
    for found in run_ranks(repeat_each_way, 2):
        # Parts of columns are no blocks of the message, and strided tensors no plain memory.
        assert found == {**dict.fromkeys(found, 0), "columns": 3, "strided": 3}


def watch_calls(rank: int) -> dict[str, Any]:
    """Which calls run the ordinary way, and what their watchers and callers see."""
    x, plain = torch.ones(5), torch.ones(5)
    for _ in range(2):
        deterministic_all_reduce(x)
    kept: list[list[float]] = []
    seen = Operators()

    def keep(_: object, __: object, summand: torch.Tensor, ___: object) -> None:
        kept.append(summand.tolist())

    profile = torch.profiler.profile(acc_events=True)
    watchers = {
        "mode": seen,
        "profiler": profile,
        "keep": mock.patch.object(OBSERVING, "keep", keep),
    }
    found: dict[str, Any] = {}
    for name, watcher in watchers.items():
        with count_ordinary() as ordinary, watcher:
            deterministic_all_reduce(plain, out=x)
        found[name] = ordinary.call_count, x.tolist()
    found["operators"] = any("peer_reduce" in name for name in seen.names)
    found["spans"] = sum(event.name.startswith("meshplan::all_red") for event in profile.events())
    found["kept"] = kept
    torch.set_flush_denormal(True)
    with pytest.raises(meshplan.MeshplanError) as caught:
        deterministic_all_reduce(x)
    torch.set_flush_denormal(False)
    found["flushing"] = caught.value.code
    meshplan.clear_report()
    counted = meshplan.coverage()
    before = x._version
    with count_ordinary() as ordinary, counted:
        deterministic_all_reduce(x)
    (entry,) = meshplan.report().entries
    found["counted"] = (
        ordinary.call_count,
        entry["count"],
        counted.steps[0].to_scalars()["meshplan/contract/count"],
        x._version - before,
    )
    scale = torch.func.grad(
        lambda p: (p * deterministic_all_reduce(plain, out=torch.ones(5))).sum()
    )
    found["transformed"] = scale(torch.ones(5)).tolist()
    with torch.inference_mode():
        found["inference"] = deterministic_all_reduce(torch.ones(5)).is_inference()
    # A call that all ranks refuse leaves the tensor as it is, and the group usable.
    for numel in (3, 4, 3, 4):
        deterministic_all_reduce(torch.ones(numel))
    y = torch.full((3 + rank,), 1.5)
    with count_ordinary() as ordinary, pytest.raises(meshplan.MeshplanError) as caught:
        deterministic_all_reduce(y)
    found["differing"] = caught.value.code, ordinary.call_count, set(y.tolist())
    found["next"] = deterministic_all_reduce(plain).tolist()
    return found


def test_watched_calls_run_operators_and_checks_stay() -> None:
    ordinary = 1, [2.0] * 5
    expected = {
        "mode": ordinary,
        "profiler": ordinary,
        "keep": ordinary,
        "operators": True,
        "spans": 1,
        "kept": [[1.0] * 5],
        "flushing": "MP413",
        "counted": (0, 1, 1, 1),
        "transformed": [2.0] * 5,
        "inference": True,
        "differing": ("MP703", 0, {1.5}),
        "next": [2.0] * 5,
    }
    assert run_ranks(watch_calls, 2) == [expected] * 2
