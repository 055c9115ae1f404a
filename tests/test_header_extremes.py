"""The ranks that the largest and the smallest words of all headers name."""

from __future__ import annotations

import random

import torch
from expecttest import TestCase

from meshplan.errors import SignatureMismatchError
from meshplan.execute._header import Header, RankHeader, extremes_error, ranked_digest, step_header
from meshplan.record import WORDS
from tests.test_collectives import step


def error_on(rank: int, brought: dict[int, Header]) -> SignatureMismatchError:
    """What one rank raises, from what two reductions leave of all headers."""
    brought = {peer: one.at(CALL) for peer, one in brought.items()}
    rows = [(*one.words, ranked_digest((peer, one))) for peer, one in brought.items()]
    ends: list[RankHeader] = []
    for extreme in (max, min):
        *words, last = map(extreme, zip(*rows, strict=True))
        ends.append((last, Header(tuple(words))))
    return extremes_error(ends, (rank, brought[rank]))


# Of all headers that have none.
CALL = 7


class TestExtremes(TestCase):
    def test_message(self) -> None:
        usual = step_header(step("exchange", sizes=(40,)), torch.float32, (8, 4), "exchange")
        longer = step_header(step("exchange", sizes=(40,)), torch.float32, (9, 4), "exchange")
        brought = {rank: longer if rank == 17 else usual for rank in range(40)}
        self.assertExpectedInline(
            str(error_on(5, brought)),
            """MP703: the ranks of one collective passed different tensors or options: ranks 17 and 39, and there may be more. Rank 5 passed float32[8, 4] for all_reduce sum over 40 ranks, contract v1/tree/wide/once, path exchange. Different: elements, shape. No result was returned on any rank: pass the same shape, dtype, operation and contract on every rank""",
        )

    def test_named_ranks_differ_and_no_rank_blames_itself(self) -> None:
        draw = random.Random(1)
        for _ in range(40):
            ranks = draw.sample(range(1 << 20), draw.randrange(33, 80))
            # With and without the word of a call of their own.
            words = draw.choice((WORDS, WORDS + 1))
            headers = [Header(tuple(draw.getrandbits(3) for _ in range(words))) for _ in range(3)]
            brought = {rank: draw.choice(headers[: draw.choice((2, 3))]) for rank in ranks}
            if len(set(brought.values())) == 1:
                continue
            errors = {rank: error_on(rank, brought) for rank in ranks}
            named = {
                str(one).partition(", and there may")[0].partition(": ")[2]
                for one in errors.values()
            }
            assert len(named) == 1
            first, second = (int(word) for word in named.pop().split() if word.isdigit())
            assert brought[first] != brought[second]
            for rank, error in errors.items():
                assert error.rank in (first, second)
                assert brought[error.rank] != brought[rank]
