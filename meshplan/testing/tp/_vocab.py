"""Shards of a vocabulary: their ranges, and the owners of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan.errors import ShardError, TokenCoverageError
from meshplan.testing.tp._checks import read_ids, read_mask


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
    token_ids: Tensor, shard_ranges: Sequence[tuple[int, int]], mask: Tensor | None = None
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
        raise ShardError(f"vocab_start_indices are {found}; pass indices from zero on")
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
