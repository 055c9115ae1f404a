"""``coverage()``: every reduction of a job is counted once, by kind and call site."""

from __future__ import annotations

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan._observing import OBSERVING
from meshplan.errors import FallbackRefusedError, InstallError, PolicyError
from meshplan.replicas import Coverage, _coverage
from meshplan.testing import nccl_model
from tests.backend import test_entry_points as entry
from tests.backend.native_calls import count_native_reductions
from tests.processes import common_result, run_ranks, warm_compiler

pytestmark = pytest.mark.processes


def test_site_of_an_installed_package_has_its_name() -> None:
    """``meshplan run`` has fixes by package."""
    site = _coverage._format_place("/env/lib/site-packages/lightning/core/module.py", 3, "f")
    assert site == "lightning/core/module.py:3 f"
    assert _coverage._format_place("/home/me/jobs/train.py", 7, "main") == "jobs/train.py:7 main"


def kinds(found: Coverage) -> dict[str, int]:
    """How many reductions of each kind the last step has; none of the kinds without any."""
    (step,) = found.steps[-1:]
    counts: Counter[str] = Counter()
    for row in step.rows:
        counts[row["kind"]] += row["count"]
    totals = {
        kind: step.to_scalars()[f"meshplan/{kind.replace(' ', '_')}/count"] for kind in counts
    }
    assert totals == counts
    return dict(counts)


def counted(run: Callable[[], object]) -> dict[str, int]:
    with meshplan.coverage() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    return kinds(found)


def count_forms(_: int) -> list[str]:
    """Over the default group: the forms that are not counted as one reduction of the one kind."""
    kind, wrong = "contract" if dist.get_backend() == "meshplan" else "outside", []
    for name, form in (*entry.ALL_REDUCES.items(), *entry.REDUCE_SCATTERS.items()):
        found = counted(lambda form=form: form(entry.summand(dist.get_rank())))
        # Two forms make one call for each root.
        calls = entry.RANKS if name in ("native reduce", "c10d reduce") else 1
        if found != {kind: calls}:
            wrong.append(f"{name}: {found}")
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "meshplan"])
def test_every_form_of_a_reduction_is_counted_once(backend: str) -> None:
    warm_compiler()
    assert run_ranks(count_forms, entry.RANKS, backend=backend) == [[]] * entry.RANKS


