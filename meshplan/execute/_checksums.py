"""The messages of path ``integer``, and checksums that any single flipped bit in them breaks.

The checksum of words is their sum with odd weights, modulo 2^64. One flipped bit changes a word by
2^j, and an odd multiple of it is not 0. Checksums are linear: that of a sum is the sum of those of
its summands, so that it travels as one more summand. Maxima are not linear: codes travel twice.

What was found wrong is compared by a sum over all ranks before anything depends on it, so that all
of them raise. This verdict is summed three times, and each bit of it is that of two sums at least:
one flipped bit in it changes it on no rank. A bit that a maximum discards changes nothing, and is
not found. What only one rank computes, it computes twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshplan._torch import functional_operators as _ops
from meshplan.errors import ChecksumError
from meshplan.execute._groups import StepGroups
from meshplan.execute._wire import Wire
from meshplan.kernel import integers
from meshplan.planner import Step

_GOLDEN = -7046029254386353131
# What a rank compares with the others, in this order.
_FIELDS = (
    *(
        "exponents",
        "integers",
        "exchanged elements",
        "lists of elements",
        "repeated arithmetic",
    ),
    "results",
)
_EXPONENTS, _INTEGERS, _EXCHANGED, _LISTS, _ARITHMETIC, _RESULTS = range(6)


def find_checksum(words: Tensor) -> Tensor:
    """The checksum over the last dim of a tensor of numbers of at most 64 bits: int64."""
    found = integers(words).to(torch.int64)
    places = torch.arange(found.shape[-1], dtype=torch.int64, device=found.device)
    return (found * ((places * _GOLDEN) | 1)).sum(-1)


class CheckedMessages:
    """The collectives of one reduction over one group. Headers are compared when it is created.
    Without ``verify`` there are no checksums, and ``compare`` does nothing.
    """

    def __init__(
        self,
        step: Step,
        groups: StepGroups,
        wire: Wire,
        verify: bool,
        device: torch.device,
    ) -> None:
        wire.compare()
        self._step, self._wire, self._verify = step, wire, verify
        self._group = groups.flat
        self._ranks = groups.flat.size()
        self._found = torch.zeros(len(_FIELDS), dtype=torch.int64, device=device)
        self._codes: tuple[Tensor, ...] = ()

    def maximum(self, codes: Tensor) -> Tensor:
        """The maximum over all ranks, of each element of a flat tensor."""
        found = self._all_reduce(torch.cat([codes, codes]) if self._verify else codes, "max")
        self._codes = torch.split(found, codes.numel())
        return self._codes[0]

    def sum(self, words: Tensor) -> Tensor:
        """The sum over all ranks: int64, flat."""
        return self._summed(self._all_reduce(self._with_checksum(words), "sum"))

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sum over all ranks of the row of this one: int64, one row for each rank."""
        op = _ops.reduce_scatter_tensor
        message = self._with_checksum(rows).view(-1)
        found = self._wire.issue(op, message, "sum", self._ranks, self._group.group_name)
        return self._summed(_ops.wait_tensor(found))

    def exchange(self, parts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """As ``Wire.exchange``."""
        leaves = self._wire.exchange(parts, self._group)
        if self._verify:
            sent = [find_checksum(part) for part in parts]
            came = [find_checksum(leaf) for leaf in leaves]
            self._found[_EXCHANGED] += torch.stack(sent).sum() - torch.stack(came).sum()
        return leaves

    def gather(self, words: Tensor) -> Tensor:
        """The words of all ranks, one row for each: int64, equally many on all ranks."""
        rows = self.gather_flat(self._with_checksum(words)).view(self._ranks, -1)
        if not self._verify:
            return rows
        self._found[_LISTS] += (find_checksum(rows[:, :-1]) != rows[:, -1]).sum()
        return rows[:, :-1]

    def gather_flat(self, tensor: Tensor) -> Tensor:
        """As ``Wire.all_gather``, waited for and without a checksum."""
        return self._wire.wait(self._wire.all_gather(tensor, self._group))

    def compare(self, result: Tensor | None = None) -> None:
        """Raise ChecksumError, which names the reduction, on all ranks if a checksum is wrong on
        any. ``result`` is the flat result that all ranks should have.
        """
        if not self._verify:
            return
        first, second = self._codes
        self._found[_EXPONENTS] = (first != second).sum()
        digest = 0 if result is None else find_checksum(result)
        self._found[_RESULTS] = digest
        one, two, three = self._all_reduce(self._found.repeat(3), "sum").view(3, -1)
        total = (one & two) | (one & three) | (two & three)
        # A result that differs on one rank changes this sum by an odd multiple of 2^j, and the
        # product by as much ``ranks`` times: not by the same, with less than 2^32 ranks.
        total[_RESULTS] -= self._ranks * digest
        wrong = [name for name, value in zip(_FIELDS, total.tolist(), strict=True) if value]
        self._found.zero_()
        if wrong:
            step = self._step
            contract = "" if step.contract is None else f", contract {step.contract.id}"
            raise ChecksumError(
                f"{step.kind} {step.op} over {self._ranks} ranks of group "
                f"{self._group.group_name}{contract}: the checksum of its {' and '.join(wrong)} is "
                "wrong, so that a bit changed on its way or in memory. No rank has a result: stop "
                "the job and check the hosts, devices and links of these ranks"
            )

    def check_repeated(self, first: Tensor, second: Tensor) -> None:
        """Check that two computations have the same bits, at the next ``compare``."""
        self._found[_ARITHMETIC] += find_checksum(first) - find_checksum(second)

    def check_parts(self, part: Tensor, whole: Tensor, sharers: int) -> None:
        """Check, at the next ``compare``, that ``whole`` consists of the flat parts of ``sharers``
        ranks. The last parts may be shorter or empty.
        """
        if not self._verify:
            return
        width = -(-whole.numel() // sharers)
        chunks = [find_checksum(chunk) for chunk in torch.split(whole, width)]
        # Every part is in the shard of every sharer.
        self._found[_EXCHANGED] += torch.stack(chunks).sum() - sharers * find_checksum(part)

    def _with_checksum(self, words: Tensor) -> Tensor:
        if not self._verify:
            return words
        return torch.cat([words, find_checksum(words)[..., None]], -1)

    def _summed(self, words: Tensor) -> Tensor:
        if not self._verify:
            return words
        self._found[_INTEGERS] += find_checksum(words[:-1]) != words[-1]
        return words[:-1]

    def _all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        found = self._wire.issue(_ops.all_reduce, tensor, op, self._group.group_name)
        reduced: Tensor = _ops.wait_tensor(found)
        return reduced
