"""The table of paths, the choice among them, and a report that is observed."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import meshplan
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.errors import PolicyError, SignatureMismatchError
from meshplan.execute import (
    PATHS,
    Purpose,
    StepGroups,
    Wire,
    clear_report,
    report,
    run_reduction,
)
from meshplan.execute._gloo import inline_bytes
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import Outcome, _exchange, get_path
from meshplan.flatten import registry
from meshplan.layout import Layout
from meshplan.planner import (
    Problem,
    Reach,
    Step,
    find_fastest,
)
from meshplan.record import Record
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology._links import CPU_LINKS
from tests.inputs import draw_leaves
from tests.processes import run_ranks
from tests.steps import make_step

pytestmark = pytest.mark.processes

P, R, S = Partial(), Replicate(), Shard
PURPOSE = Purpose("asked", "planned", "world")


def step(ranks: int, path: str = "exchange", **more: Any) -> Step:
    return make_step(more.pop("sizes", (ranks,)), path=path, **more)


# The group's methods, by the names that the report gives to their collectives.
_METHODS = {"alltoall_base": "all_to_all_single", "allgather": "all_gather_into_tensor"}


class Calls(TorchDispatchMode):
    """The collectives that torch dispatches, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        local = ("wait_tensor", "fold", "_wrap_tensor_autograd")
        if space in ("c10d", "_c10d_functional", "meshplan") and name not in local:
            name = name.rstrip("_")
            self.names.append(_METHODS.get(name, name))
        return func(*args, **(kwargs or {}))


class TestNames(TestCase):
    def test_unknown_path_is_refused(self) -> None:
        messages = []
        for refused in (
            lambda: meshplan.installed(path="star").__enter__(),
            lambda: run_reduction(
                torch.ones(2), step(1), StepGroups(dist.group.WORLD), purpose=PURPOSE, path="star"
            ),
            lambda: get_path("auto"),
            lambda: Problem.of(Layout((2,), ("a",)), ("P",), ("R",), path="star"),
        ):
            dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
            try:
                with pytest.raises(PolicyError) as caught:
                    refused()
            finally:
                dist.destroy_process_group()
            messages.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP402: no path 'star'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'