def ones(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(4).to(dtype)


def count_kinds(_: int) -> list[dict[str, int]]:
    ours = dist.new_group(backend="meshplan")
    fast = dist.new_group(
        backend="meshplan", pg_options=meshplan.BackendOptions(policy="fast", inner="gloo")
    )
    op, reduce = dist.ReduceOp, dist.all_reduce
    return [
        counted(lambda: [reduce(ones(), op.MAX), reduce(ones(torch.int32))]),
        counted(lambda: [reduce(ones(), op.PRODUCT), reduce(ones(torch.complex64))]),
        counted(lambda: [dist.all_gather([ones(), ones()], ones()), dist.broadcast(ones(), 0)]),
        counted(lambda: reduce(ones(), group=fast)),
        counted(lambda: reduce(ones(torch.int32), group=fast)),
        counted(lambda: meshplan.deterministic_all_reduce(ones(), path="native")),
        counted(lambda: meshplan.deterministic_all_reduce(ones(), path="native", group=ours)),
        counted(lambda: meshplan.deterministic_all_reduce(ones(), group=ours)),
        counted(lambda: meshplan.deterministic_all_reduce(ones(), path="exchange")),
        counted(lambda: meshplan.deterministic_reduce_scatter(ones(), async_op=True).wait()),  # type: ignore[union-attr]
        counted(lambda: reduce(ones().to_sparse(), group=ours)),
        counted(lambda: reduce(ones(torch.bool), op.BOR, ours)),
    ]


def test_each_reduction_has_its_kind() -> None:
    expected = [
        {"any order": 2},
        {"outside": 2},
        {},
        {"native": 1},
        {"any order": 1},
        {"native": 1},
        # The backend of the group runs it under its contract.
        {"contract": 1},
        {"contract": 1},
        {"contract": 1},
        {"contract": 1},
        {"outside": 1},
        {"any order": 1},
    ]
    for found in run_ranks(count_kinds, 2):
        assert found == expected


def redistribute(_: int) -> dict[str, dict[str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))

    def run(*placements: Any) -> None:
        found = DTensor.from_local(ones(), mesh, placements, run_check=False)
        found.redistribute(mesh, [Replicate(), Replicate()]).to_local()  # type: ignore[attr-defined]

    one, two = (Replicate(), Partial()), (Partial(), Partial())
    results = {"plain": counted(lambda: run(*two))}
    for policy in ("deterministic", "fast", {"fsdp": "fast"}):
        with meshplan.installed(policy=policy):  # type: ignore[arg-type]
            results[f"{policy}, one axis"] = counted(lambda: [run(*one), run(*one)])
            results[f"{policy}, two axes"] = counted(lambda: run(*two))
    results["after"] = counted(lambda: run(*one))
    meshplan.shutdown()
    return results


def test_redistributions_have_their_kind() -> None:
    for found in run_ranks(redistribute, 4):
        assert found == {
            "plain": {"outside": 2},
            "deterministic, one axis": {"contract": 2},
            "deterministic, two axes": {"contract": 1},
            "fast, one axis": {"native": 2},
            "fast, two axes": {"native": 1},
            "{'fsdp': 'fast'}, one axis": {"native": 2},
            "{'fsdp': 'fast'}, two axes": {"contract": 1},
            "after": {"outside": 1},
        }
    for found in run_ranks(redistribute, 4, backend="meshplan"):
        assert {tuple(kinds) for kinds in found.values()} == {("contract",)}


def compile_redistribution(_: int) -> list[dict[str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))

    def run(x: Tensor) -> Tensor:
        found = DTensor.from_local(x, mesh, [Partial(), Partial()], run_check=False)
        return found.redistribute(mesh, [Replicate(), Replicate()]).to_local() * 2  # type: ignore[attr-defined]

    found = []
    with meshplan.installed():
        meshplan.prepare(mesh)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        found += [counted(lambda: compiled(ones())) for _ in range(2)]
    meshplan.shutdown()
    return found


@pytest.mark.parametrize("backend", ["gloo", "meshplan"])
def test_compiled_redistributions_are_counted_when_they_run(backend: str) -> None:
    warm_compiler()
    for found in run_ranks(compile_redistribution, 4, backend=backend):
        assert found == [{"contract": 1}] * 2


def count_reductions(group: Any) -> list[dict[str, int]]:
    return [
        counted(lambda: dist.all_reduce(ones(), group=group)),
        counted(lambda: group.allreduce([ones()]).wait()),
        counted(lambda: funcol.all_reduce(ones(), "sum", group).sum()),
        counted(lambda: funcol.reduce_scatter_tensor(ones(), "sum", 0, group).sum()),
    ]


def count_model_of_nccl(_: int) -> list[dict[str, int]]:
    """A process group that is written in Python: no operator sees its reductions."""
    nccl_model.register()
    nccl_model.configure(domain_size=1)
    before = dict(vars(nccl_model.NcclModelProcessGroup))
    found = []
    for name, options in (
        ("nccl_model", None),
        ("meshplan", meshplan.BackendOptions(inner="nccl_model")),
    ):
        found += count_reductions(dist.new_group(backend=name, pg_options=options))
    assert before == dict(vars(nccl_model.NcclModelProcessGroup))
    return found


class SilentGroup(dist.ProcessGroup):
    """A third party's group, which torch and users call by position or by keyword."""

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "silent"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> None:
        pass

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> None:
        pass


def test_keywords_of_groups_written_in_python() -> None:
    group, x = SilentGroup(0, 2), ones()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    with meshplan.coverage() as found:
        group.allreduce(tensors=[x])
        group.allreduce([x], opts=options)
        group.allreduce(opts=options, tensors=[x])
        group.reduce_scatter([x], input_tensors=[[x, x]])
        group.reduce_scatter(output_tensors=[x], input_tensors=[[x, x]])
    rows = [(row["reduction"], row["bytes"]) for step in found.steps for row in step.rows]
    assert rows == [
        ("all_reduce sum over silent", 16),
        *[("all_reduce max over silent", 16)] * 2,
        *[("reduce_scatter sum over silent", 32)] * 2,
    ]


def test_groups_written_in_python_are_counted() -> None:
    for found in run_ranks(count_model_of_nccl, 2):
        assert found == [{"outside": 1}] * 4 + [{"contract": 1}] * 4


def call_sites(found: Coverage) -> list[str]:
    """By row, in the order of their first reductions: file, function and what is in between."""
    return [
        " ".join((re.sub(r":\d+ ", " ", row["site"]), "|", row["reduction"]))
        for step in found.steps
        for row in step.rows
    ]


def square_sum(x: Tensor) -> Tensor:
    return x.square().sum()


def train(model: nn.Module) -> None:
    square_sum(model(torch.ones(3, 4))).backward()


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def reduce_async(group: Any) -> None:
    dist.all_reduce(ones(), group=group, async_op=True).wait()  # type: ignore[union-attr]


def compiled_sum(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


def find_sites(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    ours = dist.new_group(backend="meshplan")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    groups = (None, ours)
    replicas = [DistributedDataParallel(nn.Linear(4, 4), process_group=one) for one in groups]
    hooked = DistributedDataParallel(nn.Linear(4, 4), process_group=ours)
    hooked.register_comm_hook(ours, default_hooks.fp16_compress_hook)
    compiled = torch.compile(compiled_sum, backend="aot_eager", fullgraph=True)
    compiled(ones())
    with meshplan.coverage() as found:
        train(model)
        clip(model)
        for one in (*replicas, hooked):
            train(one)
        for group in groups:
            reduce_async(group)
        meshplan.deterministic_all_reduce(ones(), async_op=True).wait()  # type: ignore[union-attr]
        compiled(ones())
        thread = threading.Thread(target=dist.all_reduce, args=(ones(),), name="loader")
        thread.start()
        thread.join()
    return call_sites(found)


class TestCallSites(TestCase):
    maxDiff = None

    def test_call_sites(self) -> None:
        warm_compiler()
        self.assertExpectedInline(
            "\n".join(common_result(find_sites, 2)),
            """\
tests/test_coverage.py train (backward, FSDP2) | reduce_scatter avg over gloo
tests/test_coverage.py clip (clip_grad_norm_, DTensor) | all_reduce sum over gloo
tests/test_coverage.py train (backward, C++, such as DDP's reducer) | all_reduce sum over gloo
tests/test_coverage.py train (backward, C++, such as DDP's reducer) | all_reduce sum of backend meshplan
tests/test_coverage.py train (backward, DDP hook) | all_reduce sum of backend meshplan
tests/test_coverage.py reduce_async | all_reduce sum over gloo
tests/test_coverage.py reduce_async | all_reduce sum of backend meshplan
tests/test_coverage.py find_sites | deterministic_all_reduce sum
tests/test_coverage.py compiled_sum (compiled) | all_reduce sum over gloo
thread loader | all_reduce sum over gloo""",
        )


def message_of(run: Callable[[], object]) -> str:
    """The error of a reduction under ``strict``."""
    with meshplan.coverage(strict=True) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FallbackRefusedError) as caught:
            run()
        # Nothing was outside before it, and the kinds that are none do not raise.
        dist.all_reduce(ones(), dist.ReduceOp.MAX)
        meshplan.deterministic_all_reduce(ones())
    assert set(kinds(found)) <= {"any order", "contract"}
    return re.sub(r":\d+ ", " ", str(caught.value))


def refuse(_: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    ours = dist.new_group(backend="meshplan")
    sharded, replica = nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4))
    fully_shard(sharded, mesh=mesh)
    compiled = torch.compile(compiled_sum, backend="aot_eager", fullgraph=True)
    compiled(ones())
    found = [
        message_of(lambda: dist.all_reduce(ones())),
        message_of(lambda: compiled_sum(ones())),
        message_of(lambda: compiled(ones())),
        message_of(lambda: train(replica)),
        message_of(lambda: train(sharded)),
        message_of(lambda: dist.all_reduce(ones().to_sparse(), group=ours)),
    ]
    # Nothing of it is left behind: the next reductions meet.
    total = ones()
    dist.all_reduce(total)
    dist.all_reduce(total, group=ours)
    assert total.tolist() == [4.0] * 4
    return found


class TestStrict(TestCase):
    maxDiff = None

    def test_messages(self) -> None:
        warm_compiler()
        self.assertExpectedInline(
            "\n".join(common_result(refuse, 2)),
            """\
MP701: tests/test_coverage.py <lambda>: all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"), or pass strict=False to meshplan.coverage
MP701: tests/test_coverage.py compiled_sum: all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"), or pass strict=False to meshplan.coverage
MP701: tests/test_coverage.py compiled_sum (compiled): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"), or pass strict=False to meshplan.coverage
MP701: tests/test_coverage.py train (backward, C++, such as DDP's reducer): all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"), or pass strict=False to meshplan.coverage
MP701: tests/test_coverage.py train (backward, FSDP2): reduce_scatter avg over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; create the group by init_process_group("meshplan") or new_group(backend="meshplan"), or pass strict=False to meshplan.coverage
MP701: tests/test_coverage.py <lambda>: all_reduce sum over gloo, 2 ranks, of float32 is outside the contract, in the backend's own order; convert the tensor to a dtype and layout of the contract, or pass strict=False to meshplan.coverage""",
        )


def compile_with_breaks(_: int) -> list[Any]:
    """Code that torch.compile divides: what is between the graphs is counted as it stands."""

    def run(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        dist.all_reduce(y)
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(run, backend="aot_eager")
    with meshplan.coverage(keep=2) as found:
        for _ in range(2):
            assert compiled(ones()).tolist() == [5.0] * 4
            found.end_step()

    def block(x: Tensor) -> Tensor:
        with meshplan.coverage():
            return x + 1

    with pytest.raises(Exception, match=r"meshplan\.coverage cannot be in a graph"):
        torch.compile(block, backend="aot_eager", fullgraph=True)(ones())
    return [call_sites(found), [row["count"] for step in found.steps for row in step.rows]]


def test_divided_graphs_are_counted() -> None:
    warm_compiler()
    line = "tests/test_coverage.py run (compiled) | all_reduce sum over gloo"
    assert run_ranks(compile_with_breaks, 2) == [[[line] * 2, [1, 1]]] * 2


def leave_blocks(_: int) -> None:
    with meshplan.coverage() as outer:
        dist.all_reduce(ones())
        with suppress(KeyError), meshplan.coverage(strict=True):
            raise KeyError
        # The other block goes on, without ``strict``.
        dist.all_reduce(ones())
    assert OBSERVING.observer is None
    dist.all_reduce(ones())
    with meshplan.coverage() as second:
        group = dist.new_group(backend="meshplan")
    assert kinds(outer) == {"outside": 2}
    assert kinds(second) == {}
    with count_native_reductions() as native:
        dist.all_reduce(ones(), group=group)
    assert not any(native)


def test_nothing_is_counted_after_the_block() -> None:
    run_ranks(leave_blocks, 2)


def count_steps(_: int) -> list[Any]:
    logged: list[Any] = []
    with meshplan.coverage(on_step=lambda one: logged.append(one.to_scalars()), keep=2) as found:
        for count in (1, 2, 3):
            for _ in range(count):
                dist.all_reduce(ones())
            assert found.end_step().number == count
    counts = [one["meshplan/outside/count"] for one in logged]
    sizes = [one["meshplan/outside/bytes"] for one in logged]
    assert all(one["meshplan/outside/seconds"] > 0 for one in logged)
    assert {type(value) for one in logged for value in one.values()} <= {int, float}
    with pytest.raises(InstallError, match="between start and stop"):
        found.end_step()
    # A reduction that was issued in a step belongs to it, whenever it runs.
    group = dist.new_group(backend="meshplan")
    with meshplan.coverage(keep=2) as late:
        work = dist.all_reduce(ones(), group=group, async_op=True)
        late.end_step()
        assert work is not None
        work.wait()
        late.end_step()
    assert [sum(row["count"] for row in one.rows) for one in late.steps] == [1, 0]
    return [counts, sizes, [one.number for one in found.steps]]


def test_steps_are_counted_apart() -> None:
    assert run_ranks(count_steps, 2) == [[[1, 2, 3], [16, 32, 48], [2, 3]]] * 2


def count_without_a_block(_: int) -> tuple[dict[str, int], int]:
    found = meshplan.coverage(keep=2)
    dist.all_reduce(ones())
    with pytest.raises(InstallError, match="nothing is counted"):
        found.end_step()
    assert found.start() is found
    with pytest.raises(InstallError, match="was started before"):
        found.start()
    dist.all_reduce(ones())
    found.end_step()
    dist.all_reduce(ones())
    found.stop()
    found.stop()
    assert OBSERVING.observer is None
    dist.all_reduce(ones())
    with pytest.raises(InstallError, match="was started before"):
        found.start()
    return kinds(found), len(found.steps)


def test_reductions_between_start_and_stop_are_counted() -> None:
    assert run_ranks(count_without_a_block, 2) == [({"outside": 1}, 2)] * 2


def test_a_number_of_steps_is_checked() -> None:
    with pytest.raises(PolicyError, match="pass 1 or more"), meshplan.coverage(keep=0):
        pass


class TestText(TestCase):
    maxDiff = None

    def test_table(self) -> None:
        step = _coverage.CoverageStep(3)
        for row in (
            (
                "contract",
                "all_reduce sum of backend meshplan",
                "float32",
                8,
                "job/train.py:31 step",
            ),
            ("outside", "all_reduce sum over nccl", "bfloat16", 2, "job/loss.py:7 mean"),
        ):
            for _ in range(2):
                step.add(_coverage.CoverageRow(*row), 3 << 20, 0.25, None)  # type: ignore[arg-type]
        found = Coverage(strict=False, on_step=None, keep=1)
        found._ended.append(step)
        self.assertExpectedInline(
            str(found),
            """\
[meshplan] step 3: 2 outside, 0 native, 0 any order, 2 contract (12 MiB, 1.000 s)
kind         count       bytes    host s  call site: reduction (dtype, ranks)
outside          2       6 MiB     0.500  job/loss.py:7 mean: all_reduce sum over nccl (bfloat16, 2 ranks)
contract         2       6 MiB     0.500  job/train.py:31 step: all_reduce sum of backend meshplan (float32, 8 ranks)""",
        )


def test_rows_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_coverage, "MAX_ROWS", 3)
    step = _coverage.CoverageStep(1)
    for line in (1, 2, 3, 4, 5, 1):
        row = _coverage.CoverageRow("outside", "all_reduce", "float32", 2, f"job.py:{line}")
        step.add(row, 4, 0.0, None)
    assert [row["count"] for row in step.rows] == [2, 1, 1]
    assert step.dropped == 2
    assert step.to_scalars()["meshplan/outside/count"] == 6
    found = Coverage(strict=False, on_step=None, keep=1)
    found._ended.append(step)
    assert "(2 reductions of further call sites are in the totals only)" in str(found)


def reduce_in_threads(_: int) -> list[int]:
    """Each thread has groups of its own; another one ends steps."""
    groups = [dist.new_group(backend=name) for name in ("gloo", "meshplan") * 3]

    def run(group: Any) -> None:
        for _ in range(50):
            dist.all_reduce(ones(), group=group)

    with meshplan.coverage(keep=1000) as found:
        threads = [threading.Thread(target=run, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if len(found.steps) < 900:
                found.end_step()
            threads[0].join(0.002)
    totals = [
        sum(one.to_scalars()[f"meshplan/{k}/count"] for one in found.steps)
        for k in ("outside", "contract")
    ]
    return [int(total) for total in totals]


def test_threads_are_counted_together() -> None:
    assert run_ranks(reduce_in_threads, 2) == [[150, 150]] * 2


def leave_while_others_reduce(_: int) -> float:
    """Blocks begin and end while another thread reduces; no reduction is lost."""
    group, done, total = dist.new_group(), threading.Event(), torch.zeros(1)

    def run() -> None:
        try:
            for _ in range(300):
                one = ones()
                dist.all_reduce(one, group=group)
                total.add_(one[0])
        finally:
            done.set()

    with meshplan.coverage():
        pass
    thread = threading.Thread(target=run)
    thread.start()
    while not done.is_set():
        with meshplan.coverage():
            done.wait(0.001)
    thread.join()
    return total.item()


def test_blocks_begin_and_end_while_others_reduce() -> None:
    assert run_ranks(leave_while_others_reduce, 2) == [600.0] * 2
