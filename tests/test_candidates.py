"""The output of ``explain``: the chosen plan, the rejected ones, and the reasons."""

from __future__ import annotations

import pytest
from expecttest import TestCase

from meshplan.layout import Layout
from meshplan.planner import Plan, Problem, plan
from meshplan.planner._plan import MAX_CANDIDATES
from meshplan.topology import Topology

CUBE = Layout.of(a=2, b=2, c=2)
TWO_NODES = Topology.uniform(8, node_size=4, domain_size=4)
THIRTY_NODES = Topology.uniform(240, node_size=8)
FIVE_NODES = Topology.uniform(40, node_size=8, domain_size=8)


def planned(layout: Layout, text: str, **options: object) -> Plan:
    src, dst = (part.split() for part in text.split(" -> "))
    return plan(Problem.of(layout, src, dst, **options))  # type: ignore[arg-type]


class TestCube(TestCase):
    """Eight ranks on two nodes: axis a crosses them, b and c do not."""

    def explained(self, *texts: str) -> str:
        return "\n".join(
            planned(CUBE, text, shape=(64, 64), topology=TWO_NODES).explain() for text in texts
        )

    def test_ppp_to_rs0r(self) -> None:
        self.assertExpectedInline(
            self.explained("P P P -> R S(0) R"),
            """\
(P(sum), P(sum), P(sum)) -> (R, S(0), R) on (a=2, b=2, c=2)
4 plans compared for 64 x 64 elements of float32, 2 nodes of 4, domains of 4; bytes out of the busiest rank
chosen: 38.8 us, 2 collectives, 28.7 kB out (12.3 kB domain, 16.4 kB network), 49.2 kB memory
  all_reduce sum over (a, b, c), exchange
  slice R -> S(0) over (b), local
rejected, 43.3 us slower, a new group over (a, c): 82.1 us, 2 collectives, 20.5 kB out (8.2 kB domain, 12.3 kB network), 41.0 kB memory, new group over (a, c)
  reduce_scatter sum over (a, b, c) to S(0) over b, all_gather over (a, c), exchange
rejected, 46.8 us slower, 12.3 kB more inside domains, 2 more collectives, a new group over (b, c), 8.2 kB more memory: 85.5 us, 4 collectives, 28.7 kB out (24.6 kB domain, 4.1 kB network), 57.3 kB memory, new group over (b, c)
  all_reduce sum over (a, b, c), exchange in blocks of 4
  slice R -> S(0) over (b), local
rejected, 91.7 us slower, 2.0 kB more inside domains, 1 more collective, a new group over (b, c), a new group over (a, c): 130.5 us, 3 collectives, 20.5 kB out (14.3 kB domain, 6.1 kB network), 49.2 kB memory, new group over (b, c) and over (a, c)
  reduce_scatter sum over (a, b, c) to S(0) over b, all_gather over (a, c), exchange in blocks of 4""",
        )

    def test_costs_decide_between_candidates(self) -> None:
        """Nanoseconds, collectives, bytes in the domain and over the network, and the memory."""
        rows = []
        for text in (
            "P P P -> R R R",
            "P P P -> S(0) R S(0)",
            "P S(0) P -> R R R",
            "P S(0) P -> S(0) S(0) S(0)",
            "S(0) S(0) P -> R R R",
        ):
            rows.append(text)
            for one in planned(CUBE, text, shape=(64, 64), topology=TWO_NODES).candidates:
                cost = one.cost
                figures = (cost.nanoseconds, cost.collectives, cost.domain, cost.network, cost.peak)
                sent = "; ".join(step.brief(CUBE) for step in one.steps if step.kind != "slice")
                rows.append(f"{' '.join(map(str, figures))} {' '.join(cost.creates)}: {sent}")
        self.assertExpectedInline(
            "\n".join(rows),
            """\
P P P -> R R R
38754 2 12288 16384 49152 : all_reduce sum over (a, b, c), exchange
85536 4 24576 4096 57344 over (b, c): all_reduce sum over (a, b, c), exchange in blocks of 4
P P P -> S(0) R S(0)
26582 2 8192 8192 36864 : reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over c, all_gather over (b), exchange
38754 2 12288 16384 49152 : all_reduce sum over (a, b, c), exchange
74973 3 14336 2048 45056 over (b, c): reduce_scatter sum over (a, b, c) to S(0) over a, S(0) over c, all_gather over (b), exchange in blocks of 4
85536 4 24576 4096 57344 over (b, c): all_reduce sum over (a, b, c), exchange in blocks of 4
P S(0) P -> R R R
40318 5 16384 4096 32768 : all_reduce sum over (a, c), exchange in blocks of 2; torch S(0) -> R over (b)
40418 5 24576 8192 65536 : torch S(0) -> R over (b); all_reduce sum over (a, c), exchange in blocks of 2
82590 3 12288 8192 24576 over (a, c): all_reduce sum over (a, c), exchange; torch S(0) -> R over (b)
82764 3 16384 16384 49152 over (a, c): torch S(0) -> R over (b); all_reduce sum over (a, c), exchange
P S(0) P -> S(0) S(0) S(0)
31027 4 20480 4096 57344 : torch S(0) -> R over (b); reduce_scatter sum over (a, c) to S(0) over a, all_gather over (c), exchange in blocks of 2
40318 5 16384 4096 32768 : all_reduce sum over (a, c), exchange in blocks of 2; torch S(0) -> R over (b)
40418 5 24576 8192 65536 : torch S(0) -> R over (b); all_reduce sum over (a, c), exchange in blocks of 2
77200 3 16384 8192 40960 over (a, c): torch S(0) -> R over (b); reduce_scatter sum over (a, c) to S(0) over a, all_gather over (c), exchange
82590 3 12288 8192 24576 over (a, c): all_reduce sum over (a, c), exchange; torch S(0) -> R over (b)
82764 3 16384 16384 49152 over (a, c): torch S(0) -> R over (b); all_reduce sum over (a, c), exchange
S(0) S(0) P -> R R R
31083 4 8192 8192 24576 : all_reduce sum over (c), exchange; torch S(0) -> R over (b); torch S(0) -> R over (a)
31091 4 12288 8192 24576 : torch S(0) -> R over (b); all_reduce sum over (c), exchange; torch S(0) -> R over (a)
31109 4 20480 8192 49152 : torch S(0) -> R over (b); torch S(0) -> R over (a); all_reduce sum over (c), exchange""",
        )


