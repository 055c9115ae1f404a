"""The arguments of a deterministic collective, checked before any process group is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from meshplan.contract import Contract, Op, check_dtype
from meshplan.errors import (
    ContractError,
    ContractStateError,
    ContractTypeError,
    FallbackRefusedError,
)
from meshplan.execute._choose import check_contract
from meshplan.execute._wire import check_data
from meshplan.execute.paths import PATHS, check_path, select_path

AnyOp = Op | dist.ReduceOp | dist.ReduceOp.RedOpType
"""An operation: its name, or a value of ``torch.distributed.ReduceOp``."""

_OPS: tuple[str, ...] = get_args(Op)
_TREE = Contract()
# Dynamo does not trace through a cache.
_check_dtype = lru_cache(maxsize=64)(check_dtype)


@dataclass(frozen=True, slots=True)
class ReductionOptions:
    """How a collective reduces; ``read_options`` returns checked ones."""

    op: Op
    path: str  # one of ``PATHS``
    contract: Contract  # the order of additions; path ``native`` reads its ``rounding`` only
    strict: bool  # refuse another path than ``path``
    # Compare the first and then every ``audit``-th call with the plain definition.
    audit: int | None = None
    divisor: int | None = None  # of an average; ``None``: the number of ranks
    leaves: bool = False  # a reduce-scatter of equal shards that returns the leaves of its sum

    @property
    def native(self) -> bool:
        return self.path == "native"

    def __str__(self) -> str:
        return f"{self.path}, {self.op}, {self.contract.id}"

    def operands(self, group: ProcessGroup) -> tuple[str, str, str, bool, str]:
        return self.path, self.op, self.contract.id, self.strict, group.group_name


def read_options(
    op: AnyOp = "sum",
    path: str = "auto",
    contract: Contract | None = None,
    strict: bool = False,
    verify: str | None = None,
) -> ReductionOptions:
    """The options of one call. Raises ContractError for an unsupported op or contract, PolicyError
    for an unknown path, and FallbackRefusedError for
    ``strict`` with path ``native``.
    """
    if verify is not None:
        path = select_path(path, verify)
    if path not in PATHS:
        check_path(path)
    name = read_op(op)
    if contract is not None:
        check_contract(contract)
    if path == "native":
        if contract is not None and contract != Contract(rounding=contract.rounding):
            raise ContractError(
                f"path='native' adds in the backend's own order, got contract={contract.id}; "
                "leave contract out, or pass another path, such as path='auto'"
            )
        if strict:
            raise FallbackRefusedError(
                "strict=True refuses path='native', which reduces in the backend's own order; "
                "pass path='auto', or strict=False"
            )
    return ReductionOptions(name, path, _TREE if contract is None else contract, strict)


def read_op(op: object) -> Op:
    """The name of an operation of ``AnyOp``. Raises ContractError if the contract does not define
    it.
    """
    # A ReduceOp with a factor holds its kind.
    kind = getattr(op, "op", op)
    name = kind if isinstance(kind, str) else str(getattr(kind, "name", kind)).lower()
    if name not in _OPS:
        words = ", ".join(map(repr, _OPS))
        raise ContractError(
            f"unsupported op: {getattr(kind, 'name', op)!r}; use one of {words}, or the "
            "torch.distributed.ReduceOp of that name"
        )
    return name  # type: ignore[return-value]


def check_tensor(tensor: object, name: str = "tensor") -> None:
    if not isinstance(tensor, Tensor):
        hint = "; for a list of tensors call the _coalesced function" if name == "tensor" else ""
        raise ContractTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}{hint}")
    if isinstance(tensor, DTensor):
        raise ContractTypeError(
            f"{name} is a DTensor, which is reduced by its placements; call redistribute on it, or "
            "pass tensor.to_local()"
        )
    check_data(tensor, name)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ContractTypeError(f"{name} is {kind}; pass a dense one, e.g. tensor.to_dense()")


def check_summand(tensor: Tensor, options: ReductionOptions | None) -> None:
    """Refuse a tensor that cannot be reduced with these options, or gathered without, in any state
    of the process groups. Raises ContractTypeError if it is not dense, for ``avg`` of integers, or
    if the contract does not define the op for the dtype.
    """
    check_tensor(tensor)
    if options is None:
        return
    op, numbers = options.op, tensor.is_floating_point() or tensor.is_complex()
    if op == "avg" and not numbers:
        raise ContractTypeError(
            f"op='avg' requires a floating-point or complex tensor, got {tensor.dtype}; pass "
            "op='sum' and divide as you need, or convert the tensor"
        )
    if options.native:
        return
    # Real and imaginary parts are two elements.
    pairs = tensor.is_complex() and op in ("sum", "avg")
    check = check_dtype if torch.compiler.is_compiling() else _check_dtype
    check(op, tensor.dtype.to_real() if pairs else tensor.dtype, options.contract)


def check_destination(out: Tensor, tensor: Tensor | None = None, shape: object = None) -> None:
    """Refuse a tensor that a result cannot be written to. It needs the dtype and device of the
    input ``tensor`` and the result's ``shape``; ``None`` if ``out`` is the input itself. Raises
    ContractTypeError, ContractError, or ContractStateError if ``out`` would lose its gradient.
    """
    if tensor is not None:
        check_tensor(out, "out")
        if (out.dtype, out.device) != (tensor.dtype, tensor.device):
            raise ContractTypeError(
                f"out= has {out.dtype} on {out.device}, and the tensor {tensor.dtype} on "
                f"{tensor.device}; pass an out= of the same dtype and device"
            )
        if tuple(out.shape) != shape:
            raise ContractError(
                f"out= has shape {tuple(out.shape)}, and the result of this rank has {shape}; "
                "pass an out= of the result's shape"
            )
    if _may_overlap(out):
        raise ContractError(
            f"the result is written in place, and elements of the tensor may share memory: shape "
            f"{tuple(out.shape)}, strides {out.stride()}; pass tensor.contiguous()"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ContractStateError(
            "the result is written in place of a tensor that requires a gradient, which it would "
            "cut off; call meshplan.collectives.functional.all_reduce, or use torch.no_grad()"
        )


def check_no_gradient(tensor: Tensor, function: str) -> None:
    """Raise ContractStateError if ``tensor`` requires a gradient, gradients are enabled, and the
    result would have none.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ContractStateError(
            f"the result of deterministic_{function} has no gradient, and the tensor requires one; "
            f"call meshplan.collectives.functional.{function}, or use torch.no_grad()"
        )


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements could be at one address; interleaved strides count as such."""
    # Strides of a graph may be symbols, which have no order.
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    last = 0
    wide = [(step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    for step, n in sorted(wide):
        if step <= last:
            return True
        last += (n - 1) * step
    return False
