"""The options of the backend: each has an effect, and the others are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import meshplan
import meshplan.backend
from meshplan import BackendOptions, Contract, _variables
from meshplan._torch import BackendOptionsBase
from meshplan.backend._group import MeshplanProcessGroup
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks
from tests.refusals import refusal


class TestRefusals(TestCase):
    def message(self, make: Callable[[], Any]) -> str:
        return refusal(meshplan.MeshplanError, make)

    def test_options(self) -> None:
        found = [
            self.message(make)
            for make in (
                lambda: BackendOptions(contract="tree"),  # type: ignore[arg-type]
                lambda: BackendOptions(path="fast"),
                lambda: BackendOptions(path="native"),
                lambda: BackendOptions(policy="consistent"),
                lambda: BackendOptions(audit=0),
                lambda: BackendOptions(inner="cpu:meshplan"),
                lambda: BackendOptions(timeout=3.0),  # type: ignore[arg-type]
            )
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP411: contract='tree' is not a contract; pass contract=meshplan.Contract()
MP402: no path 'fast'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'
MP402: path='native' is outside every contract; pass another path, or policy='fast' for the inner backend's own order
MP402: policy='consistent' is not a policy of a process group; pass 'deterministic' or 'fast', and 'consistent' to meshplan.install, which knows the mesh
MP402: audit=0 is not a number of calls; pass audit=100 to compare every 100th call of each reduction with the reference, or audit=None
MP505: inner='cpu:meshplan' is not another backend; pass e.g. inner='gloo' or inner='cpu:gloo,cuda:nccl'
MP505: timeout=3.0 is not a timedelta; pass datetime.timedelta(seconds=...)""",
        )

    def test_variables(self) -> None:
        found = []
        wrong = {"CONTRACT": "tree", "STRICT": "yes", "PATH": "fast", "POLICY": "x", "AUDIT": "1.5"}
        for name, value in wrong.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(f"MESHPLAN_{name}", value)
                found.append(self.message(BackendOptions))
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP411: no contract 'tree'; use an id of this version, e.g. 'v1/tree/wide/once'
MP505: MESHPLAN_STRICT='yes' is not a switch; set 1 to refuse reductions outside the contract, 0 to allow them, or unset it
MP402: no path 'fast'; use one of 'auto', 'one_shot', 'two_shot', 'exchange', 'halving', 'integer', 'integer_checksum', 'reference', 'native'
MP402: policy='x' is not a policy of a process group; pass 'deterministic' or 'fast', and 'consistent' to meshplan.install, which knows the mesh
MP402: MESHPLAN_AUDIT='1.5' is not a number of calls; set e.g. 100 to compare every 100th call of each reduction with the reference, or unset it""",
        )

    def test_calls(self) -> None:
        first, _ = run_ranks(refused_calls, 2, backend="meshplan")
        self.assertExpectedInline(
            "\n".join(first),
            """\
ContractError: MP411: allreduce got 2 tensors of one rank; pass one, or call allreduce_coalesced
ContractError: MP411: the tensors of one reduction are torch.float32 on cpu, torch.float64 on cpu; pass tensors of one dtype on one device
ContractError: MP411: a reduction got no tensors; pass one or more
ContractError: MP411: a reduce-scatter over 2 ranks got an input of 4 and an output of 3 elements; pass an input of 2 times the output's elements
ContractError: MP411: a reduce-scatter over 2 ranks got blocks of [4, 4] elements and an output of 3 elements on rank 0 of the group; pass one block for each rank, and an output of the size of this rank's block
ContractError: MP411: the result is written in place, and elements of the tensor may share memory: shape (3,), strides (0,); pass tensor.contiguous()
BackendError: MP505: torch has no backend 'none' for inner='none'; register it, or pass one that torch has, such as inner='gloo'
BackendError: MP505: the group has backend 'cpu:gloo,cuda:meshplan', and torch uses one group for all devices if one of them has 'meshplan'; pass 'meshplan' for each device, and name other backends in BackendOptions(inner=...)""",
        )


def refused_calls(rank: int) -> list[str]:
    group: Any = dist.group.WORLD
    x, out, opts = torch.ones(4), torch.empty(3), dist.ReduceScatterOptions()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: group.allreduce([x, x]),
        lambda: group.allreduce_coalesced([x, x.double()]),
        lambda: group.allreduce_coalesced([]),
        lambda: group.reduce_scatter_single(out, x, opts),
        lambda: group.reduce_scatter([out], [[x, x]], opts),
        lambda: group.allreduce([torch.ones(1).expand(3)]),
        lambda: dist.new_group(backend="meshplan", pg_options=BackendOptions(inner="none")),
        lambda: reduce_in_mixed_group(x),
    )
    found = []
    for call in calls:
        try:
            call()
            found.append("no error")
        except meshplan.MeshplanError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def reduce_in_mixed_group(x: Tensor) -> None:
    dist.all_reduce(x, group=dist.new_group(backend="cpu:gloo,cuda:meshplan"))


def test_variables_stand_for_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPLAN_CONTRACT", "v1/rank/wide/once")
    monkeypatch.setenv("MESHPLAN_PATH", "exchange")
    monkeypatch.setenv("MESHPLAN_INNER", "gloo")
    monkeypatch.setenv("MESHPLAN_STRICT", "1")
    monkeypatch.setenv("MESHPLAN_POLICY", "fast")
    monkeypatch.setenv("MESHPLAN_AUDIT", "7")
    found = BackendOptions()
    assert (found.contract, found.path, found.inner) == (Contract("rank"), "exchange", "gloo")
    assert (found.strict, found.policy, found.audit) == (True, "fast", 7)
    explicit = BackendOptions(Contract(), "reference", "deterministic", "nccl_model", 3, False)
    assert (explicit.policy, explicit.audit) == ("deterministic", 3)
    assert (explicit.contract, explicit.path, explicit.inner) == (
        Contract(),
        "reference",
        "nccl_model",
    )
    assert not explicit.strict


class TestForeignSettings(TestCase):
    """Nothing that a caller passes or sets is dropped without a word."""

    def test_pg_options_of_another_type_are_refused(self) -> None:
        gloo, other = dist.ProcessGroupGloo._Options(), BackendOptionsBase("other")
        found = []
        for options in ({"contract": "v1/rank/wide/once", "strict": True}, "strict", other):
            try:
                with pytest.raises(TypeError) as raised:
                    dist.init_process_group(
                        "meshplan", rank=0, world_size=1, store=dist.HashStore(), pg_options=options
                    )
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            found.append(re.sub("object at 0x[0-9a-f]+", "object at ADDRESS", str(raised.value)))
        for options in (None, gloo):
            dist.init_process_group(
                "meshplan", rank=0, world_size=1, store=dist.HashStore(), pg_options=options
            )
            dist.destroy_process_group()
        self.assertExpectedInline(
            "\n".join(found),
            """\
