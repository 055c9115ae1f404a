"""Process groups over real gloo processes: members, their order, and the state after failures."""

from __future__ import annotations

import gc
import re
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.dtensor._config import Config
from meshplan.dtensor._partial import PlannedPartial
from meshplan.errors import GroupAgreementError, GroupStateError
from meshplan.execute import clear_report, report
from meshplan.flatten import Block, Group, GroupRegistry, _group_table, _join, registry
from meshplan.flatten._group_table import GroupKey
from meshplan.layout import Layout
from meshplan.record import Record
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import arrive, patience, run_ranks, wait_for
from tests.steps import make_step

pytestmark = pytest.mark.processes

TOKEN = Record.of(contract="x")


def group(
    mesh: DeviceMesh,
    *axes: int,
    token: Record = TOKEN,
    timeout: float = 200.0,
    block: Block | None = None,
) -> Group:
    return registry().get(
        mesh, Layout.from_mesh(mesh), axes, token=token, timeout=timeout, block=block
    )


def blocks(mesh: DeviceMesh, *axes: int, size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Origin and ranks of this rank's inner and outer group, which work."""
    found = [group(mesh, *axes, block=Block(kind, size)) for kind in ("inner", "outer")]
    for one in found:
        assert total(one) == len(one.ranks)
        # The group's own order, not only that of the look-up.
        assert one.pg.rank() == one.ranks.index(dist.get_rank())
    return [(one.origin, one.ranks) for one in found]


def total(found: Group) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=found.pg)
    return value.item()


def world_group_works() -> bool:
    everyone = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=200))
    value = torch.ones(1)
    dist.all_reduce(value, group=everyone)
    return value.item() == dist.get_world_size()


def error(function: object, *args: object, **options: object) -> str:
    try:
        function(*args, **options)  # type: ignore[operator]
    except meshplan.MeshplanError as found:
        return str(found)
    return ""


