"""Reductions by GPUs that reach each other's memory, on streams.

A call only starts a kernel. A kernel that gives up on a rank writes the reason to memory of the
host, and leaves NaNs (integers: all ones) in the result. The next call, and ``meshplan.check``,
raise it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from meshplan._calls import NO_TICKET
from meshplan.contract import Contract
from meshplan.definition import partial_dtype
from meshplan.errors import GroupStateError, PolicyError
from meshplan.kernel._communicator import (
    LINE_BYTES,
    CallKey,
    Communicator,
    prepare_call,
)
from meshplan.kernel._device_code import CompileError, Device, device_of, kernel_name
from meshplan.kernel._driver import Driver, DriverError
from meshplan.kernel._library import (
    CALL,
    MAX_BLOCKS,
    MAX_PEERS,
    DeviceCall,
    Failures,
    PeerCall,
    Peers,
    library,
)
from meshplan.kernel._transports import Regions
from meshplan.orders import ORDERS
from meshplan.record import CALL_WORD

# An order of additions as batches of leaves: what kernels for GPUs follow, see csrc/element.h.

# As csrc/device_call.h and csrc/fold.h have them.
BATCH = 8
"""Leaves of a batch at most."""
STAGED_WAITING = 3
"""Results that may wait in a fold over peers."""
TABLE_LEAVES = 256
"""Leaves of a table; no batch is in two tables."""


class Plan(NamedTuple):
    """An order as batches of leaves, in the order of the leaves."""

    # For the first leaf of a batch its number of leaves, and 16 times the number of earlier results
    # that it is added to, the newest first; 0 for its other leaves.
    batches: bytes
    chain: bool  # the leaves are added one by one, and batches only limit how many are read at once
    waiting: int  # results that wait at once, at most


@lru_cache(maxsize=256)
def plan_of(order: str, shape: tuple[int, ...]) -> Plan | None:
    """The batches of ``order`` over axes of ``shape``, from the expression that defines it.
    ``None`` if it uses the leaves in another order than theirs, or adds one batch to more than 15
    results.
    """
    # After each leaf so many nodes take the newest two results.
    nodes: list[int] = []
    indices: list[int] = []

    def leaf(index: int) -> None:
        indices.append(index)
        nodes.append(0)

    def node(_left: None, _right: None) -> None:
        nodes[-1] += 1

    ORDERS[order].expression(shape, leaf, node)
    if indices != list(range(len(indices))):
        return None
    # Exact sums have one result in every order, and so have maxima, minima and integers.
    chain = ORDERS[order].exact or nodes == [0] + [1] * (len(nodes) - 1)
    batches = bytearray(len(nodes))
    first = depth = waiting = 0
    while first < len(nodes):
        count = min(BATCH, len(nodes) - first, TABLE_LEAVES - first % TABLE_LEAVES)
        added = int(first > 0)
        if not chain:
            count = next(n for n in range(count, 0, -1) if _is_tree(nodes[first : first + n]))
            added = nodes[first + count - 1] - (count - 1).bit_count()
        if added > 15:
            return None
        batches[first] = count + 16 * added
        depth += 1 - added if first else 0
        waiting = max(waiting, depth)
        first += count
    return Plan(bytes(batches), chain, waiting)


def _is_tree(nodes: Sequence[int]) -> bool:
    """Whether these leaves are first combined among themselves, as the tree over one axis."""
    count = len(nodes)
    # Leaf j completes one part per 1 bit at the end of j, like the carries of a binary counter. The
    # last leaf completes all open parts.
    inside = all(nodes[j] == (j + 1 & -j - 1).bit_length() - 1 for j in range(count - 1))
    return inside and nodes[-1] >= (count - 1).bit_count()


# Reductions of leaves in the memory of one GPU: one launch on the current stream, and no wait.
#
# A capture may hold it: the addresses of the leaves are parameters of the launch. More leaves than
# these have room for take one more launch for each 256 of them, which writes the addresses to
# memory of torch's allocator.

_LOG = logging.getLogger("meshplan")
# As csrc/fold.h has them.
_DIMS = 5
_TABLE_KERNEL = "mp_fold_table"
# Lanes of a block where blocks for every processor are full, and else: more blocks of fewer lanes.
_LANES, _FEW_LANES = 256, 64
_BLOCKS_PER_PROCESSOR = 4


class LeafTable(ctypes.Structure):
    _fields_ = (
        ("leaf", ctypes.c_void_p * TABLE_LEAVES),
        ("plan", ctypes.c_ubyte * TABLE_LEAVES),
    )


class FoldCall(ctypes.Structure):
    _fields_ = (
        ("table", LeafTable),
        ("tables", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("numel", ctypes.c_longlong),
        ("divisor", ctypes.c_ulonglong),
        ("size", ctypes.c_longlong * _DIMS),
        ("stride", ctypes.c_longlong * _DIMS),
        ("leaves", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("chain", ctypes.c_int),
        ("waiting", ctypes.c_int),
    )


@lru_cache(maxsize=64)
def fold_device(index: int) -> Device | None:
    """The GPU of that index with its kernels; ``None`` if it has none, which is reported once."""
    try:
        device = device_of(index)
        with device.driver.current():
            device.kernel(_TABLE_KERNEL)
    except (DriverError, CompileError) as error:
        _LOG.warning("reductions on cuda:%d run in plain torch, slower: %s", index, error)
        return None
    return device


@lru_cache(maxsize=256)
def fold_plan(order: str, shape: tuple[int, ...]) -> Plan | None:
    """As ``plan_of``; that there is no plan is reported once."""
    found = plan_of(order, shape)
    if found is None:
        _LOG.warning(
            "order %r over axes of %s runs in plain torch on GPUs, slower: it has no batches",
            order,
            list(shape),
        )
    return found


def launch_fold(
    device: Device,
    out: Tensor,
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
    divisor: int | None,
    part: int,
) -> None:
    """Start the fold of ``leaves`` of a reduction in ``dtype`` into ``out``, as that of
    `reduce_into`. Arguments are checked; ``part`` is 0 for a whole reduction, 1 for
    ``combine_leaves``, 2 for ``finish_partials``. ``DriverError`` if the driver refuses the launch.
    """
    if out.numel() == 0:
        return
    plan = fold_plan(contract.order, tuple(shape))
    assert plan is not None, contract.order
    leaves, sizes, strides = _in_one_layout(leaves)
    call = FoldCall(
        out=out.data_ptr(),
        numel=out.numel(),
        divisor=divisor or 0,
        leaves=len(leaves),
        dims=len(sizes),
        chain=plan.chain,
        waiting=plan.waiting,
    )
    call.size[: len(sizes)], call.stride[: len(strides)] = sizes, strides
    addresses = [leaf.data_ptr() for leaf in leaves]
    words = -(-out.numel() * leaves[0].itemsize // 16)
    lanes = _LANES if words >= _LANES * device.processors else _FEW_LANES
    blocks = min(-(-words // lanes), _BLOCKS_PER_PROCESSOR * device.processors)
    kernel = _kernel_name(dtype, op, contract, part)
    stream = device.stream()
    with device.driver.current():
        if len(leaves) <= TABLE_LEAVES:
            _fill(call.table, addresses, plan.batches)
        else:
            tables = _write_tables(device, stream, out, addresses, plan.batches)
            call.tables = tables.data_ptr()
        _launch(device, kernel, blocks, lanes, stream, call)


def _kernel_name(dtype: torch.dtype, op: str, contract: Contract, part: int) -> str:
    name = kernel_name(dtype, op, contract)
    # Partial results of the leaves' dtype are folded as the leaves are.
    whole = part == 0 or partial_dtype(op, dtype, contract) is dtype
    return f"{name}_{'fold' if whole else ('combine', 'finish')[part - 1]}"


def _in_one_layout(
    leaves: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[int], Sequence[int]]:
    """Leaves that the kernels can read; and sizes and strides of all, empty if contiguous."""
    first = leaves[0]
    itemsize = first.itemsize
    if any(leaf.data_ptr() % itemsize for leaf in leaves):
        # Of other libraries: torch's own elements are aligned.
        leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
    if all(leaf.is_contiguous() for leaf in leaves):
        return leaves, (), ()
    strides = first.stride()
    dims = _merged(first.shape, strides)
    if (
        len(dims) <= _DIMS
        and first.numel() < 1 << 32
        and all(leaf.stride() == strides for leaf in leaves)
    ):
        return leaves, [size for size, _ in dims], [stride for _, stride in dims]
    return [leaf.contiguous() for leaf in leaves], (), ()


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides without dims of size 1; dims that follow each other in memory are one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found


def _write_tables(
    device: Device, stream: int, out: Tensor, addresses: Sequence[int], batches: bytes
) -> Tensor:
    """Tables in memory of the device, which the allocator keeps for work on this stream."""
    each = ctypes.sizeof(LeafTable)
    starts = range(0, len(addresses), TABLE_LEAVES)
    tables = torch.empty(len(starts) * each, dtype=torch.uint8, device=out.device)
    for number, start in enumerate(starts):
        call, some = (
            FoldCall(out=tables.data_ptr() + number * each),
            slice(start, start + TABLE_LEAVES),
        )
        _fill(call.table, addresses[some], batches[some])
        _launch(device, _TABLE_KERNEL, 1, _LANES, stream, call)
    return tables


def _fill(table: LeafTable, addresses: Sequence[int], batches: bytes) -> None:
    table.leaf[: len(addresses)] = addresses
    table.plan[: len(batches)] = batches


def _launch(
    device: Device, kernel: str, blocks: int, lanes: int, stream: int, call: FoldCall
) -> None:
    # A launch copies its parameters.
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    device.driver.launch(device.kernel(kernel), blocks, lanes, stream, arguments)


# GPUs on which the paths were timed, and what ``auto`` takes there: ``timed_gpus.json``.
#
# ``make bench-gpu`` writes the file, by name of the GPU and ranks of a group. A group shares memory
# at every size or at none: ranks whose sizes differ by mistake then make one call, which
# compares them.


class TimedPaths(NamedTuple):
    """The fastest paths on a GPU, for groups of some ranks on one host."""

    one_shot_bytes: int  # up to so many bytes ``one_shot`` is faster than ``two_shot``
    # Whether the faster one of these is at least as fast as ``exchange`` at all sizes.
    share_memory: bool


@lru_cache(maxsize=1)
def _read() -> dict[str, dict[str, dict[str, int]]]:
    text = resources.files("meshplan.kernel").joinpath("timed_gpus.json").read_text()
    found: dict[str, dict[str, dict[str, int]]] = json.loads(text)
    return found


def timed_paths(name: str, ranks: int) -> TimedPaths | str:
    """The times of GPUs called ``name`` by ``torch.cuda.get_device_name``, for groups of ``ranks``
    with a GPU each; or the reason why memory is not shared.
    """
    row = _read().get(name, {}).get(str(ranks))
    if row is None:
        return (
            f"one_shot and two_shot were not timed on {name} with {ranks} ranks; write the path "
            "that you want, or time them with make bench-gpu"
        )
    found = TimedPaths(row["one_shot_bytes"], bool(row["share_memory"]))
    if not found.share_memory:
        return f"exchange was timed to be faster on {name} with {ranks} ranks"
    return found


# As ONE_SHOT_BYTES, for GPUs that are linked by NVLink: of the published times of such kernels.
DEVICE_ONE_SHOT_BYTES = ((2, 1 << 20), (4, 512 << 10), (MAX_PEERS, 256 << 10))
LANES = 512
# Of all ranks' pieces of a block in a round. A region of 32 blocks has 48 MiB. Two_shot over 8
# ranks takes 6 MiB of a message in a round. To stage them takes longer than the wait that they
# cover.
_STAGED_BYTES = 192 << 10
# A word of 16 bytes for each lane that a block copies with to one of 8 peers.
_LEAST_PIECE = 1 << 10


class _Call(NamedTuple):
    words: DeviceCall
    kernel: int
    blocks: int


_communicators: weakref.WeakSet[DeviceCommunicator] = weakref.WeakSet()
_also: list[Callable[[], None]] = []


def check() -> None:
    """Raise the errors of reductions on GPUs that were started before, if there are any.

    These run asynchronously on streams. Without this call, the next reduction of the same ranks
    raises. It does not wait: synchronise first to see every error.

    Raises:
        PeerTimeoutError, SignatureMismatchError: as for a reduction.
    """
    for communicator in list(_communicators):
        communicator.check()
    for function in _also:
        function()


def register_check(function: Callable[[], None]) -> None:
    """Let ``check`` call ``function``, which raises errors found so far and does not wait."""
    _also.append(function)


def device_region_bytes(ranks: int, blocks: int) -> int:
    """As `region_bytes`, for kernels of at most ``blocks``."""
    return int(library().mp_peer_bytes(ranks, blocks, tile_bytes(ranks), 1))


def tile_bytes(ranks: int) -> int:
    return max(_STAGED_BYTES // ranks, 4 << 10) // 64 * 64


def share_out(longest: int, blocks: int, tile: int) -> tuple[int, int]:
    """Bytes of a piece, and how many of ``blocks`` have one; no part has more than ``longest``."""
    # As few rounds as tiles of so many bytes allow, and as many blocks as have a piece.
    rounds = max(-(-longest // (blocks * tile)), 1)
    lines = -(-longest // (rounds * blocks * LINE_BYTES))
    piece = min(max(lines * LINE_BYTES, _LEAST_PIECE), tile)
    return piece, min(max(-(-longest // piece), 1), blocks)


def device_call(call: PeerCall, plan: Plan) -> DeviceCall:
    shared = {name: getattr(call, name) for name, _ in CALL}
    words = DeviceCall(**shared, piece=call.piece, chain=plan.chain)
    words.plan[: len(plan.batches)] = plan.batches
    return words


class DeviceCommunicator(Communicator[_Call]):
    """Regions in the memory of GPUs, one for each rank. A call is under way on the current stream
    when it returns, ordered by ``StreamOrder``. A graph that has captured calls must not be
    replayed after ``close``. After a failure every call raises it, on every rank, until
    ``meshplan.shutdown`` releases the groups: ranks see it at different calls, and must not
    reconnect by themselves. ``blocks``: at most, of a kernel: 1 to ``MAX_BLOCKS``, equal on all
    ranks. The device must be able to run all of them at once.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: Device,
        regions: Regions,
        timeout: float,
        *,
        blocks: int = MAX_BLOCKS,
        lanes: int = LANES,
        one_shot_bytes: int | None = None,
    ) -> None:
        super().__init__(name, ranks, rank, timeout)
        self.device_type = device.type
        self._device = device
        self._regions = regions
        self._lanes = lanes
        usual = next(size for most, size in DEVICE_ONE_SHOT_BYTES if self.size <= most)
        self.one_shot_bytes = usual if one_shot_bytes is None else one_shot_bytes
        self._peers = Peers.of(regions.addresses, rank, blocks, tile_bytes(self.size))
        with device.driver.current():
            self._order = StreamOrder(device.driver)
            self._shared = device.driver.host_malloc(ctypes.sizeof(Failures))
        self._failures = Failures.from_address(self._shared)
        self._in = ctypes.c_void_p()
        self._out = ctypes.c_void_p()
        _communicators.add(self)

    def __str__(self) -> str:
        return f"memory of {self.size} GPUs"

    def check(self) -> None:
        """Raise the error that a kernel has reported, if there is one."""
        with self._lock:
            if self.alive:
                self._raise_failure()

    def close(self) -> None:
        # If the device is not done in time, the memory stays until the process ends.
        with self._lock:
            if not self.alive:
                return
            self.alive = False
            if not self._idle():
                return
            self._regions.close()
            driver = self._device.driver
            # A device that is lost, or another process's, has taken these along.
            with suppress(DriverError), driver.current():
                self._order.close()
                driver.host_free(self._shared)

    def _idle(self) -> bool:
        driver = self._device.driver
        deadline = time.monotonic() + self.timeout
        with suppress(DriverError), driver.current():
            while not self._order.idle():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True

    def _prepare(self, key: CallKey) -> _Call:
        call = prepare_call(key, self.size, self.timeout)
        longest = call.starts[0]
        if key.mode != "one_shot":
            longest = max(call.starts[p + 1] - call.starts[p] for p in range(self.size))
        # All ranks must launch the same number of blocks. It follows from shape, dtype and mode,
        # which signatures compare.
        call.piece, blocks = share_out(longest, self._peers.blocks, self._peers.tile)
        plan = plan_of(key.how.order, tuple(call.shape[: call.axes]) or (1,))
        if plan is None or plan.waiting > STAGED_WAITING:
            raise PolicyError(
                f"order {key.how.order!r} over axes of {list(key.how.shape)} does not fit the "
                "kernels for GPUs; write path='exchange'"
            )
        words = device_call(call, plan)
        with self._device.driver.current():
            kernel = self._device.kernel(kernel_name(key.dtype, key.how.op, key.how.contract))
        return _Call(words, kernel, blocks)

    def _run(self, call: _Call, message: Tensor, out: Tensor, ticket: int) -> None:
        index = message.device.index
        if index is not None and index != self._device.driver.index:
            raise GroupStateError(
                f"the {self} is that of {self._device.type}:{self._device.driver.index} on this "
                f"rank, the tensor is on {message.device}; pass tensors of one device only"
            )
        self._raise_failure()
        driver, stream = self._device.driver, self._device.stream()
        # A graph would replay the ticket of its capture: there the kernel's own count of its calls,
        # which lies in device memory, pairs the replays of all ranks.
        captured = driver.capture(stream) is not None
        call.words.signature.words[CALL_WORD] = NO_TICKET if captured else ticket
        self._in.value, self._out.value = message.data_ptr(), out.data_ptr()
        given = (
            self._peers,
            call.words,
            self._in,
            self._out,
            ctypes.c_void_p(self._shared),
        )
        arguments = (ctypes.c_void_p * len(given))(*[ctypes.addressof(one) for one in given])
        # A launch copies its parameters, so that the next call may reuse these.
        with driver.current(), self._order.turn(stream):
            driver.launch(call.kernel, call.blocks, self._lanes, stream, arguments)

    def _raise_failure(self) -> None:
        # The kernel stores `any` last, with release at system scope: once it is not 0, the outcome
        # is complete.
        failed = self._failures.any
        if failed == 0:
            return
        failure = self._failures.of[failed - 1]
        raise self._error(failure.outcome, failure.mine)


