"""Agreement rounds over a store, with threads as ranks: all orders of arrival, and absent ranks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.errors import GroupAgreementError
from meshplan.flatten import _agree
from meshplan.flatten._agree import Members, VoteResult, open_round, roll_call, vote, wait_for_ranks
from meshplan.record import VERSION, Record
from tests.processes import run_in_threads

# Seconds: a test that waited so long would not end.
SAME = Record.of(vote="same")
NEVER = 3600.0


class Patience:
    """A clock that stands still until so many threads sleep.

    Members sleep behind their arrival, so that none of them is late, however busy the machine is.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.asleep, self.first = threads, set[int](), time.monotonic()

    def sleep(self, seconds: float) -> None:
        self.asleep.add(threading.get_ident())
        time.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic() if len(self.asleep) >= self.threads else self.first

    def time(self) -> float:
        return time.time()


def patience(threads: int) -> AbstractContextManager[object]:
    return mock.patch.object(_agree, "time", Patience(threads))


def members(
    store: dist.Store,
    ranks: tuple[int, ...],
    come: dict[int, float],
    tokens: dict[int, str] | None = None,
    vetoes: dict[int, str] | None = None,
    timeout: float = NEVER,
) -> dict[int, VoteResult]:
    """Ranks of ``come`` arrive after that many seconds; returns what each of them read.

    The time-out begins when all of them wait.
    """

    def member(rank: int) -> VoteResult:
        time.sleep(come[rank])
        here = Members(store, ranks, rank, timeout)
        prefix, refused = open_round(here, "group")
        token = Record.of(vote=(tokens or {}).get(rank, "same"))
        return refused or vote(here, prefix, token, veto=(vetoes or {}).get(rank))

    with patience(len(come)), ThreadPoolExecutor(len(come)) as pool:
        return dict(zip(come, pool.map(member, come), strict=True))


