"""Check that torch's executor runs the planned reductions that it was given.

The seam returns steps and does not see their execution. An executor that skips a planned reduction
would return each rank's summand instead of the sum, without an error. Two checks prevent that:

* The list of steps watches the executor's loop (``TrackedSteps``). When the loop asks for the step
  after a reduction, the reduction must have returned.
* If the executor never started its loop, the next redistribution of the thread raises
  (``check_last_plan``).

Plans for other callers, such as cost models, are not tracked.
"""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from meshplan._torch import (
    EXECUTOR,
    FlattenedTransformInfo,
    TracingContext,
    redistribute_module,
    tracing,
)
from meshplan._uncompiled import never_compiled
from meshplan.errors import PlanNotRunError

_RETURNS = ("RETURN_VALUE", "RETURN_CONST")


class ThreadState:
    """The state of one thread. Every redistribution finds all of it by one look-up."""

    __slots__ = ("decisions", "falls_through", "reduced", "waiting", "world")

    def __init__(self) -> None:
        self.reduced: object = None  # the carrier whose reduction returned last
        # The caller of the seam and the request, until the executor starts on the plan.
        self.waiting: tuple[FrameType, str] | None = None
        self.decisions: dict[int, Any] = {}  # by the identity of torch's list of steps
        # A reference to the default group for whose rank torch has cached this thread's steps.
        self.world: Any = None
        # The frame and its code, while reductions are counted.
        self.falls_through: tuple[int, CodeType] | None = None
        # The seam reads torch's tracing context in every redistribution. In a thread that never
        # traced, the attribute is missing, and the look-up is slower than reading None. Entering
        # an empty context once leaves None behind.
        if TracingContext.try_get() is None:
            with tracing(None):
                pass


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


THREAD = _Thread()


class TrackedSteps(list[Any]):
    """The steps of a plan, whose iteration by the executor checks each planned reduction. The state
    of a run is in its iterator and thread, so the seam can return one list many times.
    """

    def __init__(self, steps: list[Any], carriers: list[Any], executor: CodeType) -> None:
        super().__init__(steps)
        self.executor = executor
        self.asked: str = carriers[0].asked
        sources = [step.src_dst_placements[0] for step in steps]
        self._carriers = [one if any(one is c for c in carriers) else None for one in sources]

    @never_compiled
    def __iter__(self) -> Iterator[Any]:
        # Torch's debug mode iterates over the list too, to print it: only the executor counts.
        if sys._getframe(1).f_code is not self.executor:
            return super().__iter__()
        state = THREAD.state
        state.waiting = None
        return self._run(state)

    def _run(self, state: ThreadState) -> Iterator[Any]:
        for step, carrier in zip(super().__iter__(), self._carriers, strict=True):
            if carrier is None:
                yield step
                continue
            state.reduced = None
            yield step
            # The executor asks for the next step: it must have called the carrier, which notes it.
            # Redistributions inside the reduction run before, and the carrier notes itself last.
            if state.reduced is not carrier:
                raise _not_run(carrier.asked)
            state.reduced = None


def track_steps(steps: list[Any], carriers: list[Any], caller: FrameType) -> list[Any]:
    if not carriers or not _is_executor(caller):
        return steps
    tracked = TrackedSteps(steps, carriers, caller.f_code)
    THREAD.state.waiting = (caller, tracked.asked)
    return tracked


def flattened_step(**values: Any) -> Any:
    """A step of torch's flattened class, with a weak reference to its mesh, which a cached step
    must not keep alive. ``values`` are the fields of torch's class.
    """
    return _flattened_step_class()(**values)


@cache
def _flattened_step_class() -> Any:
    # Made at first use: a torch without the class must fail in ``install``, not at import.
    class FlattenedStep(FlattenedTransformInfo):
        def __init__(self, *, mesh: DeviceMesh, **values: Any) -> None:
            whole = FlattenedTransformInfo(mesh=mesh, **values)
            # Torch's class is a frozen dataclass.
            for name in {field.name for field in fields(whole)} - {"mesh"}:
                object.__setattr__(self, name, getattr(whole, name))
            object.__setattr__(self, "held", weakref.ref(mesh))

        @property
        def mesh(self) -> DeviceMesh:
            # Alive: the caller that runs the step holds the mesh.
            found: DeviceMesh = self.held()  # type: ignore[attr-defined]
            return found

    return FlattenedStep


def note_reduction(carrier: object) -> None:
    state = THREAD.state
    state.reduced = carrier
    state.waiting = None


def check_last_plan(state: ThreadState) -> None:
    """Check that torch has started on the last plan of this thread when another redistribution
    starts: that is nested in the first one; or the first one has raised, which is its own error; or
    it has returned without its loop.
    """
    assert state.waiting is not None
    frame, asked = state.waiting
    running = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back  # type: ignore[assignment]
    if running is frame:
        return
    state.waiting = None
    # A frame that was left by an exception stops at the instruction that raised.
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS:
        raise _not_run(asked)


def _is_executor(caller: FrameType) -> bool:
    """Whether the frame runs torch's executor, or a replacement of it."""
    return (
        caller.f_code.co_name == EXECUTOR
        or caller.f_globals is vars(redistribute_module)
        or caller.f_code is getattr(getattr(redistribute_module, EXECUTOR, None), "__code__", None)
    )


def _not_run(asked: str) -> PlanNotRunError:
    return PlanNotRunError(
        f"torch was given the plan of {asked} and has not run its reduction. Do not use the "
        f"result, which is not reduced; undo whatever replaced {redistribute_module.__name__}."
        f"{EXECUTOR} since meshplan.install, or use a tested torch version"
    )
