"""Process groups written in Python, as C++ calls them in each version of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._torch import (
    ALL_GATHER_SINGLE,
    REDUCE_SCATTER_SINGLE,
    backend_of,
    device_types_of,
    register_backend,
    set_default_backend,
    timeout_of,
)
from meshplan._torch.c10d_operators import Watch, answer_reductions, watch_reductions
from meshplan.errors import BackendError

# By what a subclass defines: what torch calls instead, in 2.11 and 2.12 or in all versions.
_ALSO = {
    "all_gather_single": (ALL_GATHER_SINGLE,),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "reduce_scatter_single": (REDUCE_SCATTER_SINGLE,),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "start_block": ("_start_coalescing",),
    "end_block": ("_end_coalescing",),
}

REDUCTIONS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    REDUCE_SCATTER_SINGLE,
    "reduce_scatter_tensor_coalesced",
)
"""The methods of a process group that add, under every name of every version of torch."""

FORWARDED = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    ALL_GATHER_SINGLE,
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "get_group_store",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "scatter",
    "send",
    "_enable_collectives_timing",
    "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
)
"""The methods that move data, or set something: they are those of the inner group."""

OWN = (
    "BackendType",
    *dist.ProcessGroup.BackendType.__members__,
    "_add_ephemeral_timeout",
    "_backend_id",
    "_device_types",
    "_end_coalescing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_id",
    "_pybind11_conduit_v1_",
    "_register_backend",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "_start_coalescing",
    "abort",
    "bound_device_id",
    "boxed",
    "getBackendName",
    "get_backend",
    "group_desc",
    "group_name",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
)
"""What a wrapping group answers itself, or inherits because it concerns no backend."""

REFUSED = (
    *(f"{verb}_{event}_hook" for verb in ("register", "unregister") for event in ("pre", "post")),
    *(f"{verb}_abort_hook" for verb in ("register", "unregister")),
    "get_reconfigure_handle",
    "new_window",
    "reconfigure",
)
"""Features of torch 2.15 that a wrapping group does not have: each call raises."""


def factor_of(op: dist.ReduceOp) -> float | Tensor:
    """The factor of this rank's summand in an operation of kind ``PREMUL_SUM``."""
    state: Any = op.__getstate__()
    factor: float | Tensor = state[1]
    return factor


def start_coalescing(group: Any, device: torch.device) -> None:
    """Begin a block of calls that ``group`` launches together."""
    group._start_coalescing(device)


def end_coalescing(group: Any, device: torch.device) -> dist.Work | None:
    """End the block; the work of its calls, or ``None``."""
    work: dist.Work | None = group._end_coalescing(device)
    return work


class ReceivingWork(dist.Work):
    """A work in the place of others; the first of them knows which rank has sent to it."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def _source_rank(self) -> int:
        return int(self._works[0]._source_rank())


def forward(method: str) -> Any:
    """A method that calls the one of that name of ``self.inner``."""

    def run(group: Any, *arguments: Any, **options: Any) -> Any:
        return group.pass_on(method, *arguments, **options)

    # Reports list collectives by these names.
    run.__name__ = method
    return run


def _refuse(method: str) -> Any:
    def run(group: Any, *_: Any, **__: Any) -> Any:
        raise BackendError(
            f"a group of backend {group.getBackendName()!r} does not support {method}; create "
            "groups by torch.distributed.new_group, or call it on a group of the inner backend"
        )

    run.__name__ = method
    return run


def _answer(name: str) -> Any:
    """What a wrapping group has under a name of torch's class."""
    if name in FORWARDED:
        return forward(name)
    # A property. Torch asks it before it calls the methods of a feature, which are refused.
    return property(lambda group: False) if name.startswith("supports_") else _refuse(name)


