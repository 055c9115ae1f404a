"""CUDA tensors, streams, events, graphs and collectives on a machine without a GPU.

After ``emulate()`` the process has tensors whose device is ``cuda:0`` or ``cuda:1`` and whose memory
is the CPU's. What is done with them is done later, each stream on a thread, in the stream's order
only: who forgets a wait reads garbage. Freed memory goes to the next allocation of the same stream
at once, as from torch's allocator: who lets go too early reads other numbers. A graph is replayed in
the legal order that is farthest from the order of capture. What would make the host wait is counted.

The backend ``emulated`` moves such tensors as NCCL does: on a stream of each group, which waits for
the caller's stream, over gloo.

Call ``emulate`` in a process of its own; nothing of it can be taken back.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from meshplan._torch.process_group import PythonProcessGroup
from meshplan.kernel import DriverError, _device_code
from meshplan.kernel._device_peers import fold_device

_aten = torch.ops.aten
_AS_CPU = torch._C.DispatchKey.CPU
_GARBAGE = 0xCD
_KDL_CUDA = 2
DEVICES = 2


class Counters:
    """What the host has waited for, and what went wrong on a stream."""

    def __init__(self) -> None:
        self.host_waits: list[str] = []
        self.failures: list[BaseException] = []


counters = Counters()


class Graph:
    """Captured calls, each with those that it comes after."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Callable[[], None], frozenset[int]]] = []
        self.open = True
        self.origin: Stream | None = None

    def add(self, function: Callable[[], None], behind: frozenset[int]) -> int:
        self.nodes.append((function, behind))
        return len(self.nodes) - 1

    def run(self) -> None:
        """All nodes, the last ones first as far as they are not behind others."""
        done: set[int] = set()
        while len(done) < len(self.nodes):
            ready = [
                i for i, (_, behind) in enumerate(self.nodes) if i not in done and behind <= done
            ]
            self.nodes[ready[-1]][0]()
            done.add(ready[-1])

    def ancestors(self, of: frozenset[int]) -> set[int]:
        found: set[int] = set()
        queue = list(of)
        while queue:
            node = queue.pop()
            if node not in found:
                found.add(node)
                queue += self.nodes[node][1]
        return found


class Stream:
    """A stream: a thread that does what it is given in order, or a branch of a graph."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _device(device)
        self.number = next(self._numbers)
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._started = False
        self._left, self._lock = 0, threading.Lock()
        self._awaited: threading.Event | None = None
        self.graph: Graph | None = None
        self.tail: frozenset[int] = frozenset()

    def submit(self, function: Callable[[], None]) -> None:
        graph = self.graph
        if graph is not None and graph.open:
            self.tail = frozenset([graph.add(function, self.tail)])
            return
        self.graph = None
        if not self._started:
            self._started = True
            _all_streams.append(self)
            threading.Thread(target=self._serve, daemon=True).start()
        with self._lock:
            self._left += 1
        self._jobs.put(function)

    def _serve(self) -> None:
        while True:
            function = self._jobs.get()
            try:
                with torch.no_grad():
                    function()
            except BaseException as error:
                counters.failures.append(error)
            del function
            with self._lock:
                self._left -= 1

    def wait_flag(self, flag: threading.Event) -> None:
        """Go on when it is set."""

        def wait() -> None:
            self._awaited = flag
            flag.wait()
            self._awaited = None

        self.submit(wait)

    def settled(self) -> bool:
        """Whether it has nothing to do, or waits for another stream or for a gate."""
        awaited = self._awaited
        with self._lock:
            return self._left == 0 or (awaited is not None and not awaited.is_set())

    def capturing(self) -> bool:
        return self.graph is not None and self.graph.open

    def wait_event(self, event: Event) -> None:
        if event.graph is not None and event.graph.open:
            if self.capturing() and self.graph is not event.graph:
                raise RuntimeError("operation would merge two captures")
            if not self.capturing():
                self.graph, self.tail = event.graph, frozenset()
            self.tail |= event.tail
        elif event.graph is not None:
            raise RuntimeError("an event of a graph that was captured")
        elif event.flag is not None:
            if self.capturing():
                raise RuntimeError("dependency created on uncaptured work in another stream")
            self.wait_flag(event.flag)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._before = (current_device(), current_stream(self.device))
        set_device(self.device)
        _local.streams[self.device] = self
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = self._before
        _local.streams[self.device] = stream
        set_device(device)


class Event:
    """A point of a stream, or of a graph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.graph: Graph | None = None
        self.tail: frozenset[int] = frozenset()
        self.flag: threading.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if stream.capturing():
            self.graph, self.tail, self.flag = stream.graph, stream.tail, None
            return
        self.graph, self.flag = None, threading.Event()
        stream.submit(self.flag.set)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        if self.graph is not None or _captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.flag is None or self.flag.is_set()

    def synchronize(self) -> None:
        _host_waits("Event.synchronize")
        assert self.graph is None
        if self.flag is not None:
            assert self.flag.wait(100)


