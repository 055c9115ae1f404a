"""The verdict for every number of nodes, compared with that for each number."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.layout import Layout
from meshplan.lint._every_size import judge_every_size
from meshplan.lint._facts import JobFacts
from meshplan.lint._finding import Source
from meshplan.lint._job import Job
from meshplan.topology import Cluster, Topology

NAMES = ("ddp", "fsdp", "tp")


@settings(max_examples=12)
@given(
    st.sampled_from([2, 4, 6, 8]),
    st.integers(0, 2),
    st.lists(st.integers(1, 6), min_size=2, max_size=2),
    st.sampled_from(["dtensor", "fsdp2", "ddp"]),
)
def test_verdict_holds_for_larger_numbers(
    node: int, open_axis: int, others: list[int], framework: str
) -> None:
    taken = math.prod(others)

    def read(ranks: int) -> list[Job]:
        sizes = [*others]
        sizes.insert(open_axis, ranks // taken)
        return [Job(Layout(tuple(sizes), NAMES), Source("job"), framework=framework)]  # type: ignore[arg-type]

    def place(job: Job) -> Cluster:
        ranks = job.layout.world_size
        return Cluster(Topology.uniform(ranks, node_size=node, domain_size=node))

    found = judge_every_size(read, place, node)
    if found is None:
        return
    step = math.lcm(node, taken) // node

    def has_hazard(nodes: int) -> bool:
        (job,) = read(nodes * node)
        return "MP101" in JobFacts(job, place(job), is_trial=True).codes

    # Several periods beyond the lengths that the verdict judged.
    hazards = [at * step for at in range(1, 60) if has_hazard(at * step)]
    if found.note.startswith("no hazard"):
        assert not hazards
    else:
        assert hazards[0] == found.nodes
        assert found.is_open == (hazards != [at * step for at in range(found.nodes // step, 60)])
