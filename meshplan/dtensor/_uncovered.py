"""Reductions that ``install`` does not cover: one warning per library, an error if ``strict``.

FSDP2, DDP and spmd_types reduce without redistributing a DTensor. While meshplan is installed, a
method of theirs is wrapped that runs right before such a reduction:

* for FSDP2's groups of parameters, the one that runs once gradients are ready to reduce;
* for DistributedDataParallel, the one that begins a step whose backward reduces;
* ``forward`` of the autograd functions of spmd_types that reduce.

The wrappers only read. Groups of the backend ``meshplan`` have no such reductions. No library is
imported for this: one that is imported later is wrapped then.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from meshplan._torch import (
    MARKED_CONSTANT,
    PRE_FORWARD,
    WAIT_FOR_POST_BACKWARD,
    WATCHED_FSDP_NAMES,
    find_moved,
    hooks_of_ddp,
    resolve_process_group,
    tested_range,
    training_state_of,
)
from meshplan._torch.process_group import WrappingProcessGroup
from meshplan._uncompiled import never_compiled
from meshplan.dtensor._config import Config
from meshplan.errors import FallbackRefusedError

_Call = Callable[[ModuleType], None]
_waiting: dict[str, _Call] = {}


class _Loader(Loader):
    """Another loader, and a call after it ran the module. The module keeps the other loader."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        call = _waiting.pop(self._name, None)
        if call is not None:
            call(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = _waiting.pop(fullname, None)
        if call is None:
            return None
        try:
            # This asks all finders again. This one no longer waits for the module, so it passes.
            spec = importlib.util.find_spec(fullname)
        finally:
            _waiting[fullname] = call
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


_FINDER = _Finder()


def call_when_imported(name: str, call: _Call) -> None:
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    _waiting[name] = call
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget_imports() -> None:
    _waiting.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


_SPMD_TYPES = "spmd_types._collectives"
_SPMD_TYPES_FUNCTIONS = (
    "_AllReduce",
    "_ReduceScatterShard",
    "_ReduceScatterStack",
    "_ReduceScatterUneven",
)

_ReadConfig = Callable[[], Config | None]
_read_config: _ReadConfig | None = None
_undo: list[Callable[[], None]] = []
# Libraries that have warned: once in each process, even if meshplan is installed again.
_warned: set[str] = set()


class UncoveredReductionWarning(UserWarning):
    """A library reduces outside the contract while meshplan is installed.

    With ``strict=True`` that is a ``FallbackRefusedError``.
    """


def watch(current: _ReadConfig) -> None:
    """Wrap imported libraries now and others at their import. Nothing happens the second time."""
    global _read_config
    watching, _read_config = _read_config is not None, current
    if watching:
        return
    _wrap(DistributedDataParallel, PRE_FORWARD, _before_ddp)
    call_when_imported(WATCHED_FSDP_NAMES["WAIT_FOR_POST_BACKWARD"].module, _wrap_fsdp)
    call_when_imported(_SPMD_TYPES, _wrap_spmd_types)


def unwatch() -> None:
    """Restore the methods. A wrapper that others have wrapped stays, and does nothing."""
    global _read_config
    _read_config = None
    forget_imports()
    while _undo:
        _undo.pop()()


def _wrap_fsdp(_: ModuleType) -> None:
    if gone := list(find_moved(WATCHED_FSDP_NAMES)):
        # Imported after install, whose check of torch imports nothing.
        _notify(
            "FSDP2",
            f"whether FSDP2 reduces outside the contract cannot be seen: {'; '.join(gone)}; "
            f"install torch {tested_range()}",
        )
        return
    from meshplan._torch import FSDPParamGroup

    _wrap(FSDPParamGroup, WAIT_FOR_POST_BACKWARD, _before_fsdp)


def _wrap_spmd_types(module: Any) -> None:
    # Dynamo calls a marked function while it traces, and keeps it out of the graph. The mark is set
    # by hand: from 2.15 on torch imports spmd_types while it imports dynamo, whose function for the
    # mark does not exist yet then.
    setattr(_report_spmd_types, MARKED_CONSTANT, True)
    for name in _SPMD_TYPES_FUNCTIONS:
        function = getattr(module, name, None)
        if isinstance(function, type) and "forward" in vars(function):
            _wrap_forward(function, _report_spmd_types)
        else:
            # spmd_types is not part of torch, so install does not refuse it.
            _notify(
                "spmd_types",
                "whether spmd_types reduces outside the contract cannot be seen: there is no "
                f"{_SPMD_TYPES}.{name}; use version 0.2 or 0.3 of it, or groups of the backend "
                "meshplan",
            )


def _wrap(owner: type, name: str, before: Callable[[Any], None]) -> None:
    """Have ``before(self)`` run at the start of a method."""
    original = vars(owner)[name]

    @functools.wraps(original)
    @never_compiled
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        before(self)
        return original(self, *arguments, **keywords)

    _put(owner, name, method, original)


def _wrap_forward(function: type, report: Callable[[], None]) -> None:
    original = vars(function)["forward"]
    run = original.__func__

    # torch.compile traces this wrapper, as it traces the original.
    @functools.wraps(run)
    def forward(ctx: Any, x: Any, axis: Any, *rest: Any) -> Any:
        if _size(axis) > 1:
            report()
        return run(ctx, x, axis, *rest)

    _put(function, "forward", staticmethod(forward), original)


def _put(owner: type, name: str, ours: Any, original: Any) -> None:
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner)[name] is ours:
            setattr(owner, name, original)

    _undo.append(undo)


