"""Cut links, slow hosts and different plans are errors within the timeout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from expecttest import TestCase

from tests.multinode.cluster import cluster, why_not
from tests.multinode.launch import Job, job

pytestmark = [
    pytest.mark.dist,
    pytest.mark.multinode,
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not("namespaces")), reason=why_not("namespaces")),
]
# Ranks 0 and 1 on the first host, 2 on the second, 3 on the third.
PER_HOST = (2, 1, 1)
# As in the worker: the collectives of the default group.
SECONDS = 8.0
# What a busy machine may add to a wait.
SLACK = 20.0


@contextmanager
def faults(what: str, **install: Any) -> Iterator[Job]:
    """A job whose ranks are ready."""
    with (
        cluster(len(PER_HOST)) as hosts,
        job(hosts, "faults", PER_HOST, arguments=[what, json.dumps(install)]) as started,
    ):
        started.wait_for("ready", 90)
        yield started


def cut_while_reducing(host: int) -> dict[int, Any]:
    cut = [rank for rank, its in enumerate((0, 0, 1, 2)) if its == host]
    # For the others: the timeout of the collective, and then of the roll call.
    least, most = SECONDS - 2, 2 * SECONDS + SLACK
    with faults("loop") as started:
        started.cluster.link_down(host)
        started.wait_for("result", most)
        found = started.said("result")
        # All ranks leave, as soon as they want to; the agents once they see each other again.
        started.wait_until_ranks_are_gone(SLACK)
        started.cluster.link_up(host)
        assert started.wait(60) == [0, 0, 0]
    for rank, one in found.items():
        assert one["step"] > 0
        assert least < one["seconds"] < most, one
        assert one["type"] == "CollectiveError", one
        assert f" failed on rank {rank}: " in one["text"], one
        # The store is on the first host: a rank that is cut off from it can query no other rank.
        reached = [other for other in found if (other in cut) == (rank in cut)]
        missing = [other for other in found if other not in reached] if 0 in reached else []
        assert one["missing"] == missing, one
        assert ("look for a rank that ended" in one["text"]) == (0 not in reached), one
    return found


@pytest.mark.parametrize("host", [0, 1])
def test_link_cut_during_reductions_raises_on_every_rank(host: int) -> None:
    """The first host has the store; the second a rank, no more."""
    cut_while_reducing(host)


def met(found: dict[int, Any], wait: float) -> dict[str, list[int]]:
    """The ranks of each message; each within its time."""
    texts: dict[str, list[int]] = {}
    for rank, one in found.items():
        assert one["seconds"] < wait + SLACK, one
        texts.setdefault(one["text"], []).append(rank)
    return texts


class TestMessages(TestCase):
    def test_error_note_names_the_reduction(self) -> None:
        note = cut_while_reducing(2)[3]["notes"][0]
        self.assertExpectedInline(
            note,
            """meshplan: in (P(sum)) -> (R) on (dp=4), all_reduce sum over (dp), groups of 4, exchange, contract v1/tree/wide/once: one axis, in one order for all siblings, on default group 0 of 4 ranks: 0, 1, 2, 3""",
        )

    def test_link_cut_before_the_first_reduction_is_recoverable(self) -> None:
        """No rank starts the reduction; once the link is up again, all reduce with the right bits."""
        with faults("again", timeout=5.0) as started:
            started.cluster.link_down(2)
            started.tell("go")
            started.wait_for("failed", 2 * 5.0 + SLACK)
            texts = met(started.said("failed"), 2 * 5.0)
            started.cluster.link_up(2)
            found = started.check(90)
        assert all(one["wrong"] is None for one in found.values()), found
        self.assertExpectedInline(
            self.shown(texts),
            """\
[0, 1, 2]: MP501: rank 3 did not reach the first reduction over ranks 0, 1, 2, 3 within 5 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch
[3]: MP503: the store of the default group at host0:29500 did not answer this rank within 5 s; look at the network between this host and that one, and whether that one is alive""",
        )

    def test_cut_off_store_host_raises_on_every_rank(self) -> None:
        with faults("first", timeout=5.0) as started:
            started.cluster.link_down(0)
            started.tell("go")
            started.wait_for("result", 2 * 5.0 + SLACK)
            texts = met(started.said("result"), 2 * 5.0)
            # An unanswered request does not keep a process alive.
            started.wait_until_ranks_are_gone(SLACK)
            started.cluster.link_up(0)
            assert started.wait(60) == [0, 0, 0]
        self.assertExpectedInline(
            self.shown(texts),
            """\
[0, 1]: MP501: ranks 2, 3 did not reach the first reduction over ranks 0, 1, 2, 3 within 5 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch
[2, 3]: MP503: the store of the default group at host0:29500 did not answer this rank within 5 s; look at the network between this host and that one, and whether that one is alive""",
        )

    def test_slow_host_exceeds_a_short_timeout(self) -> None:
        with faults("first", timeout=3.0) as started:
            # A question to the store and its answer take more than a second, and it asks several.
            started.cluster.slow(1, 10.0)
            started.tell("go")
            started.wait_for("result", 60)
            found = started.said("result")
            started.cluster.fast(1)
        others = {rank: one for rank, one in found.items() if rank != 2}
        assert all(one["missing"] == [2] for one in others.values()), found
        assert found[2]["type"] in ("GroupAgreementError", "GroupStateError"), found
        self.assertExpectedInline(
            self.shown(met(others, 3.0)),
            """[0, 1, 3]: MP501: rank 2 did not reach the first reduction over ranks 0, 1, 2, 3 within 3 s, so no rank started it; every rank of the group must make the same calls: look for a rank that died or took another branch""",
        )

    def test_different_plan_on_another_host_is_an_error(self) -> None:
        with faults("first", last={"path": "reference"}) as started:
            started.tell("go")
            found = started.check(60)
        assert all(one["differing"] == [3] for one in found.values()), found
        self.assertExpectedInline(
            self.shown(met(found, 5.0)),
            """[0, 1, 2, 3]: MP501: rank 3 called the first reduction over ranks 0, 1, 2, 3 with other settings than the others. Different: path auto (ranks 0, 1, 2), reference (rank 3). No rank started it; pass the same arguments (to meshplan.install, or to the call) on every rank; after meshplan.install call meshplan.shutdown there""",
        )

    @staticmethod
    def shown(texts: dict[str, list[int]]) -> str:
        return "\n".join(f"{ranks}: {text}" for text, ranks in texts.items())


def test_slow_host_is_within_the_default_timeout() -> None:
    """No error, and the right bits, with the default wait."""
    with faults("slow", seconds=60.0) as started:
        started.cluster.slow(1, 0.02)
        print(f"slowed down by {started.cluster.slowed_by}")  # noqa: T201 - shown on failure
        started.tell("go")
        found = started.check(100)
    assert all(one == {"type": "", "wrong": [None] * 10} for one in found.values()), found
