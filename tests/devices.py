"""GPUs for tests: one that a CPU plays, with the kernels' own source; and checks that suit any."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import math
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan import kernel
from meshplan.contract import Contract
from meshplan.definition import reduce_leaves
from meshplan.flatten._connect import connect_devices
from meshplan.flatten._join import members_of
from meshplan.kernel import Device, DeviceCommunicator, Ipc, Regions, Transport, _device_peers
from meshplan.kernel._driver import Driver, DriverError, DriverKind
from meshplan.testing import bits
from tests.inputs import FLOATS, INTEGERS, arithmetics, draw_leaves, golden_cases

ROOT = Path(__file__).parents[1]
MODES = ("one_shot", "two_shot")
FOLDS = "-DMP_PEER(name, D, Acc, Round, Op)="
# As meshplan.kernel._device_peers has it, for emulated GPUs.
STAGED_BYTES = 12 << 10
# Every way to round that there is a kernel for.
CONTRACTS = (
    Contract(),
    Contract(order="rank"),
    Contract(accumulate="float64"),
    Contract(accumulate="float64", rounding="node"),
    Contract(rounding="node"),
    Contract("exact"),
    Contract("exact", "float64"),
)
_held: list[DeviceCommunicator] = []
# Of tests whose ranks play GPUs on CPUs.
EMULATED = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not())),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: no GPU is emulated"),
]


@lru_cache(maxsize=3)
def emulated_library(kind: DriverKind, *flags: str) -> str:
    """The driver that a CPU plays, compiled once for all workers of a run of pytest.

    It has the kernels over peers, or with the flag ``FOLDS`` those that fold leaves.
    """
    if shared := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        name = f"meshplan-emulated-{shared}-{crc32(' '.join(flags).encode()):x}"
        folder = Path(tempfile.gettempdir(), name)
        folder.mkdir(exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="meshplan-emulated-"))
    library = folder / f"lib{kind}.so"
    with (folder / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(kind, flags, library)
    return str(library)


def _compile(kind: DriverKind, flags: tuple[str, ...], library: Path) -> None:
    """Under another name first: a compiler that is ended leaves a part of its file."""
    part = library.with_suffix(".part")
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    command += ["-shared", "-fPIC", "-pthread", "-DMP_EMULATED", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{Path(__file__).parent / 'native'}", *(["-DMP_HIP"] if kind == "hip" else [])]
    command += flags if FOLDS in flags else [*flags, "-DMP_FOLD(name, In, Acc, Round, Out, Op)="]
    command += [str(Path(__file__).parent / "native" / "emulated_driver.cpp"), "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    part.rename(library)


class Emulated(Device):
    """A GPU that a CPU emulates, with torch's CPU tensors. Work runs later, as on a GPU: call
    ``synchronize`` before you read a result. ``current_stream`` is the stream that gets the work,
    and ``flags`` are of the compiler, for another driver.
    """

    def __init__(self, kind: DriverKind = "cuda", processors: int = 5, *flags: str) -> None:
        self.current_stream = 7
        library = emulated_library(kind, *flags)
        self.library = ctypes.CDLL(library)
        # What kernels under way use, and for ever what those in graphs use.
        self._used: list[Tensor] = []
        self._captured: list[Tensor] = []
        driver = Driver(kind, 0, library)
        super().__init__(driver, processors, b"emulated", lambda: self.current_stream, "cpu")
        _emulated.add(self)

    def call(self, cuda: str, hip: str, *words: Any) -> int:
        """A function of the driver's that meshplan does not call, by its two names."""
        return int(getattr(self.library, cuda if self.driver.kind == "cuda" else hip)(*words))

    def history(self) -> list[str]:
        """The submitted work, without the checks of mappings, which run on stream 0."""
        self.library.emulated_history.restype = ctypes.c_char_p
        lines = str(self.library.emulated_history().decode()).splitlines()
        return [line for line in lines if not line.endswith((" on 0", "record 0"))]

    @contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        """Let that stream be the current one."""
        before, self.current_stream = self.current_stream, number
        try:
            yield
        finally:
            self.current_stream = before

    def delay(self, seconds: float) -> None:
        """Let what the current stream is given from now on run so much later."""
        stream = ctypes.c_void_p(self.current_stream)
        self.library.emulated_delay(stream, ctypes.c_longlong(int(seconds * 1e6)))

    def synchronize(self) -> None:
        """Wait for all that was given to its streams."""
        with self.driver.current():
            self.driver.synchronize()
        self._used.clear()

    def hold(self, *tensors: Tensor) -> None:
        """What torch's allocator does for a GPU: no memory is used again while a stream uses it."""
        capture = self.driver.capture(self.current_stream)
        (self._used if capture is None else self._captured).extend(tensors)

    def event(self) -> int:
        """An event of the program's own."""
        with self.driver.current():
            return self.driver.event()

    @contextmanager
    def capture(self, stream: int) -> Iterator[Graph]:
        """Capture a graph from a stream, which is the current one inside."""
        graph = Graph(self)
        self.begin_capture(stream)
        with self.on_stream(stream):
            yield graph
        self.end_capture(stream, graph)

    def begin_capture(self, stream: int) -> None:
        """Capture from here on what that stream is given."""
        handle = ctypes.c_void_p(stream)
        assert self.call("cuStreamBeginCapture_v2", "hipStreamBeginCapture", handle, 0) == 0

    def end_capture(self, stream: int, graph: Graph) -> None:
        """End the capture and fill the graph; ``DriverError`` if the capture is invalid."""
        handle, found = ctypes.c_void_p(stream), ctypes.byref(graph.handle)
        code = self.call("cuStreamEndCapture", "hipStreamEndCapture", handle, found)
        if code != 0:
            raise DriverError(f"capture ({code})")


