"""Reductions by ranks that reach each other's memory: one communicator for each group.

The operators ``meshplan::peer_reduce`` and, in place, ``peer_reduce_`` are what tracing records.
They find their communicator by name, choose between one-shot and two-shot by size, and are done
when they return.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from meshplan._fold import refuse_flushing_thread
from meshplan.contract import Contract, check_dtype
from meshplan.errors import (
    ContractError,
    ContractTypeError,
    GroupStateError,
    PeerTimeoutError,
    PolicyError,
    SignatureMismatchError,
)
from meshplan.kernel._fold import OPERATORS
from meshplan.kernel._library import (
    DTYPES,
    MAX_PEERS,
    OPS,
    Outcome,
    PeerCall,
    Peers,
    Signature,
    library,
)
from meshplan.kernel._memory import SharedMemory
from meshplan.kernel._pages import large_pages

__all__ = [
    "MAX_CALLS",
    "ONE_SHOT_BYTES",
    "PEER_MODES",
    "Communicator",
    "PeerMode",
    "one_shot_bytes",
    "peer_mode",
    "region_bytes",
]

PeerMode = Literal["one_shot", "two_shot"]
PEER_MODES: tuple[PeerMode, ...] = get_args(PeerMode)
# Messages up to this many bytes go one-shot: (ranks, bytes), for groups of up to so many ranks.
# Measured with benchmarks/allreduce_cpu.py; it cannot change a bit.
ONE_SHOT_BYTES = ((2, 32 << 10), (4, 16 << 10), (MAX_PEERS, 4 << 10))
MAX_CALLS = 256

_MODES = ("one_shot", "two_shot", "scatter")
_STAGED_BYTES = 512 << 10
_DONE, _LATE, _TOLD, _DIFFERS = range(4)
# In place of a phase: another block found that signatures differ.
_DIFFERING = 2
# In place of a descriptor.
_UNKNOWN, _ENDED = -1, -2


class Arithmetic(NamedTuple):
    """What is done to each element; as ``meshplan.contract.reduce_leaves`` has it."""

    op: str
    shape: tuple[int, ...]
    order: str
    accumulate: str
    rounding: str
    divisor: int | None


class _Key(NamedTuple):
    mode: str
    numel: int
    parts: tuple[int, ...]
    dtype: torch.dtype
    how: Arithmetic


_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def one_shot_bytes(ranks: int) -> int:
    """Up to how many bytes one-shot is the faster mode in a group of ``ranks``."""
    return next(size for most, size in ONE_SHOT_BYTES if ranks <= most)


def peer_mode(nbytes: int, ranks: int) -> PeerMode:
    """The faster mode for a message of ``nbytes`` in a group of ``ranks``."""
    return "one_shot" if nbytes <= one_shot_bytes(ranks) else "two_shot"


def region_bytes(ranks: int) -> int:
    """Bytes of one rank's region in a group of ``ranks``."""
    return int(library().mp_peer_bytes(ranks, 1, _tile(ranks)))


