"""Micro-batches are the same for every number of ranks: samples, random numbers, position."""

from __future__ import annotations

import torch
from expecttest import TestCase
from torch.utils.data import DataLoader

from meshplan.elastic import MicroBatches, MicroBatchSampler, seed_micro_batch
from meshplan.errors import ElasticError
from tests.refusals import refusal

M = 16


def deal(ranks: int, steps: int, state: dict[str, int] | None = None) -> list[list[int]]:
    """The samples of each micro-batch of some steps, in the order of micro-batches."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        dealt = MicroBatches(M, ranks=ranks, rank=rank)
        if state is not None:
            dealt.load_state_dict(state)
        batches = iter(MicroBatchSampler(dealt, samples=50, size=3, seed=7))
        for step in range(steps):
            for round in range(dealt.rounds):
                at, batch = step * M + dealt.index(round), next(batches)
                # Ranks without a micro-batch in the last round repeat one of their own.
                assert dealt.is_repeated(round) is (at in found)
                assert found.setdefault(at, batch) == batch
            dealt.finish_step()
    assert sorted(found) == list(range(steps * M))
    return [found[g] for g in sorted(found)]


def test_micro_batches_do_not_depend_on_the_number_of_ranks() -> None:
    wanted = deal(1, 3)
    for ranks in range(2, M + 1):
        assert deal(ranks, 3) == wanted
    stream = [sample for batch in wanted for sample in batch]
    for epoch in range(2):
        assert sorted(stream[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert stream[:50] != stream[50:100]


def test_samples_are_in_order_without_a_seed() -> None:
    batches = iter(MicroBatchSampler(MicroBatches(4, ranks=2, rank=1), samples=10, size=2))
    assert [next(batches) for _ in range(4)] == [[2, 3], [6, 7], [0, 1], [4, 5]]


def test_checkpoint_is_dealt_again() -> None:
    wanted = deal(8, 4)
    dealt = MicroBatches(M, ranks=8, rank=3)
    for _ in range(2):
        dealt.finish_step()
    for ranks in (1, 3, 4, 7, 16):
        assert deal(ranks, 2, dealt.state_dict()) == wanted[2 * M :]


def test_workers_that_read_ahead_do_not_move_the_position() -> None:
    dealt = MicroBatches(M, ranks=8, rank=3)
    sampler = MicroBatchSampler(dealt, samples=50, size=3, seed=7)
    loader = iter(DataLoader(range(50), batch_sampler=sampler, num_workers=1))  # type: ignore[arg-type]
    for _ in range(2):
        next(loader)
    dealt.finish_step()
    assert dealt.state_dict() == {"step": 1, "micro_batches": M}
    assert next(iter(sampler)) == deal(8, 2)[M + 3]


def test_random_numbers_follow_the_micro_batch() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    found = {}
    for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)):
        with seed_micro_batch(*key):
            drawn = torch.rand(4)
        assert torch.equal(found.setdefault(key, drawn), drawn)
    assert len({tuple(one.tolist()) for one in found.values()}) == 4
    assert torch.equal(torch.random.get_rng_state(), state)


class TestErrors(TestCase):
    maxDiff = None

    def test_numbers_that_do_not_fit_are_refused(self) -> None:
        dealt, other = MicroBatches(16), MicroBatches(8)
        messages = []
        for call in (
            lambda: MicroBatches(16, ranks=17),
            lambda: MicroBatches(1, ranks=2),
            lambda: MicroBatches(7, ranks=0),
            lambda: MicroBatches(16, ranks=4, rank=4),
            lambda: MicroBatches(0),
            lambda: dealt.load_state_dict(other.state_dict()),
            lambda: MicroBatchSampler(dealt, 0, 2),
        ):
            messages.append(refusal(ElasticError, call))
        self.assertExpectedInline(
            "\n".join(messages),
            """\
MP902: ranks=17 of data parallelism for 16 micro-batches in a step; pass at least 1 and at most 16, so that each rank has a micro-batch
MP902: ranks=2 of data parallelism for 1 micro-batches in a step; pass at least 1 and at most 1, so that each rank has a micro-batch
MP902: ranks=0 of data parallelism for 7 micro-batches in a step; pass at least 1 and at most 7, so that each rank has a micro-batch
MP902: rank 4 of 4 ranks; pass one from 0 to 3
MP902: 0 micro-batches in a step; pass an integer of at least 1
MP902: the checkpoint has 8 micro-batches in a step, this job 16; their number is fixed for a run, pass 8
MP902: micro-batches of 2 out of 0 samples; pass numbers of at least 1""",
        )
