"""The common part of communicators over peers: names, checked calls, one at a time, failures."""

from __future__ import annotations

import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from meshplan._calls import NO_TICKET
from meshplan._dtypes import name_of
from meshplan.contract import Contract, check_dtype
from meshplan.errors import (
    UNLIKE_CALLS,
    ContractError,
    GroupStateError,
    PeerTimeoutError,
    PolicyError,
    SignatureMismatchError,
)
from meshplan.kernel._library import DTYPES, OPS, Outcome, PeerCall, Signature
from meshplan.record import (
    CALL_WORD,
    WORDS,
    differences,
    pack_words,
    ranks_text,
    read_words,
)

PeerMode = Literal["one_shot", "two_shot"]
"""How ranks reduce in each other's memory: each reduces everything, or a part, and then the
results are exchanged."""
PEER_MODES: tuple[PeerMode, ...] = get_args(PeerMode)
"""All of ``PeerMode``."""
# Of a communicator: those prepared for the calls that were used last.
MAX_CALLS = 256
_MODES = (*PEER_MODES, "scatter", "leaves")
# Its nanoseconds, added to any clock, fit into 63 bits.
_LONGEST_SECONDS = 2**32
# No two ranks write to one line.
LINE_BYTES = 64

_UNLIKE_TENSORS = (
    "Nothing was reduced: every rank must pass the same shape, dtype, operation and contract"
)
_RECONNECT = "Call meshplan.shutdown on every rank, and these ranks reconnect"

# Fates of a call, as csrc/peer.h has them.
_LATE, _REFUSED, _DIFFERS = 1, 2, 3
# In place of a phase: two calls of that rank ran at the same time.
_OVERLAPPING = 3

_Call = TypeVar("_Call")
_communicators: weakref.WeakValueDictionary[str, Communicator[object]] = (
    weakref.WeakValueDictionary()
)


class Arithmetic(NamedTuple):
    op: str
    shape: tuple[int, ...]
    order: str
    accumulate: str
    rounding: str
    divisor: int | None

    @property
    def contract(self) -> Contract:
        return Contract(self.order, self.accumulate, self.rounding)  # type: ignore[arg-type]


class CallKey(NamedTuple):
    mode: str  # of ``PEER_MODES``, ``scatter``, or on CPUs ``leaves``: a scatter that adds none
    shape: tuple[int, ...]  # shape and dtype are of the message, which is contiguous
    # For the last two: elements of each rank's part of the message; else empty.
    parts: tuple[int, ...]
    dtype: torch.dtype
    how: Arithmetic


def nanoseconds(timeout: float) -> int:
    """Seconds as a compiled call counts them."""
    return int(min(timeout, _LONGEST_SECONDS) * 1e9)


