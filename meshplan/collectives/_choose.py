"""Which path a reduction takes, from facts that all its ranks share. No bit depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from meshplan.collectives._groups import StepGroups
from meshplan.kernel import PEER_MODES
from meshplan.planner import Step

__all__ = ["PATHS", "Choice", "PathChoice", "choose"]

PathChoice = Literal["auto", "one_shot", "two_shot", "exchange", "reference", "native"]
PATHS: tuple[PathChoice, ...] = get_args(PathChoice)


@dataclass(frozen=True, slots=True)
class Choice:
    """A path, why, and whether it is less than what was asked for."""

    path: str
    why: str
    fallback: bool = False


def choose(step: Step, groups: StepGroups, tensor: Tensor, wanted: str) -> Choice:
    """The path of ``step`` for ``tensor``.

    Args:
        step: what was planned.
        groups: of the step.
        tensor: this rank's summand.
        wanted: one of ``PATHS``.
    """
    planned = step.path or "native"
    if planned != "exchange":
        return Choice(planned, step.why)
    if wanted == "native":
        return Choice("native", "path native was asked for", fallback=True)
    if wanted not in ("auto", *PEER_MODES):
        return Choice("exchange", step.why)
    if groups.peers is None or tensor.device.type != groups.peers.device_type:
        reason = _why_not(step, groups, tensor)
        why = f"{step.why}; not through shared memory: {reason}"
        return Choice("exchange", why, fallback=wanted != "auto")
    if wanted != "auto":
        return Choice(wanted, step.why)
    # While torch traces, a size may be a symbol: the operator then chooses when it runs.
    known = isinstance(tensor.nbytes, int)
    return Choice(groups.peers.faster_mode(tensor.nbytes) if known else "auto", step.why)


def _why_not(step: Step, groups: StepGroups, tensor: Tensor) -> str:
    if step.inner > 1:
        return "near ranks reduce first"
    if groups.peers is not None:
        return f"tensors on {tensor.device.type}, and the group's memory is of {groups.peers}"
    if groups.no_peers:
        return groups.no_peers
    if tensor.device.type == "cpu":
        return "the group has none"
    return "on GPUs only where path names one_shot or two_shot"
