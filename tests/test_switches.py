"""MESHPLAN_USE_1STAGE_ALLREDUCE: one-shot always, never, or where it is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import meshplan
from meshplan.definition import reduce_leaves
from meshplan.dtensor import current_config
from meshplan.dtensor._config import Config
from meshplan.errors import FallbackRefusedError, GroupAgreementError, PolicyError
from meshplan.execute import PATHS, Purpose, StepGroups, one_shot_switch, run_reduction
from meshplan.flatten import _connect
from meshplan.testing import assert_bitwise_equal, order_sensitive
from meshplan.topology import Topology
from tests.marks import full
from tests.processes import run_ranks
from tests.steps import make_step

P, R, S = Partial(), Replicate(), Shard
NAME = "MESHPLAN_USE_1STAGE_ALLREDUCE"
# Larger than one-shot messages of ``auto``.
LARGE = 300_000


class TestValues(TestCase):
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def installed(self, value: str | None, **options: Any) -> Config:
        if value is None:
            self.patch.delenv(NAME, raising=False)
        else:
            self.patch.setenv(NAME, value)
        with meshplan.installed(**options):
            # It is read when it is installed, and then no more.
            self.patch.setenv(NAME, "nonsense")
            config = current_config()
            assert config is not None
            return config

    def test_switch_forces_forbids_or_leaves_one_shot(self) -> None:
        """Forced, forbidden, or left to the faster form."""
        found = [self.installed(value).one_shot for value in (None, "", "0", "1")]
        assert found == [None, None, False, True]
        tokens = {self.installed(value).token for value in (None, "0", "1")}
        assert len(tokens) == 3
        assert self.installed("").token == self.installed(None).token

    def test_switch_decides_shared_memory(self) -> None:
        table = {}
        for value in (None, "0", "1"):
            for path in PATHS:
                if (value, path) != ("0", "one_shot"):
                    config = self.installed(value, path=path)
                    kinds = ("cpu", "cuda")
                    table[f"{value} {path}"] = " ".join(map(config.sharing, kinds))
        self.assertExpectedInline(
            "\n".join(f"{k}: {v}" for k, v in table.items()),
            """\
None auto: always timed
None one_shot: always always
None two_shot: always always
None exchange: never never
None halving: never never
None integer: never never
None integer_checksum: never never
None reference: never never
None native: never never
0 auto: always timed
0 two_shot: always always
0 exchange: never never
0 halving: never never
0 integer: never never
0 integer_checksum: never never
0 reference: never never
0 native: never never
1 auto: always always
1 one_shot: always always
1 two_shot: always always
1 exchange: never never
1 halving: never never
1 integer: never never
1 integer_checksum: never never
1 reference: never never
1 native: never never""",
        )

    def test_invalid_switches_are_refused(self) -> None:
        messages = []
        for value, path in (("true", "auto"), ("2", "exchange"), (" 1", "auto"), ("0", "one_shot")):
            with pytest.raises(PolicyError) as caught:
                self.installed(value, path=path)
            messages.append(str(caught.value))
        self.patch.setenv("MESHPLAN_PATH", "one_shot")
        with pytest.raises(PolicyError) as caught:
            self.installed("0")
        assert str(caught.value) == messages[-1]
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP402: MESHPLAN_USE_1STAGE_ALLREDUCE='true' is no switch; write 1 for one-shot reductions wherever the path is auto, 0 for none, or unset it
MP402: MESHPLAN_USE_1STAGE_ALLREDUCE='2' is no switch; write 1 for one-shot reductions wherever the path is auto, 0 for none, or unset it
MP402: MESHPLAN_USE_1STAGE_ALLREDUCE=' 1' is no switch; write 1 for one-shot reductions wherever the path is auto, 0 for none, or unset it
MP402: path='one_shot' is forbidden by MESHPLAN_USE_1STAGE_ALLREDUCE=0; unset the variable, or pass path='auto'""",
        )
        self.patch.setenv(NAME, "yes")
        with pytest.raises(PolicyError):
            one_shot_switch()

    def test_different_switches_are_refused(self) -> None:
        def ranks(rank: int) -> str:
            mesh = init_device_mesh("cpu", (2,))
            self.patch.setenv(NAME, str(rank))
            d = DTensor.from_local(torch.ones(2), mesh, (P,), run_check=False)
            with meshplan.installed(), pytest.raises(GroupAgreementError) as caught:
                d.full_tensor()
            return str(caught.value)

        message, _ = run_ranks(ranks, 2)
        assert "Different: one_shot never (rank 0), always (rank 1)" in message


@pytest.mark.processes
def test_switch_decides_the_executed_form() -> None:
    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            mesh = init_device_mesh("cpu", (2, 2))
            for value, small, large in (
                ("", "one_shot", "two_shot"),
                ("0", "two_shot", "two_shot"),
                ("1", "one_shot", "one_shot"),
            ):
                patch.setenv(NAME, value)
                meshplan.clear_report()
                with meshplan.installed(strict=True):
                    for numel in (7, LARGE):
                        leaves = [order_sensitive(numel, rank=r, world_size=4) for r in range(4)]
                        d = DTensor.from_local(leaves[rank], mesh, (P, P), run_check=False)
                        expected = reduce_leaves(leaves, "sum", (2, 2))
                        assert_bitwise_equal(d.full_tensor(), expected)
                        d.redistribute(mesh, (S(0), R))
                    # Other paths are taken as they were named.
                    with meshplan.installed(path="reference"):
                        d.full_tensor()
                ran = {(e["ran"], e["largest_elements"]) for e in meshplan.report().entries}
                assert (small, 7) in ran or small == large, (value, ran)
                assert (large, LARGE) in ran
                assert ("reference", LARGE) in ran
                assert len(ran) == 2 + (small != large)

    run_ranks(ranks, 4)


