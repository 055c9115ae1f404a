"""Audits find every wrong bit, on every rank, and report nothing for correct results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshplan
from meshplan.contract import Contract
from meshplan.errors import AuditError, FallbackRefusedError, GroupAgreementError, PeerTimeoutError
from meshplan.execute import Purpose, StepGroups, _audit, _run
from meshplan.execute.paths import Outcome, get_path
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from meshplan.topology import Topology
from tests.marks import full
from tests.processes import run_ranks
from tests.refusals import refusal
from tests.traffic import Issued

P, R, S = Partial(), Replicate(), Shard
NODES = Topology.uniform(4, node_size=2, domain_size=2)
WAYS: list[Any] = [
    {"path": "exchange"},
    full({"path": "reference"}),
    {"path": "one_shot"},
    full({"path": "two_shot"}),
    full({"path": "exchange", "topology": NODES}),
]


def audited() -> list[int]:
    return [entry["audited"] for entry in meshplan.report().entries if entry["ran"] != "torch"]


def flipped(path: str, on_rank: int) -> None:
    """From now on ``path`` gives one wrong bit in the last element of its result on one rank."""

    def corrupting(right: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def wrong(*arguments: Any) -> Outcome:
            reduced, wire = right(*arguments), arguments[-1]
            result = wire.wait(reduced.tensor).clone()
            if dist.get_rank() == on_rank and result.numel():
                bits(result).view(-1)[-1] ^= 1
            return Outcome(result, reduced.log)

        return wrong

    for name in ("exchange", "hierarchical") if path == "exchange" else (path,):
        found: Any = get_path(name)
        found.all_reduce = corrupting(found.all_reduce)
        found.reduce_scatter = corrupting(found.reduce_scatter)


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way))[:30])
def test_correct_results_pass_the_audit(way: dict[str, Any]) -> None:
    """All dtypes and operations, shapes that do not divide evenly, in one piece and in many."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        count = 0
        for order in ("tree", "rank"):
            contract = Contract(order=order)  # type: ignore[arg-type]
            with meshplan.installed(audit=1, contract=contract, strict=True, **way):
                for op in ("sum", "avg", "max", "product") if order == "tree" else ("sum",):
                    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
                        if dtype.is_complex and op not in ("sum", "avg"):
                            continue
                        if op == "avg" and dtype is torch.int64:
                            continue
                        # Seven elements a piece, then one of the default width.
                        _audit.PIECE_BYTES = 4 * 7 * dtype.itemsize if op == "sum" else 64 << 20
                        real = torch.float32 if dtype.is_complex else dtype
                        leaf = order_sensitive(30, rank=rank, world_size=4, dtype=real).view(5, 6)
                        leaf = torch.complex(leaf, -leaf) if dtype.is_complex else leaf
                        for dst in ((R, R), (R, S(0)), (S(0), S(0)), (S(1), S(0))):
                            d = DTensor.from_local(leaf, mesh, [Partial(op)] * 2, run_check=False)
                            d.redistribute(mesh, dst)
                            count += 1
                norm = _NormPartial(3)
                d = DTensor.from_local(torch.rand(5), mesh, (norm, norm), run_check=False)
                d.full_tensor()
                # Nothing to compare, and no rank hangs: empty shards, and empty tensors.
                DTensor.from_local(torch.ones(1, 2), mesh, (P, P), run_check=False).redistribute(
                    mesh, (S(0), R)
                )
                DTensor.from_local(torch.ones(0), mesh, (P, P), run_check=False).full_tensor()
                count += 2
        assert sum(audited()) == count

    run_ranks(ranks, 4)