class _Python(dist.ProcessGroup):
    """A process group whose methods C++ finds under every name that it uses for them."""

    def __init__(self, rank: int, size: int) -> None:
        # Only the constructor without a store makes an object whose overrides C++ can see.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.inner: Any = None

    def pass_on(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.inner, method)(*arguments, **options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for ours, also in _ALSO.items():
            for theirs in also if ours in vars(cls) else ():
                setattr(cls, theirs, vars(cls)[ours])


class PythonProcessGroup(_Python):
    """A process group over gloo on CPUs; what a subclass does not override is gloo's."""

    def __init__(self, rank: int, size: int, store: Any, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        # What the class does not override goes to the gloo backend, in C++ as well.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        register_backend(self, torch.device("cpu"), kind, self.inner)
        set_default_backend(self, kind)


class WrappingProcessGroup(_Python):
    """A process group that passes calls on to ``inner``, of the same ranks; its subclass defines
    ``REDUCTIONS``, ``start_block`` and ``end_block``. C++ finds the backends of ``inner`` in it,
    for operators that move data. Those that add come back to the methods of the subclass
    (``answer_reductions``). Of the methods of a later torch, those that no table above names are
    refused, and its optional features are not supported. ``issued`` counts reductions of the
    subclass itself, which resets ``lent`` after a backend was handed out.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.issued = 0
        self.lent = False
        self._name = self._desc = ""
        # Before C++ finds a backend that could add.
        answer_reductions(WrappingProcessGroup)
        kinds = dist.ProcessGroup.BackendType
        for device in device_types_of(inner):
            backend = backend_of(inner, device)
            kind = kinds.__members__.get(backend.name().upper(), kinds.CUSTOM)
            register_backend(self, device, kind, backend)
            set_default_backend(self, kind)

    # Torch keeps name and description in the registered backends. Python reads the properties, C++
    # calls the methods.
    def getGroupName(self) -> str:  # noqa: N802 - torch's spelling, as below
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    def _get_sequence_number_for_group(self) -> int:
        return int(self.inner._get_sequence_number_for_group()) + self.issued

    def _get_backend(self, device: torch.device) -> Any:
        # A caller may set its timeout, as torch's _set_pg_timeout does.
        self.lent = True
        return backend_of(self.inner, device)

    get_backend = _get_backend

    def _groups(self) -> list[Any]:
        return [self.inner]

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        for group in self._groups():
            group._add_ephemeral_timeout(timeout)

    @property
    def _device_types(self) -> list[torch.device]:
        return device_types_of(self.inner)

    @property
    def inner_timeout(self) -> timedelta | None:
        """The timeout of the inner group's first device; ``None`` if its backend has none."""
        device = next(iter(device_types_of(self.inner)), None)
        backend = None if device is None else backend_of(self.inner, device)
        return timeout_of(getattr(backend, "options", None))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
        for name in names - {*OWN, *vars(cls)}:
            setattr(cls, name, _answer(name))


# Reductions over groups of other backends, shown to a watch. Groups of C++ are watched at the
# operators of c10d. A group written in Python answers its callers by methods of its class, which
# operators do not see: those methods are wrapped while a watch is set.

_wrapped: list[tuple[type, str, Any, Any]] = []


def watch_groups(watch: Watch) -> None:
    """Show each reduction of this process over a group of another backend; one watch at a time.
    Classes of groups that are defined later are not watched.
    """
    for kind in _classes_of(dist.ProcessGroup):
        for name in REDUCTIONS:
            method = vars(kind).get(name)
            if callable(method):
                ours = _watched(method, name, watch)
                setattr(kind, name, ours)
                _wrapped.append((kind, name, ours, method))
    watch_reductions(watch)


def unwatch_groups() -> None:
    """End that. What others have put in the place of a method stays."""
    watch_reductions(None)
    while _wrapped:
        kind, name, ours, method = _wrapped.pop()
        if vars(kind).get(name) is ours:
            setattr(kind, name, method)


def _classes_of(kind: type) -> Iterator[type]:
    """Classes of groups written in Python, except those whose reductions are meshplan's own."""
    found: list[type] = kind.__subclasses__()
    for one in found:
        if not issubclass(one, WrappingProcessGroup):
            yield one
            yield from _classes_of(one)


def _watched(method: Callable[..., Any], name: str, watch: Watch) -> Callable[..., Any]:
    @wraps(method)
    def run(group: Any, *arguments: Any, **options: Any) -> Any:
        # A group that hands its reductions to one of meshplan's, where they are counted.
        if getattr(group, "hands_on_reductions", False):
            return method(group, *arguments, **options)
        # Outputs, if they are others than the inputs; the inputs; the options, or none for a sum.
        place = 1 if "scatter" in name else 0
        reduction = partial(method, group, *arguments, **options)
        given = options.pop("opts", None)
        tensors, opts = (*arguments, *options.values(), given or dist.ReduceOp.SUM)[place:][:2]
        return watch(group, name, getattr(opts, "reduceOp", opts), tensors, reduction)

    return run
