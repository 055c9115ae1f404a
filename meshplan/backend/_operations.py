"""Which operations the contract fixes, and what ``PREMUL_SUM`` is in its terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan._torch.process_group import factor_of
from meshplan.contract import FLOATS, INTEGERS, OPS, Contract, Op, check_dtype
from meshplan.errors import ContractTypeError


@dataclass(frozen=True)
class Operation:
    """A reduction that a caller requests."""

    name: str  # of the ``ReduceOp``, in lower case
    op: Op | None  # ``None`` where the contract does not define it for the dtype
    why: str = ""
    # Whether the inner backend's result depends on the order, which no caller has requested.
    fallback: bool = True
    factor: float | Tensor | None = None  # of ``PREMUL_SUM``, this rank's

    def scale(self, tensor: Tensor, contract: Contract) -> Tensor:
        """The summand of this rank; ``tensor`` itself without a factor. A ``PREMUL_SUM`` multiplies
        each leaf by the factor in the accumulator's dtype and adds the products in that dtype. With
        ``rounding="node"`` a product is a node, and is rounded.
        """
        if self.factor is None:
            return tensor
        parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        wide = getattr(torch, contract.accumulator(name_of(parts.dtype)))
        factor = self.factor
        if not isinstance(factor, Tensor):
            # Filled on the device: a copy from the host would make the host wait.
            factor = torch.full((), factor, dtype=torch.float64, device=tensor.device)
        scaled = parts.to(wide) * factor.reshape(()).to(wide)
        if contract.rounding == "node":
            scaled = scaled.to(parts.dtype)
        return torch.view_as_complex(scaled) if tensor.is_complex() else scaled


def read_operation(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    tensor: Tensor,
    contract: Contract,
    policy: str = "deterministic",
) -> Operation:
    """What ``op`` is on tensors like this one, in a group of this contract and policy. Raises
    ContractTypeError for a product of floats in an exact order.
    """
    kind: Any = getattr(op, "op", op)
    name = str(kind.name).lower()
    if policy == "fast":
        return Operation(name, None, "policy 'fast'", fallback=False)
    dtype, factor = tensor.dtype, None
    if name == "premul_sum":
        assert isinstance(op, dist.ReduceOp)
        factor = factor_of(op)
    if tensor.layout is not torch.strided:
        return Operation(name, None, f"the tensor is {tensor.layout}")
    real = dtype.to_real() if dtype.is_complex and name in ("sum", "avg", "premul_sum") else dtype
    word: Any = "sum" if factor is not None else name
    if not (real.is_floating_point or dtype.is_complex):
        # Integers and bits: every order has the same result, and division is of the sum.
        defined = factor is None and word in OPS and word != "avg" and name_of(dtype) in INTEGERS
        why = "" if defined else "its result does not depend on the order"
        return Operation(name, word if defined else None, why, fallback=False)
    if word not in OPS:
        return Operation(name, None, f"the contract does not define {name}")
    try:
        check_dtype(word, real, contract)
    except ContractTypeError as error:
        if word == "product" and name_of(real) in FLOATS:
            # Only an exact order refuses it, and the inner backend has no exact product either.
            raise
        return Operation(name, None, str(error))
    return Operation(name, word, factor=factor)
