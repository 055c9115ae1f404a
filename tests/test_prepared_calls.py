"""A communicator keeps the calls that were used last, up to a limit."""

from __future__ import annotations

import torch
from torch import Tensor

from meshplan.kernel._communicator import MAX_CALLS, Arithmetic, CallKey, Communicator, PeerCall


class Counting(Communicator[PeerCall]):
    """Counts the calls that it prepares; it reduces nothing."""

    device_type = "cpu"
    one_shot_bytes = 0

    def __init__(self) -> None:
        super().__init__("counting", (0, 1), 0, 1.0)
        self.prepared: list[CallKey] = []

    def close(self) -> None: ...

    def _prepare(self, key: CallKey) -> PeerCall:
        self.prepared.append(key)
        return PeerCall()

    def _run(self, call: PeerCall, message: Tensor, out: Tensor, ticket: int) -> None: ...


def key_of(numel: int) -> CallKey:
    how = Arithmetic("sum", (2,), "tree", "wide", "once", None)
    return CallKey("one_shot", (numel,), (), torch.float32, how)


def test_call_in_use_outlives_many_others() -> None:
    communicator = Counting()
    kept = communicator.prepare(key_of(0))
    for numel in range(1, 2 * MAX_CALLS):
        communicator.prepare(key_of(numel))
        assert communicator.prepare(key_of(0)) is kept
    assert communicator.prepared == [key_of(numel) for numel in range(2 * MAX_CALLS)]


def test_call_that_was_not_used_is_prepared_again() -> None:
    communicator = Counting()
    for numel in range(MAX_CALLS + 1):
        communicator.prepare(key_of(numel))
    communicator.prepare(key_of(1))
    assert communicator.prepared[-1] == key_of(MAX_CALLS)
    communicator.prepare(key_of(0))
    assert communicator.prepared[-1] == key_of(0)
