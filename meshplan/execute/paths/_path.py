"""The interface of paths.

A path moves the summands of a step and runs the contract over them. Every path within the contract
returns the same bits. ``CONTRIBUTING.md`` has the recipe for a new one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from meshplan.execute._groups import StepGroups
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._wire import Wire
from meshplan.planner import Step


class Outcome(NamedTuple):
    tensor: Tensor  # the result or this rank's shard: contiguous, of the summand's dtype
    log: CollectiveLog  # the wire's own, so that a path cannot report calls that it did not make
    pending: bool = False  # the last collective may still be under way: wait for the result


class Path(Protocol):
    """A way to move the data of a step: an instance of a subclass, in the table of paths. A path
    sends by the methods of its ``wire``, which compare headers, or calls collectives as
    ``wire.issue(collective, ...)`` after ``wire.compare()``.
    """

    name: str  # the value of ``path=`` that selects it
    offered: bool = True  # whether users may select it by name
    in_contract: bool = True  # whether the contract fixes its bits
    shares_memory: bool = False  # it needs memory that the ranks share, instead of a backend
    captured: bool = True  # a CUDA graph may hold it
    replaceable: bool = True  # an exchange may run in its place where it cannot
    # Torch may trace through it. It need not over gloo: there graphs hold one operator, which runs
    # the path later.
    traced: bool = True
    # It may return on a CPU while its last collective is under way, which leaves the backend's
    # errors to whoever waits.
    asynchronous: bool = False

    @property
    def reported_name(self) -> str:
        """Its name in reports, errors and headers."""
        return self.name

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        """Why it cannot run ``step``, equal on all ranks; empty if it can. It must not read the
        shape of ``tensor``: a rank that passes another shape than the others must still take
        part in the comparison.
        """
        return (
            ""
            if groups.whole is not None
            else f"path {self.name} needs one group of all ranks, and the plan has blocks"
        )

    # The decisions of a path may depend on the step, the groups and the summand's shape and dtype
    # only: once headers are compared, these are equal on all ranks, so all ranks issue the same
    # collectives.
    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Every rank gets the whole. ``tensor`` has any strides and is left as it is. It has at
        least one element, except on paths that share memory.
        """
        ...

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Each rank gets its shard: ``select_shard(tensor, step, groups.position)`` of the
        whole.
        """
        ...
