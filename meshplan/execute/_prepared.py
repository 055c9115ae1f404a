"""The decisions about a reduction, made once for tensors of one dtype, shape and device."""

from __future__ import annotations

import math

from torch import Tensor

from meshplan._observing import Extent
from meshplan.errors import FallbackRefusedError
from meshplan.execute._choose import ChosenPath, PathRequest, choose
from meshplan.execute._deferred import is_deferred
from meshplan.execute._gloo_groups import is_gloo
from meshplan.execute._groups import StepGroups
from meshplan.execute._header import RankHeader
from meshplan.execute._provenance import Event, Purpose
from meshplan.execute._wire import is_captured
from meshplan.execute.paths import get_path
from meshplan.planner import Step


class PreparedReduction:
    """The decisions about a reduction of tensors of one dtype, shape and device. It belongs to the
    groups of the step, and keeps neither them nor a tensor alive.
    """

    __slots__ = (
        "choice",
        "contract",
        "deferred",
        "events",
        "extent",
        "header",
        "keys",
        "over_gloo",
        "pairs",
        "path",
        "ran",
    )

    def __init__(
        self,
        tensor: Tensor,
        step: Step,
        groups: StepGroups,
        purpose: Purpose,
        path: str,
        strict: bool,
        one_shot: bool | None,
        traced: bool,
    ) -> None:
        over_gloo = is_gloo(tensor, groups)
        captured = traced and is_captured(tensor)
        request = PathRequest(step, groups, tensor, path, one_shot, traced, captured, over_gloo)
        self.choice = choose(request)
        if self.choice.fallback and (strict or not _is_replaceable(path)):
            raise _refused(self.choice, request, tensor, purpose)
        self.path, self.ran = self.choice.path, self.choice.path.reported_name
        backend = not self.path.shares_memory
        self.over_gloo = over_gloo and backend
        self.deferred = backend and not over_gloo and not traced and is_deferred(tensor, groups)
        self.contract = step.contract if self.path.in_contract else None
        native: Extent = "fallback" if self.choice.fallback else "native"
        self.extent: Extent = native if self.contract is None else "counted"
        # Real and imaginary part are two elements.
        self.pairs = tensor.is_complex() and step.op in ("sum", "avg") and step.norm is None
        # Kept, so that no others have their identities.
        self.keys = step, purpose
        self.header: RankHeader | None = None
        self.events: dict[tuple[str, ...], Event] = {}

    def event(
        self,
        purpose: Purpose,
        path: str,
        collectives: tuple[str, ...],
        tensor: Tensor,
        step: Step,
        traced: bool,
    ) -> Event:
        """The event of a call. ``collectives`` are the names of those that it issued."""
        choice, why = self.choice, self.choice.why
        if not collectives:
            empty = not traced and tensor.numel() == 0
            why += "; no elements, so nothing was sent" if empty else "; the path issued nothing"
        return Event(
            asked=purpose.request,
            planned=purpose.planned,
            ran=self.ran,
            sends=collectives,
            group=purpose.group,
            dtype=str(tensor.dtype).removeprefix("torch."),
            why=why,
            fallback=choice.fallback,
            kind=purpose.kind,
            path=path,
            contract=self.contract.id if self.contract else None,
            ranks=math.prod(step.sizes),
            traced=traced,
        )


def _is_replaceable(path: str) -> bool:
    return path == "auto" or get_path(path).replaceable


def _refused(
    choice: ChosenPath, request: PathRequest, tensor: Tensor, purpose: Purpose
) -> FallbackRefusedError:
    if request.no_contract:
        return FallbackRefusedError(
            f"{purpose.request}: {tensor.dtype} would run on the backend's own {request.step.op}, "
            "in its own order; convert the tensor, or pass strict=False"
        )
    if not choice.path.in_contract:
        return FallbackRefusedError(
            f"{purpose.request}: path {choice.path.name} is outside the contract; pass another "
            "path, or strict=False"
        )
    return FallbackRefusedError(
        f"{purpose.request}: path {choice.wanted} was requested and "
        f"{choice.path.reported_name} would run: {choice.why}; pass another path"
        + ", or strict=False"
        * _is_replaceable(request.wanted)
    )
