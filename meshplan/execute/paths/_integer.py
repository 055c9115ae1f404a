"""Path ``integer``: the exact order by the backend's own reductions of integers.

A maximum of one byte per element, then a sum of one int64 per element. Both are the same in any
order, so that the backend may use its ring, its tree or a switch. What the integers mean:
``_scaled_integers``. All ranks of a part find the same ambiguous elements in it. Their summands are
exchanged and reduced by the definition; above ``MOST_REPAIRED`` of a part, those of all elements.

9 bytes per element travel in place of the 2 or 4 of its dtype; 17 if sums are in float64.

Checksums cover the messages where they are requested (``CheckedMessages``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from meshplan._bits import flatten
from meshplan._dtypes import name_of
from meshplan._torch import functional_operators as _ops
from meshplan.contract import is_exact
from meshplan.definition import refuse_flushed_subnormals
from meshplan.errors import ChecksumError
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Wire, fold, split_equally
from meshplan.execute.paths._exchange import PATH as EXCHANGE
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import (
    MAX_RANKS,
    find_codes,
    from_integers,
    integers,
    large_pages,
    to_integers,
    words_of,
)
from meshplan.planner import Step

# The messages of path ``integer``, and checksums that any single flipped bit in them breaks.
#
# The checksum of words is their sum with odd weights, modulo 2^64. One flipped bit changes a word
# by 2^j, and an odd multiple of it is not 0. Checksums are linear: that of a sum is the sum of
# those of its summands, so that it travels as one more summand. Maxima are not linear: codes
# travel twice.
#
# The errors of all ranks are summed before any result is used, so that all ranks raise. This
# verdict is summed three times, and each of its bits is the majority: one flipped bit changes the
# verdict on no rank. A bit that a maximum discards changes no result, and is not found. Values that
# only one rank computes are computed twice.

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
        found = self._all_reduce(torch.cat([codes, codes]) if self._verify else codes, "max")
        self._codes = torch.split(found, codes.numel())
        return self._codes[0]

    def sum(self, words: Tensor) -> Tensor:
        return self._summed(self._all_reduce(self._with_checksum(words), "sum"))

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sum over all ranks of the row of this one: int64, one row for each rank."""
        op = _ops.reduce_scatter_tensor
        message = self._with_checksum(rows).view(-1)
        found = self._wire.issue(op, message, "sum", self._ranks, self._group.group_name)
        return self._summed(_ops.wait_tensor(found))

    def exchange(self, parts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
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


MOST_REPAIRED = 0.25
"""Above this fraction of ambiguous elements all elements are exchanged, without a list of them."""


class IntegerPath(Path):
    """Sums of integers. Message sizes depend on the data, so no graph holds it. With ``verify``,
    checksums cover the messages.
    """

    traced = False
    captured = False

    def __init__(self, *, verify: bool) -> None:
        self.name = "integer_checksum" if verify else "integer"
        self.verify = verify
        # A request for checksums is not met by a path without them.
        self.replaceable = not verify

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        contract, dtype = step.contract, name_of(tensor.dtype.to_real())
        assert contract is not None
        assert step.op is not None
        if not contract.ordering.exact:
            return f"path {self.name} adds in order='exact', and this is order={contract.order!r}"
        if is_exact(step.op, dtype):
            return "" if not self.verify else f"{step.op} of {dtype} has no checksum"
        if step.group_size > MAX_RANKS:
            return f"path {self.name} has at most {MAX_RANKS} ranks"
        return super().why_not(step, groups, tensor)

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """As in ``Path``. Maxima, minima and integers are exchanged."""
        assert step.op is not None
        if is_exact(step.op, name_of(tensor.dtype)):
            return EXCHANGE.all_reduce(tensor, step, groups, wire)
        messages = self._messages(tensor, step, groups, wire)
        flat = flatten(tensor.detach())
        ranks, accumulator = step.group_size, _accumulator(tensor, step)
        codes = messages.maximum(find_codes(flat, accumulator))
        words = flat.new_empty((words_of(accumulator), flat.numel()), dtype=torch.int64)
        to_integers(flat, codes, ranks, accumulator, large_pages(words))
        total = messages.sum(words.view(-1)).view(words.shape)
        result, found = from_integers(total, codes, ranks, accumulator, flat.dtype, step.divisor)
        messages.compare(result)
        if found.numel() > 0:
            whole = found.numel() > MOST_REPAIRED * flat.numel()
            picked = flat if whole else flat[found]
            own = self._repaired(messages, split_equally(picked, ranks), step)
            gathered = messages.gather_flat(own)
            messages.check_parts(own, gathered, ranks)
            repaired = gathered[: picked.numel()]
            result = repaired if whole else result.index_copy_(0, found, repaired)
            messages.compare(result)
        return Outcome(result.view(tensor.shape), wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """As in ``Path``: each rank sums its part, and lists its ambiguous elements to all."""
        assert step.op is not None
        if is_exact(step.op, name_of(tensor.dtype)):
            return EXCHANGE.reduce_scatter(tensor, step, groups, wire)
        messages = self._messages(tensor, step, groups, wire)
        rank, ranks = groups.flat.rank(), step.group_size
        accumulator = _accumulator(tensor, step)
        parts = list(split_parts(tensor.detach(), step, ranks))
        lengths = [part.numel() for part in parts]
        flat = torch.cat(parts)
        codes = torch.split(messages.maximum(find_codes(flat, accumulator)), lengths)
        # One length for all ranks.
        words = words_of(accumulator)
        rows = flat.new_zeros((ranks, words * max(lengths)), dtype=torch.int64)
        for row, part, code in zip(rows, torch.split(flat, lengths), codes, strict=True):
            out = row[: words * part.numel()].view(words, -1)
            to_integers(part, code, ranks, accumulator, out)
        total = messages.sum_rows(rows)[: words * lengths[rank]].view(words, -1)
        finish = partial(
            from_integers,
            total,
            codes[rank],
            ranks,
            accumulator,
            flat.dtype,
            step.divisor,
        )
        finished, found = finish()
        if self.verify:
            messages.check_repeated(finished, finish()[0])
        counts = messages.gather(found.new_tensor([found.numel()]))
        messages.compare()
        numbers = counts.view(-1).tolist()
        if max(numbers) > MOST_REPAIRED * max(lengths):
            finished = self._repaired(messages, parts, step)
            messages.compare()
        elif max(numbers) > 0:
            listed = found.new_zeros(max(numbers))
            listed[: found.numel()] = found
            lists = messages.gather(listed)
            messages.compare()
            picked = [p[i[:n]] for p, i, n in zip(parts, lists, numbers, strict=True)]
            finished.index_copy_(0, found, self._repaired(messages, picked, step))
            messages.compare()
        shard = select_shard(tensor, step, rank)
        whole, pending = gather_shard(finished, shard.shape, groups, wire)
        if pending and self.verify:
            whole, pending = wire.wait(whole), False
        if groups.gather is not None:
            messages.check_parts(finished, whole.view(-1), groups.gather.size())
            messages.compare()
        return Outcome(whole, wire.log, pending)

    def _repaired(
        self,
        messages: CheckedMessages,
        parts: Tensor | Sequence[Tensor],
        step: Step,
    ) -> Tensor:
        leaves = messages.exchange(parts)
        own = fold(leaves, step)
        if self.verify:
            # No order of the leaves changes a bit.
            messages.check_repeated(own, fold(leaves[::-1], step))
        return own

    def _messages(
        self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire
    ) -> CheckedMessages:
        refuse_flushed_subnormals(tensor)
        return CheckedMessages(step, groups, wire, self.verify, tensor.device)


def _accumulator(tensor: Tensor, step: Step) -> torch.dtype:
    assert step.contract is not None
    wide = step.contract.accumulator(name_of(tensor.dtype)) == "float64"
    return torch.float64 if wide else torch.float32


PATH = IntegerPath(verify=False)
CHECKED = IntegerPath(verify=True)
