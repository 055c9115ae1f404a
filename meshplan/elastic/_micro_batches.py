"""Which micro-batches of a step a rank computes, from which samples and with which random numbers.

Nothing here depends on the number of ranks, except which rank does the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Sampler

from meshplan.errors import ElasticError


def check_count(count: int) -> None:
    """Refuse a number of micro-batches that is not a positive integer."""
    if not isinstance(count, int) or count < 1:
        raise ElasticError(f"{count!r} micro-batches in a step; pass an integer of at least 1")


class MicroBatches:
    """The micro-batches of each step, those of them that this rank computes, and finished steps.

    Of M micro-batches and W ranks, rank g mod W computes micro-batch g in round g div W. If W does
    not divide M, ranks without a micro-batch in the last round repeat their one before: all ranks
    take part in the collectives of a round. The state (``state_dict``) does not depend on W: load
    it in a job of any other W.

    Attributes:
        count: M, micro-batches of a step on all ranks. It is fixed for a run.
        ranks: W, data-parallel ranks: any number from 1 to M.
        rank: of this process among them.
        rounds: M / W, rounded up.
        step: finished steps.
    """

    def __init__(self, count: int, *, ranks: int = 1, rank: int = 0) -> None:
        """Deal ``count`` micro-batches of each step to ``ranks`` ranks.

        Raises:
            ElasticError: numbers that do not fit, with those that do.
        """
        check_count(count)
        if ranks not in range(1, count + 1):
            raise ElasticError(
                f"ranks={ranks!r} of data parallelism for {count} micro-batches in a step; pass "
                f"at least 1 and at most {count}, so that each rank has a micro-batch"
            )
        if rank not in range(ranks):
            raise ElasticError(f"rank {rank} of {ranks} ranks; pass one from 0 to {ranks - 1}")
        self.count, self.ranks, self.rank, self.step = count, ranks, rank, 0
        self.rounds = -(-count // ranks)

    def index(self, round: int) -> int:
        """The micro-batch of the step, 0 to M - 1, that this rank computes in ``round``."""
        return (round - self.is_repeated(round)) * self.ranks + self.rank

    def is_repeated(self, round: int) -> bool:
        """Whether this rank computes a micro-batch in ``round`` that it has computed before.

        Then its gradients, its value in ``sum_scalars`` and its random numbers are left out of the
        step. Leave it out of your own logs and counts too.
        """
        return round * self.ranks + self.rank >= self.count

    def finish_step(self) -> None:
        """Count one more finished step. ``GradientAccumulator.finish`` calls it."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the number of finished steps, and M."""
        return {"step": self.step, "micro_batches": self.count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Call ``iter`` of the data loader again.

        Args:
            state_dict: of ``state_dict()``, in a job of any number of ranks.

        Raises:
            ElasticError: another number of micro-batches.
        """
        if state_dict["micro_batches"] != self.count:
            raise ElasticError(
                f"the checkpoint has {state_dict['micro_batches']} micro-batches in a step, this "
                f"job {self.count}; their number is fixed for a run, pass "
                f"{state_dict['micro_batches']}"
            )
        self.step = int(state_dict["step"])


class MicroBatchSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for a ``DataLoader``: samples of this rank's micro-batches.

    Micro-batch g of a step holds the samples from g b to (g + 1) b - 1 of that step, for b samples
    each. A repeated micro-batch (``MicroBatches.is_repeated``) has its samples again. Steps and
    epochs follow each other without a gap and without an end. Iteration starts
    behind the finished steps of ``micro_batches``, so that workers of the loader may read ahead.
    """

    def __init__(
        self,
        micro_batches: MicroBatches,
        samples: int,
        size: int,
        *,
        seed: int | None = None,
    ) -> None:
        """Deal the samples of a dataset.

        Args:
            micro_batches: of this rank, with the position of the run.
            samples: in the dataset.
            size: b, samples of a micro-batch.
            seed: shuffle each epoch by it; ``None``: in order.

        Raises:
            ElasticError: ``samples`` or ``size`` is not a positive integer.
        """
        if samples < 1 or size < 1:
            raise ElasticError(
                f"micro-batches of {size} out of {samples} samples; pass numbers of at least 1"
            )
        self._micro_batches, self._samples, self._size = micro_batches, samples, size
        self._seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        dealt = self._micro_batches
        epoch, order = -1, range(0)
        for at in range(dealt.step * dealt.rounds, 1 << 62):
            batch = []
            step, round = divmod(at, dealt.rounds)
            first = (step * dealt.count + dealt.index(round)) * self._size
            for place in range(first, first + self._size):
                if place // self._samples != epoch:
                    epoch = place // self._samples
                    order = self._order(epoch)
                batch.append(int(order[place % self._samples]))
            yield batch

    def _order(self, epoch: int) -> Any:
        if self._seed is None:
            return range(self._samples)
        generator = torch.Generator().manual_seed(mix(self._seed, epoch))
        return torch.randperm(self._samples, generator=generator)


@contextmanager
def seed_micro_batch(seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Seed torch's random numbers by a micro-batch, and restore their state at the end.

    The generators of CPUs and of the current accelerator are seeded, for dropout. Generators of
    Python and numpy are not.

    Args:
        seed: of the run.
        step: finished steps.
        micro_batch: 0 to M - 1.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if device is None else [torch.accelerator.current_device_index()]
    kind = "cuda" if device is None else device.type
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.manual_seed(mix(seed, step, micro_batch))
        yield


def mix(*values: int | str) -> int:
    """A seed of 64 bits; near values have unrelated ones."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")
