"""As many redistributions as in a job of hours, each checked on all elements.

The problems are those of ``tests/test_random_redistributions.py``; here their values, contracts,
paths and topologies change too, drawn identically on all ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections import Counter
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import meshplan
from meshplan.contract import Contract
from meshplan.layout import Layout
from meshplan.topology import Topology
from tests.faults.jobs import count_resources, end, run_to_end
from tests.strategies import CONTRACTS, FAST_NODES
from tests.test_random_redistributions import drawn, run_one

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes]

WORLD = 4
# Redistributions under one contract and path, and then others.
BLOCK = 100
SEEDS = 3
KINDS = ("descriptors", "threads", "python threads")
GROWTH_KIB = 32 << 10
OPTIONS: list[dict[str, Any]] = [
    {"path": "exchange", "topology": Topology.unknown(WORLD)},
    {"path": "reference", "topology": Topology.unknown(WORLD)},
    {"path": "auto", "topology": Topology.unknown(WORLD)},
    {"path": "one_shot", "topology": Topology.unknown(WORLD)},
    {"path": "two_shot", "topology": Topology.unknown(WORLD)},
    {
        "path": "exchange",
        "topology": Topology.uniform(WORLD, node_size=2, links=FAST_NODES),
        "contract": Contract(),
    },
]


@pytest.mark.parametrize(
    ("times", "problems"), [(600, 60), pytest.param(20_000, 100, marks=pytest.mark.dist)]
)
def test_thousands_of_redistributions_are_exact(times: int, problems: int) -> None:
    cases = drawn(problems, WORLD)

    def ranks(rank: int) -> tuple[Counter[str], list[Counter[str]]]:
        meshes: dict[Layout, DeviceMesh] = {}
        for case in cases:
            if case.layout not in meshes:
                meshes[case.layout] = DeviceMesh("cpu", case.layout.grid)
        done: Counter[str] = Counter()
        holds = []
        generator = random.Random(20260101)
        for number in range(times):
            if number % BLOCK == 0:
                # What is held is counted without groups of ours: how many there are is chance.
                meshplan.shutdown()
                if number in (times // 2 // BLOCK * BLOCK, times - BLOCK):
                    gc.collect()
                    holds.append(count_resources())
                options = dict(OPTIONS[number // BLOCK % len(OPTIONS)])
                options.setdefault("contract", generator.choice(CONTRACTS))
            case = generator.choice(cases)
            case = dataclasses.replace(case, options=options, seed=generator.randrange(SEEDS))
            where = meshes[case.layout].get_coordinate()
            if where is not None:
                done[run_one(case, meshes[case.layout], tuple(where))] += 1
        end()
        return done, holds

    for done, (middle, last) in run_to_end(ranks, WORLD, timeout=800):
        assert done.total() > times // 3
        assert done["right"] > times // 4
        assert done["hierarchical"] > 0
        assert all(last[kind] <= middle[kind] + 3 for kind in KINDS), (middle, last)
        assert last["KiB"] - middle["KiB"] < GROWTH_KIB