class Graph:
    """A captured graph of an emulated GPU."""

    def __init__(self, device: Emulated) -> None:
        self.device = device
        self.handle = ctypes.c_void_p()

    def replay(self, stream: int) -> None:
        """Give it to a stream."""
        handle = ctypes.c_void_p(stream)
        assert self.device.call("cuGraphLaunch", "hipGraphLaunch", self.handle, handle) == 0


_emulated: weakref.WeakSet[Emulated] = weakref.WeakSet()
_run = DeviceCommunicator._run


def _run_and_hold(
    self: DeviceCommunicator, call: Any, message: Tensor, out: Tensor, ticket: int
) -> None:
    if isinstance(self._device, Emulated):
        self._device.hold(message, out)
    _run(self, call, message, out, ticket)


DeviceCommunicator._run = _run_and_hold  # type: ignore[method-assign]


def synchronize() -> None:
    """Wait for every emulated GPU of this process."""
    for device in list(_emulated):
        device.synchronize()


@dataclass(frozen=True)
class Swapped(Ipc):
    """On one rank the mappings of two peers stand for each other's memory."""

    rank: int = 0
    peers: tuple[int, int] = (1, 2)
    name: str = "swapped"

    def open(self, device: Device, nbytes: int, rank: int, *more: Callable[..., object]) -> Regions:
        regions = super().open(device, nbytes, rank, *more)  # type: ignore[arg-type]
        if rank == self.rank:
            found = list(regions.addresses)
            first, second = self.peers
            found[first], found[second] = found[second], found[first]
            regions.addresses = tuple(found)
        return regions


def connect_ranks(
    device: Device | None,
    ranks: Sequence[int],
    *,
    timeout: float = 20.0,
    transports: Sequence[Transport] | None = None,
    lanes: int = 512,
    name: str = "test",
) -> DeviceCommunicator | str:
    """Connect the ranks; operators find the communicator by ``name`` until the process ends.

    An emulated GPU has small tiles, so that small messages have several pieces.
    """
    staged = STAGED_BYTES if isinstance(device, Emulated) else _device_peers._STAGED_BYTES
    with patch.object(_device_peers, "_STAGED_BYTES", staged):
        found = connect_devices(
            dist.group.WORLD.group_name,
            members_of(None, tuple(ranks), 30.0),
            name,
            timeout=timeout,
            find=None if device is None else lambda: device,
            transports=transports,
            lanes=lanes,
        )
    assert isinstance(found, DeviceCommunicator | str), found
    if isinstance(found, DeviceCommunicator):
        _held.append(found)
    return found


def reduce_peers(
    tensor: Tensor,
    shape: Sequence[int],
    mode: str,
    *,
    op: str = "sum",
    contract: Contract = Contract(),
    divisor: int | None = None,
    parts: Sequence[int] = (),
    name: str = "test",
) -> Tensor:
    """The public operator."""
    result: Tensor = torch.ops.meshplan.peer_reduce(
        tensor,
        list(parts),
        op,
        list(shape),
        contract.order,
        contract.accumulate,
        contract.rounding,
        divisor,
        mode,
        name,
    )
    return result