class _Local(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[torch.device, Stream] = {}
        self.coalesced: list[Call] | None = None


_local = _Local()
_defaults: dict[torch.device, Stream] = {}
_captures: list[Graph] = []


def _device(device: Any = None) -> torch.device:
    if device is None:
        return torch.device("cuda", _local.device)
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return torch.device("cuda", _local.device if device.index is None else device.index)


def current_device() -> int:
    return _local.device


def set_device(device: Any) -> None:
    _local.device = _device(device).index


def default_stream(device: Any = None) -> Stream:
    return _defaults.setdefault(_device(device), Stream(_device(device)))


def current_stream(device: Any = None) -> Stream:
    device = _device(device)
    return _local.streams.get(device) or default_stream(device)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


@contextmanager
def on_stream(stream: Stream) -> Iterator[Stream]:
    with stream:
        yield stream


def synchronize(device: Any = None) -> None:
    _host_waits("synchronize")
    for stream in [one for one in list(_all_streams) if one.device == _device(device)]:
        if not stream.capturing():
            flag = threading.Event()
            stream.submit(flag.set)
            assert flag.wait(100)
    if counters.failures:
        raise counters.failures[0]


_all_streams: list[Stream] = []


def _host_waits(what: str) -> None:
    if _captures:
        raise RuntimeError(f"{what} not permitted when stream is capturing")
    counters.host_waits.append(what)


class Gate:
    """The stream does nothing that it is given from now on, until the gate is opened."""

    def __init__(self, stream: Stream) -> None:
        self._flag = threading.Event()
        stream.wait_flag(self._flag)

    def open(self) -> None:
        """When all streams have done what they can: what no event holds back has run."""
        while not all(stream.settled() for stream in list(_all_streams)):
            time.sleep(0.001)
        self._flag.set()


@contextmanager
def capture(stream: Stream) -> Iterator[Graph]:
    """Capture what is given to ``stream``, and to streams that wait for it."""
    graph = Graph()
    stream.graph, stream.tail = graph, frozenset()
    _captures.append(graph)
    try:
        with stream:
            yield graph
    finally:
        graph.open = False
        _captures.remove(graph)
    if graph.ancestors(stream.tail) != set(range(len(graph.nodes))):
        raise RuntimeError("capturing stream has unjoined work")


def replay(graph: Graph) -> None:
    current_stream().submit(graph.run)


# Memory.

_memory: dict[int, Tensor] = {}
_free: dict[tuple[object, int], list[Tensor]] = defaultdict(list)
_used_elsewhere: dict[int, set[Stream]] = defaultdict(set)
_live: set[int] = set()


def is_live(address: int) -> bool:
    """Whether memory is allocated."""
    return address in _live


class _DLTensor(ctypes.Structure):
    """The part of a DLPack tensor that names the device."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _allocate(size: Any, stride: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Memory of the current stream, filled with garbage."""
    device = _device(device)
    stream = current_stream(device)
    elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    nbytes = max(1, 0 if 0 in size else elements) * dtype.itemsize
    # A graph has memory of its own.
    key = (stream.graph if stream.capturing() else stream, nbytes)
    pool = _free[key]
    memory = pool.pop() if pool else torch.full((nbytes,), _GARBAGE, dtype=torch.uint8)
    address = memory.data_ptr()
    _memory[address] = memory
    _live.add(address)
    # Its end is the end of the storage.
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(block, _give_back, key, memory)
    capsule = torch.utils.dlpack.to_dlpack(torch.frombuffer(block, dtype=torch.uint8))
    head = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    head.kind, head.index = _KDL_CUDA, device.index
    whole = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    if dtype is torch.uint8 and tuple(size) == (nbytes,):
        return whole  # type: ignore[no-any-return]
    return _view(whole, size, stride, 0, dtype)


def _give_back(key: Any, memory: Tensor) -> None:
    _live.discard(memory.data_ptr())
    streams = _used_elsewhere.pop(memory.data_ptr(), ())
    if not streams:
        _free[key].append(memory)
        return
    left = list(streams)

    def one() -> None:
        left.pop()
        if not left:
            _free[key].append(memory)

    for stream in streams:
        stream.submit(one)


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    if tensor.device.type == "cuda":
        _used_elsewhere[tensor.untyped_storage().data_ptr()].add(stream)


def _view(
    tensor: Tensor, size: Any, stride: Any, offset: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Another tensor of the same storage."""
    if dtype is None or dtype is tensor.dtype:
        found: Tensor = _aten.as_strided.default._op_dk(_AS_CPU, tensor, size, stride, offset)
        return found
    # An empty tensor of another dtype, given the storage.
    capsule = torch.utils.dlpack.to_dlpack(torch.empty(0, dtype=dtype))
    head = _DLTensor.from_address(_pointer(capsule, b"dltensor"))
    head.kind, head.index = _KDL_CUDA, tensor.device.index
    empty = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    set_ = _aten.set_.source_Storage_storage_offset
    set_._op_dk(_AS_CPU, empty, tensor.untyped_storage(), offset, size, stride)
    return empty  # type: ignore[no-any-return]


def on_cpu(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, which does not keep it."""
    if tensor.device.type != "cuda":
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = _memory[tensor.untyped_storage().data_ptr()]
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(  # type: ignore[call-overload,no-any-return]
        memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


# Operators.

_FACTORIES = ("aten::empty.memory_format", "aten::empty_strided")
_BLOCKING = ("aten::_local_scalar_dense", "aten::equal")
# Made of others in C++, which does not ask for a guard of the device.
_COMPOSED = ("aten::_to_copy",)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _to_cpu(value: Any) -> Any:
    if _is_cuda(value):
        return on_cpu(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """One operator of the device ``cuda``."""
    name = op._schema.name + ("." + op._overloadname if op._overloadname != "default" else "")
    if name in _FACTORIES:
        like = op(*args, **{**kwargs, "device": "meta", "pin_memory": None})
        return _allocate(like.size(), like.stride(), like.dtype, kwargs.get("device"))
    if name in ("aten::copy_", "aten::_copy_from"):
        target, source = args[:2] if name == "aten::copy_" else (args[1], args[0])
        return _copy(target, source, *args[2:], **kwargs)
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    device = next((one.device for one in tensors if _is_cuda(one)), kwargs.get("device"))
    stream = current_stream(device)
    if name in _BLOCKING:
        _host_waits(name)
        _finish(stream)
        return op(*map(_to_cpu, args), **kwargs)
    aliases = [ret.alias_info for ret in op._schema.returns]
    here = tree_map(_to_cpu, (args, kwargs))
    if any(alias is not None and not alias.is_write for alias in aliases):
        found = op(*here[0], **here[1])
        base = tensors[0]
        return tree_map(
            lambda one: _view(base, one.size(), one.stride(), one.storage_offset(), one.dtype),
            found,
        )
    written = [
        value
        for argument, value in itertools.chain(
            zip(op._schema.arguments, args, strict=False),
            ((one, kwargs[one.name]) for one in op._schema.arguments if one.name in kwargs),
        )
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written:
        stream.submit(lambda: op(*here[0], **here[1]))
        return written[0] if len(written) == 1 else tuple(written)
    meta = tree_map(_to_meta, (args, kwargs))
    made = tree_map(
        lambda one: (
            _allocate(one.size(), one.stride(), one.dtype, device)
            if isinstance(one, Tensor)
            else one
        ),
        op(*meta[0], **meta[1]),
    )
    targets = [on_cpu(one) for one in tree_flatten(made)[0]]

    def compute() -> None:
        for target, value in zip(targets, tree_flatten(op(*here[0], **here[1]))[0], strict=True):
            target.copy_(value)

    stream.submit(compute)
    return made


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    device = target.device if _is_cuda(target) else source.device
    stream, there, here = current_stream(device), on_cpu(target), on_cpu(source)
    if target.device != source.device and not non_blocking:
        _host_waits("copy between host and device")
        stream.submit(lambda: there.copy_(here))
        _finish(stream)
    else:
        stream.submit(lambda: there.copy_(here))
    return target


def _finish(stream: Stream) -> None:
    flag = threading.Event()
    stream.submit(flag.set)
    assert flag.wait(100)


_libraries: list[Any] = []


def _register_guard() -> None:
    """The guard of the device ``meta``, which does nothing, is that of ``cuda`` as well."""
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * 32).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    kinds = torch._C._autograd.DeviceType
    table[int(kinds.CUDA)] = table[int(kinds.Meta)]


def _register() -> None:
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run, "CUDA")  # type: ignore[no-untyped-call]
    kernels = torch.library.Library("aten", "IMPL")
    composite = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name in _COMPOSED:
            continue
        if not any(has(name, key) for key in composite):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(_aten, packet), overload or "default")
        kernels.impl(op, lambda *a, op=op, **k: _run(op, *a, **k), "CUDA")  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, kernels))