class TestWrongBits(TestCase):
    def test_one_wrong_bit_is_an_error_on_every_rank(self) -> None:
        def ranks(rank: int) -> list[tuple[str, tuple[int, ...], int]]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            found = []
            flipped("exchange", on_rank=2)
            flipped("one_shot", on_rank=0)
            for way in ({"path": "exchange"}, {}, {"path": "exchange", "topology": NODES}):
                with meshplan.installed(audit=1, **way):  # type: ignore[arg-type]
                    for dst, dtype in (
                        ((R, R), torch.float32),
                        ((S(0), S(0)), torch.bfloat16),
                        ((R, S(0)), torch.complex64),
                    ):
                        summand = torch.full((4, 3), float(rank + 1), dtype=dtype)
                        d = DTensor.from_local(summand, mesh, (P, P), run_check=False)
                        with pytest.raises(AuditError) as caught:
                            d.redistribute(mesh, dst)
                        error = caught.value
                        found.append((str(error), error.ranks, error.elements))
            assert audited() == [1] * 9
            # Correct results still pass.
            with meshplan.installed(audit=1, path="reference"):
                d = DTensor.from_local(torch.ones(3), mesh, (P, P), run_check=False)
                assert d.full_tensor().tolist() == [4.0] * 3
            return found

        first, *others = run_ranks(ranks, 4)
        assert all(found == first for found in others)
        assert [who for _, who, _ in first] == [(2,)] * 3 + [(0,)] * 3 + [(2,)] * 3
        assert {elements for *_, elements in first} == {1}
        self.assertExpectedInline(
            "\n".join(message for message, *_ in first[:4]),
            """\
MP704: call 1 of (P(sum), P(sum)) -> (R, R) on (a=2, b=2): path exchange does not give the bits of contract v1/tree/wide/once: 1 element differs on 1 of 4 ranks (2); the first is element 11 of the result of rank 2, 10.000000953674316 (0x41200001) instead of 10.0 (0x41200000); do not trust what was computed since the last audit: look for failing hardware on these ranks, and compare path='reference'
MP704: call 1 of (P(sum), P(sum)) -> (S(0), S(0)) on (a=2, b=2): path exchange does not give the bits of contract v1/tree/wide/once: 1 element differs on 1 of 4 ranks (2); the first is element 2 of the result of rank 2, 10.0625 (0x4121) instead of 10.0 (0x4120); do not trust what was computed since the last audit: look for failing hardware on these ranks, and compare path='reference'
MP704: call 1 of (P(sum), P(sum)) -> (R, S(0)) on (a=2, b=2): path exchange does not give the bits of contract v1/tree/wide/once: 1 element differs on 1 of 4 ranks (2); the first is element 5 (imaginary part) of the result of rank 2, 1.401298464324817e-45 (0x00000001) instead of 0.0 (0x00000000); do not trust what was computed since the last audit: look for failing hardware on these ranks, and compare path='reference'
MP704: call 1 of (P(sum), P(sum)) -> (R, R) on (a=2, b=2): path one_shot does not give the bits of contract v1/tree/wide/once: 1 element differs on 1 of 4 ranks (0); the first is element 11 of the result of rank 0, 10.000000953674316 (0x41200001) instead of 10.0 (0x41200000); do not trust what was computed since the last audit: look for failing hardware on these ranks, and compare path='reference'""",
        )

    def test_many_wrong_elements_are_counted(self) -> None:
        def ranks(rank: int) -> tuple[str, tuple[int, ...], int]:
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("a",))

            def wrong(tensor: Tensor, step: Any, groups: Any, wire: Any) -> Outcome:
                return Outcome(tensor + 1 + (rank == 0), wire.log)

            reference: Any = get_path("reference")
            reference.all_reduce = wrong
            d = DTensor.from_local(torch.zeros(5), mesh, (P,), run_check=False)
            with (
                meshplan.installed(audit=1, path="reference"),
                pytest.raises(AuditError) as caught,
            ):
                d.full_tensor()
            return str(caught.value), caught.value.ranks, caught.value.elements

        found = run_ranks(ranks, 3)
        assert all(each == found[0] for each in found)
        assert found[0][1:] == ((0, 1, 2), 15)
        self.assertExpectedInline(
            found[0][0],
            """MP704: call 1 of (P(sum)) -> (R) on (a=3): path reference does not give the bits of contract v1/tree/wide/once: 15 elements differ on 3 of 3 ranks (0, 1, 2); the first is element 0 of the result of rank 0, 2.0 (0x40000000) instead of 0.0 (0x00000000); do not trust what was computed since the last audit: look for failing hardware on these ranks, and compare path='reference'""",
        )

    def test_different_audit_settings_are_refused(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2,))
            d = DTensor.from_local(torch.ones(2), mesh, (P,), run_check=False)
            with (
                meshplan.installed(audit=10 if rank else None),
                pytest.raises(GroupAgreementError) as caught,
            ):
                d.full_tensor()
            return str(caught.value)

        message, _ = run_ranks(ranks, 2)
        assert "audit none (rank 0), 10 (rank 1)" in message

    @pytest.mark.full
    def test_compiled_and_eager_ranks_do_not_deadlock(self) -> None:
        """The graph has no audit, and the other rank does not wait for ever."""

        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2,))

            def step(x: Tensor) -> Tensor:
                return DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor() * 1.0

            with meshplan.installed(audit=1):
                step(torch.ones(3))
                if rank == 0:
                    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
                    with pytest.raises(PeerTimeoutError):
                        compiled(torch.ones(3))
                    return ""
                return refusal(GroupAgreementError, step, torch.ones(3))

        self.assertExpectedInline(
            run_ranks(ranks, 2, collective_timeout=3.0)[1],
            """MP501: rank 0 did not reach a reduction over ranks 0, 1 within 3 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )


@pytest.mark.processes
def test_every_nth_call_of_each_reduction_is_audited() -> None:
    def ranks(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def call(dst: Any, dtype: torch.dtype = torch.float32) -> bool:
            before = sum(audited())
            DTensor.from_local(
                torch.ones(4, dtype=dtype), mesh, [Partial("max")] * 2, run_check=False
            ).redistribute(mesh, dst)
            return sum(audited()) > before

        with meshplan.installed(audit=3, path="exchange", strict=True):
            found = [call((R, R)) for _ in range(5)]
            # Another reduction has a count of its own.
            found += [call((S(0), S(0))), call((R, R))]
            # One that is refused is counted as well, on all ranks.
            with pytest.raises(FallbackRefusedError):
                call((R, R), torch.bool)
            found += [call((R, R)) for _ in range(3)]
        # Nothing is sent for an audit but in the calls that are audited.
        with meshplan.installed(audit=2, path="exchange"):
            for _ in range(2):
                with Issued() as sent:
                    found.append(call((S(0), R)))
                found.append(sent.total > 2)
        return found

    calls = [True, False, False, True, False, True, False]
    calls += [False, False, True]
    assert run_ranks(ranks, 4) == [[*calls, True, True, False, False]] * 4


@pytest.mark.full
@pytest.mark.processes
def test_counts_restart_with_shared_memory() -> None:
    """A rank that missed a call which failed on the others is in step with them again."""

    def ranks(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))

        def call() -> None:
            DTensor.from_local(torch.ones(4), mesh, (P,), run_check=False).full_tensor()

        with meshplan.installed(audit=3, path="one_shot", strict=True):
            call()
            # Rank 1 is not there for the second one. It comes when rank 0 has given up.
            store = c10d._get_default_store()
            if rank == 1:
                store.wait(["given up"], timedelta(seconds=30))
            with pytest.raises(PeerTimeoutError):
                call()
            store.set("given up" if rank == 0 else "noticed", "")
            store.wait(["noticed"], timedelta(seconds=30))
            # The group has stopped on both ranks.
            meshplan.shutdown()
            meshplan.clear_report()
            for _ in range(4):
                call()
        return audited()

    assert run_ranks(ranks, 2, collective_timeout=5.0) == [[2], [2]]


@pytest.mark.processes
def test_graphs_are_not_audited() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        flipped("one_shot", on_rank=1)
        summand = order_sensitive(12, rank=rank, world_size=4)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def step(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (P, P), run_check=False).full_tensor() * 1.0

        with meshplan.installed(audit=1, path="exchange"):
            first = step(summand)
            assert_bitwise_equal(step(summand), first)
        assert audited() == [0]

    run_ranks(ranks, 4)


def test_fake_groups_are_not_audited() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        with meshplan.installed(audit=1):
            d = DTensor.from_local(torch.ones(3), mesh, (P,), run_check=False)
            assert d.full_tensor().shape == (3,)
        assert sum(audited()) == 0
    finally:
        dist.destroy_process_group()
        meshplan.clear_report()


class Peers:
    """Stands for the groups of a reduction."""


def groups(peers: object) -> StepGroups:
    return SimpleNamespace(peers=peers, levels=())  # type: ignore[return-value]


def test_counts_are_bounded_and_die_with_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "MAX_REDUCTIONS", 3)
    one, other, next_call = Peers(), Peers(), _run.next_call
    before = len(_run._COUNTS)
    sources = [Purpose(f"asked {n}", "planned", "a") for n in range(4)]
    assert [next_call(groups(one), sources[0]) for _ in range(3)] == [1, 2, 3]
    assert next_call(groups(other), sources[0]) == 1
    # Of another group of the same ranks.
    assert next_call(groups(one), Purpose("asked 0", "planned", "b")) == 1
    assert [next_call(groups(one), source) for source in sources] == [4, 1, 1, 1]
    # The fourth call restarted all counts.
    assert [next_call(groups(one), source) for source in sources[::3]] == [1, 2]
    assert len(_run._COUNTS) == before + 2
    del one, other
    gc.collect()
    assert len(_run._COUNTS) == before
