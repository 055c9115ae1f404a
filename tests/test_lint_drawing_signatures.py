"""Signatures of groups, and which groups differ from their siblings."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout import Layout, signature
from meshplan.lint._drawing._picture import GroupSignatures, SignatureClass, classify_groups
from meshplan.planner import Hazard, Problem, hazards
from meshplan.planner._hazards import Siblings
from meshplan.topology import Topology

ISSUE, HOSTS = Layout.of(ddp=8, fsdp=5), Topology.uniform(40, node_size=8)


def find_hazards(layout: Layout, topology: Topology, src: str, *steps: str) -> tuple[Hazard, ...]:
    job = Problem.of(layout, src.split(), ["R"] * len(layout.sizes))
    return hazards(job, topology, steps=[step.split() for step in steps] or None)


def marked(found: GroupSignatures) -> list[int]:
    return found.marked.nonzero()[0].tolist()


def test_mesh_of_8_by_5_has_four_marked_groups() -> None:
    (hazard,) = find_hazards(ISSUE, HOSTS, "P P", "ddp", "fsdp")
    for reported in ((), (hazard,)):
        found = classify_groups(ISSUE, (1,), HOSTS, reported)
        assert found.classes == (
            SignatureClass((5,), False, 4, 0),
            SignatureClass((3, 2), True, 1, 1),
            SignatureClass((1, 4), True, 1, 3),
            SignatureClass((4, 1), True, 1, 4),
            SignatureClass((2, 3), True, 1, 6),
        )
        assert marked(found) == [1, 3, 4, 6]
        assert found.class_of.tolist() == [0, 1, 0, 2, 3, 0, 4, 0]
        assert found.members.tolist() == ISSUE.siblings("fsdp").tolist()


def test_odd_sibling_is_marked() -> None:
    layout = Layout.of(a=3, b=2, c=3)
    topology = Topology.of([*[0, 0, 0, 0, 0, 0], *[1, 1, 1, 2, 2, 2], *[3, 3, 4, 4, 4, 4]])
    job = Problem.of(layout, ["R", "S(0)", "P"], ["R", "S(0)", "R"])
    (hazard,) = hazards(job, topology)
    assert hazard.along == ("a",)
    found = classify_groups(layout, (2,), topology, [hazard])
    # Groups by (a, b): only (2, 0), ranks 12 to 14, is on two nodes.
    assert marked(found) == [4]


def test_each_set_of_siblings_has_its_own_usual_signature() -> None:
    # Groups of 3 along c. With b=0 they are (1, 2) on nodes, with b=1 (2, 1), but for two of them.
    layout = Layout.of(a=4, b=2, c=3)
    node_of_rank: list[int] = []
    for a in range(4):
        for b in range(2):
            low = 100 * a + 10 * b
            first = 1 if (b == 0) != (a == 3) else 2
            node_of_rank += [low] * first + [low + 1] * (3 - first)
    topology = Topology.of(node_of_rank)
    assert len(marked(classify_groups(layout, (2,), topology, ()))) == 4
    job = Problem.of(layout, ["R", "S(0)", "P"], ["R", "S(0)", "R"])
    (hazard,) = hazards(job, topology)
    assert hazard.verdict == "may differ"
    found = classify_groups(layout, (2,), topology, [hazard])
    assert marked(found) == [6, 7]
    assert [(way.signature, way.marked, way.groups) for way in found.classes] == [
        ((1, 2), False, 3),
        ((2, 1), False, 3),
        ((2, 1), True, 1),
        ((1, 2), True, 1),
    ]


def test_siblings_that_need_not_agree_are_not_marked() -> None:
    # (3) and (1, 2): along a, ranks hold different inputs.
    layout, topology = Layout.of(a=2, b=3, c=2), Topology.of([0] * 6 + [1, 1, 2, 2, 2, 2])
    job = Problem.of(layout, ["S(0)", "P", "R"], ["S(0)", "R", "R"])
    (hazard,) = hazards(job, topology)
    assert hazard.verdict == "none"
    found = classify_groups(layout, (1,), topology, [hazard])
    assert marked(found) == []
    assert {way.signature for way in found.classes} == {(3,), (1, 2)}
    assert marked(classify_groups(layout, (1,), topology, ())) == [2, 3]


def test_equal_signatures_on_other_members_are_marked() -> None:
    # Both groups are (2, 2), but AABB and ABAB: the ranks per node do not tell.
    layout, topology = Layout.of(a=2, b=4), Topology.of([0, 0, 1, 1, 2, 3, 2, 3])
    assert marked(classify_groups(layout, (1,), topology, ())) == []
    (hazard,) = find_hazards(layout, topology, "R P")
    assert hazard.verdict == "may differ"
    found = classify_groups(layout, (1,), topology, [hazard])
    assert marked(found) == [1]
    assert found.classes == (
        SignatureClass((2, 2), False, 1, 0),
        SignatureClass((2, 2), True, 1, 1),
    )


def test_unknown_nodes_have_no_classes() -> None:
    topology = Topology.unknown(40)
    found = classify_groups(
        ISSUE, (0,), topology, find_hazards(ISSUE, topology, "P P", "fsdp", "ddp")
    )
    assert found.classes == ()
    assert marked(found) == []
    assert found.members.tolist() == ISSUE.siblings("ddp").tolist()


@given(st.integers(0, 10**9))
def test_marks_agree_with_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    names = [f"a{i}" for i in range(len(sizes))]
    layout = Layout.of(**dict(zip(names, sizes, strict=True)))
    count = layout.world_size
    order = list(range(count))
    if draw.random() < 0.5:
        draw.shuffle(order)
    layout = Layout.of(order, **dict(zip(names, sizes, strict=True)))
    topology = Topology.of([draw.randint(0, 3) for _ in range(count)])
    axis = draw.randrange(len(sizes))
    src = ["R"] * len(sizes)
    src[axis] = "P"
    node_of_rank = [topology.node_of(rank) for rank in range(count)]
    groups = np.sort(layout.siblings(axis), axis=1).tolist()
    signatures = [signature(group, node_of_rank) for group in groups]

    found = classify_groups(layout, (axis,), topology, ())
    usual = Counter(signatures).most_common()[0][1]
    assert not found.classes[0].marked
    assert found.classes[0].groups == usual
    assert found.marked.tolist() == [s != found.classes[0].signature for s in signatures]

    reported = find_hazards(layout, topology, " ".join(src))
    found = classify_groups(layout, (axis,), topology, reported)
    assert [found.classes[way].signature for way in found.class_of.tolist()] == signatures
    assert [found.classes[way].marked for way in found.class_of.tolist()] == found.marked.tolist()
    assert Counter(found.class_of.tolist()) == {
        i: way.groups for i, way in enumerate(found.classes)
    }
    for hazard in reported:
        # Groups that are not marked add as all others of their set that are not marked.
        siblings = Siblings(layout, (axis,), topology, sort_ranks=True)
        sets = siblings.sets(layout.axis_indices(hazard.along))
        for algorithm in hazard.may_differ:
            for row, orders in zip(sets, siblings.associations(algorithm, sets), strict=True):
                assert len(np.unique(orders[~found.marked[row]])) == 1
        assert bool(found.marked.any()) == (hazard.verdict == "may differ")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_million_ranks_are_classified(axis: int) -> None:
    count = 2**20
    layout, topology = Layout.of(a=count // 64, b=64), Topology.uniform(count, node_size=72)
    found = classify_groups(layout, (axis,), topology, ())
    assert len(found.classes) == 8
    assert sum(way.groups for way in found.classes) == len(found.members)
