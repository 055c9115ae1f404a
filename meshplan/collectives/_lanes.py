"""Asynchronous collectives: one lane for each process group, in order of submission.

On a CPU a lane is a thread that has a process group to itself, so that what it sends can never
change places with what the caller sends. On a GPU it is a side stream, of the device.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LaneTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import THIS_THREAD, Abort, GroupCalls
from meshplan._observing import OBSERVING, carry_origin
from meshplan._uncompiled import never_compiled
from meshplan.errors import GroupStateError, SignatureMismatchError
from meshplan.execute._deferred import raise_pending

# The side streams of a device: calls that run concurrently with the caller's stream.
#
# The caller's thread issues them, so that their order is the order of its calls and a CUDA graph
# can hold them. Events order the streams; nothing here makes the host wait for the device, except
# ``StreamCall.block``.

# Calls of one stream whose memory is held; far more than a host is ahead of its device.
MAX_HELD = 512
_POLL_SECONDS = 0.0005


@dataclass(slots=True, eq=False)
class StreamCall:
    side: SideStream
    _origin: Any  # the caller's stream at the call
    _end: Any  # an event behind the call
    _held: Any  # keeps tensors alive that the device may still use
    found: Any  # the returned value
    failure: Any  # the error that was raised instead

    @property
    def holds_memory(self) -> bool:
        """Whether it keeps the tensors of the call alive."""
        return self._held is not None

    def wait(self) -> Any:
        """Order the current stream of the device behind the call; returns that stream."""
        side = self.side
        stream = side.module.current_stream(side.device)
        stream.wait_event(self._end)
        if stream == self._origin:
            # What the caller frees from now on is reused behind the call.
            self._held = None
        return stream

    def is_done(self) -> bool:
        """Whether the device has finished the call; an error while a graph captures it."""
        return bool(self._end.query())

    def release(self) -> None:
        """Let go of memory: without a wait if the call is done, else behind it."""
        if self._held is not None and not self.is_done():
            self._origin.wait_event(self._end)
        self._held = None

    def block(self, timeout: timedelta) -> bool:
        """Make the host wait; returns whether the call was done within ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The current stream is one on which this call has ended."""
        side = self.side
        with side.module.device(side.device), side.module.stream(side.stream):
            yield


class SideStream:
    """A stream of a device with an index, and the calls on it whose memory is held."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        # A callback of a call may issue another one.
        self._lock = threading.RLock()
        self._calls: deque[StreamCall] = deque()

    def issue(self, run: Callable[[], Any]) -> StreamCall:
        """Call ``run`` on this stream, behind all work of the current one; it issues work on the
        current stream. ``run`` refers to every tensor of the caller that the work reads or writes.
        Returns the call, also if ``run`` has raised an error.
        """
        module, found, failure = self.module, None, None
        with self._lock, module.device(self.device):
            origin = module.current_stream(self.device)
            captured = self.is_captured()
            if not captured:
                self._sweep()
            self.stream.wait_stream(origin)
            with module.stream(self.stream):
                try:
                    found = run()
                except Exception as error:
                    failure = error
                end = module.Event()
                end.record(self.stream)
            call = StreamCall(self, origin, end, run, found, failure)
            # A capture without a wait for the call is an error, and until then the caller has it.
            if not captured:
                self._calls.append(call)
        return call

    def is_captured(self) -> bool:
        with self.module.device(self.device):
            return bool(self.module.is_current_stream_capturing())

    def _sweep(self) -> None:
        """Forget calls that have ended; of too many, the oldest."""
        calls = self._calls
        while calls and (not calls[0].holds_memory or calls[0].is_done()):
            calls.popleft().release()
        while len(calls) >= MAX_HELD:
            calls.popleft().release()


_streams: dict[torch.device, SideStream] = {}
_lock = threading.Lock()


def side_stream_of(device: torch.device) -> SideStream:
    with _lock:
        if device not in _streams:
            _streams[device] = SideStream(device)
        return _streams[device]


_Result = TypeVar("_Result")
_Job = tuple["_CallFuture", Callable[[], Any]]


