"""Path ``integer``: the exact order by the backend's own reductions of integers.

A maximum of one byte per element, then a sum of one int64 per element. Both are the same in any
order, so that the backend may use its ring, its tree or a switch. What the integers mean:
``_scaled_integers``. All ranks of a part find the same ambiguous elements in it. Their summands are
exchanged and reduced by the definition; above ``MOST_REPAIRED`` of a part, those of all elements.

9 bytes per element travel in place of the 2 or 4 of its dtype; 17 if sums are in float64.

Checksums cover the messages where they are requested (``_checksums``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from meshplan._bits import flatten
from meshplan._dtypes import name_of
from meshplan.contract import is_exact
from meshplan.definition import refuse_flushed_subnormals
from meshplan.execute._checksums import CheckedMessages
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Wire, fold, split_equally
from meshplan.execute.paths._exchange import PATH as EXCHANGE
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import (
    MAX_RANKS,
    find_codes,
    from_integers,
    large_pages,
    to_integers,
    words_of,
)
from meshplan.planner import Cost, PlannedReduction, Step, integer_cost

MOST_REPAIRED = 0.25
"""Above this fraction of ambiguous elements all elements are exchanged, without a list of them."""


class IntegerPath(Path):
    """See the module. Sizes depend on the data, so that no graph holds it. With ``verify``,
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

    def cost(self, reduction: PlannedReduction) -> Cost:
        """As in ``Path``: a maximum of 1 byte and a sum of 8 or 16 bytes per element."""
        return integer_cost(reduction)

    def _repaired(
        self, messages: CheckedMessages, parts: Tensor | Sequence[Tensor], step: Step
    ) -> Tensor:
        """The contract's sums of this rank's part."""
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
