"""The operators ``torch.ops.c10d`` that add: groups written in Python answer them.

C++ reaches a group's backends through these operators and calls no method of Python. So do callers
of ``torch.ops.c10d`` and of the methods of the C++ class. Torch has no backend that Python could
write. So each operator that takes a ``ReduceOp`` gets a kernel in front of those of the devices. It
passes calls of such groups on to their methods, and all others to the device.

The same kernels show reductions over all other groups to a watch. They are there from the first
watch or the first group with methods that reduce, and stay: torch removes a kernel in two steps,
and a call of another thread between them fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, DispatchKeySet

from meshplan.errors import BackendError

Watch = Callable[[dist.ProcessGroup, str, Any, Sequence[Any], Callable[[], Any]], Any]
"""Sees a reduction over a group that does not answer itself, on the thread that issues it.

Its arguments are the group, the operator, the ``ReduceOp``, this rank's summands (tensors, or lists
of them) and the reduction, whose result it returns.
"""

_LOCK = Lock()
# The kernels are there as long as this is.
_libraries: list[Any] = []
_kind: type[dist.ProcessGroup] | None = None
_watch: Watch | None = None
_new_library: Any = torch.library.Library
# In front of the keys of the devices. No operator of c10d has a kernel for it.
_KEY = DispatchKey.BackendSelect
_AFTER: DispatchKeySet = torch._C._dispatch_keyset_full_after(_KEY)

_METHODS: dict[str, tuple[str, Any]] = {
    "allreduce_": ("allreduce", dist.AllreduceOptions),
    "allreduce_coalesced_": ("allreduce_coalesced", dist.AllreduceCoalescedOptions),
    "reduce_": ("reduce", dist.ReduceOptions),
    "reduce_scatter_": ("reduce_scatter", dist.ReduceScatterOptions),
    "_reduce_scatter_base_": ("reduce_scatter_single", dist.ReduceScatterOptions),
    "reduce_scatter_tensor_coalesced_": (
        "reduce_scatter_single_coalesced",
        dist.ReduceScatterOptions,
    ),
}
"""By operator: the method of a process group, and the type of its options."""

# The options of torch by the names of the operators' arguments. Python has none for
# ``sparse_indices``, which gloo and NCCL do not read.
_OPTIONS = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "async_op": "asyncOp",
    "timeout": "timeout",
}


def reducing_operators() -> list[str]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::") and "." not in name:
            schema = torch._C._get_schema(name, "")
            if any(str(one.type).endswith("c10d.ReduceOp") for one in schema.arguments):
                found.append(name.removeprefix("c10d::"))
    return sorted(found)


def answer_reductions(kind: type[dist.ProcessGroup]) -> None:
    """Have groups of the class ``kind`` answer the operators that add, on any thread, by their
    methods; an operator without a method is refused.
    """
    global _kind
    with _LOCK:
        _kind = kind
        _put_in_front()


def watch_reductions(watch: Watch | None) -> None:
    """Show reductions over groups that do not answer themselves; ``None``: not any more."""
    global _watch
    with _LOCK:
        _watch = watch
        if watch is not None:
            _put_in_front()


def _put_in_front() -> None:
    if _libraries:
        return
    library: Any = _new_library("c10d", "IMPL")
    for name in reducing_operators():
        library.impl(name, _kernel(name), _KEY.name, with_keyset=True)
    _libraries.append(library)


def _kernel(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    names = [one.name for one in operator._schema.arguments]
    place, several = names.index("process_group"), len(operator._schema.returns) > 1
    reduce_op = names.index("reduce_op")

    def run(keys: DispatchKeySet, *arguments: Any) -> Any:
        group = arguments[place]
        # Later versions of torch pass the group itself.
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        if _kind is not None and isinstance(group, _kind):
            work = _answer(group, name, arguments[:place], zip(names, arguments, strict=False))
            return (arguments[0], work) if several else work
        watch = _watch
        if watch is None:
            return operator.redispatch(keys & _AFTER, *arguments)
        reduction = partial(operator.redispatch, keys & _AFTER, *arguments)
        # Outputs come first.
        return watch(group, name, arguments[reduce_op], arguments[place - 1], reduction)

    return run


def _answer(
    group: dist.ProcessGroup, name: str, tensors: Any, given: Iterable[tuple[str, Any]]
) -> Any:
    if name not in _METHODS:
        raise BackendError(
            f"a group of backend {group.name()!r} does not support the operator "
            f"torch.ops.c10d.{name}; call the function of torch.distributed for it"
        )
    method, make_options = _METHODS[name]
    options = make_options()
    for one, value in given:
        if one == "reduce_op":
            value = _read_op(group, value)
        elif one == "timeout":
            value = timedelta(milliseconds=value)
        if one in _OPTIONS:
            setattr(options, _OPTIONS[one], value)
    return _own_by_native_code(getattr(group, method)(*tensors, options))


def _own_by_native_code(work: dist.Work) -> Any:
    """A work of C++ that keeps the one of Python alive, whose methods C++ would not find else."""
    found: Any = dist.ProcessGroup.barrier(_Relay(work), dist.BarrierOptions())
    return found.boxed()


class _Relay(dist.ProcessGroup):
    """Only what C++ gets from a group written in Python is kept alive by C++."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._work = work

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._work


def _read_op(group: dist.ProcessGroup, op: Any) -> Any:
    """Raise BackendError for ``PREMUL_SUM``, whose factor Python cannot read."""
    if isinstance(op, dist.ReduceOp):
        return op
    kind = dist.ReduceOp.RedOpType(op.op())
    if kind == dist.ReduceOp.PREMUL_SUM:
        raise BackendError(
            f"a group of backend {group.name()!r} does not support PREMUL_SUM in an "
            "operator torch.ops.c10d; call the function of torch.distributed for it"
        )
    return dist.ReduceOp(kind)