class TestMessages(TestCase):
    def test_absent_rank_different_token_and_full_table_are_named(self) -> None:
        def ranks(rank: int) -> tuple[str, str, str]:
            mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("a",))
            with patience(2):
                missing = "" if rank == 1 else error(group, mesh, 0, timeout=1.0)
            dist.barrier()
            token = Record.of(contract="rank" if rank == 2 else "tree")
            differing = error(group, mesh, 0, token=token)
            full = error(
                GroupRegistry(max_groups=0 if rank == 0 else 5).get,
                mesh,
                Layout.from_mesh(mesh),
                (0,),
                token=TOKEN,
                timeout=200.0,
            )
            return missing, differing, full

        found = run_ranks(ranks, 3)
        assert found[0] == found[2]
        assert found[1][1:] == found[0][1:]
        missing, differing, full = found[0]
        self.assertExpectedInline(
            missing,
            """MP501: rank 1 did not reach the first reduction over ranks 2, 0, 1 within 1 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )
        self.assertExpectedInline(
            differing,
            """MP501: rank 2 called the first reduction over ranks 2, 0, 1 with other settings than the others. Different: contract rank (rank 2), tree (ranks 0, 1). No rank started it; pass the same arguments (to meshplan.install, or to the call) on every rank; after meshplan.install call meshplan.shutdown there""",
        )
        self.assertExpectedInline(
            full,
            """MP503: rank 0 cannot join the group of ranks 2, 0, 1: 0 groups exist and the limit is 0; call meshplan.shutdown() between phases that use different meshes""",
        )

    def test_missing_default_group_and_outside_rank_are_refused(self) -> None:
        def ranks(rank: int) -> tuple[str, str]:
            mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
            outside = error(group, mesh, 0) if rank == 2 else ""
            dist.barrier()
            dist.destroy_process_group()
            return outside, error(registry().get, mesh, Layout.of(a=2), (0,), token=TOKEN)

        found = run_ranks(ranks, 3)
        self.assertExpectedInline(
            found[2][0],
            """MP503: rank 2 is not in the mesh (a=2); only its members can reduce over it""",
        )
        self.assertExpectedInline(
            found[0][1],
            """MP503: a reduction needs process groups and there is no default group; call torch.distributed.init_process_group first""",
        )


def test_existing_groups_are_reused() -> None:
    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("a", "b", "c"))
        origins = [group(mesh, 0, 1).origin, group(mesh, 0).origin, group(mesh, 1).origin]
        # Ranks in another order than torch's groups have: neither default nor axis group serves.
        shuffled = DeviceMesh("cpu", [[3, 1, 2], [5, 4, 0]], mesh_dim_names=("a", "b"))
        origins += [group(shuffled, 0, 1).origin, group(shuffled, 1).origin]
        cube = init_device_mesh("cpu", (3, 1, 2), mesh_dim_names=("x", "y", "z"))
        part = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("p", "q"))
        if rank < 4:
            origins.append(group(part, 0, 1).origin)
        cube["x", "z"]._flatten("xz")
        origins.append(group(cube, 0, 2).origin)
        # One group serves every contract.
        origins.append(group(shuffled, 0, 1, token=Record.of(contract="another")).origin)
        return origins

    found = run_ranks(ranks, 6)
    shared = ["default", "axis", "axis", "created", "created"]
    assert found[0] == [*shared, "created", "default", "created"]
    assert found[5] == [*shared, "default", "created"]


def test_blocks_of_whole_axes_are_the_axis_groups() -> None:
    def ranks(rank: int) -> tuple[list[tuple[str, tuple[int, ...]]], bool]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        found = blocks(mesh, 0, 1, size=3)
        inner = group(mesh, 0, 1, block=Block("inner", 3)).pg
        outer = group(mesh, 0, 1, block=Block("outer", 3)).pg
        return found, inner is mesh.get_group("b") and outer is mesh.get_group("a")

    for rank, (found, same) in enumerate(run_ranks(ranks, 6)):
        o, j = divmod(rank, 3)
        assert found == [("axis", (3 * o, 3 * o + 1, 3 * o + 2)), ("axis", (j, j + 3))]
        assert same


def test_blocks_inside_an_axis_are_created() -> None:
    def ranks(rank: int) -> list[tuple[str, tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        found = blocks(mesh, 0, size=2)
        # Another mesh order: the same ranks in another order are another group.
        found += blocks(DeviceMesh("cpu", [2, 0, 3, 1]), 0, size=2)
        # And one that was made for a block is found again as what it is.
        again = group(DeviceMesh("cpu", [[2, 0], [3, 1]]), 1)
        return [*found, (again.origin, again.ranks)]

    found = run_ranks(ranks, 4)
    made = [
        [("created", inner), ("created", outer)]
        for inner, outer in (((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3)))
    ]
    assert [lines[:2] for lines in found] == made
    assert found[0][2:] == [("created", (2, 0)), ("created", (0, 1)), ("created", (2, 0))]
    assert found[1][2:] == [("created", (3, 1)), ("created", (0, 1)), ("created", (3, 1))]
    assert found[2][2:] == [("created", (2, 0)), ("created", (2, 3)), ("created", (2, 0))]
    assert found[3][2:] == [("created", (3, 1)), ("created", (2, 3)), ("created", (3, 1))]


def test_blocks_of_several_axes_and_the_whole_group_beside_them() -> None:
    def ranks(rank: int) -> list[tuple[str, tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        mesh["b", "c"]._flatten("bc")
        found = blocks(mesh, 0, 1, 2, size=4) + blocks(mesh, 0, 2, size=2)
        whole = group(mesh, 0, 1, 2)
        return [*found, (whole.origin, whole.ranks), *blocks(mesh, 0, 1, 2, size=2)]

    assert run_ranks(ranks, 8)[5] == [
        ("flattened", (4, 5, 6, 7)),
        ("axis", (1, 5)),
        ("axis", (4, 5)),
        ("axis", (1, 5)),
        ("default", tuple(range(8))),
        ("axis", (4, 5)),
        ("created", (1, 3, 5, 7)),
    ]


@pytest.mark.parametrize("scatter", [False, True])
def test_hierarchical_step_looks_up_groups_once(scatter: bool) -> None:
    cut = {"scatter": ((1, 0),)} if scatter else {}
    step = make_step((2, 2, 2), inner=2, **cut)

    def ranks(rank: int) -> tuple[bool, int, int, str]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        planned = PlannedPartial(step, Layout.from_mesh(mesh), "", Config(timeout=200.0), step.axes)
        summand = order_sensitive(6, rank=rank, world_size=8).view(3, 2)
        first = planned._reduce_value(summand, mesh, 0) + 0
        count = len(registry()._table)
        clear_report()
        again = planned._reduce_value(summand, mesh, 0) + 0
        (entry,) = report().entries
        leaves = [order_sensitive(6, rank=r, world_size=8).view(3, 2) for r in range(8)]
        whole = reduce_leaves(leaves, "sum", (2, 2, 2))
        if scatter:
            whole = whole[2:] if mesh.get_coordinate()[1] else whole[:2]
        assert_bitwise_equal(first, whole)
        return torch.equal(first, again), count, len(registry()._table), entry["group"]

    found = run_ranks(ranks, 8)
    for same, first, second, _ in found:
        assert same
        # Over a and b without c, which nothing has yet; of c and a alone the mesh's own.
        assert first == second == (3 if scatter else 2)
    text = re.sub(r"created group \S+", "created group ...", found[5][3])
    expected = "inner axis group c of 2 ranks: 4, 5; outer created group ... of 4 ranks: 1, 3, 5, 7"
    if scatter:
        expected += "; gathered on created group ... of 4 ranks: 0, 1, 4, 5"
    assert text == expected


def test_group_ranks_follow_the_mesh_coordinate() -> None:
    order = [[4, 0, 3], [2, 5, 1]]

    def ranks(rank: int) -> tuple[list[int], int, list[float]]:
        mesh = DeviceMesh("cpu", order)
        found = group(mesh, 0, 1)
        gathered = [torch.zeros(1) for _ in range(6)]
        dist.all_gather(gathered, torch.tensor([float(rank)]), group=found.pg)
        return (
            dist.get_process_group_ranks(found.pg),
            dist.get_group_rank(found.pg, rank),
            [g.item() for g in gathered],
        )

    flat = [r for row in order for r in row]
    for rank, (listed, position, gathered) in enumerate(run_ranks(ranks, 6)):
        assert listed == flat
        assert gathered == flat
        assert flat[position] == rank


def test_single_pipeline_stage_creates_its_group() -> None:
    """The others never hear of the group, and every later creation of torch's still works."""

    def ranks(rank: int) -> tuple[float, bool, bool]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "a", "b"))
        stage = mesh.get_coordinate()[0]  # type: ignore[index]
        value = 0.0
        if stage == 0:
            sub = mesh["a", "b"]
            with meshplan.installed():
                summand = torch.full((3,), float(rank))
                d = DTensor.from_local(summand, sub, (Partial(), Partial()), run_check=False)
                value = d.redistribute(sub, (Replicate(), Replicate())).to_local()[0].item()
        world = world_group_works()
        other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("m", "n"))
        ones = torch.ones(1)
        dist.all_reduce(ones, group=other.get_group("m"))
        return value, world, ones.item() == 4

    found = run_ranks(ranks, 8)
    assert found == [(6.0, True, True)] * 4 + [(0.0, True, True)] * 4