MP402: no path 'star'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'
MP402: auto stands for a chosen path; pass the name of a path
MP402: unknown contract path 'star'; use 'auto' or 'exchange' or 'reference' or 'halving' or 'integer' or 'integer_checksum'""",
        )


def test_flags_decide_what_graphs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of gloo; over gloo a graph holds the operator that runs any path later."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        groups, wanted = StepGroups(dist.group.WORLD), step(2, contract=Contract("exact"))

        def reasons(path: str, captured: bool) -> str:
            clear_report()
            monkeypatch.setattr("meshplan.execute._run.is_captured", lambda _: captured)
            make_fx(
                lambda t: run_reduction(t, wanted, groups, purpose=PURPOSE, path=path),
                tracing_mode="fake",
            )(torch.ones(4))
            (entry,) = report().entries
            assert entry["traced"]
            return entry["ran"] if not entry["fallback"] else entry["why"]

        assert reasons("integer", False) == "a test; path integer cannot be traced"
        assert reasons("integer", True) == "a test; path integer cannot be captured in a CUDA graph"
        assert reasons("exchange", False) == reasons("exchange", True) == "exchange"
    finally:
        dist.destroy_process_group()


def test_path_without_communication_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is of calls that were made: there is no list that a path could write."""

    def send_nothing(tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        return Outcome(tensor.clone(), wire.log)

    def boast(tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        other = Wire()
        other.log.names.append("all_reduce")
        return Outcome(tensor.clone(), other.log)

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        source = DTensor.from_local(torch.ones(64), mesh, (P,), run_check=False)
        monkeypatch.setattr(_exchange.PATH, "all_reduce", send_nothing)
        with meshplan.installed(path="exchange"), Calls() as calls:
            source.redistribute(mesh, (R,))
        (entry,) = report().entries
        assert entry["sends"] == tuple(calls.names) == ()
        assert entry["why"].endswith("; the path issued nothing")
        assert "ran: exchange (nothing sent)" in str(report())
        monkeypatch.setattr(_exchange.PATH, "all_reduce", boast)
        with (
            meshplan.installed(path="exchange"),
            pytest.raises(AssertionError, match="another list"),
        ):
            source.redistribute(mesh, (R,))

    run_ranks(ranks, 4)


def test_reported_collectives_are_those_torch_dispatches() -> None:
    """Small and large messages, all-reduce and reduce-scatter, flat and in blocks."""
    cut: dict[str, Any] = {"kind": "reduce_scatter"}

    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        group = registry().get(
            mesh, Layout.from_mesh(mesh), (0, 1), token=Record.of(use="test"), peers="always"
        )
        pairs = [mesh.get_group(axis) for axis in (0, 1)]
        flat = StepGroups(group.pg, gather=pairs[1], peers=group.peers)
        alone = StepGroups(group.pg, gather=pairs[1])
        whole = StepGroups(group.pg, peers=group.peers)
        blocks = StepGroups(None, inner=pairs[1], outer=pairs[0])
        sizes: dict[str, Any] = {"sizes": (2, 2)}
        forms: list[tuple[Step, StepGroups]] = [
            (step(4, **sizes), whole),
            (step(4, scatter=((0, 0),), **cut, **sizes), flat),
            (step(4, scatter=((0, 0), (1, 0)), **cut, **sizes), whole),
            (step(4, **sizes), alone),
            (step(4, scatter=((0, 0),), **cut, **sizes), alone),
            (step(4, inner=2, **sizes), blocks),
            (step(4, inner=2, scatter=((0, 0), (1, 0)), **cut, **sizes), blocks),
        ]
        seen = []
        for wanted, groups in forms:
            for path in (one for one in PATHS if one != "integer_checksum"):
                for numel in (8, 300_000):
                    clear_report()
                    with Calls() as calls:
                        result = run_reduction(
                            torch.ones(numel), wanted, groups, purpose=PURPOSE, path=path
                        )
                        torch.ops._c10d_functional.wait_tensor(result)
                    (entry,) = report().entries
                    assert entry["sends"] == tuple(calls.names), (wanted, path, numel)
                    assert calls.names
                    assert result.unique().tolist() == [4.0]
                    seen.append(entry["ran"])
        return seen

    for seen in run_ranks(ranks, 4):
        assert set(seen) == {"one_shot", "two_shot", "exchange", "halving", "reference", "native"}


def small_bytes(ranks: int) -> int:
    """Up to how many bytes ``auto`` takes one all-gather."""
    sizes, reach = range(inline_bytes(ranks) + 1), Reach.unknown((ranks,), CPU_LINKS)
    return bisect_right(sizes, 0, key=lambda n: find_fastest(reach, n, 1, (0, 1), False)[0]) - 1


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_small_messages_take_one_collective(world_size: int) -> None:
    """On both sides of the size that decides, with the same bits."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        limit = small_bytes(world_size) // dtype.itemsize
        for numel in (1, 7, limit - 1, limit, limit + 1, 2 * limit + 3):
            leaves = draw_leaves(world_size, numel, dtype, specials=True)
            cases.append((leaves, numel <= limit, reduce_leaves(leaves, "sum", (world_size,))))

    def ranks(rank: int) -> None:
        groups = StepGroups(dist.group.WORLD)
        for leaves, small, expected in cases:
            clear_report()
            with Calls() as calls:
                found = run_reduction(
                    leaves[rank], step(world_size), groups, purpose=PURPOSE, path="auto"
                )
            (entry,) = report().entries
            assert entry["ran"] == ("reference" if small else "exchange")
            assert not entry["fallback"]
            assert (len(calls.names) == 1) == small
            assert ("one all-gather costs less" in entry["why"]) == small
            assert "not through shared memory: the group has none" in entry["why"]
            assert_bitwise_equal(found, expected, f"{expected.dtype} {expected.numel()}")

    run_ranks(ranks, world_size)


def test_unshared_shards_take_one_collective() -> None:
    """Ranks that share a shard exchange and gather; where none do, there is one collective."""
    leaves = [order_sensitive(24, rank=r, world_size=4).view(6, 4) for r in range(4)]
    whole = reduce_leaves(leaves, "sum", (2, 2))

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for scatter, gather, ran in (
            (((0, 0),), mesh.get_group(1), "reference"),
            (((0, 0), (1, 1)), None, "exchange"),
        ):
            wanted = step(4, kind="reduce_scatter", sizes=(2, 2), scatter=scatter)
            groups = StepGroups(dist.group.WORLD, gather=gather)
            clear_report()
            with Calls() as calls:
                found = run_reduction(leaves[rank], wanted, groups, purpose=PURPOSE, path="auto")
            (entry,) = report().entries
            assert (entry["ran"], calls.names) == (ran, ["all_to_all_single"])
            assert_bitwise_equal(found, select_shard(whole, wanted, rank).contiguous())

    run_ranks(ranks, 4)


def test_sizes_across_the_threshold_are_an_error_at_once() -> None:
    """One brings a message for one collective, the others for two: an error on every rank.

    Graphs that were traced for any size decide when they run, as calls do.
    """
    limit = small_bytes(3) // 4

    def ranks(rank: int) -> list[str]:
        groups, texts = StepGroups(dist.group.WORLD), []

        def reduce(tensor: Tensor) -> Tensor:
            found = run_reduction(tensor, step(3), groups, purpose=PURPOSE, path="auto")
            return torch.ops._c10d_functional.wait_tensor(found)

        graph = make_fx(reduce, tracing_mode="symbolic")(torch.ones(50))
        assert report().entries[-1]["ran"] == "auto"
        sizes = (limit, limit + 1), (limit + 1, limit), (0, 7), (3, 900_000)
        for compiled, odd, (one, others) in itertools.product(((), (0,), (0, 1, 2)), (0, 2), sizes):
            call = graph if rank in compiled else reduce
            with pytest.raises(SignatureMismatchError) as caught:
                call(torch.ones(one if rank == odd else others))
            texts.append(str(caught.value))
            for numel in (limit, limit + 1):
                leaves = draw_leaves(3, numel)
                assert_bitwise_equal(call(leaves[rank]), reduce_leaves(leaves, "sum", (3,)))
        return texts

    found = run_ranks(ranks, 3, collective_timeout=30)
    assert found == [found[0]] * 3