MP404: pg_options={'contract': 'v1/rank/wide/once', 'strict': True} has no effect on this group; pass meshplan.BackendOptions(...), options of the inner backend 'gloo', or None
MP404: pg_options='strict' has no effect on this group; pass meshplan.BackendOptions(...), options of the inner backend 'gloo', or None
MP404: pg_options=<torch._C._distributed_c10d.Backend.Options object at ADDRESS... has no effect on this group; pass meshplan.BackendOptions(...), options of the inner backend 'gloo', or None""",
        )

    def test_unknown_variables_are_reported(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESHPLAN_CONTARCT", "v1/rank/wide/once")
            patch.setenv("MESHPLAN_TEST_OF_A_USER", "1")
            with pytest.warns(UserWarning, match="CONTARCT") as warned:
                BackendOptions()
            with pytest.warns(UserWarning, match="CONTARCT"):
                meshplan.install()
            meshplan.uninstall()
            (found,) = [str(one.message) for one in warned]
            with pytest.raises(meshplan.MeshplanError) as raised:
                BackendOptions(strict=True)
            with pytest.raises(meshplan.MeshplanError):
                meshplan.install(strict=True)
        self.assertExpectedInline(
            f"{found}\n{raised.value}",
            """\
[meshplan] no variable MESHPLAN_CONTARCT (did you mean 'MESHPLAN_CONTRACT'?); unset it, or correct its name
MP402: no variable MESHPLAN_CONTARCT (did you mean 'MESHPLAN_CONTRACT'?); unset it, or correct its name""",
        )

    def test_every_variable_of_the_page_exists(self) -> None:
        page = (Path(__file__).parents[2] / "docs/environment.md").read_text(encoding="utf-8")
        cells = re.findall(r"^\| (`MESHPLAN_.*?) \|", page, re.MULTILINE)
        names = {name for cell in cells for name in re.findall(r"MESHPLAN_[A-Z0-9_]+", cell)}
        assert {one for one in names if "_TEST_" not in one} == _variables._NAMES


@pytest.mark.processes
class TestEffects:
    def test_each_option_has_its_effect(self) -> None:
        for found in run_ranks(try_options, 4, backend="meshplan"):
            assert found == {
                "contract": [1.0, 0.0],
                "inherited": "v1/tree/wide/once",
                "path": ["exchange"],
                "timeout": [3.0, 1800.0],
                "mesh": [0.0, "MeshplanProcessGroup"],
            }

    def test_different_options_are_an_error_on_all_ranks(self) -> None:
        for found in run_ranks(differ, 2, backend="meshplan"):
            assert found == [["MP501", True]] * 3

    def test_policy_fast_reduces_by_the_inner_backend(self) -> None:
        for found in run_ranks(reduce_fast, 3, backend="meshplan"):
            assert found == [True, {"allreduce_": 2, "_reduce_scatter_base_": 1}, ["native"], False]

    def test_audits_compare_the_first_and_then_every_nth_call(self) -> None:
        for found in run_ranks(audit_calls, 3, backend="meshplan"):
            # 1, 4 and 7 of 7 calls, the same of the three tensors at once, 1 of 1.
            assert found == {"all_reduce sum": 3 + 2, "reduce_scatter sum": 1, "bits": True}

    def test_an_audit_finds_a_wrong_bit_on_every_rank(self) -> None:
        for found in run_ranks(audit_wrong_bit, 3, backend="meshplan"):
            assert found == [("MP704", (1,), 1)] * 2


def differ(rank: int) -> list[Any]:
    found = []
    for options, word in (
        (BackendOptions(Contract(("tree", "rank")[rank])), "v1/rank/wide/once"),
        (BackendOptions(policy=("deterministic", "fast")[rank]), "fast"),
        (BackendOptions(audit=(3, 4)[rank]), "audit"),
    ):
        group = dist.new_group(backend="meshplan", pg_options=options)
        with pytest.raises(meshplan.MeshplanError) as raised:
            dist.all_reduce(torch.ones(2), group=group)
        found.append([raised.value.code, word in str(raised.value)])
    return found


def reduce_fast(rank: int) -> list[Any]:
    """The same bits as those of a plain group, and strict is no objection: it is no fallback."""
    options = BackendOptions(policy="fast", strict=True)
    group = dist.new_group(backend="meshplan", pg_options=options)
    plain = dist.new_group(backend="gloo")
    leaf = torch.randn(60, generator=torch.Generator().manual_seed(rank)) * 9**rank
    expected, x, shard = leaf.clone(), leaf.clone(), torch.empty(20)
    dist.all_reduce(expected, group=plain)
    meshplan.clear_report()
    with count_native_reductions() as counts:
        dist.all_reduce(x, group=group)
        dist.all_reduce(leaf.clone(), group=group, async_op=True).wait()  # type: ignore[union-attr]
        dist.reduce_scatter_single(shard, leaf, group=group)
    entries = meshplan.report().entries
    return [
        torch.equal(x, expected),
        dict(counts),
        sorted({entry["ran"] for entry in entries}),
        any(entry["fallback"] for entry in entries),
    ]


def audit_calls(rank: int) -> dict[str, Any]:
    group = dist.new_group(backend="meshplan", pg_options=BackendOptions(audit=3))
    leaves = [torch.randn(30, generator=torch.Generator().manual_seed(r)) * 9**r for r in range(3)]
    expected, same = meshplan.reduce_leaves(leaves, "sum", [3]), True
    meshplan.clear_report()
    for _ in range(7):
        x = leaves[rank].clone()
        dist.all_reduce(x, group=group)
        same = same and torch.equal(x, expected)
    # Calls 8 to 13: one by one, of which 10 and 13 are compared.
    for _ in range(2):
        parts = list(leaves[rank].clone().split(10))
        with dist.distributed_c10d._coalescing_manager(group):
            for part in parts:
                dist.all_reduce(part, group=group)
        same = same and torch.equal(torch.cat(parts), expected)
    shard = torch.empty(10)
    dist.reduce_scatter_single(shard, leaves[rank].clone(), group=group)
    same = same and torch.equal(shard, expected.chunk(3)[rank])
    counts: dict[str, Any] = {}
    for entry in meshplan.report().entries:
        name = entry["asked"].removesuffix(" of backend meshplan")
        counts[name] = counts.get(name, 0) + entry["audited"]
    return {**counts, "bits": same}


def audit_wrong_bit(rank: int) -> list[Any]:
    from meshplan.execute.paths import Outcome, get_path

    path: Any = get_path("exchange")
    right = path.all_reduce

    def wrong(*arguments: Any) -> Outcome:
        found = right(*arguments)
        result = arguments[-1].wait(found.tensor).clone()
        if rank == 1:
            result.view(torch.int32)[-1] ^= 1
        return Outcome(result, found.log)

    path.all_reduce = wrong
    options = BackendOptions(audit=1, path="exchange")
    group = dist.new_group(backend="meshplan", pg_options=options)
    found = []
    # Every rank has raised, so that the group goes on.
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(5), group=group)
        except meshplan.MeshplanError as error:
            found.append((error.code, getattr(error, "ranks", ()), getattr(error, "elements", 0)))
    return found


def try_options(rank: int) -> dict[str, Any]:
    leaf = torch.tensor([(1e20, 1.0, -1e20, 1.0)[rank]])

    def group(options: BackendOptions | None = None) -> Any:
        return dist.new_group(backend="meshplan", pg_options=options)

    def reduced(group: Any) -> float:
        x = leaf.clone()
        dist.all_reduce(x, group=group)
        return x.item()

    default = dist.group.WORLD
    assert isinstance(default, MeshplanProcessGroup)
    contracts = [reduced(group(BackendOptions(Contract(order)))) for order in ("rank", "tree")]
    meshplan.clear_report()
    reduced(group(BackendOptions(path="exchange")))
    paths = [entry["ran"] for entry in meshplan.report().entries]
    timed = group(BackendOptions(timeout=timedelta(seconds=3)))
    reduced(timed)
    seconds = [
        one._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for one in (timed._lane, timed.inner)
    ]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    within = mesh.get_group()
    return {
        "contract": contracts,
        "inherited": group().options.contract.id,
        "path": paths,
        "timeout": seconds,
        "mesh": [reduced(within), type(within).__name__],
    }
