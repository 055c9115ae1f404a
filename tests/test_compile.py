"""Under ``torch.compile``: graphs have the bits of eager code, and no plan goes stale.

Local arithmetic is exact or of one product an element, so that what is compared are reductions: a
compiler may well add in another order than eager torch does.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import meshplan
from meshplan import Contract
from meshplan.definition import reduce_leaves
from meshplan.dtensor import current_config
from meshplan.errors import GroupStateError
from meshplan.execute._graph import write_step
from meshplan.execute.paths import _hierarchical
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Links, Topology
from tests.compiled import NATIVE, REDUCTIONS, Graphs, bits, compiles, orders_run, warm_inductor
from tests.inputs import draw_leaves
from tests.marks import full
from tests.processes import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.processes]

P, R, S = Partial(), Replicate(), Shard
RANK, TREE = Contract(order="rank"), Contract(order="tree")
# By tree 0, in the order of ranks 1.
SUMMANDS = (1e20, 1.0, -1e20, 1.0)
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor needs a C++ compiler",
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(autouse=True)
def _warm() -> None:
    warm_inductor()


class Block(nn.Module):
    """Every matrix product on a rank has one term, so that only ranks' summands are added."""

    def __init__(self, tp: int, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(1, tp, bias=False)
        self.down = nn.Linear(tp, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Not a view, which FSDP2 warns of.
        return self.down(torch.relu(self.up(x))) * 1.0  # type: ignore[no-any-return]


def block(mesh: DeviceMesh, features: int = 5) -> Block:
    model = Block(mesh.size(), features)
    with torch.no_grad():
        model.up.weight.fill_(1.0)
        columns = draw_leaves(mesh.size(), features)
        model.down.weight.copy_(torch.stack(columns, 1))
    return parallelize_module(  # type: ignore[return-value]
        model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def train(model: nn.Module, forward: Callable[[Tensor], Tensor], compiled: bool) -> list[Tensor]:
    """Two steps: outputs, losses, and the gradients and parameters of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    update = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.ones(1, 1, requires_grad=True)
        out = forward(x)
        loss = out * 2
        back = torch.zeros_like(loss)
        back[0, 2] = 1.0
        loss.backward(back)
        assert x.grad is not None
        found += [out.detach(), loss.detach(), x.grad]
        found += [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
        update()
        found += [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        optimizer.zero_grad()
    return [t.detach() for t in found]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_training_has_eager_bits(backend: str) -> None:
    """Forward, backward and optimizer of a tensor-parallel block, on a mesh never prepared."""

    def ranks(rank: int) -> bytes:
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("fsdp", "tp"))["tp"]
        with meshplan.installed(strict=True):
            model = block(mesh)
            eager = train(model, model, False)
            planned = sum(e["count"] for e in meshplan.report(json=True)["entries"])
            assert planned == 4  # two steps: the output, and the gradient of the input
            graphs = Graphs()
            model = block(mesh)
            chosen: Any = graphs.backend if backend == "aot_eager" else backend
            compiled = torch.compile(model, backend=chosen, fullgraph=True)
            ran = orders_run()
            for mine, theirs in zip(train(model, compiled, True), eager, strict=True):
                assert_bitwise_equal(mine, theirs)
            assert ran == ["tree"] * planned
            if backend == "aot_eager":
                assert (graphs.count(REDUCTIONS), graphs.count(NATIVE)) == (2, 0)
        # The data shows the order: another one has other bits.
        columns = draw_leaves(3, 5)
        assert bits(columns[0] + columns[1] + columns[2]) == bits(eager[0])
        assert bits(columns[2] + columns[1] + columns[0]) != bits(eager[0])
        return bits(*eager[:3])

    assert len(set(run_ranks(ranks, 3))) == 1


def _both(x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Redistributions of several kinds, six of them reductions."""

    def of(*placements: Any) -> DTensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    return [
        of(P, P).redistribute(mesh, (R, R)).to_local(),
        of(R, P).redistribute(mesh, (R, R)).to_local(),
        of(P, P).redistribute(mesh, (R, S(0))).to_local(),
        of(P, P).redistribute(mesh, (S(0), S(1))).to_local(),
        of(Partial("avg"), Partial("avg")).full_tensor() * 1.0,
        of(P, S(1)).full_tensor() * 1.0,
        of(S(0), R).full_tensor() * 1.0,
    ]


@pytest.mark.parametrize("path", ["auto", "exchange", full("halving")])
def test_each_planned_reduction_is_one_graph_operator(path: Any) -> None:
    """Each planned reduction is one in the graph, none is the backend's own; backward as well."""

    def ranks(rank: int) -> bytes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        x = order_sensitive(15, rank=rank, world_size=4).view(5, 3)

        def run(function: Callable[..., list[Tensor]]) -> list[Tensor]:
            given = x.clone().requires_grad_()
            found = function(given, mesh)
            back = [order_sensitive(t.numel(), rank=rank, world_size=4, seed=9) for t in found]
            used = [pair for pair in zip(found, back, strict=True) if pair[0].numel()]
            torch.autograd.backward([t for t, _ in used], [b.view(t.shape) for t, b in used])
            assert given.grad is not None
            return [t.detach() for t in found] + [given.grad]

        with meshplan.installed(path=path, strict=True):
            eager = run(_both)
            entries = meshplan.report(json=True)["entries"]
            planned = sum(e["count"] for e in entries if e["contract"])
            graphs = Graphs()
            compiled = run(torch.compile(_both, backend=graphs.backend, fullgraph=True))
        for mine, theirs in zip(compiled, eager, strict=True):
            assert_bitwise_equal(mine, theirs)
        assert planned == 6
        assert (graphs.count(REDUCTIONS), graphs.count(NATIVE)) == (planned, 0)
        return bits(eager[0], eager[4], eager[5])

    assert len(set(run_ranks(ranks, 4))) == 1


@pytest.mark.parametrize(
    ("compiler", "blocks"),
    [("aot_eager", True), pytest.param("inductor", False, marks=needs_compiler)],
)
def test_halving_and_chunks_have_their_bits_in_graphs(compiler: Any, blocks: bool) -> None:
    """Six ranks: in blocks of two and three chunks, or flat halving."""

    def ranks(rank: int) -> None:
        chunks = []

        def three(*_: object) -> int:
            chunks.append(3)
            return 3

        _hierarchical.count_chunks = three
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("ddp", "fsdp"))
        leaves = draw_leaves(6, 999)
        how: dict[str, Any] = {"path": "halving"}
        if blocks:
            # As if measured: between CPUs the defaults are others, and halving is not chosen.
            links = Links(launch=6.5e-6)
            how = {"topology": Topology.uniform(6, node_size=2, domain_size=2, links=links)}

        def step(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (P, P), run_check=False).full_tensor() * 1.0

        with meshplan.installed(strict=True, **how):
            compiled = torch.compile(step, backend=compiler, fullgraph=True)
            found = [compiled(leaves[rank]), compiled(leaves[rank]), step(leaves[rank])]
            entries = meshplan.report(json=True)["entries"]
        for one in found:
            assert_bitwise_equal(one, reduce_leaves(leaves, "sum", (3, 2)))
        form = "exchange in blocks of 2, halving between them" if blocks else "halving"
        planned = f"all_reduce sum over (ddp, fsdp), groups of 6, {form}, contract "
        assert all(entry["planned"].startswith(planned) for entry in entries), entries
        assert len(chunks) == 3 * blocks

    run_ranks(ranks, 6)


@pytest.mark.parametrize("prepared", [False, True])
def test_groups_are_created_while_tracing(prepared: bool) -> None:
    """Ranks trace at different times, and one does not trace at all."""

    def ranks(rank: int) -> tuple[bytes, str]:
        # Not in the order of any group of torch's.
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
        x = order_sensitive(12, rank=rank, world_size=4)

        def step(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (P, P), run_check=False).full_tensor() * 1.0

        with meshplan.installed(path="exchange"):
            if prepared:
                meshplan.prepare(mesh)
            time.sleep(0.3 * rank)
            function = step if rank == 3 else torch.compile(step, backend="aot_eager")
            found = [function(x), function(x)]
            assert_bitwise_equal(found[0], found[1])
            groups = [e["group"] for e in meshplan.report(json=True)["entries"]]
        return bits(found[0]), groups[0]

    found = run_ranks(ranks, 4)
    assert len(set(found)) == 1
    assert "created group meshplan:" in found[0][1]


class Summands:
    """A reduction of four summands whose sum depends on the order, compiled and counted."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        self.x = torch.tensor([SUMMANDS[dist.get_rank()]])
        self.graphs = Graphs()
        chosen: Any = self.graphs.backend if backend == "aot_eager" else backend
        self.compiled = torch.compile(self.eager, backend=chosen, fullgraph=True)

    def eager(self, x: Tensor) -> Tensor:
        d = DTensor.from_local(x, self.mesh, (P,), run_check=False)
        return d.redistribute(self.mesh, (R,)).to_local() + 0.0

    def __call__(self) -> float:
        """The sum; the same as eager's, where the order is meshplan's."""
        found = self.compiled(self.x).item()
        config = current_config()
        if config is not None and config.policy != "fast":
            assert found == self.eager(self.x).item()
        return float(found)


def test_reinstall_recompiles() -> None:
    """After another contract, path or policy, or an uninstall, older graphs are not used."""

    def ranks(rank: int) -> None:
        sums = Summands()
        native = sums.graphs.count
        sums()
        assert (native(NATIVE), native(REDUCTIONS)) == (1, 0)
        # Compiled without meshplan: forgotten.
        meshplan.install(contract=RANK)
        assert sums() == 1.0
        assert (native(NATIVE), native(REDUCTIONS)) == (1, 1)
        # Compiled with it: guarded.
        meshplan.install(contract=TREE)
        assert sums() == 0.0
        with meshplan.policy("fast"):
            sums()
            assert native(NATIVE) == 2
        with meshplan.installed(contract=RANK, path="exchange"):
            assert sums() == 1.0
        made = compiles()
        # The graph of a setting is reused when the setting returns.
        for contract, expected in ((RANK, 1.0), (TREE, 0.0)) * 2:
            meshplan.install(contract=contract)
            assert sums() == expected
        with meshplan.policy("fast"):
            sums()
        assert compiles() == made
        assert native(NATIVE) == 2
        # Uninstalled, and installed again.
        meshplan.uninstall()
        sums()
        assert native(NATIVE) == 3
        meshplan.install(contract=RANK)
        assert sums() == 1.0
        assert native(NATIVE) == 3

    run_ranks(ranks, 4)


def test_policy_applies_to_its_thread_only() -> None:
    def ranks(rank: int) -> None:
        sums = Summands()
        meshplan.install(contract=RANK)
        assert sums() == 1.0
        found: list[float] = []
        with meshplan.policy("fast"):
            sums()
            assert sums.graphs.count(NATIVE) == 1
            thread = threading.Thread(target=lambda: found.append(sums()))
            thread.start()
            thread.join(30)
        assert found == [1.0]
        assert sums.graphs.count(REDUCTIONS) == 1

    run_ranks(ranks, 4)


def test_graph_with_a_reduction_in_backward_only_is_guarded() -> None:
    """Nothing is reduced in forward, so that only the gradient could go stale."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = nn.Linear(1, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor(SUMMANDS).view(4, 1))
        parallelize_module(model, mesh, ColwiseParallel())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

        def gradient() -> float:
            x = torch.ones(1, 1, requires_grad=True)
            compiled(x).backward(torch.ones(1, 1))
            assert x.grad is not None
            return x.grad.item()

        for contract, expected in ((RANK, 1.0), (TREE, 0.0), (RANK, 1.0)):
            meshplan.install(contract=contract)
            assert gradient() == expected

    run_ranks(ranks, 4)


def test_destroyed_groups_are_created_again() -> None:
    """After ``shutdown`` and in another life of the default group, as in eager code."""

    def ranks(rank: int) -> None:
        meshplan.install(contract=RANK, path="exchange")
        sums = Summands()
        sums.mesh = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("tp",))
        sums.x = torch.tensor([SUMMANDS[3 - rank]])
        assert sums() == 1.0
        meshplan.shutdown()
        assert sums() == 1.0
        dist.destroy_process_group()
        store = dist.FileStore(f"{os.environ['MESHPLAN_TEST_STORE']}-again", 4)
        dist.init_process_group("gloo", rank=rank, world_size=4, store=store)
        # Names of torch's are numbers, which mean other groups now.
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        assert [group is dist.GroupMember.NON_GROUP_MEMBER for group in pairs]
        sums.mesh = DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("tp",))
        assert sums() == 1.0
        assert sums.graphs.count(REDUCTIONS) == 3

    run_ranks(ranks, 4)


