"""The exchange in blocks: the ranks of a node combine their summands first.

The group is split into blocks of ``step.inner`` consecutive ranks, which are subtrees of the
contract's tree. So the bits are those of the flat exchange, whatever each level does:

* Inside a block the wire carries the tensor's own dtype, in an all-to-all.
* Between blocks it carries partials, which no rounding has touched, and of each only a
  1 / inner-th part: in an all-to-all, or in rounds of recursive halving (``step.between``). In an
  exact order a partial is the words of a sum (``EXACT_WORDS``), in an all-to-all.

With n ranks in a block and m blocks, (m - 1) / (n m) of the tensor's elements leave each rank for
other blocks as partials, and as many to gather an all-reduce; flat it is n times as many.

Large tensors are reduced in chunks of elements, so that both levels are busy at once. Headers are
compared before. Chunks in flight hold the leaves of two, and of the others partials and results of
a 1 / inner-th part. The groups: ``StepGroups``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._bits import flatten
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import gather_shard, select_shard, split_parts
from meshplan.execute._wire import Wire, is_compiled, split_equally
from meshplan.execute.paths._halving import (
    HalvedReduction,
    Pending,
    Stages,
    hand_out,
    run_stages,
    why_not_simulated,
)
from meshplan.execute.paths._path import Outcome, Path
from meshplan.kernel import combine_leaves, finish_partials, large_pages
from meshplan.planner import (
    Step,
    count_chunks,
    cut_chunks,
    share_owners,
    weigh_chunks,
)


class HierarchicalPath(Path):
    """An ``exchange`` in blocks. Plans choose it and its blocks, users do not."""

    name = "hierarchical"
    offered = False

    @property
    def reported_name(self) -> str:
        return "exchange"

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        return "" if step.inner > 1 else "the plan has no blocks"

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Each level reduces on the way up, and gathers on the way down."""
        levels = Levels(step, groups, wire, tensor)
        chunks = _count(tensor, step)
        if chunks == 1 and not levels.halves:
            (gathered,) = levels.run([levels.all_reduce(tensor)])
            return Outcome(gathered[: tensor.numel()].view(tensor.shape), wire.log)
        wire.compare()
        flat = flatten(tensor.detach())
        result = large_pages(torch.empty_like(flat))
        lengths = cut_chunks(flat.numel(), chunks, step.group_size)
        pairs = zip(
            torch.split(flat, lengths),
            torch.split(result, lengths),
            strict=True,
        )
        levels.run(_write(place, levels.all_reduce(chunk, place)) for chunk, place in pairs)
        return Outcome(result.view(tensor.shape), wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        """Each level reduces; ranks of one shard gather the parts that they have finished."""
        levels = Levels(step, groups, wire, tensor)
        parts = list(split_parts(tensor, step, step.group_size))
        chunks = _count(tensor, step)
        if chunks == 1 and not levels.halves:
            (finished,) = levels.run([levels.reduce_scatter(parts)])
        else:
            wire.compare()
            pieces = [_split(part, chunks) for part in parts]
            rows = levels.run(levels.reduce_scatter(chunk) for chunk in zip(*pieces, strict=True))
            finished = torch.cat(rows)
        shard = select_shard(tensor, step, groups.position)
        found, pending = gather_shard(finished, shard.shape, groups, wire)
        return Outcome(found, wire.log, pending)


class Levels:
    """The levels of a step, and the stages of a chunk through them."""

    def __init__(self, step: Step, groups: StepGroups, wire: Wire, tensor: Tensor) -> None:
        dtype = tensor.dtype
        if groups.whole is None:
            inner, outer = groups.nested
        else:
            # Messages between two ranks have no headers.
            wire.compare()
            inner, outer = groups.split(step.inner)
        assert step.op is not None
        assert step.contract is not None
        self._sizes = inner.size(), outer.size()
        self._place = inner.rank()
        self._inner, self._outer, self._wire = inner, outer, wire
        self._combine = partial(
            combine_leaves,
            op=step.op,
            shape=step.inner_sizes,
            contract=step.contract,
        )
        self._finish = partial(
            finish_partials,
            op=step.op,
            shape=step.outer_sizes,
            contract=step.contract,
            dtype=dtype,
            divisor=step.divisor,
        )
        # Blocks reduce by recursive halving; headers are compared before.
        self.halves = step.between == "halving" and not why_not_simulated()
        self._outer_sizes, self._block = step.outer_sizes, outer.rank()
        self._halved = partial(
            HalvedReduction,
            step.op,
            step.contract,
            step.divisor,
            dtype,
            step.outer_sizes,
            outer,
            wire,
            raised=True,
        )
        self.run = partial(
            run_stages,
            send_round=partial(wire.start_round, group=outer, device=tensor.device),
        )

    def all_reduce(self, chunk: Tensor, place: Tensor | None = None) -> Stages[Tensor]:
        """The whole result of a chunk, padded at its end; it may be in ``place``."""
        ranks, blocks = self._sizes
        # Rank j of block o finishes slice j * blocks + o, not that of its position in the group:
        # the slices of one j lie together, and both gathers put theirs where they belong.
        slices = split_equally(chunk, ranks * blocks).view(ranks, -1)
        # Leaves arrive where results do later, and so do partials of their dtype.
        if place is not None and place.numel() != slices.numel():
            place = None
        mine = None if place is None else place.view(ranks, -1)[self._place]
        combined = self._combine((yield self._send(slices, self._inner, place)))
        del slices
        if self.halves:
            halved = self._halved(numel=combined.numel())
            total = yield from halved.reduce(combined)
            finished = yield from halved.gather(halved.finish(total), mine)
        else:
            # An exact partial has several words, which travel together.
            words = combined.shape[:-1]
            messages = combined.view(*words, blocks, -1).movedim(-2, 0).reshape(blocks, -1)
            # Of slices of one element that is a view of transposed words.
            messages = messages.contiguous()
            room = mine if messages.dtype is chunk.dtype and not words else None
            own = self._finish_rows((yield self._send(messages, self._outer, room)), words)
            finished = yield self._wire.start_gather(own, self._outer, mine)
        del combined
        whole: Tensor = yield self._wire.start_gather(finished, self._inner, place)
        return whole

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Stages[Tensor]:
        """This rank's part of the result; ``parts`` has one for each position in the group."""
        ranks, _ = self._sizes
        # To rank j of the block goes what rank j of any block is to finish.
        by_peer = [torch.cat(tuple(parts[j::ranks])) for j in range(ranks)]
        lengths = [part.numel() for part in parts[self._place :: ranks]]
        combined = self._combine((yield self._send(by_peer, self._inner)))
        del by_peer
        pieces = torch.split(combined, lengths, dim=-1)
        if not self.halves:
            messages = [piece.reshape(-1) for piece in pieces]
            return self._finish_rows(
                (yield self._send(messages, self._outer)),
                combined.shape[:-1],
            )
        served = share_owners(self._outer_sizes)
        cuts = [
            0,
            *accumulate(sum(lengths[block] for block in blocks) for blocks in served),
        ]
        message = torch.cat([pieces[block] for blocks in served for block in blocks])
        halved = self._halved(numel=message.numel(), cuts=cuts)
        finished = halved.finish((yield from halved.reduce(message)))
        if len(served) < len(pieces):
            own = parts[self._place :: ranks]
            finished = yield from hand_out(finished, own, served, self._block)
        return finished

    def _send(
        self,
        parts: Tensor | Sequence[Tensor],
        group: ProcessGroup,
        room: Tensor | None = None,
    ) -> Pending:
        """Send ``parts[r]`` to rank r. Parts from other ranks may be written to ``room``: a row for
        each, apart from ``parts``.
        """
        memory = None if room is None else room.view(group.size(), -1).unbind(0)
        last = group is self._outer
        return self._wire.start_exchange(parts, group, last=last, room=memory)

    def _finish_rows(self, rows: Sequence[Tensor], words: Sequence[int]) -> Tensor:
        count = math.prod(words)
        return self._finish([row.view(*words, row.numel() // count) for row in rows])


def _write(place: Tensor, stages: Stages[Tensor]) -> Stages[None]:
    finished = yield from stages
    if finished.data_ptr() != place.data_ptr():
        place.copy_(finished[: place.numel()])


def _split(part: Tensor, chunks: int) -> list[Tensor]:
    """``part`` in ``chunks`` pieces, of which some may be empty."""
    weights = weigh_chunks(chunks)
    total = sum(weights)
    ends = [part.numel() * end // total for end in accumulate(weights)]
    return [part[start:end] for start, end in pairwise((0, *ends))]


def _count(tensor: Tensor, step: Step) -> int:
    """How many chunks. A graph has one: its size may be unknown, and compilers reorder by cost."""
    return 1 if is_compiled() else count_chunks(tensor.nbytes, step.chunk)


PATH = HierarchicalPath()