def _before_fsdp(group: Any) -> None:
    # At the call: an import at module level would import FSDP2.
    from meshplan._torch import post_backward_state

    if training_state_of(group) is not post_backward_state():
        return
    info, parts = group.mesh_info, []
    shards = _size(getattr(info, "shard_process_group", None))
    replicas = _size(getattr(info, "replicate_process_group", None))
    if shards > 1:
        parts.append(f"a reduce-scatter over {shards} shards")
    if replicas > 1 and group.all_reduce_grads:
        parts.append(f"an all-reduce over {replicas} replicas")
    if parts:
        _report("FSDP2", f"reduces gradients by {' and '.join(parts)}")


def _before_ddp(model: Any) -> None:
    if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
        return
    ranks, hooks = _size(model.process_group), hooks_of_ddp(model)
    if ranks == 1:
        return
    by = ""
    if hooks:
        by = f" by the communication hook {getattr(hooks[-1][0], '__qualname__', hooks[-1][0])}"
    _report("DistributedDataParallel", f"reduces gradients over {ranks} ranks{by}")


def _report_spmd_types() -> None:
    _report("spmd_types", "reduces")


def _size(group: Any) -> int:
    if group is None:
        return 1
    # Dynamo, which traces DDP and spmd_types, reads the name of a group, but not its class.
    covered = (
        _is_covered(group.group_name)
        if torch.compiler.is_compiling()
        else isinstance(group, WrappingProcessGroup)
    )
    return 1 if covered else int(dist.get_world_size(group))


def _is_covered(name: Any) -> bool:
    return isinstance(resolve_process_group(name), WrappingProcessGroup)


# As for spmd_types above.
setattr(_is_covered, MARKED_CONSTANT, True)


def _report(library: str, what: str) -> None:
    _notify(
        library,
        f"{library} {what} outside the contract, in the backend's own order: meshplan.install() "
        "covers redistributions of DTensors only; create the process groups by "
        "torch.distributed.init_process_group('meshplan'), which covers every reduction",
    )


def _notify(library: str, text: str) -> None:
    """Warn once for each library; with ``strict``, raise FallbackRefusedError."""
    config = _read_config() if _read_config is not None else None
    # Policy "fast" requests the backend's order.
    if config is None or config.policy == "fast":
        return
    if config.strict:
        raise FallbackRefusedError(f"{text}; or pass strict=False to meshplan.install")
    if config.path != "native" and library not in _warned:
        _warned.add(library)
        warnings.warn(f"meshplan: {text}", UncoveredReductionWarning, stacklevel=4)
