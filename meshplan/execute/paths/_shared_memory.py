"""One reduction through memory that the ranks share: the message is written once and read once.

Finished when the function returns, on GPUs on the current stream. The kernel compares signatures
and reports missing ranks by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Wire
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import Arithmetic, CallKey, Communicator
from meshplan.planner import Step


class SharedMemoryPath(Path):
    """Through shared memory in one of the kernel's modes: ``one_shot``, ``two_shot``, or ``auto``
    for the faster one when it runs.
    """

    shares_memory = True
    # The names of what it issues.
    collectives = ("peer_reduce",)

    def __init__(self, mode: str) -> None:
        self.name = mode

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        kind = tensor.device.type
        if groups.peers is not None and groups.peers.device_type == kind:
            return ""
        if step.inner > 1:
            why = "near ranks reduce first"
        elif groups.peers is not None:
            why = f"tensors on {kind}, and the group's memory is of {groups.peers}"
        elif groups.no_peers:
            why = groups.no_peers
        else:
            why = "the group has none"
        return f"not through shared memory: {why}"

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        return Outcome(self._reduce(tensor, [], step, groups, wire), wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        parts = list(split_parts(tensor, step, groups.flat.size()))
        # Peers compare the message's shape, which must be the summand's.
        message = torch.cat(parts).view(tensor.shape)
        finished = self._reduce(message, [part.numel() for part in parts], step, groups, wire)
        if step.leaves:
            return Outcome(finished, wire.log)
        shard = select_shard(tensor, step, groups.flat.rank())
        found, pending = gather_shard(finished, shard.shape, groups, wire)
        return Outcome(found, wire.log, pending)

    def prepare(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        step: Step,
        peers: Communicator[Any],
    ) -> Callable[[Tensor, Tensor, int], None]:
        """The kernel's call without an operator: reduces its first tensor into its second one, both
        contiguous. Its last argument is the word of its ticket. In a ``reduce_scatter`` the second
        tensor is this rank's shard, or its leaves, and the first dim is the one that is split.
        """
        mode = "leaves" if step.leaves else "scatter" if step.lengths else self.name
        parts = tuple(n * math.prod(shape[1:]) for n in step.lengths)
        key = CallKey(mode, shape, parts, dtype, _arithmetic(step))
        return partial(peers.run, peers.prepare(key))

    def _reduce(
        self,
        message: Tensor,
        parts: list[int],
        step: Step,
        groups: StepGroups,
        wire: Wire,
    ) -> Tensor:
        assert groups.peers is not None
        result: Tensor = wire.issue(
            torch.ops.meshplan.peer_reduce,
            message,
            parts,
            *_arithmetic(step),
            "leaves" if step.leaves else self.name,
            groups.peers.name,
            wire.calls,
            wire.call,
        )
        return result


def _arithmetic(step: Step) -> Arithmetic:
    contract = step.contract
    assert contract is not None
    assert step.op is not None
    return Arithmetic(
        step.op,
        tuple(step.sizes),
        contract.order,
        contract.accumulate,
        contract.rounding,
        step.divisor,
    )


ONE_SHOT = SharedMemoryPath("one_shot")
"""Every rank reads all summands and folds all of them."""
TWO_SHOT = SharedMemoryPath("two_shot")
"""Every rank folds a part, and reads the other parts."""
FASTER_MODE = SharedMemoryPath("auto")
"""For a traced graph whose sizes are unknown."""