def prepare_call(key: CallKey, ranks: int, timeout: float) -> PeerCall:
    """The call of ``key`` in a group of ``ranks``, whose members wait ``timeout`` seconds; the
    contract's errors and ``PolicyError`` if it does not define the call.
    """
    _check(key, ranks)
    how, item = key.how, key.dtype.itemsize
    # An axis of size 1 adds no node to the tree. The others are at most 6, because 2**7 ranks are
    # more than MAX_PEERS: they fit into PeerCall.shape.
    wide = [size for size in how.shape if size > 1]
    call = PeerCall(
        timeout_ns=nanoseconds(timeout),
        divisor=how.divisor or (ranks if how.op == "avg" else 0),
        mode=_MODES.index(key.mode),
        item=item,
        dtype=DTYPES[key.dtype],
        op=OPS[how.op],
        order=how.contract.ordering.code,
        accumulate=int(how.accumulate == "float64"),
        node=int(how.rounding == "node"),
        axes=len(wide),
    )
    call.shape[: len(wide)] = wide
    # Where each rank's part of the message starts, in bytes, and where the last one ends.
    nbytes = math.prod(key.shape) * item
    if key.mode == "one_shot":
        starts = [nbytes]
    elif key.parts:
        starts = [0, *(item * elements for elements in accumulate(key.parts))]
    else:
        # Parts are whole lines: each starts as aligned as the message, so that words stay wide.
        lines = -(-nbytes // (ranks * LINE_BYTES))
        width = lines * LINE_BYTES
        starts = [min(place * width, nbytes) for place in range(ranks + 1)]
    call.starts[: len(starts)] = starts
    call.signature.words[:WORDS] = pack_words(
        kind="reduce_scatter" if key.parts else "all_reduce",
        path=key.mode,
        dtype=name_of(key.dtype),
        shape=key.shape,
        axes=wide,
        op=how.op,
        contract=how.contract,
        divisor=call.divisor,
        layout=repr(key.parts) if key.parts else "",
    )
    return call


def _check(key: CallKey, ranks: int) -> None:
    how, parts, numel = key.how, key.parts, math.prod(key.shape)
    check_dtype(how.op, key.dtype, how.contract)
    if key.mode not in _MODES:
        words = ", ".join(map(repr, ("auto", *PEER_MODES)))
        raise PolicyError(f"no mode {key.mode!r}; use one of {words}")
    if math.prod(how.shape) != ranks or min(how.shape, default=0) < 1:
        raise ContractError(
            f"axes of {list(how.shape)} are not {ranks} ranks; pass axis sizes whose product is "
            f"{ranks}"
        )
    if how.divisor is not None and how.divisor < 1:
        raise ContractError(f"no average over {how.divisor} leaves; pass a divisor above 0")
    if parts and (len(parts) != ranks or sum(parts) != numel or min(parts) < 0):
        raise ContractError(
            f"parts of {list(parts)} elements do not split a message of {numel} among {ranks} "
            "ranks; pass one part for each rank"
        )


def communicator(name: str) -> Communicator[object]:
    found = _communicators.get(name)
    if found is None:
        raise GroupStateError(
            "the memory that a compiled reduction uses was released; run one reduction of that "
            "group, or meshplan.prepare, before the compiled code"
        )
    return found


class Communicator(ABC, Generic[_Call]):
    """Ranks that reach each other's memory: ``ranks``, 2 to ``MAX_PEERS`` global ones in group
    order. All issue the same calls in the same order, each on one thread at a time. ``name`` is
    equal on all ranks and in every run, ``rank`` this rank's place, ``timeout`` the seconds to wait
    for each peer in each step. Calls are possible while it is ``alive``: until ``close``.
    """

    device_type: str
    one_shot_bytes: int  # up to how many bytes one-shot is the faster mode; it cannot change a bit

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        timeout: float,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.alive = True
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: OrderedDict[CallKey, _Call] = OrderedDict()
        _communicators[name] = self  # type: ignore[assignment]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        self._calls.clear()

    def abort(self) -> None:
        """End the call under way, if this kind of memory can, and refuse later ones."""
        self.alive = False

    def faster_mode(self, nbytes: int) -> PeerMode:
        return "one_shot" if nbytes <= self.one_shot_bytes else "two_shot"

    @abstractmethod
    def close(self) -> None:
        """Release the memory once the last call or replay has ended. A second call does nothing."""

    @abstractmethod
    def _prepare(self, key: CallKey) -> _Call:
        """A call as ``_run`` takes it, made once for many."""

    @abstractmethod
    def _run(
        self,
        call: _Call,
        message: Tensor,
        out: Tensor,
        ticket: int,
    ) -> None:
        """Reduce."""

    def prepare(self, key: CallKey) -> _Call:
        """The call of ``key``, prepared once for many. Errors of `prepare_call`, and
        ``GroupStateError`` if closed or of another process.
        """
        with self._lock:
            self._check_usable()
            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = self._prepare(key)
                if len(self._calls) > MAX_CALLS:
                    self._calls.popitem(last=False)
            else:
                # Another thread may have cleared all of them: see set_timeout.
                with suppress(KeyError):
                    self._calls.move_to_end(key)
            return call

    def run(
        self,
        call: _Call,
        message: Tensor,
        out: Tensor,
        ticket: int = NO_TICKET,
    ) -> None:
        """Reduce ``message`` with all peers into ``out``, both contiguous, on this device and as in
        the key of the call; ``ticket`` is its word, equal on all ranks. ``GroupStateError`` as for
        ``prepare``; ``PeerTimeoutError`` and ``SignatureMismatchError`` if other ranks are missing
        or make another call.
        """
        with self._lock:
            self._check_usable()
            self._run(call, message, out, ticket)

    def _check_usable(self) -> None:
        if not self.alive:
            raise GroupStateError(
                f"the {self} was closed; call meshplan.shutdown on every rank, and these ranks "
                "reconnect"
            )
        if self._process != os.getpid():
            raise GroupStateError(
                f"the {self} belongs to process {self._process}, this is a fork of it; "
                "initialise torch.distributed in the process that computes"
            )

    def _error(self, outcome: Outcome, signature: Signature) -> Exception:
        who, me = self.ranks[outcome.rank], self.ranks[self.rank]
        mine = read_words(signature.words)
        among = ranks_text(self.ranks)
        if outcome.fate == _DIFFERS:
            records = {who: read_words(outcome.theirs.words), me: mine}
            unlike = outcome.theirs.words[CALL_WORD] != signature.words[CALL_WORD]
            advice = UNLIKE_CALLS if unlike else _UNLIKE_TENSORS
            return SignatureMismatchError(
                f"rank {who} called a reduction over {among} with {records[who]}, this rank "
                f"{me} with {mine}. Different: {differences(records)}. {advice}",
                rank=who,
                unlike_calls=unlike,
            )
        if outcome.phase == _OVERLAPPING:
            return GroupStateError(
                f"two reductions over {among} ran at the same time on rank {who}: {mine}; "
                "let each stream and each graph that reduces over them wait for the one before. "
                f"{_RECONNECT}"
            )
        assert outcome.fate in (_LATE, _REFUSED), (outcome.fate, mine)
        found, bound = "did not reach", f" within {self.timeout:g} s"
        if outcome.ended:
            found, bound = "has ended and did not reach", ""
        elif outcome.rank == self.rank:
            found, bound = f"(this one) {found}", f"{bound}, and the others gave up"
        phase = ("summands", "results")[outcome.phase]
        return PeerTimeoutError(
            f"rank {who} {found} block {outcome.block}, phase {outcome.phase} ({phase}) of a "
            f"reduction over {among}{bound}: {mine}; look for a rank that died or took "
            f"another branch. {_RECONNECT}",
            rank=who,
            block=outcome.block,
            phase=outcome.phase,
            ended=bool(outcome.ended),
        )