@never_compiled
class Work(dist.Work):
    """A collective, as torch's own asynchronous collectives return it. ``wait`` raises its failure,
    and is bounded by the process group's timeout. Without a ``future`` it has ended, and has
    ``result``.
    """

    def __init__(self, result: Any = None, future: Future[Any] | None = None) -> None:
        super().__init__()
        self._result, self.future = result, future
        self._torch_future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result, and return True. Raises what the collective failed with, or
        GroupStateError if it is not finished within ``timeout``; it then continues. C++ passes a
        timeout of zero for none.
        """
        if self.future is None:
            return True
        try:
            self.future.result(timeout.total_seconds() if timeout else None)
        except LaneTimeoutError as error:
            if not self.future.done():
                assert timeout is not None
                raise _unfinished(timeout) from error
            # The collective's own, or it has finished just now.
            self.future.result()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self.future is None or self.future.done()

    def is_success(self) -> bool:
        """Whether it has finished and not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Its error, or ``None``; waits for it."""
        return None if self.future is None else self.future.exception()

    def result(self) -> Any:
        """The result of the collective without ``async_op``; waits for it."""
        self.wait()
        return self._result if self.future is None else self.future.result()

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result, for DDP's reducer and hooks; its error is a RuntimeError."""
        if self._torch_future is None:
            done = torch.futures.Future[Any]()
            if self.future is None:
                done.set_result(self._result)
                self._torch_future = done
            else:
                # Not a method: the callback would keep this work alive.
                self._torch_future = done.then(partial(_read, self.future))
                self.future.add_done_callback(lambda _: done.set_result(None))
        return self._torch_future


# An exception that is set from Python is a value for C++, in which DDP's reducer looks for tensors:
# it ends the process by a signal. One that a callback raises is an error there too.
def _read(future: Future[Any], _: object) -> Any:
    return future.result()


def _fail(error: BaseException, _: object) -> Any:
    raise error


@never_compiled
class StreamWork(Work):
    """A collective on a side stream of a device. ``wait`` does not make the host wait, and queries
    no event of a graph that is captured. It writes ``result``, or returns tensors in the side
    stream's memory. ``calls`` stop if headers of an earlier reduction differ.
    """

    def __init__(
        self,
        call: StreamCall,
        result: Any = None,
        calls: GroupCalls | None = None,
    ) -> None:
        super().__init__(call.found if result is None else result)
        made = call.found if result is None else ()
        self._call, self._calls = call, calls
        self._made = [made] if isinstance(made, Tensor) else made or ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective, and return True; with ``timeout`` the
        host waits as well. Raises the error of issuing it, GroupStateError if it is not finished in
        time, and SignatureMismatchError if ranks had different headers in an earlier reduction.
        """
        stream = self._call.wait()
        for tensor in self._made:
            tensor.record_stream(stream)
        with stopping(self._calls):
            if self._call.failure is not None:
                raise self._call.failure
            if not self._call.side.is_captured():
                if timeout and not self._call.block(timeout):
                    raise _unfinished(timeout)
                raise_pending()
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished, or the collective has failed."""
        return self._call.failure is not None or self._call.is_done()

    def exception(self) -> Any:
        """The error of issuing it, or ``None``."""
        return self._call.failure

    def get_future(self) -> torch.futures.Future[Any]:
        """As ``Work``; waits and callbacks run on the stream of the waiting thread."""
        if self._torch_future is None:
            call = self._call
            self._torch_future = torch.futures.Future(devices=[call.side.device])
            # The future records events on the current streams.
            with call.behind():
                self._torch_future.set_result(self._result)
                if call.failure:
                    self._torch_future = self._torch_future.then(partial(_fail, call.failure))
        return self._torch_future


@contextmanager
def stopping(calls: GroupCalls | None) -> Iterator[None]:
    """Stop ``calls`` if headers of an earlier reduction differ: ranks find that in other calls."""
    try:
        yield
    except SignatureMismatchError as error:
        if calls is not None:
            calls.stop(error)
        raise


def _unfinished(timeout: timedelta) -> GroupStateError:
    return GroupStateError(
        f"the collective did not finish within {timeout.total_seconds():g} s and still runs; "
        "wait again, or leave the timeout to the process group"
    )


def in_lane(group: ProcessGroup, device: torch.device, run: Callable[[], Any]) -> Work:
    """Run a collective of tensors on ``device`` asynchronously, after those that were submitted to
    ``group`` before it. Every rank submits to it in the same order, and ``run`` sends on ``group``
    only, on which nothing else sends. The result of the ``Work`` is what ``run`` returns.
    """
    job = partial(run_in_mode, run, torch.is_inference_mode_enabled())
    if device.type == "cpu":
        return Work(future=_thread_of(group).submit(job))
    return StreamWork(side_stream_of(device).issue(job))


def run_in_mode(run: Callable[..., Any], inference: bool, *given: Any) -> Any:
    """``run(*given)`` without gradients. Each thread has a mode of its own, and tensors that were
    made in inference mode can be written to in that mode only.
    """
    with torch.inference_mode(inference), torch.no_grad():
        return run(*given)