class StreamOrder:
    """The order of one communicator's calls on one device, whatever their streams and graphs.
    Two calls of one rank must not overlap, and all ranks must run them in one order. One stream
    keeps that order by itself. Between streams events keep it: ``last`` covers the last call that
    was issued or replayed, ``inside`` the last one in the capture under way. Every method expects
    the driver to be current; ``DriverError`` if it refuses events.

    * A call outside graphs waits for the last one, if that was on another stream, or may have been
      part of a graph, which can be replayed on any.
    * In a graph, the first call waits for ``last`` as it is at the launch. Each call records it, so
      that later calls and graphs wait for the whole of the replay.
    * Inside a capture, a call on another stream waits for the call before it. A capture cannot wait
      for events recorded outside, hence ``inside``.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._last = driver.event()
        self._inside = driver.event()
        # Of the last call outside graphs.
        self._stream: int | None = None
        # Of the last call in a graph, and the graphs before.
        self._capture: int | None = None
        self._captured_stream: int | None = None
        self._earlier: set[int] = set()

    @contextmanager
    def turn(self, stream: int) -> Iterator[None]:
        """Launch inside this, on a stream that may be captured: after all calls before.
        ``GroupStateError`` if the order cannot be kept in this capture; nothing was launched.
        """
        driver = self._driver
        capture = driver.capture(stream)
        if capture is None:
            if self._capture is not None or self._stream not in (None, stream):
                driver.wait(self._last, stream)
            yield
            driver.record(self._last, stream)
            self._stream = stream
            return
        self._refuse(capture)
        try:
            if capture != self._capture:
                driver.wait_external(self._last, stream)
            elif stream != self._captured_stream:
                driver.wait(self._inside, stream)
            yield
            driver.record_external(self._last, stream)
            # Behind the record, so that the last one of a replay is that of its last call.
            driver.record(self._inside, stream)
        except DriverError as error:
            raise GroupStateError(
                f"a reduction cannot be captured in this graph: {error}; reduce outside the graph, "
                "or take the path exchange there"
            ) from error
        if self._capture not in (None, capture):
            self._earlier.add(self._capture)
        self._capture, self._captured_stream = capture, stream

    def idle(self) -> bool:
        """Whether all calls and all replays that were launched are done."""
        return self._driver.is_done(self._last)

    def close(self) -> None:
        self._driver.destroy_event(self._last)
        self._driver.destroy_event(self._inside)

    def _refuse(self, capture: int) -> None:
        if not self._driver.has_external_events:
            raise GroupStateError(
                "this driver cannot record events in graphs, so that a captured reduction would "
                "overlap others of the same ranks; reduce outside the graph, or take the path "
                "exchange there"
            )
        if capture in self._earlier:
            raise GroupStateError(
                "two graphs that capture reductions of the same ranks are captured at the same "
                "time, which leaves no order between the calls; capture them sequentially"
            )