def test_members_with_different_group_counts_agree() -> None:
    def ranks(rank: int) -> tuple[float, bool]:
        mesh = DeviceMesh("cpu", [[2, 1], [0, 3]])
        if rank in (0, 1):
            dist.new_group([0, 1], use_local_synchronization=True)
        return total(group(mesh, 0, 1)), True

    assert run_ranks(ranks, 4) == [(4.0, True)] * 4


def test_rank_without_the_same_calls_before_is_not_missing() -> None:
    """Where the rank that passes on the names is, others have reduced over other axes before."""

    def ranks(rank: int) -> tuple[int, ...]:
        mesh = init_device_mesh("cpu", (2, 2, 1))
        if rank < 2:
            group(mesh, 1, 2)
        dist.barrier()
        missing: tuple[int, ...] = ()
        if rank:
            with patience(3), pytest.raises(GroupAgreementError) as caught:
                group(mesh, 0, 1, timeout=1.0)
            missing = caught.value.missing
            arrive("failed")
        wait_for("failed", 3)
        return missing

    assert run_ranks(ranks, 4) == [(), (0,), (0,), (0,)]


def test_groups_are_created_again_after_shutdown() -> None:
    def ranks(rank: int) -> tuple[int, int, int, float]:
        mesh = DeviceMesh("cpu", [[2, 1], [0, 3]])
        group(mesh, 0, 1)
        group(mesh, 1)
        before = len(registry()._table)
        destroyed = meshplan.shutdown()
        after = len(registry()._table)
        assert world_group_works()
        return before, destroyed, after, total(group(mesh, 0, 1))

    # Over axis 1, ranks (2, 1) descend and need a group of their own; (0, 3) have the axis group.
    found = run_ranks(ranks, 4)
    assert [r[1] for r in found] == [1, 2, 2, 1]
    assert {(r[0], r[2], r[3]) for r in found} == {(2, 0, 4.0)}


def test_shutdown_continues_if_torch_fails_to_destroy_one_group() -> None:
    def ranks(rank: int) -> tuple[str, int, int]:
        mesh = DeviceMesh("cpu", [[2, 1], [0, 3]])
        group(mesh, 0, 1)
        group(mesh, 1)
        real, calls = dist.destroy_process_group, []

        def fails_at_first(pg: dist.ProcessGroup) -> None:
            calls.append(pg)
            real(pg)
            if len(calls) == 1:
                raise RuntimeError("of torch's own")

        with (
            mock.patch.object(dist, "destroy_process_group", fails_at_first),
            pytest.raises(RuntimeError) as caught,
        ):
            meshplan.shutdown()
        return str(caught.value), len(calls), len(registry()._table)

    found = run_ranks(ranks, 4)
    assert [calls for _, calls, _ in found] == [1, 2, 2, 1]
    assert {(said, left) for said, _, left in found} == {("of torch's own", 0)}