class OrderedThread:
    """Run submitted calls in order. The thread starts with the first submission, and ends when no
    caller holds the object. A callback of a call's future may submit and wait, as hooks of DDP do.
    What it submits is part of that call: it runs at once, before later submissions, on every rank.
    """

    # ``owner`` of the calls, for errors after ``abort``.
    def __init__(self, name: str, owner: str = "") -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._turn = _Turn(Abort(owner))
        self._started = False

    def abort(self) -> None:
        """Fail the calls that wait for their turn, and all later ones; does not wait. The running
        call sees the request in ``THIS_THREAD``.
        """
        self._turn.abort.requested = True

    @property
    def is_aborted(self) -> bool:
        return self._turn.abort.requested

    def join(self) -> None:
        """Wait for all calls that were submitted; none of their errors is raised here."""
        with suppress(GroupStateError):
            self.run(lambda: None)

    def call(self, function: Callable[[], _Result]) -> _Result:
        """``function()`` at once, in an order that is up to the caller, but not after ``abort``."""
        return self._turn.call(function)

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` on the thread, after all that was submitted or run before."""
        # The caller is a callback, on the thread that serves: the turn is its call's.
        if self._turn.server == threading.get_ident():
            done: Future[Any] = Future()
            _settle(done, partial(self._turn.call, function))
            return done
        future = _CallFuture()
        if OBSERVING.observer is not None:
            function = carry_origin(function)
        with self._turn.lock:
            self._turn.waiting += 1
            self._jobs.put((future, function))
            if not self._started:
                self._started = True
                # A daemon: a process that gives up does not wait for ranks that never come.
                threading.Thread(
                    target=_serve,
                    args=(self._jobs, self._turn),
                    name=self._name,
                    daemon=True,
                ).start()
                weakref.finalize(self, self._jobs.put, None)
        return future

    def start(self, run: Callable[[], Any], is_async: bool) -> Work:
        """Run a collective in the same order. Unless ``is_async`` it has ended then, and its errors
        are raised now.
        """
        return Work(future=self.submit(run)) if is_async else Work(self.run(run))

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Call ``function`` in the same order, on the caller's thread if no call is before it."""
        turn = self._turn
        if turn.server == threading.get_ident():
            return turn.call(function)
        with turn.lock:
            idle = turn.waiting == 0
            if idle:
                turn.waiting += 1
                # Free: nothing runs and nothing waits.
                turn.taken.acquire()
        if not idle:
            found: _Result = self.submit(function).result()
            return found
        try:
            return turn.call(function)
        finally:
            turn.end()


class _Turn:
    """Whose turn it is: the thread's, or that of a caller who found it idle."""

    def __init__(self, abort: Abort) -> None:
        self.lock = threading.Lock()
        self.taken = threading.Lock()
        self.waiting = 0
        self.abort = abort
        self.server: int | None = None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """``function()``, whose waits end with the abort."""
        if self.abort.requested:
            raise self.abort.error()
        former, THIS_THREAD.abort = THIS_THREAD.abort, self.abort
        try:
            return function()
        finally:
            THIS_THREAD.abort = former

    def end(self) -> None:
        with self.lock:
            self.waiting -= 1
            self.taken.release()


class _CallFuture(Future[Any]):
    """A future that reports whether it has callbacks when its call ends, and then has no more."""

    def __init__(self) -> None:
        super().__init__()
        self._gate = threading.Lock()
        self._has_callbacks = self._is_ending = False

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        with self._gate:
            late = self._is_ending
            self._has_callbacks = True
        if late:
            # The result comes in a moment; the callback then runs here and not on the thread.
            self.exception()
        super().add_done_callback(fn)

    def end(self) -> bool:
        """Whether there are callbacks, which run on the thread that sets the result."""
        with self._gate:
            self._is_ending = True
            return self._has_callbacks


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        found = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)


def _serve(jobs: SimpleQueue[_Job | None], turn: _Turn) -> None:
    turn.server = threading.get_ident()
    while (job := jobs.get()) is not None:
        future, function = job
        turn.taken.acquire()
        found: Any = None
        error: BaseException | None = None
        try:
            found = turn.call(function)
        except BaseException as failure:
            error = failure
        # Callbacks keep the turn. Without them, a thread that waited for the future finds this one
        # idle.
        keeps = future.end()
        if not keeps:
            turn.end()
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)
        if keeps:
            turn.end()
        # Not to be kept alive until the next one comes.
        del job, future, function, found, error


# One thread for each process group and process, for the lifetime of the group: a fork does not
# inherit threads.
_THREADS: WeakKeyDictionary[ProcessGroup, tuple[int, OrderedThread]] = WeakKeyDictionary()


def _thread_of(group: ProcessGroup) -> OrderedThread:
    with _lock:
        process, found = _THREADS.get(group, (0, None))
        if found is None or process != os.getpid():
            found = OrderedThread(f"meshplan {group.group_name}")
            _THREADS[group] = os.getpid(), found
        return found