def test_later_topology_discovery_recompiles() -> None:
    """Eager ranks plan by it from then on, so graphs do as well."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = order_sensitive(12, rank=rank, world_size=4)

        def step(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (P, R), run_check=False).full_tensor() * 1.0

        with meshplan.installed():
            compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
            made = compiles()
            first = compiled(x)
            assert meshplan.dtensor.discovered_cluster() is None
            meshplan.prepare(mesh)
            assert meshplan.dtensor.discovered_cluster() is not None
            for _ in range(2):
                assert_bitwise_equal(compiled(x), first)
            assert compiles() == made + 2

    run_ranks(ranks, 4)


def test_graph_survives_a_later_flatten() -> None:
    """The graph keeps its plan, and eager ranks issue the same collectives."""

    def ranks(rank: int) -> bytes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = order_sensitive(12, rank=rank, world_size=4)

        def step(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, (P, P), run_check=False).full_tensor() * 1.0

        with meshplan.installed(path="exchange"):
            compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
            first = compiled(x)
            mesh._flatten("flat")
            again = step(x) if rank % 2 else compiled(x)
            assert_bitwise_equal(again, first)
            torch._dynamo.reset()
            assert_bitwise_equal(compiled(x), first)
        return bits(first)

    assert len(set(run_ranks(ranks, 4))) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_code_below_a_graph_break_runs_eagerly() -> None:
    """What a graph break leaves to Python runs as it does without a compiler, checks and all."""

    def ranks(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        lock = threading.Lock()
        d = DTensor.from_local(
            order_sensitive(12, rank=rank, world_size=4), mesh, (P, P), run_check=False
        )

        def step(d: DTensor) -> Tensor:
            with lock:
                y = d.redistribute(mesh, (R, R))
            return y.to_local()

        found = []
        for path in ("exchange", "auto"):
            with meshplan.installed(path=path, audit=1, debug=True):
                eager = step(d)
                meshplan.clear_report()
                function = torch.compile(step, backend="aot_eager") if rank else step
                assert_bitwise_equal(function(d), eager)
                (entry,) = meshplan.report(json=True)["entries"]
                found.append((entry["traced"], entry["count"], entry["audited"]))
        return found

    assert run_ranks(ranks, 4) == [[(False, 1, 1)] * 2] * 4


def test_one_graph_serves_all_sizes() -> None:
    """With a dynamic batch there is one graph for all sizes, and all ranks choose the same path."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def step(x: Tensor) -> Tensor:
            d = DTensor.from_local(x, mesh, (P, P), run_check=False)
            return d.redistribute(mesh, (R, R)).to_local() * 1.0

        for path in ("auto", "exchange"):
            with meshplan.installed(path=path):
                graphs = Graphs()
                compiled = torch.compile(step, backend=graphs.backend, fullgraph=True, dynamic=True)
                # Small ones and such as take another path when they are there.
                for rows in (3, 7, 5, 70_000):
                    x = order_sensitive(2 * rows, rank=rank, world_size=4).view(rows, 2)
                    function = step if rank == 1 else compiled
                    assert_bitwise_equal(function(x), step(x))
                assert graphs.count(REDUCTIONS) == (0 if rank == 1 else 1)

    run_ranks(ranks, 4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_in_fsdp_have_eager_bits() -> None:
    """FSDP2's hooks are not traced; what tensor parallelism reduces inside has eager's bits."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))

        def run(backend: str | None) -> list[Tensor]:
            model = nn.Sequential(block(mesh["tp"], 1), block(mesh["tp"]))
            for layer in model:
                if backend:
                    layer.compile(backend=backend, fullgraph=True)
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            out = model(torch.ones(1, 1))
            back = torch.zeros_like(out)
            back[0, 2] = 1.0
            out.backward(back)
            return [out.detach()] + [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]

        with meshplan.installed(strict=True):
            for mine, theirs in zip(run("aot_eager"), run(None), strict=True):
                assert_bitwise_equal(mine, theirs)
        reduced = [e for e in meshplan.report(json=True)["entries"] if e["traced"]]
        assert reduced

    run_ranks(ranks, 3)


def test_compiled_model_in_ddp_has_eager_bits() -> None:
    """DDP's own reductions are the backend's; those of tensor parallelism in it are planned."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))

        def run(backend: str | None) -> list[Tensor]:
            model = block(mesh["tp"])
            weights = [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]

            class Local(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.weights = nn.ParameterList(weights)

                def forward(self, x: Tensor) -> Tensor:
                    placed = [
                        DTensor.from_local(w, mesh["tp"], (S(i),), run_check=False)
                        for i, w in enumerate(self.weights)
                    ]
                    y = DTensor.from_local(x, mesh["tp"], (R,), run_check=False)
                    for w in placed:
                        y = torch.relu(y) @ w.t()
                    return y.redistribute(mesh["tp"], (R,)).to_local()

            wrapped: nn.Module = DistributedDataParallel(
                Local(), process_group=mesh["dp"].get_group()
            )
            if backend:
                wrapped = torch.compile(wrapped, backend=backend)
            out = wrapped(torch.ones(1, 1))
            back = torch.zeros_like(out)
            back[0, 2] = 1.0
            out.backward(back)
            return [out.detach()] + [w.grad for w in wrapped.parameters() if w.grad is not None]

        with meshplan.installed(strict=True):
            found, expected = run("aot_eager"), run(None)
            assert len(found) == 3
            for mine, theirs in zip(found, expected, strict=True):
                assert_bitwise_equal(mine, theirs)

    run_ranks(ranks, 3)


class TestMessages(TestCase):
    maxDiff = None

    def test_untraceable_call_is_refused_with_fullgraph(self) -> None:
        """One graph is refused; two graphs with the call between them are made."""

        def ranks(rank: int) -> list[str]:
            meshplan.install(contract=TREE)
            sums = Summands()

            def step(x: Tensor) -> Tensor:
                with meshplan.policy("deterministic"), meshplan.installed(contract=RANK):
                    meshplan.prepare(sums.mesh)
                    found = sums.eager(x)
                return found * 2

            assert torch.compile(step, backend="aot_eager")(sums.x).item() == 2.0
            assert sums.eager(sums.x).item() == 0.0
            messages = []
            for call in (
                lambda: meshplan.install(),
                lambda: meshplan.uninstall(),
                lambda: meshplan.prepare(sums.mesh),
                lambda: meshplan.shutdown(),
            ):

                def graph(x: Tensor, call: Callable[[], object] = call) -> Tensor:
                    call()
                    return x + 1

                with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
                    torch.compile(graph, backend="aot_eager", fullgraph=True)(sums.x)
                found = re.search(r"meshplan\.\w+ cannot be in a graph[^'\")]*", str(caught.value))
                messages.append("" if found is None else found[0])
            return messages

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 4)[0]),
            """\
meshplan.install cannot be in a graph; call it around what is compiled
meshplan.uninstall cannot be in a graph; call it around what is compiled
meshplan.prepare cannot be in a graph; call it around what is compiled
meshplan.shutdown cannot be in a graph; call it around what is compiled""",
        )

    def test_graph_with_an_unknown_group_is_refused(self) -> None:
        def ranks(rank: int) -> list[str]:
            x = torch.ones(2)
            messages = []
            for group, size in (("meshplan:0123", 2), ("0", 3)):
                text = write_step(Step("all_reduce", (0,), (size,), "", "", "sum"))
                with pytest.raises(GroupStateError) as caught:
                    torch.ops.meshplan.reduction(x, text, "exchange", False, [group, "", "", ""])
                messages.append(str(caught.value))
            return messages

        self.assertExpectedInline(
            "\n".join(run_ranks(ranks, 2)[0]),
            """\
MP503: compiled code reduces over the process group meshplan:0123, and this process has none of that name; call meshplan.prepare(mesh) before compiled code runs, on every rank, and torch.compiler.reset() where process groups were destroyed
MP503: compiled code reduces over 3 ranks of the process group 0, and the one of that name has 2; call meshplan.prepare(mesh) before compiled code runs, on every rank, and torch.compiler.reset() where process groups were destroyed""",
        )
