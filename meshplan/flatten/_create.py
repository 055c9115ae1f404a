"""Create one process group: members only, under a name that every member can compute.

``DeviceMesh._flatten`` and ``new_group`` are collective over the whole world and advance counters
in every process; if only some ranks call them, a later creation hangs. Here only the members take
part, the name is a digest of the group's identity, and torch does not count the group.
"""

from __future__ import annotations

import atexit
import errno
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from meshplan._observing import within
from meshplan._torch import (
    NAMES_OF_GROUPS,
    WORLD,
    PrefixStore,
    Store,
    backend_of,
    default_group,
    default_pg_timeout,
    default_store,
    disable_current_modes,
    new_process_group,
    timeout_of,
)
from meshplan.errors import GroupStateError
from meshplan.flatten._agree import seconds_left
from meshplan.flatten._threads import is_worker_thread

Sharing = Literal["never", "always", "timed"]
"""When ranks share memory: wherever they can, or on GPUs of which it was timed to be faster."""
# Threads that ask for the interpreter have it at once while the main thread sleeps; a busy machine
# may let them ask late.
_REST_SECONDS = 0.2
# Torch waits for ever where it is to wait 0 s.
_LEAST_SECONDS = 0.1


@cache
def rest_at_end() -> None:
    """Let this process rest for a moment before it ends. To be called once or more."""
    if sys.version_info < (3, 14):
        # Gloo's thread frees the tensors of a collective after the threads that wait continue, and
        # aborts a process whose interpreter has ended by then.
        atexit.register(time.sleep, _REST_SECONDS)


# How much earlier than the backend a reduction in shared memory gives up: the smaller of the two.
_EARLIER_SHARE = 0.1
_EARLIER_SECONDS = 60.0
# Descriptors that a new group of gloo has open for a moment, to look up addresses.
_LOOKUPS = 8
# What torch reads as a yes in a variable.
_TRUE = ("1", "t", "true", "y", "yes")


# Of groups whose members belong to several jobs, and share no default store. Their global ranks
# repeat, so they are numbered by their ranks in the group.
_STORES: WeakKeyDictionary[ProcessGroup, Store] = WeakKeyDictionary()


def keep_store(group: ProcessGroup, store: Store) -> None:
    """Let the members of ``group``, who belong to several jobs, agree through ``store``, which is
    for this group alone. In torch's tables, its global ranks are its group ranks.
    """
    _STORES[group] = store


def is_across_jobs(group: ProcessGroup) -> bool:
    return group in _STORES


def store_of(group: ProcessGroup | None) -> Store:
    """The store that the members of ``group`` agree through; ``None``: of a group to be created."""
    found = None if group is None else _STORES.get(group)
    return default_store() if found is None else found


def rank_in(group: ProcessGroup) -> int:
    """This process's global rank; its rank in ``group`` if that is across jobs."""
    return int((group if group in _STORES else default_group()).rank())


def possible_sharing(wanted: Sharing, device_type: str, backend: str) -> Sharing:
    """``wanted``, on devices and over backends whose ranks can share memory."""
    return wanted if device_type in ("cpu", "cuda") and backend != "fake" else "never"


def this_rank() -> int:
    """This process's global rank; a number also where torch simulates all ranks in one process."""
    return int(default_group().rank())


def default_timeout(device_type: str, group: ProcessGroup | None = None) -> float:
    """Seconds that ``group`` (``None``: the default group) allows its collectives on a device type;
    torch's default if unknown.
    """
    options = None
    try:
        backend = backend_of(group or default_group(), torch.device(device_type))
        options = getattr(backend, "options", None)
    except RuntimeError:
        # A default group without a backend for this device, or one written in Python.
        pass
    timeout = timeout_of(options) or default_pg_timeout
    return float(timeout.total_seconds())


def peer_timeout(device_type: str, group: ProcessGroup) -> float:
    """Seconds that a reduction in memory of ``group``'s ranks waits for one of them. They end
    before the group's own: else the backend's watchdog would first report a collective that is
    queued behind the reduction, without the missing rank.
    """
    seconds = default_timeout(device_type, group)
    return seconds - min(_EARLIER_SHARE * seconds, _EARLIER_SECONDS)


def capture_objection(device_type: str) -> str | None:
    """Why a group cannot be created now, if a CUDA graph is being captured."""
    if device_type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return (
        "a CUDA graph is being captured, in which no communicator can be created; "
        "call meshplan.prepare(mesh) before the capture"
    )


def descriptor_objection(backend: str, ranks: int) -> str | None:
    """Why this process may not open the descriptors of a group of so many ranks."""
    # Of gloo: a queue of events, both ends of a pipe, a port, and a connection to each other rank.
    # Without one for a connection its thread aborts the process. Lazy, it connects ranks when they
    # first send: each one to its neighbours, and to others where they reduce by exchange.
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _TRUE
    connections = min(ranks - 1, 2) if is_lazy else ranks - 1
    needed = connections + 4 + _LOOKUPS if "gloo" in backend else 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Without the one that lists them.
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        used = limit if error.errno == errno.EMFILE else 0
    if used + needed <= limit or limit == resource.RLIM_INFINITY:
        return None
    return (
        f"it needs {needed} file descriptors, and this process has opened {used} of {limit}, the "
        "limit of ulimit -n; raise the limit before the job starts, such as with ulimit -n 65536, "
        "or destroy groups that the job does not use any more"
    )


