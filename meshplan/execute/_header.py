"""The header of a rank's part in a collective, as the words of a record that ranks compare.

Every rank sends its header in front of its data, or before it. All headers of one collective must
be equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshplan._dtypes import name_of
from meshplan.errors import UNLIKE_CALLS, SignatureMismatchError
from meshplan.planner import Step
from meshplan.record import (
    CALL_WORD,
    WORD_FIELDS,
    differences,
    pack_words,
    ranks_text,
    read_words,
)

HEADER_BYTES = 192
"""Bytes of one header, of its call and of the rank that it is of; a multiple of 64."""
HEADER_WORDS = HEADER_BYTES // 8
"""64-bit words of the same: the header's, the call, the rank, and zeros."""
RANK_WORD = CALL_WORD + 1
"""The place of the rank among them."""


class Header(NamedTuple):
    # As ``meshplan.record.pack_words`` packs them; then the call, if it was compared.
    words: tuple[int, ...]

    def at(self, call: int) -> Header:
        """The header in one call, whose word it gets; unchanged if it has one."""
        return self if len(self.words) > CALL_WORD else Header((*self.words, call))

    def __str__(self) -> str:
        """The header for people; only what the words hold."""
        return str(read_words(self.words))


RankHeader = tuple[int, Header]
"""A global rank and its header."""


_UNLIKE_TENSORS = (
    "No result was returned on any rank: pass the same shape, dtype, operation and contract on "
    "every rank"
)

# Of a number of 64 bits that also has a rank: over 16 million ranks.
_RANK_BITS = 24


@lru_cache(maxsize=1024)
def step_header(step: Step, dtype: torch.dtype, shape: tuple[int, ...], path: str) -> Header:
    """The header of one rank's part in a reduction of a summand of this dtype and shape. It has the
    path that runs, but no decision that only ranks with equal headers make later.
    """
    # Which rank gets which shard. Without shards the positions of the axes do not matter.
    cut = ""
    if step.scatter or step.lengths:
        cut = f"{step.axes} {step.scatter} {step.lengths}{' leaves' * step.leaves}"
    # The backend's own all-reduce runs under no contract, so ranks need not agree on one.
    contract = None if path == "native" else step.contract
    return Header(
        pack_words(
            kind=step.kind,
            path=path,
            dtype=name_of(dtype),
            shape=shape,
            op=step.op or "",
            contract=contract,
            axes=step.sizes,
            divisor=step.divisor or 0,
            norm=step.norm,
            layout=cut,
            inner=step.inner,
            between=step.between,
            chunk=step.chunk,
        )
    )


def tensor_header(summand: Tensor, step: Step, path: str, is_complex: bool) -> Header:
    """``step_header`` of ``summand``, which is real. With ``is_complex``, its last dim holds the
    real and the imaginary parts.
    """
    dtype, shape = summand.dtype, tuple(summand.shape)
    if is_complex:
        dtype, shape = dtype.to_complex(), shape[:-1]
    return step_header(step, dtype, shape, path)


def gather_header(
    dtype: torch.dtype,
    shape: Sequence[int],
    dim: int,
    lengths: tuple[int, ...],
) -> Header:
    # Of the result: shards may have different lengths, it has one shape on all ranks.
    whole = [*shape[:dim], sum(lengths), *shape[dim + 1 :]]
    return Header(
        pack_words(
            kind="all_gather",
            path="all_gather",
            dtype=name_of(dtype),
            shape=tuple(whole),
            axes=(len(lengths),),
            layout=f"{dim} {lengths}",
        )
    )


def list_header(
    kind: str,
    tensors: Sequence[Tensor],
    layout: Sequence[str],
    op: str,
    ranks: int,
) -> Header:
    """The header of a list of tensors in few messages. ``layout`` has the dtype and shape of each
    tensor that all ranks must share. ``op`` is empty for an all-gather.
    """
    elements = () if kind == "all_gather" else (sum(tensor.numel() for tensor in tensors),)
    return Header(
        pack_words(
            kind=kind,
            path="list",
            dtype=name_of(tensors[0].dtype),
            shape=elements,
            op=op,
            axes=(ranks,),
            layout=", ".join(layout),
        )
    )


def ranked_digest(mine: RankHeader) -> int:
    """A signed 64-bit number: a digest of the header, then the rank. Equal headers have equal
    digests, so if headers differ, the largest and the smallest number of all ranks belong to ranks
    with different headers.
    """
    rank, header = mine
    digest = hashlib.sha1(repr(header.words).encode()).digest()[:8]
    return int.from_bytes(digest, "little", signed=True) >> _RANK_BITS << _RANK_BITS | rank


def extremes_error(ends: Sequence[RankHeader], mine: RankHeader) -> SignatureMismatchError:
    """``mismatch_error`` where only the largest and the smallest words of all headers are known.
    ``ends`` has the largest of each word, then the smallest, with a ``ranked_digest`` in place of
    the rank.
    """
    (most, largest), (least, smallest) = ends
    first, last = (number & ((1 << _RANK_BITS) - 1) for number in (most, least))
    # At most one of them has this rank's header.
    other = last if most >> _RANK_BITS == ranked_digest(mine) >> _RANK_BITS else first
    fields = dict.fromkeys(
        field
        for field, high, low in zip(WORD_FIELDS, largest.words, smallest.words, strict=True)
        if high != low
    )
    unlike = WORD_FIELDS[CALL_WORD] in fields
    return SignatureMismatchError(
        f"the ranks of one collective passed different tensors or options: ranks "
        f"{min(first, last)} and {max(first, last)}, and there may be more. Rank {mine[0]} passed "
        f"{mine[1]}. Different: "
        f"{', '.join(fields)}. {UNLIKE_CALLS if unlike else _UNLIKE_TENSORS}",
        rank=other,
        unlike_calls=unlike,
    )


def mismatch_error(brought: Sequence[RankHeader], rank: int) -> SignatureMismatchError:
    """The error of a collective whose ranks have different headers. ``brought`` has those of all
    ranks, and the text is the same on all of them.
    """
    # From the headers of all ranks and nothing else, so that every rank raises the same text.
    by_header: dict[Header, list[int]] = {}
    for who, header in brought:
        by_header.setdefault(header, []).append(who)
    # Without the word of calls that are not counted.
    unlike = len({word for header in by_header for word in header.words[CALL_WORD:] if word}) > 1
    lines = []
    for header, ranks in by_header.items():
        number = f"call {read_words(header.words).get('call')}, " if unlike else ""
        lines.append(f"{ranks_text(ranks)}: {number}{header}")
    mine = next(header for who, header in brought if who == rank)
    other = next(who for who, header in brought if header != mine)
    shown = "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")
    found = differences({who: read_words(header.words) for who, header in brought})
    return SignatureMismatchError(
        f"the ranks of one collective passed different tensors or options. {shown}. Different: "
        f"{found}. {UNLIKE_CALLS if unlike else _UNLIKE_TENSORS}",
        rank=other,
        unlike_calls=unlike,
    )