@pytest.mark.processes
@pytest.mark.parametrize("value", [full(""), "0", full("1")])
def test_switch_decides_the_form_in_a_graph(value: str) -> None:
    """With a size that is known, and with one that is a symbol."""

    def ranks(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(NAME, value)
            mesh = init_device_mesh("cpu", (2,))
            modes: list[str] = []

            def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
                found = [n for n in graph.graph.nodes if "peer_reduce" in str(n.target)]
                modes.extend(node.args[8] for node in found)
                return graph

            def step(x: torch.Tensor) -> torch.Tensor:
                return DTensor.from_local(x, mesh, (P,), run_check=False).full_tensor() * 1.0

            with meshplan.installed(strict=True):
                for dynamic in (False, True):
                    torch._dynamo.reset()
                    compiled = torch.compile(
                        step, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic
                    )
                    for numel in (6, 7):
                        leaves = [order_sensitive(numel, rank=r, world_size=2) for r in range(2)]
                        found = compiled(leaves[rank])
                        assert_bitwise_equal(found, reduce_leaves(leaves, "sum", (2,)))
            known = {"": "one_shot", "0": "two_shot", "1": "one_shot"}[value]
            symbol = {"": "auto", "0": "two_shot", "1": "one_shot"}[value]
            assert set(modes) == {known, symbol}
            assert modes[-1] == symbol

    run_ranks(ranks, 2)


class TestForcedOneShot(TestCase):
    def test_forced_one_shot_without_shared_memory_falls_back(self) -> None:
        """On several hosts, where near ranks reduce first, and for a collective by itself."""

        def ranks(rank: int) -> list[str]:
            messages = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(NAME, "1")
                mesh = init_device_mesh("cpu", (2, 2))
                d = DTensor.from_local(torch.ones(4), mesh, (P, P), run_check=False)
                nodes = Topology.uniform(4, node_size=2, domain_size=2)
                with meshplan.installed(topology=nodes, strict=True):
                    with pytest.raises(FallbackRefusedError) as caught:
                        d.full_tensor()
                    messages.append(str(caught.value))
                _connect.host = lambda: f"host {rank}"
                with meshplan.installed(strict=True):
                    with pytest.raises(FallbackRefusedError) as caught:
                        d.full_tensor()
                    messages.append(str(caught.value))
                with meshplan.installed():
                    assert d.full_tensor().tolist() == [4.0] * 4
                (entry,) = meshplan.report().fallbacks
                messages.append(entry["why"])
                assert (entry["path"], entry["ran"]) == ("auto", "exchange")
                patch.setenv(NAME, "0")
                meshplan.clear_report()
                with meshplan.installed(strict=True):
                    d.full_tensor()
                (entry,) = meshplan.report().entries
                messages.append(entry["why"])
            step = make_step((4,))
            with pytest.raises(FallbackRefusedError) as caught:
                run_reduction(
                    torch.ones(2),
                    step,
                    StepGroups(dist.group.WORLD),
                    purpose=Purpose("all_reduce", "planned", "world", kind="collective"),
                    path="auto",
                    strict=True,
                    one_shot=True,
                )
            messages.append(str(caught.value))
            return messages

        found = run_ranks(ranks, 4)
        assert all(messages == found[0] for messages in found)
        self.assertExpectedInline(
            "\n".join(found[0]),
            """\
MP701: (P(sum), P(sum)) -> (R, R) on (axis0=2, axis1=2): path one_shot (MESHPLAN_USE_1STAGE_ALLREDUCE=1) was requested and exchange would run: 2 axes in one reduction, in one order for all siblings, hierarchical, 2 ranks per block, cheapest for 4194304 elements; MESHPLAN_USE_1STAGE_ALLREDUCE=1; not through shared memory: near ranks reduce first; pass another path, or strict=False
MP701: (P(sum), P(sum)) -> (R, R) on (axis0=2, axis1=2): path one_shot (MESHPLAN_USE_1STAGE_ALLREDUCE=1) was requested and exchange would run: 2 axes in one reduction, in one order for all siblings; MESHPLAN_USE_1STAGE_ALLREDUCE=1; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other; pass another path, or strict=False
2 axes in one reduction, in one order for all siblings; MESHPLAN_USE_1STAGE_ALLREDUCE=1; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other
2 axes in one reduction, in one order for all siblings; MESHPLAN_USE_1STAGE_ALLREDUCE=0; not through shared memory: its ranks are on several hosts, or in containers that cannot see each other; one all-gather costs less than an exchange of this size
MP701: all_reduce: path one_shot (MESHPLAN_USE_1STAGE_ALLREDUCE=1) was requested and exchange would run: a test; MESHPLAN_USE_1STAGE_ALLREDUCE=1; not through shared memory: the group has none; pass another path, or strict=False""",
        )
