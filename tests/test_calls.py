"""Tickets: the count of a group's calls, what ranks compare of it, and what stops a group."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from meshplan._calls import GroupCalls, restart_calls, restarted_before
from meshplan.errors import (
    AuditError,
    CollectiveError,
    ContractError,
    FallbackRefusedError,
    GroupAgreementError,
    GroupStateError,
    PeerTimeoutError,
    SignatureMismatchError,
)
from meshplan.record import pack_words, unpack_words


def call_of(word: int) -> tuple[str | None, str | None]:
    """Number and group of a ticket, as a peer reads them."""
    words = pack_words(kind="all_reduce", path="exchange", dtype="float32", shape=(4,), axes=(2,))
    record = unpack_words([*words, word])
    return record.get("call"), record.get("group")


def test_calls_are_counted_from_one_in_each_lane() -> None:
    calls = GroupCalls("0")
    words = [calls.take(lane).word for lane in ("cpu", "cpu", "cuda", "cpu")]
    assert [call_of(word)[0] for word in words] == ["1", "2", "1", "3"]
    groups = [call_of(word)[1] for word in words]
    assert groups[0] == groups[1] == groups[3] != groups[2]


def test_words_differ_between_groups_and_match_between_ranks() -> None:
    names = [str(number) for number in range(2000)]
    words = {GroupCalls(name).take("cpu").word for name in names}
    assert len(words) == len(names)
    assert words == {GroupCalls(name).take("cpu").word for name in names}
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)


def test_name_that_ranks_agree_on_later_counts() -> None:
    calls = GroupCalls()
    ticket = calls.take("cpu")
    calls.agree_on("3, 4")
    assert ticket.word == GroupCalls("3, 4").take("cpu").word


def test_failed_call_has_used_its_ticket() -> None:
    calls = GroupCalls("0")
    with pytest.raises(ContractError), calls.take("cpu"):
        raise ContractError("no sum")
    assert calls.take("cpu").number == 2


def test_call_without_an_answer_of_the_store_is_counted_again() -> None:
    calls = GroupCalls("0")
    calls.take("cpu")
    with pytest.raises(GroupStateError), calls.take("cpu"):
        raise GroupStateError("no answer", unanswered=True)
    assert calls.take("cpu").number == 2
    # Another call was issued meanwhile.
    earlier, later = calls.take("cpu"), calls.take("cpu")
    with pytest.raises(GroupStateError), earlier:
        raise GroupStateError("no answer", unanswered=True)
    assert calls.take("cpu").number == later.number + 1


def stop_of(error: BaseException) -> str:
    """What the call after ``error`` raises; empty if the group is usable."""
    calls = GroupCalls("7")
    with pytest.raises(type(error)), calls.take("cpu"):
        raise error
    try:
        with calls.take("cpu"):
            return ""
    except GroupStateError as found:
        return str(found)


@pytest.mark.parametrize(
    "error",
    [
        # Of all ranks, in the same call.
        FallbackRefusedError("refused"),
        AuditError("bits"),
        GroupAgreementError("missing"),
        SignatureMismatchError("shapes", rank=1),
        # Of one rank perhaps, which has sent nothing: its next call has the next ticket.
        ContractError("no sum"),
        torch.OutOfMemoryError("no memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory"),
    ],
)
def test_group_is_usable_after_an_error_of_all_ranks(error: BaseException) -> None:
    assert stop_of(error) == ""


@pytest.mark.parametrize(
    "error",
    [
        CollectiveError("connection lost"),
        PeerTimeoutError("late", rank=1, block=0, phase=0),
        SignatureMismatchError("calls", rank=1, unlike_calls=True),
        RuntimeError("something else"),
        TypeError("no tensor"),
        KeyboardInterrupt(),
    ],
)
def test_group_stops_after_an_error_of_one_rank(error: BaseException) -> None:
    assert "group 7 has stopped, because a reduction failed before: " in stop_of(error)


def test_message_of_a_stop() -> None:
    assert_expected_inline(
        stop_of(CollectiveError("connection lost")),
        """MP503: group 7 has stopped, because a reduction failed before: MP504: connection lost. Call meshplan.shutdown() on every rank; where the process group itself has failed, destroy it on every rank and create it again, with the ranks that are left""",
    )


def test_refusal_of_a_stopped_group_is_counted_once() -> None:
    """The doors count calls whose errors have no ticket."""
    calls = GroupCalls("7")
    calls.stop(RuntimeError("first"))
    with pytest.raises(GroupStateError) as caught, calls.take("cpu"):
        pass
    assert caught.value.used_ticket  # type: ignore[attr-defined]


def test_restart_ends_a_stop_and_counts_from_one() -> None:
    calls = GroupCalls("7")
    calls.take("cpu")
    calls.stop(RuntimeError("first"))
    calls.stop(RuntimeError("second"))
    with pytest.raises(GroupStateError, match="before: first"), calls.take("cpu"):
        pass
    calls.restart()
    with calls.take("cpu") as ticket:
        assert ticket.number == 1


def test_notes_from_before_a_restart_are_of_other_calls() -> None:
    before = time.time()
    restart_calls()
    assert not restarted_before(before)
    assert restarted_before(time.time() + 1.0)


def test_works_under_way_are_asked_once_and_never_compared() -> None:
    class Work(dist.Work):
        asked = 0

        def __init__(self, ended: bool) -> None:
            super().__init__()
            self.ended = ended

        def is_completed(self) -> bool:
            Work.asked += 1
            return self.ended

        def wait(self, timeout: timedelta | None = None) -> bool:
            return True

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    calls = GroupCalls("0")
    for number in range(6):
        calls.watch(Work(ended=number % 2 == 0))
    calls.refuse_stopped()
    assert Work.asked == 6
    calls.refuse_stopped()
    assert Work.asked == 9
