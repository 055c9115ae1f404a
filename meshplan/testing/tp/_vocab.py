"""Shards of a vocabulary: their ranges, and the owners of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshplan.definition import NAN_BITS, refuse_flushed_subnormals
from meshplan.errors import ShardError, TokenCoverageError

# Checks of arguments that several references share. All raise ``ShardError``.


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
    for name, dtype in (
        ("reduction_dtype", reduction_dtype),
        ("output_dtype", output_dtype),
    ):
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
    if not 0.0 <= float(eps) < math.inf:
        raise ShardError(f"eps is {eps}; pass a finite number, at least zero")


def check_pair(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    _check_real(first, names[0])
    _check_real(second, names[1])
    check_same_shape(names[0], first.shape, second, names[1])
    if first.device != second.device:
        raise ShardError(
            f"{names[0]} is on {first.device}, {names[1]} is on {second.device}; "
            "pass both on one device"
        )


def check_same_shape(
    what: str,
    shape: torch.Size,
    other: Tensor,
    other_name: str = "token_ids",
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


def vocab_shard_ranges(vocab_size: int, tp_size: int) -> list[tuple[int, int]]:
    """Consecutive ranges ``(start, stop)`` of a vocabulary, one per rank.

    Where the vocabulary does not divide evenly, the first ranks hold one token more.

    Args:
        vocab_size: tokens.
        tp_size: ranks.

    Raises:
        ShardError: a size below one, or more ranks than tokens.
    """
    if vocab_size < 1 or not 1 <= tp_size <= vocab_size:
        raise ShardError(
            f"vocab_size={vocab_size} and tp_size={tp_size}; "
            "pass a vocab_size of at least one and a tp_size from 1 to vocab_size"
        )
    size, more = divmod(vocab_size, tp_size)
    starts = [rank * size + min(rank, more) for rank in range(tp_size + 1)]
    return list(itertools.pairwise(starts))


def shard_logits_by_vocab(logits: Tensor, tp_size: int) -> list[Tensor]:
    """Views ``logits[..., start:stop]``, one per range of ``vocab_shard_ranges``.

    Args:
        logits: [..., vocabulary], any dtype.
        tp_size: ranks.

    Raises:
        ShardError: logits without a dim, or as ``vocab_shard_ranges``.
    """
    if logits.dim() < 1:
        raise ShardError("logits have shape (); pass the vocabulary in the last dim")
    return [logits[..., a:b] for a, b in vocab_shard_ranges(logits.shape[-1], tp_size)]


def owner_ranks_for_token_ids(
    token_ids: Tensor,
    shard_ranges: Sequence[tuple[int, int]],
    mask: Tensor | None = None,
) -> Tensor:
    """The rank that holds each token; -1 where the mask is off, or where no rank holds it.

    Args:
        token_ids: integers [*tokens].
        shard_ranges: ``(start, stop)`` of each rank, in any order, without overlaps.
        mask: [*tokens]; without it all tokens are active.

    Returns:
        int64 [*tokens] on the device of ``token_ids``.

    Raises:
        ShardError: invalid ranges or ranges that overlap, ids that are not integers, another
            shape of the mask.
    """
    ranges = read_ranges(shard_ranges)
    ids = read_ids(token_ids)
    active = read_mask(mask, ids)
    owners = torch.full_like(ids, -1)
    for rank, (start, stop) in enumerate(ranges):
        owners.masked_fill_(active & (ids >= start) & (ids < stop), rank)
    return owners


def read_ranges(
    ranges: Sequence[tuple[int, int]], name: str = "shard_ranges"
) -> list[tuple[int, int]]:
    found = [(int(start), int(stop)) for start, stop in ranges]
    for rank, (start, stop) in enumerate(found):
        if not 0 <= start <= stop:
            raise ShardError(
                f"{name}[{rank}] is [{start}, {stop}); use 0 <= start <= stop, stop excluded"
            )
    order = sorted((start, stop, rank) for rank, (start, stop) in enumerate(found) if start < stop)
    for (_, stop, rank), (start, _, other) in itertools.pairwise(order):
        if start < stop:
            raise ShardError(
                f"{name}[{rank}] is [{found[rank][0]}, {found[rank][1]}) and {name}[{other}] is "
                f"[{found[other][0]}, {found[other][1]}), they overlap; "
                "assign each token of the vocabulary to one rank"
            )
    return found


def start_indices(starts: Sequence[int] | None, shards: Sequence[Tensor]) -> list[int]:
    sizes = [shard.shape[-1] for shard in shards]
    if starts is None:
        return [sum(sizes[:i]) for i in range(len(sizes))]
    found = [int(start) for start in starts]
    if len(found) != len(sizes):
        raise ShardError(
            f"{len(found)} vocab_start_indices for {len(sizes)} logit_shards; pass one per shard"
        )
    if min(found) < 0:
        raise ShardError(f"vocab_start_indices are {found}; pass indices of 0 or more")
    if found != sorted(found):
        raise ShardError(
            f"vocab_start_indices are {found}; pass the shards sorted by their first token"
        )
    read_ranges([(a, a + n) for a, n in zip(found, sizes, strict=True)], "logit_shards")
    return found


def check_coverage(ids: Tensor, active: Tensor, covered_by: Tensor) -> None:
    """Refuse active tokens that are not held by exactly one shard."""
    wrong = active & (covered_by != 1)
    if not bool(wrong.any()):
        return
    first = int(wrong.flatten().to(torch.uint8).argmax())
    token, count = int(ids.flatten()[first]), int(covered_by.flatten()[first])
    found = f"is covered by {count} vocab shards" if count else "is not covered by any vocab shard"
    raise TokenCoverageError(
        f"active token id {token} {found}, expected exactly one; "
        "mask the token out or correct the first tokens and sizes of the shards",
        token_id=token,
        covered_by=count,
    )
