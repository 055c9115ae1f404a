"""Torch's placements, as the planner's ``Spec``."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshplan._torch import MaskPartial, NormPartial
from meshplan.contract import OPS
from meshplan.planner._problem import Spec

_BITWISE = ("band", "bor", "bxor")
_ONE = "at most one summand of an element is not zero"


def read_spec(placement: Placement) -> Spec:
    """What ``Spec.of`` returns for a placement of torch."""
    text = str(placement)
    if type(placement) is Partial and placement.reduce_op in OPS:
        return Spec("partial", text, op=placement.reduce_op)
    if type(placement) is Partial:
        why = "bits are combined one by one" if placement.reduce_op in _BITWISE else ""
        return Spec("opaque", text, op=placement.reduce_op, any_order=why)
    if isinstance(placement, Replicate):
        return Spec("replicate", text)
    if type(placement) is Shard:
        return Spec("shard", text, dim=placement.dim)
    if type(placement) is NormPartial:
        return Spec("norm", text, norm=float(placement.norm_type))
    if type(placement) is MaskPartial:
        return Spec("opaque", text, any_order=_ONE if placement.reduce_op == "sum" else "")
    return Spec("opaque" if isinstance(placement, Partial) else "other", text)
