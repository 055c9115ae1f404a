"""The forms of a reduction in shared memory: one-shot, two-shot, or the faster one by size."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan import kernel
from meshplan.definition import reduce_leaves
from meshplan.errors import FallbackRefusedError
from meshplan.execute import PATHS, Purpose, StepGroups, run_reduction
from meshplan.execute.paths import sharing_of
from meshplan.flatten import _connect
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Topology
from tests.marks import full
from tests.processes import run_ranks
from tests.refusals import refusal
from tests.steps import make_step

P, R, S = Partial(), Replicate(), Shard
# Larger than one-shot messages of ``auto``.
LARGE = 300_000


class TestSharing(TestCase):
    def test_path_decides_shared_memory(self) -> None:
        table = {path: [sharing_of(path, kind) for kind in ("cpu", "cuda")] for path in PATHS}
        self.assertExpectedInline(
            "\n".join(f"{path}: {' '.join(kinds)}" for path, kinds in table.items()),
            """\
auto: always timed
one_shot: always always
two_shot: always always
exchange: never never
halving: never never
integer: never never
integer_checksum: never never
reference: never never
native: never never""",
        )


@pytest.mark.processes
def test_path_decides_the_executed_form() -> None:
    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for path, small, large in (
            ("auto", "one_shot", "two_shot"),
            ("two_shot", "two_shot", "two_shot"),
            ("one_shot", "one_shot", "one_shot"),
        ):
            meshplan.clear_report()
            with meshplan.installed(path=path, strict=True):
                for numel in (7, LARGE):
                    leaves = [order_sensitive(numel, rank=r, world_size=4) for r in range(4)]
                    d = DTensor.from_local(leaves[rank], mesh, (P, P), run_check=False)
                    expected = reduce_leaves(leaves, "sum", (2, 2))
                    assert_bitwise_equal(d.full_tensor(), expected)
                    d.redistribute(mesh, (S(0), R))
            ran = {(e["ran"], e["largest_elements"]) for e in meshplan.report().entries}
            assert (small, 7) in ran or small == large, (path, ran)
            assert (large, LARGE) in ran
            assert len(ran) == 1 + (small != large)

    run_ranks(ranks, 4)


@pytest.mark.processes
@pytest.mark.parametrize("path", [full("one_shot"), "two_shot", full("auto")])
def test_path_decides_the_form_in_a_graph(path: str) -> None:
    """With a size that is known, and with one that is a symbol."""

    def ranks(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        modes: list[str] = []

        def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
            found = [n for n in graph.graph.nodes if "peer_reduce" in str(n.target)]
            modes.extend(node.args[8] for node in found)
            return graph

        def step(x: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor() * 1.0

        with meshplan.installed(path=path, strict=True):
            for dynamic in (False, True):
                torch._dynamo.reset()
                compiled = torch.compile(
                    step, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic
                )
                for numel in (6, 7):
                    leaves = [order_sensitive(numel, rank=r, world_size=2) for r in range(2)]
                    found = compiled(leaves[rank])
                    assert_bitwise_equal(found, reduce_leaves(leaves, "sum", (2,)))
        known = "one_shot" if path == "auto" else path
        assert set(modes) == {known, path}
        assert modes[-1] == path

    run_ranks(ranks, 2)


class TestRefusedForms(TestCase):
    def test_one_shot_without_shared_memory_falls_back(self) -> None:
        """On several hosts, where near ranks reduce first, and for a collective by itself.

        For ``auto`` that is no fallback; the report has the reason.
        """

        def ranks(rank: int) -> list[str]:
            messages = []
            mesh = init_device_mesh("cpu", (2, 2))
            d = DTensor.from_local(torch.ones(4), mesh, (P, P), run_check=False)
            nodes = Topology.uniform(4, node_size=2, domain_size=2)
            with meshplan.installed(path="one_shot", topology=nodes, strict=True):
                messages.append(refusal(FallbackRefusedError, d.full_tensor))
            _connect.host = lambda: f"host {rank}"
            with meshplan.installed(path="one_shot", strict=True):
                messages.append(refusal(FallbackRefusedError, d.full_tensor))
            with meshplan.installed(path="one_shot"):
                assert d.full_tensor().tolist() == [4.0] * 4
            (entry,) = meshplan.report().fallbacks
            messages.append(entry["why"])
            assert (entry["path"], entry["ran"]) == ("one_shot", "exchange")
            meshplan.clear_report()
            with meshplan.installed(strict=True):
                d.full_tensor()
            assert not meshplan.report().fallbacks
            messages.append(meshplan.report().entries[0]["why"])

            def nothing(size: int) -> None:
                raise OSError(28, "No space left on device")

            kernel.SharedMemory.create = nothing  # type: ignore[assignment, method-assign]
            _connect.host = lambda: "one host"
            meshplan.shutdown()
            with meshplan.installed():
                d.full_tensor()
            messages.append(meshplan.report().entries[-1]["why"])
            step = make_step((4,))
            messages.append(
                refusal(
                    FallbackRefusedError,
                    run_reduction,
                    torch.ones(2),
                    step,
                    StepGroups(dist.group.WORLD),
                    purpose=Purpose("all_reduce", "planned", "world", kind="collective"),
                    path="one_shot",
                    strict=True,
                )
            )
            return messages

        found = run_ranks(ranks, 4)
        assert all(messages == found[0] for messages in found)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP701: (P(sum), P(sum)) -> (R, R) on (axis0=2, axis1=2): path one_shot was requested and exchange would run: 2 axes in one reduction, in one order for all siblings, hierarchical, 2 ranks per block, cheapest for 4194304 elements; not through shared memory: near ranks reduce first; pass another path, or strict=False
MP701: (P(sum), P(sum)) -> (R, R) on (axis0=2, axis1=2): path one_shot was requested and exchange would run: 2 axes in one reduction, in one order for all siblings; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other; pass another path, or strict=False
2 axes in one reduction, in one order for all siblings; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other
2 axes in one reduction, in one order for all siblings; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other; one all-gather costs less than an exchange of this size
2 axes in one reduction, in one order for all siblings; not through shared memory: rank 0: no shared memory: [Errno 28] No space left on device; one all-gather costs less than an exchange of this size
MP701: all_reduce: path one_shot was requested and exchange would run: a test; not through shared memory: the group has none; pass another path, or strict=False""",
        )
