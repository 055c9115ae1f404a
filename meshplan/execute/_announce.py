"""What torch's counters of collectives see of a reduction: the one collective that it stands for.

``CommDebugMode`` and ``DebugMode`` count the operators of collectives. Through shared memory a
reduction issues none, on other paths several, and some on another thread. So a front door runs its
reduction without these modes and then shows them one operator, the functional one on a meta tensor,
which sends nothing. Other modes see the operators that are really issued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

from meshplan._torch import (
    comm_debug_mode,
    debug_mode,
    disable_current_modes,
    mode_stack,
    pop_mode,
    push_mode,
)
from meshplan._torch import functional_operators as _ops
from meshplan.execute._wire import is_compiled

_Result = TypeVar("_Result")


def is_counted() -> bool:
    """Whether torch's counters are active on this thread. While torch traces they see the graph."""
    return not is_compiled() and any(map(_counts, mode_stack()))


def run_as_one(
    run: Callable[[], _Result],
    collective: str,
    op: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Callable[[], ProcessGroup],
) -> _Result:
    """``run()``, which torch's counters on this thread see as one collective of this shape. Call it
    only if ``dispatch_modes() and is_counted()``: the first is the whole cost without modes. A call
    that raises is not counted, as in torch. ``group`` is called last: the first use of a group
    creates it.
    """
    with _modes(lambda mode: not _counts(mode)):
        result = run()
    with _modes(_counts):
        with disable_current_modes():
            shown = torch.empty(shape or (1,), dtype=dtype, device="meta")
        pg = group()
        ranks, name = pg.size(), pg.group_name
        if collective == "all_reduce":
            _ops.all_reduce(shown, op, name)
        elif collective == "reduce_scatter":
            _ops.reduce_scatter_tensor(shown, op, ranks, name)
        else:
            _ops.all_gather_into_tensor(shown, ranks, name)
    return result


def _counts(mode: Any) -> bool:
    kinds = tuple(kind for kind in (comm_debug_mode(), debug_mode()) if kind is not None)
    return isinstance(mode, kinds)


@contextmanager
def _modes(keep: Callable[[Any], bool]) -> Iterator[None]:
    """Leave only some of this thread's modes active. They are not exited: counters would reset."""
    all_modes = mode_stack()
    kept = [mode for mode in all_modes if keep(mode)]
    for _ in all_modes:
        pop_mode()
    try:
        for mode in kept:
            push_mode(mode)
        try:
            yield
        finally:
            for _ in kept:
                pop_mode()
    finally:
        for mode in all_modes:
            push_mode(mode)
