"""Reductions over groups of other backends, shown to a watch, in each version of torch.

Groups of C++ are watched at the operators of c10d. A group written in Python answers its callers by
methods of its class, which operators do not see: those methods are wrapped while a watch is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist

from meshplan._torch.c10d_operators import Watch, watch_reductions
from meshplan._torch.process_group import REDUCTIONS, WrappingProcessGroup

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
    @functools.wraps(method)
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
