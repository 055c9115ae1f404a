"""Unanimous decisions of a group's members, over the store, before any group exists.

Creating a process group blocks until every member takes part. A member that is missing, or creates
something else, hangs the others. So the members vote first. A vote is one key that is written
once, atomically, with ``compare_set``: the last member to arrive writes "yes"; the first that runs
out of time writes "no" and the missing ranks. All members read the same key, so either all go on or
none does.

A vote that said no stays in the store. The next try, and a later default group on the same store,
walk past finished votes to the first open one, so processes that failed differently need no common
counter. A rank that comes after the others gave up on it reads that verdict, in the same call, or
joins their next try; a rank that comes after a refusal reads the refusal.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError

from meshplan._calls import check_aborted, restarted_before
from meshplan._torch import PrefixStore, Store, TCPStore
from meshplan.errors import (
    GroupAgreementError,
    GroupStateError,
    SignatureMismatchError,
)
from meshplan.record import Record, differences, ranks_text

_FIRST_POLL_SECONDS = 0.0005
_LAST_POLL_SECONDS = 0.1
_EXCHANGE_POLL_SECONDS = 0.001
# Ranks that ask at most so often: a store serves some ten thousand questions a second.
_POLLS_PER_SECOND = 10_000

# Members that came last may not have used any of their time yet, so those that waited for them have
# a share of theirs left.
_SHARE_AFTER_ARRIVAL = 0.125
_FIRST_USE = threading.local()  # ``ends``: by when, of ``time.monotonic()``


@contextmanager
def first_use(timeout: float) -> Iterator[None]:
    """One deadline for all waits of this thread for a group, which the outermost context sets."""
    before = getattr(_FIRST_USE, "ends", None)
    if before is None:
        _FIRST_USE.ends = time.monotonic() + (1 + _SHARE_AFTER_ARRIVAL) * timeout
    try:
        yield
    finally:
        _FIRST_USE.ends = before


def seconds_left(timeout: float) -> float:
    """The part of ``timeout`` that the first use of a group leaves to a wait of this thread."""
    ends = getattr(_FIRST_USE, "ends", None)
    return timeout if ends is None else max(min(timeout, ends - time.monotonic()), 0.0)


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that agree with each other, as one of them sees them."""

    store: Store
    ranks: tuple[int, ...]  # global, equal on all
    rank: int  # this one
    wait: float  # seconds to wait for the others, from this rank's arrival
    # That needs the votes. Members in calls of different numbers differ, as with different tokens;
    # 0, in no call, differs from none.
    call: int | str = 0
    # The key prefix under which they note their arrival, before the votes.
    arrivals: str = ""


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The verdict that all members read."""

    # Global ranks that had not arrived when the first member ran out of time.
    missing: tuple[int, ...] = ()
    # The record of each global rank, where the records differ; else empty.
    tokens: dict[int, Record] = field(default_factory=dict)
    veto: tuple[int, str] | None = None  # global rank and reason of a member that refused
    # The text of the member that decided a unanimous vote, where the vote has an answer.
    answer: str = ""
    call: int | str = 0  # in which ranks are missing, if in one
    # When the member that gave up had waited for half of its time, in seconds since the epoch. A
    # process that started later was not in this job.
    began: float = 0.0

    @property
    def unanimous(self) -> bool:
        """Whether all members arrived with the same token."""
        return not (self.missing or self.tokens or self.veto)

    def gave_up_on(self, rank: int, call: int | str) -> bool:
        """Whether this process is ``rank``, on which the members gave up in ``call``."""
        named = bool(call) and call == self.call and rank in self.missing
        return named and started_before(self.began)

    def dumps(self) -> str:
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        tokens = [(rank, token.pack()) for rank, token in self.tokens.items()]
        return json.dumps(found | {"tokens": tokens})

    @classmethod
    def loads(cls, text: str) -> VoteResult:
        found = json.loads(text)
        found["tokens"] = {rank: Record.unpack(text) for rank, text in found["tokens"]}
        lists: dict[str, Any] = {k: tuple(v) for k, v in found.items() if isinstance(v, list)}
        return cls(**{one.name: (found | lists)[one.name] for one in fields(cls)})


# A process, the default group of its last vote, and since when it votes there: 0 for its first.
_job: tuple[int, Callable[[], object], float] = 0, object, math.inf


def _job_began() -> float:
    global _job
    process, world = os.getpid(), dist.group.WORLD
    if world is not None and (_job[0] != process or _job[1]() is not world):
        _job = (
            process,
            weakref.ref(world),
            time.time() if _job[0] == process else 0.0,
        )
    return _job[2]


def started_before(moment: float) -> bool:
    """Whether this process ran at ``moment``, in seconds since the epoch, in the same job, and has
    counted its calls since before. Else a note of that time in the store may be of other calls.
    """
    found = process_stat(os.getpid())
    if found is None or not _job_began() < moment or not restarted_before(moment):
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(found[1]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age < moment


def process_stat(number: int) -> tuple[str, str] | None:
    """State and start time of a process; ``None`` if it does not exist."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may contain anything.
    words = text.rpartition(")")[2].split()
    return words[0], words[19]