def have_equal_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have equal bits, on any device, after all pending work."""
    synchronize()
    return bool(torch.equal(bits(found.cpu()), bits(expected.cpu())))


def at_byte(values: Tensor, offset: int) -> Tensor:
    """The same values on the same device, ``offset`` bytes beyond a multiple of 16."""
    step = values.dtype.itemsize
    assert offset % step == 0
    store = torch.empty(values.numel() + 32 // step, dtype=values.dtype, device=values.device)
    first = (-store.data_ptr() % 16 + offset) // step
    place = store[first : first + values.numel()]
    place.copy_(values)
    return place


def wrong_golden(rank: int, world_size: int, where: str) -> list[str]:
    """The golden vectors of this world size that some mode gets wrong."""
    wrong, cases = [], golden_cases(ranks=world_size)
    for number, case in enumerate(cases):
        how: dict[str, Any] = {"contract": case.contract, "divisor": case.divisor}
        for mode in MODES:
            mine = case.leaves[rank].to(where)
            found = reduce_peers(mine, case.shape, mode, op=case.op, **how)
            if not have_equal_bits(found, case.result):
                wrong.append(f"case {number} {mode}")
    assert cases
    return wrong


def wrong_arithmetic(rank: int, shape: Sequence[int], where: str, numel: int) -> list[str]:
    """Every operation, dtype and rounding whose kernel differs from the definition."""
    wrong = []
    world_size = math.prod(shape)
    for dtype in (*FLOATS, *INTEGERS):
        leaves = draw_leaves(world_size, numel, dtype)
        for (op, contract), mode in itertools.product(arithmetics(dtype, CONTRACTS), MODES):
            expected = reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
            found = reduce_peers(leaves[rank].to(where), shape, mode, op=op, contract=contract)
            if not have_equal_bits(found, expected):
                wrong.append(f"{dtype} {op} {contract.id} {mode}")
    return wrong


def wrong_sizes(
    rank: int, world_size: int, where: str, numels: Sequence[int], **more: Any
) -> list[str]:
    """Sizes, addresses and splits whose bits differ from the definition."""
    wrong = []
    for dtype, numel in itertools.product((torch.float32, torch.bfloat16), numels):
        leaves = draw_leaves(world_size, numel, dtype, **more)
        expected = reduce_leaves(leaves, "sum", (world_size,))
        mine = leaves[rank].to(where)
        offsets = range(0, 16, dtype.itemsize) if numel < 100 else (0, 4)
        for mode, offset in itertools.product(MODES, offsets):
            if not have_equal_bits(
                reduce_peers(at_byte(mine, offset), (world_size,), mode), expected
            ):
                wrong.append(f"{dtype} {numel} {mode} at byte {offset}")
        cuts = sorted((numel * place * place) // world_size**2 for place in range(world_size + 1))
        parts = [stop - start for start, stop in itertools.pairwise(cuts)]
        found = reduce_peers(mine, (world_size,), "auto", parts=parts) if numel else expected
        if not have_equal_bits(found, expected[cuts[rank] : cuts[rank + 1]] if numel else expected):
            wrong.append(f"{dtype} {numel} scatter")
        inplace = mine.clone()
        torch.ops.meshplan.peer_reduce_(
            inplace, "sum", [world_size], "tree", "wide", "once", None, "auto", "test"
        )
        if not have_equal_bits(inplace, expected):
            wrong.append(f"{dtype} {numel} in place")
    return wrong


def wrong_offsets(rank: int, world_size: int, where: str, numels: Sequence[int]) -> list[str]:
    """Byte offsets of message and result whose bits differ from the definition, in every mode."""
    wrong = []
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
    for dtype, numel in itertools.product(dtypes, numels):
        leaves = draw_leaves(world_size, numel, dtype)
        expected = reduce_leaves(leaves, "sum", (world_size,))
        cuts = [numel * place**2 // world_size**2 for place in range(world_size + 1)]
        parts = [stop - start for start, stop in itertools.pairwise(cuts)]
        for offset in range(0, 16, dtype.itemsize):
            mine = at_byte(leaves[rank].to(where), offset)
            found = {mode: reduce_peers(mine, (world_size,), mode) for mode in MODES}
            for mode in MODES:
                found[f"{mode} in place"] = inside = at_byte(mine, offset)
                around = torch.empty(0, dtype=torch.uint8, device=mine.device)
                around = around.set_(inside.untyped_storage())
                before = around.clone()
                torch.ops.meshplan.peer_reduce_(
                    inside, "sum", [world_size], "tree", "wide", "once", None, mode, "test"
                )
                synchronize()
                first = inside.storage_offset() * dtype.itemsize
                last = first + numel * dtype.itemsize
                before[first:last] = around[first:last]
                if not have_equal_bits(around, before):
                    wrong.append(f"{dtype} {numel} {mode} at byte {offset}: beyond its ends")
            part = reduce_peers(mine, (world_size,), "auto", parts=parts)
            wrong += [
                f"{dtype} {numel} {mode} at byte {offset}"
                for mode, result in found.items()
                if not have_equal_bits(result, expected)
            ]
            if not have_equal_bits(part, expected[cuts[rank] : cuts[rank + 1]]):
                wrong.append(f"{dtype} {numel} scatter at byte {offset}")
    return wrong