class Future:
    """As ``torch.futures.Future`` of devices: who waits, waits on its stream."""

    def __init__(self, *, devices: Any = None) -> None:
        self._devices = [_device(one) for one in devices or ()]
        self._events: list[tuple[torch.device, Event]] = []
        self._value: Any = None
        self._error: Any = None

    def set_result(self, value: Any) -> None:
        self._value = value
        self._events = [(one, current_stream(one).record_event()) for one in self._devices]

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        for device, event in self._events:
            current_stream(device).wait_event(event)
        return self._value

    def value(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True

    def then(self, callback: Callable[[Any], Any]) -> Future:
        found = Future(devices=self._devices)
        with Stream(self._devices[0]):
            if self._error is None:
                self.wait()
            try:
                found.set_result(callback(self))
            except Exception as error:
                found._error = RuntimeError(f"{type(error).__name__}: {error}")
        return found


def _pageable(make: Any) -> Any:
    return lambda *given, pin_memory=False, **options: make(*given, **options)


def _no_driver(kind: str, index: int) -> Any:
    raise DriverError("none: this GPU is emulated")


def emulate() -> None:
    """Give this process two emulated GPUs and the backend ``emulated``."""
    torch.cuda._lazy_init = lambda: None  # type: ignore[attr-defined]
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: DEVICES
    module: Any = torch.cuda
    module.current_device, module.set_device, module.device = current_device, set_device, on_device
    module.Stream, module.Event, module.stream = Stream, Event, on_stream
    module.current_stream, module.default_stream = current_stream, default_stream
    module.synchronize = synchronize
    module.get_device_name = lambda: "emulated"
    module.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=4)
    # Folds run as the definition does, also where an earlier test of this process has loaded a driver.
    code: Any = _device_code
    code.Driver = _no_driver
    fold_device.cache_clear()
    module.is_current_stream_capturing = lambda: current_stream().capturing()
    generic: Any = torch
    generic.Event, generic.Stream = Event, Stream
    accelerator: Any = torch.accelerator
    accelerator.current_stream, accelerator.synchronize = current_stream, synchronize
    accelerator.current_device_index = current_device
    tensor: Any = Tensor
    tensor.record_stream = _record_stream
    futures: Any = torch.futures
    futures.Future = Future
    # There is no pinned memory without a GPU.
    for name in ("empty", "tensor"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    with warnings.catch_warnings():
        # Overriding what is composed of other operators is what this is for.
        warnings.simplefilter("ignore")
        _register()
    _register_guard()
    dist.Backend.register_backend("emulated", EmulatedGroup, True, ["cpu", "cuda"])


# Collectives.


class EmulatedWork(dist.Work):
    def __init__(self, event: Event, device: torch.device) -> None:
        super().__init__()
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> bool:
        current_stream(self._device).wait_event(self._event)
        return True


Call = tuple[Any, Any, tuple[Any, ...]]
"""A group, a method of its gloo group, and its arguments."""


def _as_nccl(method: str) -> Any:
    def run(group: Any, *args: Any) -> Any:
        tensors = [one for one in tree_flatten(args)[0] if _is_cuda(one)]
        gloo = getattr(group.inner, method)
        if not tensors:
            return gloo(*args)
        device = tensors[0].device
        if _local.coalesced is not None:
            # As in NCCL, the block is the thread's, whichever group has begun it.
            _local.coalesced.append((group, gloo, args))
            return EmulatedWork(Event(), device)
        return _launch([(group, gloo, args)], device)

    run.__name__ = method
    return run


def _launch(calls: list[Call], device: torch.device) -> EmulatedWork:
    """Calls of one group, all under way before the first is waited for."""
    group = calls[0][0]
    stream = group.streams.setdefault(device, Stream(device))
    stream.wait_stream(current_stream(device))
    given = [(gloo, tree_map(_to_cpu, args)) for _, gloo, args in calls]

    def run() -> None:
        for work in [gloo(*args) for gloo, args in given]:
            work.wait()

    # Nothing here holds the tensors: that is up to the caller.
    stream.submit(run)
    event = stream.record_event()
    if not all(getattr(args[-1], "asyncOp", True) for _, _, args in calls):
        current_stream(device).wait_event(event)
    return EmulatedWork(event, device)


class EmulatedGroup(PythonProcessGroup):
    """Tensors on emulated GPUs move on a stream of the group, others by gloo."""

    def __init__(self, made: Any, _: object = None) -> None:
        super().__init__(made.group_rank, made.group_size, made.store, made.timeout)
        self.streams: dict[torch.device, Stream] = {}

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return super()._get_backend(device)
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        assert _local.coalesced is None
        _local.coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        calls, _local.coalesced = _local.coalesced, None
        assert calls is not None
        works = [
            _launch([one for one in calls if one[0] is group], device)
            for group in dict.fromkeys(group for group, _, _ in calls)
        ]
        return works[-1] if works else None

    allreduce = _as_nccl("allreduce")
    allgather = _as_nccl("allgather")
    all_gather_single = _as_nccl("_allgather_base")
    alltoall_base = all_to_all_single = _as_nccl("alltoall_base")
    broadcast = _as_nccl("broadcast")
    send = _as_nccl("send")
    recv = _as_nccl("recv")

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            work = self.all_gather_single(output, tensor, opts)
        return work