def _tile(ranks: int) -> int:
    # Large enough for few meetings, where ranks outnumber processors, and small enough for caches.
    return max(_STAGED_BYTES // ranks, 16 << 10) // 64 * 64


class Communicator:
    """The mapped memory of a group and what this rank does with it.

    All ranks issue the same calls in the same order, each on one thread at a time. After an error
    it is of no more use (``alive`` is false), on every rank: the group meets anew.

    Args:
        name: equal on all ranks, and in every run.
        ranks: global ranks in group order; 2 to ``MAX_PEERS``.
        rank: this rank's place among them.
        memory: of ``len(ranks) * region_bytes(len(ranks))`` bytes, in which each rank has noted its
            process; the communicator closes it.
        timeout: seconds to wait for each peer in each step.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        memory: SharedMemory,
        timeout: float,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.alive = True
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: OrderedDict[_Key, PeerCall] = OrderedDict()
        size = region_bytes(len(ranks))
        self._peers = Peers(world=len(ranks), rank=rank, blocks=1, tile=_tile(len(ranks)))
        for place in range(len(ranks)):
            self._peers.region[place] = memory.address + place * size
        self._outcome = Outcome()
        self._processes = (ctypes.c_int * len(ranks))(
            *[_process(memory.noted(place)) for place in range(len(ranks))]
        )
        # Also where nobody closes it; but not when the interpreter ends, for a thread may still be
        # in there, and the system gives all of it back.
        self._release = weakref.finalize(self, _give_back, memory, list(self._processes))
        self._release.atexit = False
        self._run = library().mp_peer_reduce
        _communicators[name] = self

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"shared memory of {len(self.ranks)} ranks"

    def close(self) -> None:
        """Unmap the memory in this process, once the call under way has ended; again is nothing."""
        with self._lock:
            self.alive = False
            self._release()

    def reduce(
        self, message: Tensor, out: Tensor, mode: str, parts: tuple[int, ...], how: Arithmetic
    ) -> None:
        """Reduce ``message`` with all peers into ``out``, both contiguous and on the CPU.

        Args:
            message: this rank's summand.
            out: of the message's size, or of this rank's part.
            mode: ``one_shot``, ``two_shot`` or ``scatter``.
            parts: for ``scatter``: elements of each rank's part of the message; else empty.
            how: the arithmetic.

        Raises:
            ContractError, ContractTypeError, PolicyError: what the contract does not define, before
                anything is written.
            GroupStateError: closed, or another process's.
            PeerTimeoutError, SignatureMismatchError: other ranks did not come, or came for
                something else.
        """
        key = _Key(mode, message.numel(), parts, message.dtype, how)
        with self._lock:
            if not self.alive:
                raise GroupStateError(
                    f"the {self} was closed; redistribute through meshplan again, which meets anew"
                )
            if self._process != os.getpid():
                raise GroupStateError(
                    f"the {self} belongs to process {self._process}, this is a fork of it; "
                    "initialise torch.distributed in the process that computes"
                )
            call = self._calls.get(key)
            if call is None:
                call = self._calls[key] = self._call(key)
                if len(self._calls) > MAX_CALLS:
                    self._calls.popitem(last=False)
            fate = self._run(
                ctypes.addressof(self._peers),
                ctypes.addressof(call),
                message.data_ptr(),
                out.data_ptr(),
                ctypes.addressof(self._outcome),
                ctypes.addressof(self._processes),
            )
            if fate != _DONE:
                self.alive = False
                raise self._error(fate, call)

    def _call(self, key: _Key) -> PeerCall:
        self._check(key)
        how, item = key.how, key.dtype.itemsize
        wide = [size for size in how.shape if size > 1]
        call = PeerCall(
            timeout_ns=int(self.timeout * 1e9),
            divisor=how.divisor or (self.size if how.op == "avg" else 0),
            mode=_MODES.index(key.mode),
            item=item,
            dtype=DTYPES[key.dtype],
            op=OPS[how.op],
            order=int(how.order == "rank"),
            accumulate=int(how.accumulate == "float64"),
            node=int(how.rounding == "node"),
            axes=len(wide),
        )
        call.shape[: len(wide)] = wide
        starts = self._starts(key.mode, key.numel, key.parts, item)
        call.starts[: len(starts)] = starts
        digest = hashlib.sha1(repr(key.parts).encode()).digest()
        call.signature.words[:] = [
            key.numel,
            call.dtype | call.op << 8 | call.order << 16 | call.accumulate << 24 | call.node << 32
            | call.mode << 40,
            sum(size << 8 * i for i, size in enumerate(wide)),
            call.divisor,
            int.from_bytes(digest[:8], "little"),
            0,
            0,
            0,
        ]  # fmt: skip
        return call

    def _check(self, key: _Key) -> None:
        how = key.how
        check_dtype(how.op, key.dtype)
        Contract(how.order, how.accumulate, how.rounding)  # type: ignore[arg-type]
        if key.mode not in _MODES:
            words = ", ".join(map(repr, ("auto", *PEER_MODES)))
            raise PolicyError(f"no mode {key.mode!r}; write one of {words}")
        if math.prod(how.shape) != self.size or min(how.shape, default=0) < 1:
            raise ContractError(
                f"axes of {list(how.shape)} are not {self.size} ranks; write axis sizes whose "
                f"product is {self.size}"
            )
        if how.divisor is not None and how.divisor < 1:
            raise ContractError(f"no average over {how.divisor} leaves; write a divisor above 0")
        parts = key.parts
        if parts and (len(parts) != self.size or sum(parts) != key.numel or min(parts) < 0):
            raise ContractError(
                f"parts of {list(parts)} elements do not cut a message of {key.numel} for "
                f"{self.size} ranks; write one part for each rank"
            )

    def _starts(self, mode: str, numel: int, parts: tuple[int, ...], item: int) -> list[int]:
        """Where each rank's part of the message starts, in bytes, and where the last one ends."""
        if mode == "one_shot":
            return [numel * item]
        ranks = len(self.ranks)
        if mode == "scatter":
            starts = [0]
            for part in parts:
                starts.append(starts[-1] + part * item)
            return starts
        # Whole lines, so that no two ranks write to one.
        width = -(-numel * item // ranks)
        width = -(-width // 64) * 64
        return [min(place * width, numel * item) for place in range(ranks + 1)]

    def _error(self, fate: int, call: PeerCall) -> Exception:
        outcome = self._outcome
        who = self.ranks[outcome.rank]
        mine = _text(call.signature)
        among = ", ".join(map(str, self.ranks[:16])) + (", ..." if len(self.ranks) > 16 else "")
        if fate == _DIFFERS or outcome.phase == _DIFFERING:
            return SignatureMismatchError(
                f"rank {who} came to a reduction over ranks {among} with {_text(outcome.theirs)}, "
                f"this rank {self.ranks[self.rank]} with {mine}; nothing was reduced: every rank "
                "must bring the same shape, dtype, operation and contract",
                rank=who,
            )
        assert fate in (_LATE, _TOLD), (fate, mine)
        found = f"did not come within {self.timeout:g} s"
        if outcome.ended:
            found = "has ended and did not come"
        elif outcome.rank == self.rank:
            found = f"(this one) did not come within {self.timeout:g} s, the others have given up,"
        phase = ("summands", "results")[outcome.phase]
        return PeerTimeoutError(
            f"rank {who} {found} to block {outcome.block}, phase "
            f"{outcome.phase} ({phase}) of a reduction over ranks {among}: {mine}; look for a rank "
            "that died or took another branch. The next reduction of these ranks meets anew",
            rank=who,
            block=outcome.block,
            phase=outcome.phase,
        )


def _give_back(memory: SharedMemory, processes: list[int]) -> None:
    memory.close()
    for descriptor in processes:
        if descriptor >= 0:
            os.close(descriptor)


def _process(number: int) -> int:
    """A descriptor that tells when a process ends, as the library takes it."""
    try:
        return os.pidfd_open(number)
    except ProcessLookupError:
        return _ENDED
    except (OSError, AttributeError):
        # An older kernel, or one that does not allow it: then only time tells.
        return _UNKNOWN


def _text(signature: Signature) -> str:
    """What a signature says, for people."""
    numel, code, shape, divisor, _, *_ = signature.words
    dtype, op, order, accumulate, node, mode = (code >> 8 * i & 0xFF for i in range(6))
    names = {number: str(key).removeprefix("torch.") for key, number in DTYPES.items()}
    ops = {number: name for name, number in OPS.items() if name != "avg"}
    sizes = [shape >> 8 * i & 0xFF for i in range(8)]
    axes = "x".join(str(size) for size in sizes if size)
    contract = "/".join(
        (("tree", "rank")[order], ("wide", "float64")[accumulate], ("once", "node")[node])
    )
    average = f"/{divisor}" if divisor else ""
    return (
        f"{numel} elements of {names.get(dtype)}, {ops.get(op)}{average} over {axes}, {contract}, "
        f"{_MODES[mode]}"
    )


def _empty(
    message: Tensor,
    parts: list[int],
    op: str,
    shape: list[int],
    order: str,
    accumulate: str,
    rounding: str,
    divisor: int | None,
    mode: str,
    peers: str,
) -> Tensor:
    if parts:
        return message.new_empty(parts[_found(peers).rank])
    return torch.empty_like(message, memory_format=torch.contiguous_format)


def _peer_reduce(
    message: Tensor,
    parts: list[int],
    op: str,
    shape: list[int],
    order: str,
    accumulate: str,
    rounding: str,
    divisor: int | None,
    mode: str,
    peers: str,
) -> Tensor:
    message = message.contiguous()
    out = _empty(message, parts, op, shape, order, accumulate, rounding, divisor, mode, peers)
    large_pages(out)
    how = Arithmetic(op, tuple(shape), order, accumulate, rounding, divisor)
    _reduce(message, out, tuple(parts), how, mode, peers)
    return out


def _peer_reduce_(
    message: Tensor,
    op: str,
    shape: list[int],
    order: str,
    accumulate: str,
    rounding: str,
    divisor: int | None,
    mode: str,
    peers: str,
) -> None:
    flat = message.contiguous()
    how = Arithmetic(op, tuple(shape), order, accumulate, rounding, divisor)
    _reduce(flat, flat, (), how, mode, peers)
    if flat is not message:
        message.copy_(flat)


def _reduce(
    message: Tensor, out: Tensor, parts: tuple[int, ...], how: Arithmetic, mode: str, peers: str
) -> None:
    communicator = _found(peers)
    if message.dtype.is_floating_point and how.op not in ("max", "min"):
        refuse_flushing_thread()
    if parts:
        mode = "scatter"
    elif mode == "auto":
        mode = peer_mode(message.nbytes, len(communicator.ranks))
    communicator.reduce(message, out, mode, parts, how)


def _refuse(message: Tensor, *_: object) -> Tensor:
    where = message.device.type if message.layout is torch.strided else str(message.layout)
    raise ContractTypeError(
        f"a tensor on {where} cannot be reduced through the memory of this host; bring a strided "
        "tensor on the CPU, or take the path exchange"
    )


def _found(name: str) -> Communicator:
    communicator = _communicators.get(name)
    if communicator is None:
        raise GroupStateError(
            "the memory that a compiled reduction uses was given back; run one reduction of that "
            "group, or meshplan.prepare, before what was compiled"
        )
    return communicator


OPERATORS.define(  # type: ignore[no-untyped-call]
    "peer_reduce(Tensor message, int[] parts, str op, int[] shape, str order, str accumulate, "
    "str rounding, int? divisor, str mode, str peers) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
OPERATORS.impl("peer_reduce", _peer_reduce, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshplan::peer_reduce", _empty, lib=OPERATORS)
OPERATORS.define(  # type: ignore[no-untyped-call]
    "peer_reduce_(Tensor(a!) message, str op, int[] shape, str order, str accumulate, "
    "str rounding, int? divisor, str mode, str peers) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
OPERATORS.impl("peer_reduce_", _peer_reduce_, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshplan::peer_reduce_", lambda *_: None, lib=OPERATORS)
for _operator in ("peer_reduce", "peer_reduce_"):
    for _elsewhere in ("CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"):
        OPERATORS.impl(_operator, _refuse, _elsewhere)  # type: ignore[no-untyped-call]