def open_round(members: Members, name: str) -> tuple[str, VoteResult | None]:
    """Enter the first vote on ``name`` that this rank may take part in. Returns its key prefix,
    which ends in its number, and its verdict if that holds for this rank too: before it came, a
    member refused for all, or the others gave up on it in the call that needs the vote.
    """
    store, rank = members.store, members.rank
    # Not the rank alone: a restarted process has the rank of the one that died, and must not take
    # a vote which that one has entered for its own.
    mine = uuid.uuid4().hex
    _job_began()
    number = 0
    while True:
        prefix = f"meshplan/{name}/{number}"
        number += 1
        verdict = None
        if store.check([f"{prefix}/verdict"]):
            verdict = VoteResult.loads(store.get(f"{prefix}/verdict").decode())
            # A yes was for the ranks that took part. So was a list of missing ranks, but for a
            # missing one in the same call: the others are in later calls, and would not join this
            # one. A refusal holds for every rank, however late.
            if verdict.veto is None and not verdict.gave_up_on(rank, members.call):
                continue
        # Written once: a vote in which this rank was before, even one that was never decided
        # because a process died in the middle, is over for it.
        found: bytes = store.compare_set(f"{prefix}/entered/{rank}", "", mine)
        if found == mine.encode():
            return prefix, verdict


def gave_up_on(store: Store, name: str, rank: int, call: int = 0) -> VoteResult | None:
    """The verdict of a past vote on ``name``, in ``call`` or any, that gave up on ``rank``."""
    number = 0
    while store.check([f"meshplan/{name}/{number}/verdict"]):
        verdict = VoteResult.loads(store.get(f"meshplan/{name}/{number}/verdict").decode())
        if rank in verdict.missing and call in (0, verdict.call):
            return verdict
        number += 1
    return None


def vote(
    members: Members,
    prefix: str,  # from ``open_round``, or a suffix of it for a second vote of the same members
    token: Record,  # a yes needs the same on all members
    *,
    veto: str | None = None,  # a reason to refuse for all, at once
    # Called on the member that decides, once all have arrived with one token. It must return the
    # same on any member: all read it.
    answer: Callable[[], str] | None = None,
    # This rank may have been counted, in a vote in which the store did not answer it.
    again: bool = False,
) -> VoteResult:
    """Arrive with ``token``, and return what all members decide within the wait of this rank.
    Raises GroupAgreementError on all of them if the versions of their records differ.
    """
    store, ranks, rank, call = (
        members.store,
        members.ranks,
        members.rank,
        members.call,
    )
    deadline = time.monotonic() + seconds_left(members.wait)
    packed = token.pack()
    judge = partial(_judge, members, prefix, packed, answer)
    # A refusal needs no other rank, so none waits for its time to run out. No rank reads a yes of
    # the one that refuses.
    if veto is not None:
        return _decide(store, prefix, VoteResult(veto=(rank, veto)))
    # Before the counts: a rank that finds a count complete may read the records of all.
    number = call if isinstance(call, int) else 0
    store.set(
        f"{prefix}/token/{rank}",
        token.adding(call=number).pack() if number else packed,
    )
    if number and store.compare_set(f"{prefix}/call", "", f"{number}") != f"{number}".encode():
        store.set(f"{prefix}/unlike", f"{rank}")
    # The token's own count goes first: who sees the total complete sees every token counted.
    if not again:
        store.add(f"{prefix}/count/{packed}", 1)
        if store.add(f"{prefix}/total", 1) == len(ranks):
            return _decide(store, prefix, judge())
    verdict = f"{prefix}/verdict"
    # Most votes are decided within a millisecond. Those that wait must not load the store, which
    # serves all ranks, so the pauses grow, and grow further with the number of ranks.
    pause, all_came = _FIRST_POLL_SECONDS, False
    longest = max(_LAST_POLL_SECONDS, len(ranks) / _POLLS_PER_SECOND)
    while not store.check([verdict]):
        left = deadline - time.monotonic()
        if left <= 0 or all_came:
            # The last rank may arrive just now. Then one of the two verdicts is stored first, and
            # both ranks return that one.
            return _decide(store, prefix, judge())
        # Where this rank was not counted, no total is ever complete, and no rank decides.
        all_came = again and not wait_for_ranks(store, prefix, ranks, 0.0)
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return _read(store.get(verdict))