def create_members_only(
    ranks: Sequence[int],
    backend: str,
    device_type: str,
    prefix: str,
    name: str,
) -> ProcessGroup:
    """Create the group of ``ranks``, in that order, after the vote ``prefix`` of its members.
    Raises torch's RuntimeError or ValueError if the backend cannot connect them.
    """
    with disable_current_modes(), hidden_device():
        return create_uncounted(
            len(ranks),
            list(ranks).index(this_rank()),
            ranks,
            backend,
            attempt_store(prefix, backend),
            name=name,
            timeout=timedelta(seconds=default_timeout(device_type)),
        )


_NAMES_LOCK = threading.Lock()


class _UncountedName(str):
    """The name of a group that is not one of those by whose number torch names another."""

    __slots__ = ()


class _NamesOfGroups(dict[ProcessGroup, str]):
    """Torch's names of groups, with the length that it would have without meshplan's. The names of
    ``split_group`` and ``use_local_synchronization`` contain it: only ranks of which it is equal
    find each other, and which of them have reduced, over what, must not matter.
    """

    def __len__(self) -> int:
        # A copy, made at once: other threads may create groups.
        return sum(not isinstance(name, _UncountedName) for name in [*self.values()])


def create_uncounted(
    size: int,
    rank: int,
    ranks: Sequence[int],  # global; none for the default group
    backend: str,
    store: Store,
    *,
    name: str,
    timeout: timedelta,
    options: Any = None,
    use: str = "",
) -> ProcessGroup:
    """Create a group in torch, which neither counts it nor finds it by its ranks. Raises as
    ``create_members_only``.
    """
    # Torch waits as long for members that do not connect.
    limit = timeout
    if "gloo" in backend:
        limit = timedelta(seconds=max(seconds_left(timeout.total_seconds()), _LEAST_SECONDS))
    with _NAMES_LOCK:
        # One thread copies them: what another one has named in its copy would be lost.
        names = getattr(c10d, NAMES_OF_GROUPS)
        if not isinstance(names, _NamesOfGroups):
            setattr(c10d, NAMES_OF_GROUPS, copied := _NamesOfGroups(names))
            # Groups that torch has named meanwhile.
            copied.update(names)
    group, _ = new_process_group(
        size,
        rank,
        list(ranks),
        c10d.Backend(backend),
        store,
        group_name=_UncountedName(name),
        backend_options=options,
        timeout=limit,
        # Of its own. Without one, torch's look-up by ranks finds the group.
        pg_tag=f"meshplan/{name}",
        group_desc=f"meshplan:{use}" if use else "meshplan",
    )
    if limit < timeout:
        group.set_timeout(timeout)
    members = ranks or range(size)
    getattr(c10d, WORLD).pg_group_ranks[group] = {one: i for i, one in enumerate(members)}
    return group


def warm_up(group: ProcessGroup, device_type: str, timeout: float) -> None:
    """One tiny all-reduce, so that lazy connections are made now. Raises RuntimeError if it fails,
    or is wrong.
    """
    with disable_current_modes():
        device = torch.device(device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        ones = torch.ones(1, device=device)
        work = within(
            "counted",
            partial(dist.all_reduce, ones, group=group, async_op=True),
        )
        if work is not None:
            work.wait(timedelta(seconds=max(seconds_left(timeout), _LEAST_SECONDS)))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if ones.item() != group.size():
            raise RuntimeError(f"the sum of ones over {group.size()} members was {ones.item()}")


# Of the default group: how many threads create, and what is to be given back. The lock is not held
# while a group is created: other ranks' threads may create the same groups in the opposite order.
_HIDDEN: WeakKeyDictionary[ProcessGroup, tuple[int, object]] = WeakKeyDictionary()
_HIDDEN_LOCK = threading.Lock()


@contextmanager
def hidden_device() -> Iterator[None]:
    """Hides the default group's device while groups are created, in however many threads. With a
    bound device torch would split the default communicator, which is collective over the whole
    world: the ranks outside this group would have to take part.
    """
    default = default_group()
    with _HIDDEN_LOCK:
        count, bound = _HIDDEN.get(default, (0, None))
        if count == 0:
            bound = getattr(default, "bound_device_id", None)
        if bound is not None:
            default.bound_device_id = None
        _HIDDEN[default] = (count + 1, bound)
    try:
        yield
    finally:
        with _HIDDEN_LOCK:
            count, bound = _HIDDEN.pop(default)
            if count > 1:
                _HIDDEN[default] = (count - 1, bound)
            elif bound is not None:
                default.bound_device_id = bound  # type: ignore[assignment]


def attempt_store(prefix: str, backend: str, store: Store | None = None) -> Store:
    """A part of ``store`` (``None``: the default group's) for one creation, apart from what earlier
    ones have left. Raises GroupStateError in a worker thread if the store cannot be cloned.
    """
    given, store = store, store or default_store()
    # The fake backend connects no ranks.
    if is_worker_thread() and backend != "fake":
        # Who waits on a store keeps other threads from using it, on which ranks may wait in turn.
        try:
            store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            if given is not None:
                # The thread of a group: all members have voted, and connect without any other wait.
                return PrefixStore(f"{prefix}/connect", store)
            raise GroupStateError(
                f"a thread beside the main thread creates groups through a store of its own, and "
                f"the default group's {type(store).__name__} has no clone(); give "
                "init_process_group a TCPStore, or have the main thread wait for the thread in "
                "Thread.join() without a timeout"
            ) from error
    return PrefixStore(f"{prefix}/connect", store)