class TestClusters(TestCase):
    def test_mesh_of_5_by_8(self) -> None:
        """The same ranks with the large axis inside: blocks of 8 are nodes."""
        turned = Layout.of(fsdp=5, ddp=8, tp=1)
        self.assertExpectedInline(
            planned(turned, "P P R -> R R R", topology=FIVE_NODES).explain(),
            """\
(P(sum), P(sum), R) -> (R, R, R) on (fsdp=5, ddp=8, tp=1)
2 plans compared for 4194304 elements of float32 (no shape given), 5 nodes of 8, domains of 8; bytes out of the busiest rank
chosen: 190.9 us, 8 collectives, 32.7 MB out (29.4 MB domain, 3.4 MB network), 54.5 MB memory
  all_reduce sum over (fsdp, ddp), exchange in blocks of 8
rejected, 553.4 us slower, 23.5 MB more over the network: 744.3 us, 2 collectives, 32.7 MB out (5.9 MB domain, 26.8 MB network), 50.3 MB memory
  all_reduce sum over (fsdp, ddp), exchange""",
        )

    def test_latency_decides_for_small_messages(self) -> None:
        self.assertExpectedInline(
            planned(CUBE, "P P P -> R R R", shape=(4,), topology=TWO_NODES).explain(),
            """\
(P(sum), P(sum), P(sum)) -> (R, R, R) on (a=2, b=2, c=2)
2 plans compared for 4 elements of float32, 2 nodes of 4, domains of 4; bytes out of the busiest rank
chosen: 38.4 us, 2 collectives, 56 B out (24 B domain, 32 B network), 48 B memory
  all_reduce sum over (a, b, c), exchange
rejected, 47.0 us slower, 2 more collectives, a new group over (b, c), 8 B more memory: 85.4 us, 4 collectives, 32 B out (24 B domain, 8 B network), 56 B memory, new group over (b, c)
  all_reduce sum over (a, b, c), exchange in blocks of 4""",
        )

    def test_a_plan_without_a_new_group_wins(self) -> None:
        """The pipeline's other stage keeps (dp, fsdp) from being a group that exists."""
        stage = Layout(sizes=(2, 2, 2), names=("dp", "cp", "fsdp"))
        self.assertExpectedInline(
            planned(
                stage, "P P P -> R R S(0)", shape=(8,), topology=Topology.unknown(16)
            ).explain(),
            """\
(P(sum), P(sum), P(sum)) -> (R, R, S(0)) on (dp=2, cp=2, fsdp=2)
2 plans compared for 8 elements of float32, placement of ranks unknown; bytes out of the busiest rank
chosen: 101.0 us, 2 collectives, 56 B out network, 96 B memory, new group over (dp, cp, fsdp)
  all_reduce sum over (dp, cp, fsdp), exchange
  slice R -> S(0) over (fsdp), local
rejected, 39.2 us slower, a new group over (dp, cp): 140.2 us, 2 collectives, 40 B out network, 80 B memory, new group over (dp, cp, fsdp) and over (dp, cp)
  reduce_scatter sum over (dp, cp, fsdp) to S(0) over fsdp, all_gather over (dp, cp), exchange""",
        )

    def test_equal_placements_have_no_candidates(self) -> None:
        self.assertExpectedInline(
            planned(CUBE, "R R R -> R R R").explain(),
            """\
(R, R, R) -> (R, R, R) on (a=2, b=2, c=2)
nothing to do""",
        )


def test_candidates_are_bounded_and_include_the_plan() -> None:
    wide = Layout(sizes=(2, 3, 4, 5, 2))
    found = planned(wide, "P S(0) S(0) S(1) P -> R R S(1) S(0) S(0)", topology=THIRTY_NODES)
    assert found.compared > MAX_CANDIDATES == len(found.candidates)
    assert found.candidates[0].steps == found.steps
    costs = [candidate.cost.nanoseconds for candidate in found.candidates]
    assert costs == sorted(costs)


@pytest.mark.parametrize("text", ["P P P -> R R R", "P P P -> R S(0) R"])
def test_explain_is_a_function_of_the_problem(text: str) -> None:
    plan.cache_clear()
    first = planned(CUBE, text, topology=TWO_NODES).explain()
    plan.cache_clear()
    assert planned(CUBE, text, topology=TWO_NODES).explain() == first