def _read(text: bytes) -> VoteResult:
    verdict = VoteResult.loads(text.decode())
    versions = {token.version for token in verdict.tokens.values()}
    if len(versions) > 1:
        common = max(verdict.tokens.values(), key=list(verdict.tokens.values()).count)
        raise GroupAgreementError(
            f"the ranks of the group differ in the {differences(verdict.tokens)}",
            differing=tuple(r for r, t in verdict.tokens.items() if t.version != common.version),
        )
    return verdict


def wait_for_ranks(store: Store, prefix: str, ranks: Sequence[int], wait: float) -> tuple[int, ...]:
    """The other members of a vote, ``ranks``, that do not reach it within ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while missing := tuple(r for r in ranks if not store.check([f"{prefix}/token/{r}"])):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(_LAST_POLL_SECONDS, left))
    return missing


def gather_texts(
    members: Members, prefix: str, what: str, text: str, decided: str
) -> list[str] | int:
    """Every member's text in group order, or the rank that has published none within the wait.
    That also ends when the vote ``decided`` has a verdict: a member has given up. ``what`` is
    unique within a round.
    """
    store = members.store
    store.set(f"{prefix}/{what}/{members.rank}", text)
    deadline = time.monotonic() + seconds_left(members.wait)
    found = []
    # In sequence, under one deadline: a single missing text makes the others useless.
    for member in members.ranks:
        key = f"{prefix}/{what}/{member}"
        while not store.check([key]):
            if store.check([f"{decided}/verdict"]) or time.monotonic() > deadline:
                return member
            time.sleep(_EXCHANGE_POLL_SECONDS)
        found.append(store.get(key).decode())
    return found


def roll_call(
    members: Members, name: str, note: str = ""
) -> tuple[tuple[int, ...], bool, tuple[tuple[int, str], ...]]:
    """The ranks that have not reported a common failure within the wait; whether the others called
    the roll before this rank came (then the first are those that did not answer them, without this
    rank); and each rank that has reported it, with its ``note``.
    """
    members, rank = replace(members, call="the roll"), members.rank
    prefix, past = open_round(members, f"failed/{name}")
    if past is not None:
        # To wait for ranks that do not call again would only use up its own time.
        others = tuple(r for r in past.missing if r != rank)
        return others, True, ((rank, note), *_notes(members, prefix))
    members.store.set(f"{prefix}/note/{rank}", note)
    verdict = vote(members, prefix, Record.of(group="failed"))
    return verdict.missing, False, _notes(members, prefix)


def _notes(members: Members, prefix: str) -> tuple[tuple[int, str], ...]:
    store = members.store
    keys = ((r, f"{prefix}/note/{r}") for r in members.ranks)
    return tuple((r, store.get(key).decode()) for r, key in keys if store.check([key]))


def _judge(
    members: Members,
    prefix: str,
    token: str,
    answer: Callable[[], str] | None,
) -> VoteResult:
    store, ranks = members.store, members.ranks
    # To add 0 is to read. One number decides a vote on which all agree; the records of all ranks
    # are read only if they do not.
    complete = store.add(f"{prefix}/count/{token}", 0) == len(ranks)
    if complete and not store.check([f"{prefix}/unlike"]):
        return VoteResult(answer=answer() if answer else "")
    missing = tuple(r for r in ranks if not store.check([f"{prefix}/token/{r}"]))
    if missing:
        began = time.time() - members.wait / 2
        return VoteResult(missing=missing, call=members.call, began=began)
    tokens = {r: store.get(f"{prefix}/token/{r}").decode() for r in ranks}
    # All have arrived with one token, and the last of them has not written its verdict yet.
    if len(set(tokens.values())) == 1:
        return VoteResult(answer=answer() if answer else "")
    return VoteResult(tokens={r: Record.unpack(text) for r, text in tokens.items()})


def _decide(store: Store, prefix: str, verdict: VoteResult) -> VoteResult:
    # The first verdict stays, and a rank that judged otherwise follows it.
    return _read(store.compare_set(f"{prefix}/verdict", "", verdict.dumps()))


@dataclass(slots=True)
class Signatures:
    """The votes of one group: all members hold one and call ``compare`` equally often."""

    members: Members
    prefix: str
    number: int = 0
    last: Record = field(default_factory=Record.of)

    @classmethod
    def of(cls, members: Members, name: str) -> Signatures:
        """For the group ``name``."""
        return cls(members, open_round(members, f"signatures/{name}")[0])

    def compare(self, mine: Record, wait: float) -> VoteResult:
        """Compare ``mine`` with the other members' in a vote. Returns a verdict without tokens.
        Raises SignatureMismatchError on every member if they differ.
        """
        ranks, rank = self.members.ranks, self.members.rank
        verdict = vote(
            replace(self.members, wait=wait),
            f"{self.prefix}/{self.number}",
            mine,
        )
        self._forget_last()
        self.number += 1
        self.last = mine
        others = {r: token for r, token in verdict.tokens.items() if token != mine}
        if others:
            who, theirs = next(iter(others.items()))
            raise SignatureMismatchError(
                f"rank {who} called a reduction over {ranks_text(ranks)} with {theirs}, this rank "
                f"{rank} with {mine}. Different: "
                f"{differences({who: theirs, rank: mine})}. Nothing was sent: every rank must "
                "pass the same shape, dtype, operation and contract",
                rank=who,
            )
        return verdict

    def _forget_last(self) -> None:
        """Remove the last vote from the store: a rank in this one no longer needs it."""
        last = f"{self.prefix}/{self.number - 1}"
        members = self.members
        keys = [f"{last}/token/{members.rank}"]
        if members.rank == members.ranks[0]:
            keys += [
                f"{last}/verdict",
                f"{last}/total",
                f"{last}/count/{self.last.pack()}",
            ]
        # A store that cannot delete keeps them.
        with suppress(RuntimeError, NotImplementedError):
            for key in keys if self.number else ():
                members.store.delete_key(key)


# A store whose every answer is waited for a bounded time.
#
# Torch's client of a TCP store waits for most answers (``check``, ``add``, ``compare_set``,
# ``set``) without a limit. Where the network to the store's host breaks without a notice, that is
# until the kernel closes the connection: a quarter of an hour and more. So each question is put on
# a thread that is left behind if no answer comes. (Where Python is older than 3.14, a process that
# is just ending when a late answer comes after all is aborted.)

_Question = Callable[[], Any]
# A busy machine takes its time, however short the wait for other ranks should be.
_LEAST_SECONDS = 5.0


def _bounded(name: str) -> Any:
    def ask(self: AnsweringStore, *given: Any) -> Any:
        return self._ask(lambda: getattr(self._store, name)(*given))

    return ask


class AnsweringStore(Store):
    """A view of a store that answers each request within ``seconds``, at least 5. Else every method
    raises GroupStateError, also if the connection is lost or the group of this thread's reduction
    was aborted. The store may still carry out the last request then.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = max(seconds, _LEAST_SECONDS)
        self._questions: SimpleQueue[tuple[_Question, SimpleQueue[Any]] | None] | None = None

    check = _bounded("check")
    get = _bounded("get")
    multi_get = _bounded("multi_get")
    set = _bounded("set")
    add = _bounded("add")
    compare_set = _bounded("compare_set")
    delete_key = _bounded("delete_key")

    def __del__(self) -> None:
        if self._questions is not None:
            self._questions.put(None)

    def _ask(self, question: _Question) -> Any:
        # Whoever waits for other ranks asks again and again.
        check_aborted("other ranks")
        if self._questions is None:
            self._questions = SimpleQueue()
            # Not to be waited for when the process ends.
            threading.Thread(
                target=_answer,
                args=(self._questions,),
                name="meshplan store",
                daemon=True,
            ).start()
        answers: SimpleQueue[Any] = SimpleQueue()
        self._questions.put((question, answers))
        try:
            error, answer = answers.get(timeout=self._seconds)
        except Empty:
            # The thread is stuck; the next question gets another one.
            self._questions.put(None)
            self._questions = None
            raise GroupStateError(
                f"{_shown(self._store)} did not answer this rank within {self._seconds:g} s; look "
                "at the network between this host and that one, and whether that one is alive",
                unanswered=True,
            ) from None
        if isinstance(error, DistNetworkError):
            text = " ".join(str(error).split())[:200]
            raise GroupStateError(
                f"{_shown(self._store)} was lost: {text}; look whether the process that holds it "
                "(torchrun's agent on the first host, or rank 0) has ended",
                unanswered=True,
            ) from error
        if error is not None:
            raise error
        return answer


def _answer(
    questions: SimpleQueue[tuple[_Question, SimpleQueue[Any]] | None],
) -> None:
    while (found := questions.get()) is not None:
        question, answers = found
        # Its own name would keep the store, and with it this thread, alive.
        del found
        try:
            answers.put((None, question()))
        except Exception as error:
            answers.put((error, None))
        del question, answers


def _shown(store: Store) -> str:
    """The store in words, with its address where it has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"the store of the default group at {store.host}:{store.port}"
    return "the store of the default group"
