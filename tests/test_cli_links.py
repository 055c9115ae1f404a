"""``meshplan links``: the ranks that exchange, the file of a job, and refusals."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st

from meshplan.cli import _plan, _ranks
from meshplan.cli._options import try_to_open
from meshplan.cli._ranks import MOST_GROUPS, MOST_RANKS, group_by_class, time_exchanges
from meshplan.topology import Links, Topology
from tests.links import name_link
from tests.processes import arrive, run_ranks, wait_for
from tests.programs import capture

ROOT = Path(__file__).parents[1]
JOB = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "0")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    count = draw(st.integers(2, 12))
    nodes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    domains = draw(st.none() | st.lists(st.integers(0, 2), min_size=count, max_size=count))
    return Topology.of(nodes, domains)


@given(topologies())
def test_groups_have_links_of_their_class_and_one_size(topology: Topology) -> None:
    for name, groups in group_by_class(topology).items():
        assert len({len(group) for group in groups}) == 1
        assert len(groups[0]) > 1
        ranks = [rank for group in groups for rank in group]
        assert len(set(ranks)) == len(ranks)
        for group in groups:
            for left, right in combinations(group, 2):
                found = name_link(topology, left, right)
                # Without domains, only nodes are known.
                assert found in ((name, "unknown") if topology.domains is None else (name,))


@given(topologies())
def test_every_link_class_has_a_group(topology: Topology) -> None:
    pairs = combinations(range(topology.world_size), 2)
    there = {name_link(topology, left, right) for left, right in pairs}
    # An unknown link inside a node is measured as one of the node.
    expected = {"node" if name == "unknown" else name for name in there}
    assert set(group_by_class(topology)) == expected


def test_large_job_needs_few_small_groups() -> None:
    topology = Topology.uniform(4000, node_size=8, domain_size=4)
    found = group_by_class(topology)
    assert found["domain"][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["node"][:2] == [[0, 4], [1, 5]]
    # The first rank of eight nodes, and of the next eight.
    assert found["network"][:2] == [[8 * node for node in range(i, i + 8)] for i in (0, 8)]
    assert {len(groups) for groups in found.values()} == {MOST_GROUPS}
    assert max(len(group) for groups in found.values() for group in groups) == MOST_RANKS


def test_unknown_topology_is_one_node() -> None:
    assert group_by_class(Topology.unknown(3)) == {"node": [[0, 1, 2]]}


@pytest.mark.full
@pytest.mark.processes
def test_absent_rank_is_an_error_within_the_timeout() -> None:
    """The groups of an exchange wait as long as was said, not for torch's half an hour."""

    def away(*_: object, **__: object) -> None:
        wait_for("the error", 2)
        raise RuntimeError

    def ranks(rank: int) -> None:
        late = mock.patch.object(dist, "all_to_all_single", side_effect=away)
        with late if rank == 2 else nullcontext(), pytest.raises(RuntimeError):
            time_exchanges(Topology.unknown(3), torch.device("cpu"), 1, 3.0)
        arrive("the error")

    # Ranks 0 and 1 know while rank 2 is still away.
    run_ranks(ranks, 3)


@pytest.mark.processes
@pytest.mark.full
def test_job_of_two_hosts_writes_a_file(tmp_path: Path) -> None:
    script = (
        "import os, sys; from meshplan.cli import main; "
        "os.environ['MESHPLAN_HOST'] = 'host%d' % (int(os.environ['RANK']) // 2); "
        "sys.exit(main(['links', *sys.argv[1:]]))"
    )
    path = tmp_path / "links.json"
    command = [*TORCHRUN, "4", "--no-python", sys.executable, "-c", script]
    done = capture(
        [*command, "--output-file", str(path), "--repeat", "40"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["measured"]
    assert (found["ranks"], found["topology"]) == (4, "2 nodes of 2")
    assert found["backend"] == "gloo"
    # Two classes with pairs and no larger groups: at four sizes at once, at two in batches.
    assert found["exchanges"] == 12
    links = Links.loads(path.read_text())
    assert links.domain == Links().domain
    assert links.node != Links().node
    assert links.network != Links().network
    assert "12 exchanges, median error" in done.stderr


def test_ranks_meet_after_some_calls() -> None:
    """A rank outside of all groups waits in a barrier, however many repetitions there are."""
    calls: list[str] = []
    with (
        mock.patch.object(dist, "barrier", side_effect=partial(calls.append, "barrier")),
        mock.patch.object(dist, "all_reduce"),
    ):
        _ranks._time_steadily(lambda: calls.append("call"), torch.device("cpu"), 50)
    between = [len(part.split()) for part in " ".join(calls).split("barrier")]
    assert between == [0, 22, 22, 12]


def test_write_check_leaves_files_unchanged(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("links")
    try_to_open(str(old))
    # Of the ranks of a host, which check at once.
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(try_to_open, [str(new)] * 2000))
    assert [*tmp_path.iterdir()] == [old]
    assert old.read_text() == "links"


class TestRefusals(TestCase):
    def said(self, *words: str, job: Any = JOB) -> str:
        parser = argparse.ArgumentParser(prog="meshplan")
        _plan.add_links(parser.add_subparsers(dest="verb"))
        given = parser.parse_args(["links", *words])
        out = io.StringIO()
        with mock.patch.dict(os.environ, job), redirect_stderr(out):
            assert given.run(given) == 2
        return out.getvalue().strip()

    def test_invalid_options_are_refused(self) -> None:
        found = (
            self.said(job={}),
            self.said("--repeat", "0"),
            self.said("--timeout", "nan"),
            self.said("--output-file", "missing/links.json"),
        )
        self.assertExpectedInline(
            "\n".join(found),
            """\
meshplan: MP402: meshplan links runs on all ranks of a job at once, and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set; use torchrun --nproc-per-node 8 -m meshplan links --output-file links.json
meshplan: MP402: --repeat: use an integer from 1 to 10000, got 0
meshplan: MP402: --timeout: use a positive number of seconds, got nan
meshplan: MP402: missing/links.json: cannot be written: No such file or directory""",
        )

    def test_unwritable_file_is_refused(self) -> None:
        with mock.patch("meshplan.cli._ranks.measure", return_value=("{}", "measured")):
            assert self.said("--output-file", "/dev/full") == (
                "meshplan: MP402: /dev/full: cannot be written: No space left on device"
            )

    @pytest.mark.full
    @pytest.mark.processes
    def test_single_rank_is_refused(self) -> None:
        command = [*TORCHRUN, "1", "-m", "meshplan", "links"]
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=300, check=False, cwd=ROOT
        )
        assert "rank 0: MP211: one rank has no links; start two ranks or more" in done.stderr
