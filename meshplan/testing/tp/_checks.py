"""Checks of arguments that several references share. All raise ``ShardError``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshplan.definition import NAN_BITS, refuse_flushed_subnormals
from meshplan.errors import ShardError


def check_shards(shards: Sequence[Tensor], name: str) -> None:
    if isinstance(shards, Tensor):
        raise ShardError(f"{name} is one tensor; pass a list of shards, [x] for a single one")
    if not shards:
        raise ShardError(f"{name} is empty; pass at least one shard")
    for i, shard in enumerate(shards):
        _check_real(shard, name if len(shards) == 1 else f"{name}[{i}]")
        first = shards[0]
        if (shard.device, shard.dtype) != (first.device, first.dtype):
            raise ShardError(
                f"{name}[{i}] is {shard.dtype} on {shard.device}, {name}[0] is {first.dtype} on "
                f"{first.device}; pass all shards in one dtype on one device"
            )


def check_logits(shards: Sequence[Tensor], token_ids: Tensor, name: str) -> None:
    check_shards(shards, name)
    for i, shard in enumerate(shards):
        shown = name if len(shards) == 1 else f"{name}[{i}]"
        if not shard.is_floating_point():
            raise ShardError(f"{shown} is {shard.dtype}; pass floating-point logits")
        if shard.dim() < 1 or shard.shape[-1] == 0:
            raise ShardError(
                f"{shown} has shape {tuple(shard.shape)}; pass at least one token of the "
                "vocabulary in the last dim"
            )
        check_same_shape(f"{shown} without its last dim", shard.shape[:-1], token_ids)


def read_ids(token_ids: Tensor) -> Tensor:
    _check_plain(token_ids, "token_ids")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype is torch.bool:
        raise ShardError(f"token_ids are {token_ids.dtype}; pass integers")
    return token_ids.to(torch.int64)


def read_mask(mask: Tensor | None, tokens: Tensor, name: str = "token_ids") -> Tensor:
    """The mask as bool on the device of ``tokens``; all True without a mask."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    _check_plain(mask, "mask")
    check_same_shape("mask", mask.shape, tokens, name)
    return mask.to(device=tokens.device, dtype=torch.bool)


def check_dtypes(reduction_dtype: torch.dtype, output_dtype: torch.dtype | None = None) -> None:
    """Refuse dtypes other than float32, float64, bfloat16 and float16."""
    for name, dtype in (("reduction_dtype", reduction_dtype), ("output_dtype", output_dtype)):
        if dtype is not None and dtype not in NAN_BITS:
            allowed = ", ".join(map(str, NAN_BITS))
            raise ShardError(f"{name} is {dtype}; use one of {allowed}")


def check_temperature(temperature: float, reduction_dtype: torch.dtype) -> None:
    rounded = float(torch.tensor(float(temperature), dtype=reduction_dtype, device="cpu"))
    if not 0.0 < rounded < math.inf:
        raise ShardError(
            f"temperature is {temperature}, in {reduction_dtype} {rounded}; "
            "pass a finite number above zero"
        )


def check_eps(eps: float) -> None:
    """Refuse a least denominator that is negative, infinite or NaN."""
    if not 0.0 <= float(eps) < math.inf:
        raise ShardError(f"eps is {eps}; pass a finite number, at least zero")


def check_pair(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    """Refuse two tensors that cannot be compared element by element."""
    _check_real(first, names[0])
    _check_real(second, names[1])
    check_same_shape(names[0], first.shape, second, names[1])
    if first.device != second.device:
        raise ShardError(
            f"{names[0]} is on {first.device}, {names[1]} is on {second.device}; "
            "pass both on one device"
        )


def check_same_shape(
    what: str, shape: torch.Size, other: Tensor, other_name: str = "token_ids"
) -> None:
    if shape != other.shape:
        raise ShardError(
            f"{what} has shape {tuple(shape)}, {other_name} has shape {tuple(other.shape)}; "
            "pass both in one shape"
        )


def _check_real(tensor: Tensor, name: str) -> None:
    _check_plain(tensor, name)
    if tensor.is_complex():
        raise ShardError(f"{name} is {tensor.dtype}; pass real numbers")
    refuse_flushed_subnormals(tensor)


def _check_plain(tensor: Tensor, name: str) -> None:
    if isinstance(tensor, DTensor):
        raise ShardError(f"{name} is a DTensor; pass the tensor of this rank, x.to_local()")
    if not isinstance(tensor, Tensor):
        raise ShardError(f"{name} is a {type(tensor).__name__}; pass a torch.Tensor")
