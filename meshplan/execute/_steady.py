"""A reduction through the memory of one host that has been run before: no decision is left.

It makes the call of the kernel that ``run_reduction`` would make, without operators in between, and
records the same event. Ranks that run it meet ranks that do not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch import Tensor

from meshplan.execute._failures import raise_failure
from meshplan.execute._groups import StepGroups
from meshplan.execute._provenance import Event, Purpose, record
from meshplan.execute._run import prepare_reduction
from meshplan.execute.paths import _path as registry
from meshplan.execute.paths._shared_memory import SharedMemoryPath
from meshplan.flatten import GroupHandle
from meshplan.planner import Step

_SMALLEST_SUBNORMAL = math.ulp(0.0)


class SteadyReduction:
    """A reduction of CPU tensors of one dtype and number of elements; see ``find_steady``. It holds
    no process group and no tensor.
    """

    __slots__ = ("_call", "_changes", "_event", "_handle", "_purpose", "_rounds")

    def __init__(
        self,
        call: Callable[[Tensor, Tensor, int], None],
        handle: GroupHandle,
        purpose: Purpose,
        event: Event,
        rounds: bool,
    ) -> None:
        self._call = call
        self._handle = handle
        self._purpose = purpose
        self._event = event
        self._rounds = rounds
        self._changes = registry.changes

    def run(self, message: Tensor, out: Tensor, ticket: int) -> bool:
        """Reduce ``message`` into ``out``, which may be the same tensor; both are contiguous.
        Returns False, with nothing done, if the decisions must be made again. Raises as
        ``run_reduction``; ``out`` then holds NaN (or all ones).
        """
        pg = self._handle.process_group()
        if (
            pg is None
            or self._changes != registry.changes
            or (self._rounds and _SMALLEST_SUBNORMAL * 1.0 == 0.0)
        ):
            # The group or its memory is gone, paths were registered, or this thread flushes
            # subnormal numbers, which the ordinary way refuses. All ranks find the first two at the
            # same call. The last has no effect on other ranks.
            return False
        started = time.perf_counter()
        try:
            self._call(message, out, ticket)
        except RuntimeError as error:
            raise_failure(error, StepGroups(pg), "cpu", self._purpose, started)
        seconds = time.perf_counter() - started
        record(self._event, elements=message.numel(), nbytes=message.nbytes, seconds=seconds)
        return True


def find_steady(
    tensor: Tensor,
    step: Step,
    groups: StepGroups,
    handle: GroupHandle,
    purpose: Purpose,
    path: str,
    strict: bool,
    one_shot: bool | None,
) -> SteadyReduction | None:
    """The steady form of a reduction that ``run_reduction`` has run with these arguments. ``None``
    if it did not run through shared memory on CPUs, is of complex numbers, or scatters a summand
    that is not flat. ``handle`` finds ``groups.whole``.
    """
    how = (path, strict, one_shot, False)
    found = prepare_reduction(tensor, step, groups, purpose, *how)
    peers = groups.peers
    if not isinstance(found.path, SharedMemoryPath) or peers is None or found.pairs:
        return None
    if peers.device_type != "cpu" or step.norm is not None or groups.gather is not None:
        return None
    # The parts of a message are blocks of it where it is flat.
    if step.scatter and (tensor.dim() != 1 or not step.lengths):
        return None
    shared = found.path
    call = shared.prepare(tuple(tensor.shape), tensor.dtype, step, peers)
    event = found.events.get(shared.collectives)
    if event is None:
        return None
    rounds = tensor.dtype.is_floating_point and step.op not in ("max", "min")
    return SteadyReduction(call, handle, purpose, event, rounds)