@pytest.fixture(autouse=True)
def one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have run since before the first vote; they have no default group to tell."""
    monkeypatch.setattr(_agree, "started_before", bool)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=100), wait_for_workers=False
    )


def test_vote_with_all_members_present_passes(store: dist.Store) -> None:
    for _ in range(2):  # the second time on the same store walks past the first vote
        found = members(store, (4, 2, 7), {4: 0.0, 2: 0.02, 7: 0.0})
        assert all(v.unanimous for v in found.values())


def test_a_missing_rank_is_named_to_all(store: dist.Store) -> None:
    found = members(store, (0, 1, 2, 3), {0: 0.0, 1: 0.1, 3: 0.0}, timeout=0.2)
    assert {v.missing for v in found.values()} == {(2,)}


def test_late_rank_does_not_join_a_finished_vote(store: dist.Store) -> None:
    first = members(store, (0, 1), {0: 0.0}, timeout=0.1)
    assert first[0].missing == (1,)
    # The late rank and the retry of the first one take part in the next round.
    second = members(store, (0, 1), {1: 0.0, 0: 0.2})
    assert all(v.unanimous for v in second.values())


def test_late_rank_reads_the_verdict_on_its_own_call_once(store: dist.Store) -> None:
    def give_up(call: int | str) -> VoteResult:
        here = Members(store, (0, 1), 0, 0.1, call)
        prefix, _ = open_round(here, "group")
        return vote(here, prefix, SAME)

    calls: tuple[int | str, ...] = ("a 1", "b 1", "a 1", 7)
    verdicts = [give_up(call) for call in calls]
    # Equal meshes have equal words: the verdicts are taken in order.
    for call, number in (("b 1", 1), ("a 1", 0), ("a 1", 2), (7, 3)):
        found = open_round(Members(store, (0, 1), 1, 0.1, call), "group")
        assert found == (f"meshplan/group/{number}", verdicts[number])
    for call in ("a 1", 8, 0, ""):
        prefix, past = open_round(Members(store, (0, 1), 1, 0.1, call), "group")
        assert int(prefix.rpartition("/")[2]) >= len(calls)
        assert past is None


def test_verdict_of_an_earlier_job_is_of_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_agree, "_job", (0, object, 0.0))
    first, second, moment = mock.Mock(), mock.Mock(), time.time()
    for job in (first, second):
        monkeypatch.setattr(_agree, "dist", job)
        heeded = [_agree.started_before(at) for at in (0.0, moment, time.time() + 1.0)]
        assert heeded == [False, job is first, True]


def test_differing_tokens_are_named_without_waiting(store: dist.Store) -> None:
    found = members(store, (0, 1, 2), {0: 0.0, 1: 0.0, 2: 0.05}, {1: "other"})
    assert {tuple(v.tokens.items()) for v in found.values()} == {
        tuple(enumerate(Record.of(vote=word) for word in ("same", "other", "same")))
    }


def test_a_veto_is_read_by_all_without_waiting(store: dist.Store) -> None:
    come = {0: 0.0, 1: 0.05, 2: 0.1}
    found = members(store, (0, 1, 2, 3), come, vetoes={1: "full"})
    assert {v.veto for v in found.values()} == {(1, "full")}
    # A rank that comes later still reads it, once; then all are in the next round together.
    assert members(store, (0, 1, 2, 3), {3: 0.0})[3].veto == (1, "full")
    again = members(store, (0, 1, 2, 3), dict.fromkeys(range(4), 0.0))
    assert all(v.unanimous for v in again.values())


def test_undecided_vote_of_a_dead_process_is_skipped() -> None:
    """A process that died in the middle leaves its arrival behind on a store that lives on."""
    store = dist.HashStore()
    here = Members(store, (0, 1), 0, NEVER)
    assert open_round(here, "group") == ("meshplan/group/0", None)
    assert open_round(here, "group") == ("meshplan/group/1", None)


@pytest.mark.parametrize("token", ["same", "other"])
def test_rank_that_was_not_counted_ends_its_vote_when_all_have_come(
    store: dist.Store, token: str
) -> None:
    """The store had not answered it, and it comes back to the vote before another rank comes."""
    looked = threading.Event()

    class Watched(dist.Store):
        def check(self, keys: list[str]) -> bool:
            looked.set()
            return bool(store.check(keys))

        def __getattribute__(self, name: str) -> object:
            return super().__getattribute__(name) if name == "check" else getattr(store, name)

    def member(rank: int) -> VoteResult:
        if rank:
            assert looked.wait(60.0)
        here = Members(store if rank else Watched(), (0, 1), rank, NEVER)
        return vote(here, "vote", Record.of(vote=token if rank else "same"), again=not rank)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(member, (0, 1)))
    assert found[0] == found[1]
    assert found[0].unanimous == (token == "same")


@settings(max_examples=15)
@given(
    late=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    gone=st.sets(st.integers(0, 4), max_size=2),
)
def test_all_members_read_the_same(late: list[int], gone: set[int]) -> None:
    ranks = (0, 1, 2, 3, 4)
    come = {r: late[r] * 0.002 for r in ranks if r not in gone}
    found = members(dist.HashStore(), ranks, come, timeout=0.1 if gone else NEVER)
    (verdict,) = {v.dumps() for v in found.values()}
    if gone:
        assert set(VoteResult.loads(verdict).missing) == gone
    else:
        assert VoteResult.loads(verdict).unanimous


def test_timeout_racing_the_last_arrival_decides_once() -> None:
    """Whichever of the two writes first, both read the same verdict."""
    for delay in (0.048, 0.05, 0.052):
        store = dist.HashStore()
        barrier = threading.Barrier(2)
        results: list[VoteResult] = []

        def member(
            rank: int,
            pause: float,
            store: dist.Store = store,
            barrier: threading.Barrier = barrier,
            results: list[VoteResult] = results,
        ) -> None:
            here = Members(store, (0, 1), rank, 0.05)
            prefix, _ = open_round(here, "group")
            barrier.wait()
            time.sleep(pause)
            results.append(vote(here, prefix, SAME))

        run_in_threads(partial(member, 0, 0.0), partial(member, 1, delay))
        assert len(results) == 2
        assert results[0] == results[1]


def answers(store: dist.Store, ranks: tuple[int, ...], come: tuple[int, ...]) -> list[object]:
    with patience(len(come)), ThreadPoolExecutor(len(come)) as pool:
        return list(
            pool.map(
                lambda r: roll_call(Members(store, ranks, r, 0.1), "group", f"call {r}"),
                come,
            )
        )


def notes(*ranks: int) -> tuple[tuple[int, str], ...]:
    return tuple((rank, f"call {rank}") for rank in ranks)


def test_roll_call_names_silent_ranks(store: dist.Store) -> None:
    assert answers(store, (0, 1, 2), (0, 1, 2)) == [((), False, notes(0, 1, 2))] * 3
    # Of a later failure; the ranks that come when it is over learn who else was missing.
    assert answers(store, (0, 1, 2, 3), (0, 2)) == [((1, 3), False, notes(0, 2))] * 2
    assert answers(store, (0, 1, 2, 3), (1,)) == [((3,), True, notes(1, 0, 2))]


def test_single_silent_rank_learns_of_its_failure(store: dist.Store) -> None:
    assert answers(store, (0, 1, 2), (0, 2)) == [((1,), False, notes(0, 2))] * 2
    assert answers(store, (0, 1, 2), (1,)) == [((), True, notes(1, 0, 2))]


def test_arrivals_at_a_vote_are_listed() -> None:
    store = dist.HashStore()
    here = Members(store, (0, 1, 2), 0, 0.1)
    prefix, _ = open_round(here, "group")
    assert vote(here, prefix, SAME).missing == (1, 2)
    assert wait_for_ranks(store, prefix, (0, 2), 0.1) == (2,)
    assert wait_for_ranks(store, prefix, (0,), 0.1) == ()


def test_another_release_is_reported_at_once_on_every_rank(store: dist.Store) -> None:
    """The last member decides: this release, one of another version, or one without records."""

    class Other:
        """What a rank of another release packs."""

        def __init__(self, text: str) -> None:
            self.text = text

        def pack(self) -> str:
            return self.text

    for text in ('{"meshplan": 7, "vote": "same"}', "contract v1/tree/wide/once, path auto"):
        for late in range(3):

            def member(rank: int, text: str = text, late: int = late) -> tuple[str, tuple]:
                time.sleep(0.1 * (rank == late))
                here = Members(store, (0, 1, 2), rank, NEVER)
                prefix, _ = open_round(here, f"group {text} {late}")
                token = Other(text) if rank == 1 else SAME
                with pytest.raises(GroupAgreementError) as caught:
                    vote(here, prefix, token)
                return str(caught.value), caught.value.differing

            with ThreadPoolExecutor(3) as pool:
                found = set(pool.map(member, range(3)))
            version = 7 if "meshplan" in text else 1
            assert found == {
                (
                    "MP501: the ranks of the group differ in the version of meshplan's "
                    f"records {VERSION} (ranks 0, 2), {version} (rank 1): install one release "
                    "of meshplan on every rank",
                    (1,),
                )
            }