def test_exhausted_agreements_on_one_rank_are_an_error_on_all() -> None:
    def ranks(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        layout = Layout.from_mesh(mesh)
        # From now on the table belongs to this default group.
        assert len(registry()._table) == 0
        if rank == 2:
            for number in range(_group_table.MAX_MEETINGS):
                registry()._table.meetings.add(number)
        said = []
        for turn in range(2):
            try:
                registry().meet(mesh, layout, (0, 1), token=TOKEN, timeout=200.0)
                said.append("agreed")
            except GroupStateError as error:
                said.append(str(error))
            if turn == 0:
                meshplan.shutdown()
        return said

    found = run_ranks(ranks, 4)
    assert {said[1] for said in found} == {"agreed"}
    assert {said[0][:6] for said in found} == {"MP503:"}
    assert all("rank 2" in said[0] and "1024 different reductions" in said[0] for said in found)


def test_prepare_makes_all_sets_and_later_calls_make_none() -> None:
    def ranks(rank: int) -> tuple[list[tuple[int, ...]], int, int, list[str]]:
        mesh = DeviceMesh("cpu", [[[0, 2]], [[1, 3]]], mesh_dim_names=("a", "one", "b"))
        groups = meshplan.prepare(mesh)
        count = len(registry()._table)
        with meshplan.installed():
            d = DTensor.from_local(torch.ones(3), mesh, [Partial()] * 3, run_check=False)
            d.full_tensor()
        with FakeTensorMode():
            again = meshplan.prepare(mesh, ("b", "a"), ("b",))
        assert again == (groups[2], groups[1])
        return [g.ranks for g in groups], count, len(registry()._table), [g.origin for g in groups]

    found = run_ranks(ranks, 4)
    assert found[0] == ([(0, 1), (0, 2), (0, 2, 1, 3)], 3, 3, ["axis", "axis", "created"])
    assert found[3][0] == [(2, 3), (1, 3), (0, 2, 1, 3)]


def test_prepare_does_nothing_outside_the_mesh() -> None:
    def ranks(rank: int) -> int:
        mesh = DeviceMesh("cpu", [[2, 0]])
        return len(meshplan.prepare(mesh))

    assert run_ranks(ranks, 4) == [1, 0, 1, 0]


def test_names_are_the_same_in_every_run() -> None:
    def ranks(rank: int) -> str:
        return GroupKey((3, 1, 0, 2), "gloo", "cpu", "never").group_name()

    (name,) = set(run_ranks(ranks, 2))
    assert name == "meshplan:d2d5429b376a19d192b234dbe4be9166cd4e4345"


def test_fake_backend_skips_agreement() -> None:
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [[0, 5, 1], [2, 3, 4]])
        found = group(mesh, 0, 1)
        assert found.origin == "created"
        assert found.pg.size() == 6
    finally:
        dist.destroy_process_group()


def test_registry_keeps_no_group_alive() -> None:
    own = GroupRegistry()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [1, 0])
        group = own.get(mesh, Layout.from_mesh(mesh), (0,), token=TOKEN)
        pg = weakref.ref(group.pg)
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert pg() is None
    with pytest.raises(GroupStateError, match=r"created group .* of 2 ranks: 1, 0 was destroyed"):
        _ = group.pg


@pytest.mark.full
def test_the_default_groups_own_timeout_bounds_the_wait() -> None:
    def ranks(rank: int) -> None:
        mesh = DeviceMesh("cpu", [1, 0])
        if rank == 1:
            return wait_for("the error", 1)
        started = time.monotonic()
        found = error(registry().get, mesh, Layout.from_mesh(mesh), (0,), token=TOKEN)
        assert "rank 1 did not reach" in found
        assert time.monotonic() - started >= 3
        return arrive("the error")

    run_ranks(ranks, 2, collective_timeout=3.0)


@pytest.mark.full
def test_failed_creation_on_one_member_fails_all_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no cable")

    def ranks(rank: int) -> tuple[str, float]:
        mesh = DeviceMesh("cpu", [2, 1, 0])
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(_join, "create_members_only", broken)
            message = error(group, mesh, 0, timeout=2.0)
        return message, total(group(mesh, 0))

    found = run_ranks(ranks, 3, collective_timeout=4.0)
    for message, sum_of_ones in found:
        assert re.sub(r"\d\.\d s later", "N s later", message) == (
            "MP502: the group of ranks 2, 1, 0 was agreed on but could not be created, rank 1 "
            "failed: RuntimeError: no cable (ranks 2, 0 still missing N s later); the members have dropped it and the next call tries "
            "again"
        )
        assert sum_of_ones == 3.0
