"""Path ``halving``: recursive halving over the contract's tree, and doubling of the results.

About 2 log2 W messages leave each rank, instead of 2 (W - 1). ``meshplan.planner._halving`` has the
schedule. Leaves travel in the tensor's own dtype, sums as partials, which no rounding has touched,
and results in the tensor's own dtype again. In float32 that is less than 2 times the tensor's
bytes for groups of a power of two.

A reduce-scatter orders the message such that each owner of a part of the schedule ends with its own
shard. In groups of other sizes some ranks own no part: their shards end with the owners of others,
and one more message sends each of them to its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._bits import flatten
from meshplan._dtypes import name_of
from meshplan._torch import local_tensor_mode
from meshplan.contract import Contract, Op, is_exact
from meshplan.definition import partial_dtype
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Message, Wire
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import combine_leaves, finish_partials, large_pages
from meshplan.orders import order_named
from meshplan.planner import (
    HalvingMessage,
    HalvingRound,
    Step,
    halving_schedule,
    merge_axes,
    share_owners,
)

# Reductions of several chunks side by side: while one travels on one level, others do on others.
#
# A chunk is a generator. It yields what it waits for: a collective that is under way, or the
# messages of a round between pairs of ranks. The rounds of all chunks in flight go out together,
# as one batch of the backend, so that a chunk adds a round instead of all of its rounds.
#
# The order of collectives and messages depends on the number of chunks and of their stages alone,
# which all ranks share.

_Result = TypeVar("_Result")
Pending = Callable[[], Any]
"""Waits for a collective under way, and returns its result."""
Stages = Generator[Pending | Sequence[Message], Any, _Result]
"""One chunk: a ``Pending`` is answered with its result, a round with ``None`` after its end."""
Rounds = Generator[Sequence[Message], None, _Result]
"""The rounds of one reduction: each is yielded, and exchanged before the next one."""


class _Chunk:
    """A chunk in flight, and what it waits for."""

    __slots__ = ("number", "request", "stages")

    def __init__(self, number: int, stages: Stages[Any]) -> None:
        self.number = number
        self.stages = stages
        self.request: Pending | Sequence[Message] = ()


def run_stages(
    chunks: Iterable[Stages[_Result]],
    send_round: Callable[[Sequence[Message]], Pending],
) -> list[_Result]:
    """Run all chunks, and return their results in order. One more starts in each turn, before the
    older ones are waited for. Calling back what ``send_round`` returns waits for all messages of
    its round, also if one fails. Raises the first failure of a chunk.
    """
    waiting = enumerate(chunks)
    results: dict[int, _Result] = {}
    # Newest first: what it sends next is on its way while older chunks wait.
    live: list[_Chunk] = []
    while True:
        number, stages = next(waiting, (0, None))
        fresh = [] if stages is None else [_Chunk(number, stages)]
        fresh = [one for one in fresh if _advance(one, None, results)]
        rounds = [one.request for one in live if not callable(one.request)]
        # Also without messages: on some backends all ranks take part in a round.
        if rounds:
            # After a failure, collectives of other chunks may be under way. They keep their memory,
            # and end with the connections of their group.
            send_round([message for one in rounds for message in one])()
        live = fresh + [one for one in live if _advance(one, _answer(one), results)]
        if not live and stages is None:
            return [results[number] for number in sorted(results)]


def _answer(chunk: _Chunk) -> Any:
    return chunk.request() if callable(chunk.request) else None


def _advance(chunk: _Chunk, answer: Any, results: dict[int, Any]) -> bool:
    """Let ``chunk`` go on until it waits again; whether it does."""
    try:
        chunk.request = chunk.stages.send(answer)
    except StopIteration as end:
        results[chunk.number] = end.value
        return False
    return True


class HalvingPath(Path):
    name = "halving"

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        found = super().why_not(step, groups, tensor)
        contract, tree = step.contract, order_named("tree").expression
        if found or contract is None or step.op is None:
            return found
        dtype = name_of(tensor.dtype)
        if not is_exact(step.op, dtype):
            if contract.ordering.undivided:
                return f"order {contract.order!r} {contract.ordering.undivided}"
            if contract.ordering.exact or contract.ordering.expression is not tree:
                return f"path halving adds in order 'tree', and not {contract.order!r}"
        return why_not_simulated()

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        reduction = _reduction(tensor, step, groups, wire)
        send = partial(wire.start_round, group=groups.flat, device=tensor.device)
        (total,) = run_stages([reduction.reduce(flatten(tensor))], send)
        (whole,) = run_stages([reduction.gather(reduction.finish(total))], send)
        wire.end_rounds(gathered=True)
        return Outcome(whole.view(tensor.shape), wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        group = groups.flat
        rank = group.rank()
        pieces = list(split_parts(tensor, step, group.size()))
        served = share_owners(step.sizes)
        lengths = [sum(pieces[peer].numel() for peer in peers) for peers in served]
        reduction = _reduction(tensor, step, groups, wire, [0, *accumulate(lengths)])
        message = torch.cat([pieces[peer] for peers in served for peer in peers])
        send = partial(wire.start_round, group=group, device=tensor.device)
        (total,) = run_stages([reduction.reduce(message)], send)
        finished = reduction.finish(total)
        wire.end_rounds(gathered=False)
        if len(served) < len(pieces):
            (finished,) = run_stages([hand_out(finished, pieces, served, rank)], send)
        shard = select_shard(tensor, step, rank)
        found, pending = gather_shard(finished, shard.shape, groups, wire)
        return Outcome(found, wire.log, pending)


def why_not_simulated() -> str:
    """Why no reduction halves now; empty if one can."""
    if local_tensor_mode() is None:
        return ""
    return "ranks of one simulation issue the same collectives, those of halving differ"


def _reduction(
    tensor: Tensor,
    step: Step,
    groups: StepGroups,
    wire: Wire,
    cuts: Sequence[int] | None = None,
) -> HalvedReduction:
    assert step.op is not None
    assert step.contract is not None
    how = step.op, step.contract, step.divisor, tensor.dtype, step.sizes
    numel = tensor.numel() if cuts is None else cuts[-1]
    return HalvedReduction(*how, groups.flat, wire, numel=numel, cuts=cuts)


def hand_out(
    own: Tensor, pieces: Sequence[Tensor], served: Sequence[Sequence[int]], rank: int
) -> Rounds[Tensor]:
    """Bring finished shards to the ranks that own no part; returns this rank's own. ``own`` are the
    results of this rank's part, and ``pieces`` has a tensor like its shard for each rank.
    """
    finished = torch.empty_like(pieces[rank])
    messages = []
    for owner, *others in served:
        if rank == owner:
            lengths = [pieces[peer].numel() for peer in (owner, *others)]
            finished, *rest = torch.split(own, lengths)
            messages = [
                Message(True, part.view(torch.uint8), peer)
                for peer, part in zip(others, rest, strict=True)
            ]
        elif rank in others:
            messages = [Message(False, finished.view(torch.uint8), owner)]
    yield messages
    return finished


class HalvedReduction:
    """One reduction over the ranks of a group: of leaves, or of partials that others combined. Run
    ``reduce``, then ``finish`` unless the sum is combined further, then ``gather`` unless it stays
    scattered, and ``wire.end_rounds``. Rounds of several reductions may go out together.
    """

    def __init__(
        self,
        op: Op,
        contract: Contract,
        divisor: int | None,
        dtype: torch.dtype,
        shape: tuple[int, ...],  # sizes of the axes over the ranks of ``group``, outermost first
        group: ProcessGroup,
        wire: Wire,
        *,
        numel: int,  # elements that each rank passes
        # Where parts of the message begin, in elements, and its length: ``parts + 1`` numbers.
        # ``None``: equal parts of ``numel``.
        cuts: Sequence[int] | None = None,
        raised: bool = False,  # the inputs are partials, from which the tree continues
    ) -> None:
        self._op, self._contract, self._divisor, self._dtype = (
            op,
            contract,
            divisor,
            dtype,
        )
        self._numel, self._cuts = numel, cuts
        self._partial = partial_dtype(op, dtype, contract)
        self._leaf = self._partial if raised else dtype
        # Partials are wide already: only rounding at every node is repeated.
        node = contract.rounding == "node"
        self._of_partials = contract if node else replace(contract, accumulate="wide")
        self._plan = halving_schedule(shape, group.rank())
        first = self._plan.owned
        # The slice of the message whose result this rank holds; empty if it holds none.
        self.owned = slice(0, 0) if first is None else self._slice(first, first + 1)
        # A message has a sum and a tail, of all elements where the parts are uneven.
        nbytes = 2 * numel * max(self._partial.itemsize, self._leaf.itemsize)
        wire.begin_rounds(group, nbytes, inline=len(merge_axes(shape)) == 1)

    def reduce(self, message: Tensor) -> Rounds[Tensor]:
        """Return the sum over ``owned`` of all ranks' messages, unfinished. ``message`` is flat and
        contiguous, and is not changed.
        """
        total, start, tail, tail_start = message.detach(), 0, message, 0
        for one in (*self._plan.rounds, *self._idle()):
            sends = []
            for sent in one.sends:
                parts = [self._part(total, start, sent)]
                if sent.tail:
                    parts.append(self._part(tail, tail_start, sent))
                flat = [part.view(torch.uint8) for part in parts]
                data = flat[0] if len(flat) == 1 else torch.cat(flat)
                sends.append(Message(True, data, sent.peer))
            came = [self._memory(message, got) for got in one.receives]
            peers = [got.peer for got in one.receives]
            yield sends + [Message(False, *got) for got in zip(came, peers, strict=True)]
            summands = list[tuple[int, Tensor]]()
            for got, data in zip(one.receives, came, strict=True):
                first, behind = self._read(got, data)
                if got.is_tail:
                    tail, tail_start = first, got.start
                    continue
                summands.append((got.peer, first))
                if behind is not None:
                    tail, tail_start = behind, got.start
            if summands:
                operands = [summand for _, summand in sorted(summands, key=lambda pair: pair[0])]
                operands.insert(one.place, total[self._slice(one.start, one.stop, start)])
                total, start = self._add(operands), one.start
            if one.closes:
                kept = self._slice(one.start, one.stop, tail_start)
                total = self._add([total, tail[kept]])
        if self._plan.owned is None:
            total = total[:0]
        return total if total.dtype is self._partial else self._raise(total)

    def finish(self, total: Tensor) -> Tensor:
        how = self._op, [1], self._contract, self._dtype, self._divisor
        return finish_partials([total], *how)

    def gather(self, part: Tensor, room: Tensor | None = None) -> Rounds[Tensor]:
        """Return the whole, from the flat ``part`` of all ranks, of any dtype, in ``room`` (apart
        from ``part``) or new memory.
        """
        whole = large_pages(part.new_empty(self._numel)) if room is None else room
        whole[self.owned] = part
        flat = whole.view(torch.uint8)
        for one in (*self._idle(), *self._plan.gather()):
            yield [
                Message(sends, flat[self._slice(m.start, m.stop, 0, part.itemsize)], m.peer)
                for sends, messages in ((True, one.sends), (False, one.receives))
                for m in messages
            ]
        return whole

    def _idle(self) -> list[HalvingRound]:
        """The rounds of other ranks that this one has no message in."""
        return [HalvingRound((), (), 0, 0)] * (self._plan.turns - len(self._plan.rounds))

    def _slice(self, start: int, stop: int, base: int = 0, item: int = 1) -> slice:
        """Elements of an interval of parts, counted from part ``base``; or their bytes."""
        return slice(*((self._cut(part) - self._cut(base)) * item for part in (start, stop)))

    def _cut(self, part: int) -> int:
        if self._cuts is not None:
            return self._cuts[part]
        return self._numel * part // self._plan.parts

    def _part(self, values: Tensor, base: int, message: HalvingMessage) -> Tensor:
        return values[self._slice(message.start, message.stop, base)]

    def _width(self, kind: str) -> torch.dtype:
        return self._leaf if kind == "leaf" else self._partial

    def _memory(self, like: Tensor, message: HalvingMessage) -> Tensor:
        width = sum(self._width(kind).itemsize for kind in (message.sum, message.tail) if kind)
        span = self._slice(message.start, message.stop)
        nbytes = (span.stop - span.start) * width
        return large_pages(like.new_empty(nbytes, dtype=torch.uint8))

    def _read(self, message: HalvingMessage, data: Tensor) -> tuple[Tensor, Tensor | None]:
        """The sum and the tail in a received message."""
        dtype = self._width(message.sum)
        if not message.tail:
            return data.view(dtype), None
        span = self._slice(message.start, message.stop)
        middle = (span.stop - span.start) * dtype.itemsize
        return data[:middle].view(dtype), data[middle:].view(self._width(message.tail))

    def _add(self, operands: list[Tensor]) -> Tensor:
        shape = [len(operands)]
        if all(x.dtype is self._dtype for x in operands):
            return combine_leaves(operands, self._op, shape, self._contract)
        raised = [x if x.dtype is self._partial else self._raise(x) for x in operands]
        return combine_leaves(raised, self._op, shape, self._of_partials)

    def _raise(self, leaf: Tensor) -> Tensor:
        return combine_leaves([leaf], self._op, [1], self._contract)


PATH = HalvingPath()
