"""What the ranks of a group tell one another: facts first, then tensors.

A rank that refuses its arguments on its own would leave its peers waiting. So every rank first
tells all others what it was given, or why it refuses it, and what follows is decided from these
facts, which are the same on all ranks: all go on, or all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import GroupStateError, ShardError, SignatureMismatchError
from meshplan.testing._bitwise import bits
from meshplan.testing._segments import Block, covering

__all__ = [
    "Options",
    "check_alike",
    "check_member",
    "digest",
    "exchanged_blocks",
    "exchanged_facts",
    "group_ranks",
    "largest",
    "total",
]

Options = dict[str, str]
"""What must be the same on all ranks, in words."""

_T = TypeVar("_T")


def check_member(group: Any) -> None:
    """Refuse to talk over a group that is not there.

    Raises:
        GroupStateError: no torch.distributed, no process group, or this rank is not in ``group``.
    """
    if not dist.is_available():
        raise GroupStateError("this build of torch has no torch.distributed; use another build")
    if not dist.is_initialized():
        raise GroupStateError(
            "shards of several ranks are exchanged over a process group, none is initialised; "
            "call torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise GroupStateError(
            f"rank {dist.get_rank()} is not in the group; call this on the group's members only"
        )


def exchanged_facts(own: Callable[[], _T], group: Any) -> list[_T]:
    """What ``own`` returns on each rank, in the order of the group.

    Raises:
        Exception: what ``own`` raised here.
        ShardError: ``own`` raised on another rank.
    """
    failure: Exception | None = None
    mine: tuple[_T | None, str] = (None, "")
    try:
        mine = (own(), "")
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure, mine = error, (None, str(error) or type(error).__name__)
    facts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts, mine, group=group)
    if failure is not None:
        raise failure
    for rank, (_, refusal) in zip(group_ranks(group), facts, strict=True):
        if refusal:
            raise ShardError(f"rank {rank} refused what it was given: {refusal}")
    return [fact for fact, _ in facts]


def check_alike(options: Sequence[Options], group: Any) -> None:
    """Refuse options that are not the same on all ranks.

    Raises:
        SignatureMismatchError: with the first option that differs.
    """
    ranks, own = group_ranks(group), dist.get_rank(group)
    for name, first in options[0].items():
        values = [option[name] for option in options]
        if len(set(values)) > 1:
            other = next(i for i, value in enumerate(values) if value != values[own])
            at = next(i for i, value in enumerate(values) if value != first)
            raise SignatureMismatchError(
                f"ranks were given different {name}: {first} on rank {ranks[0]}, {values[at]} on "
                f"rank {ranks[at]}; give the same on all ranks of the group",
                rank=ranks[other],
            )


def digest(tensor: Tensor) -> str:
    """Short text that tells tensors apart by shape and bits."""
    raw = bits(tensor).cpu().flatten().tolist()
    found = hashlib.sha256(repr((tuple(tensor.shape), raw)).encode()).hexdigest()[:12]
    return f"{tuple(tensor.shape)} #{found}"


def largest(local: Tensor, group: Any) -> Tensor:
    """The elementwise maximum over ranks of floats; canonical NaN is the largest of all."""
    # As integers, which have no NaN that a backend could overlook: for negative numbers all bits
    # but the sign are turned, and the order of these integers is that of the floats.
    integer = bits(local)
    key = _turned(integer).to(torch.int64)
    dist.all_reduce(key, op=dist.ReduceOp.MAX, group=group)
    return _turned(key.to(integer.dtype)).view(local.dtype)


def total(local: Tensor, group: Any) -> Tensor:
    """The elementwise sum over ranks of int64, which no order of additions changes."""
    result = local.contiguous().clone()
    dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group)
    return result


def exchanged_blocks(
    blocks: Sequence[tuple[Block, Tensor]], ranges: Sequence[Block], like: Tensor, group: Any
) -> list[tuple[Block, Tensor]]:
    """The blocks of all ranks, given those of this one.

    Args:
        blocks: of this rank: those of ``covering`` of its range, in order.
        ranges: the range of each rank, in the order of the group.
        like: any tensor of the shape, dtype and device of one block's value.
        group: the ranks.
    """
    of_rank = [covering(start, stop) for start, stop in ranges]
    # all_gather wants one shape on all ranks.
    room = max(map(len, of_rank))
    sent = like.new_zeros((room, *like.shape))
    for place, (_, value) in enumerate(blocks):
        sent[place] = value
    # As bytes, which every backend takes.
    received = [torch.empty_like(sent).view(torch.uint8) for _ in ranges]
    dist.all_gather(received, sent.view(torch.uint8), group=group)
    return [
        (block, tensor.view(like.dtype)[place])
        for held, tensor in zip(of_rank, received, strict=True)
        for place, block in enumerate(held)
    ]


def _turned(pattern: Tensor) -> Tensor:
    return torch.where(pattern < 0, pattern ^ torch.iinfo(pattern.dtype).max, pattern)


def group_ranks(group: Any) -> list[int]:
    whole: Any = dist.group.WORLD if group is None else group
    return [dist.get_global_rank(whole, i) for i in range(dist.get_world_size(whole))]
