"""Reductions of FSDP2 and DDP that send the leaves of each round to the owners of slices."""

# No "from __future__ import annotations" here: torch compares a hook's annotations with types.

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshplan._chunks import cover_range
from meshplan._torch import fsdp_group_of, fsdp_state_of, tree_leaves
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.backend._reductions import LEFT_OUT
from meshplan.contract import Contract
from meshplan.definition import refuse_flushed_subnormals
from meshplan.errors import ElasticError
from meshplan.execute._wire import split_equally
from meshplan.integrations.ddp import check_bucket
from meshplan.integrations.fsdp import (
    ReduceScatter,
    own_parameters,
    set_reduce_scatter,
)
from meshplan.kernel import combine_leaves

# A rank without a leaf sends -0.0: x + -0.0 is x, also if x is -0.0, so that the tree is that of
# the other leaves. All ranks of a round then send messages of one size.
_NO_LEAF = -0.0
# Of DDP's gradients that travel together; DDP's own buckets change after the first backward.
_BUCKET_ELEMENTS = 25 << 18


class TreeSum:
    """The sums of aligned subtrees of the contract's tree, which come in order.

    At most ``log2(n) + 1`` sums over n leaves are kept, the new one included: a subtree waits until
    a neighbour of its size is there, like the digits of a binary counter. If ``start`` is not 0,
    the tree is the part of another one from that leaf on.
    """

    def __init__(self, contract: Contract, start: int = 0) -> None:
        self._contract, self._end = contract, start
        # The first leaf, the number of leaves, and the sum.
        self._kept: list[tuple[int, int, Tensor]] = []

    def add(self, part: Tensor, size: int = 1) -> None:
        """Add the sum of the next ``size`` leaves, a power of two that divides the number of the
        first one. It is copied, as its memory may be that of a message.
        """
        refuse_flushed_subnormals(part)
        start, self._end, added = self._end, self._end + size, part
        while self._kept and self._kept[-1][1] == size and self._kept[-1][0] % (2 * size) == 0:
            start, _, left = self._kept.pop()
            added, size = self._node(left, added), 2 * size
        self._kept.append((start, size, part.clone() if added is part else added))

    def take_blocks(self) -> list[tuple[int, Tensor]]:
        """The largest aligned subtrees, in order, with their sizes; none are left then."""
        found, self._kept = [(size, total) for _, size, total in self._kept], []
        return found

    def take(self) -> Tensor:
        """The sum of all subtrees, neither divided nor rounded; none are left then."""
        *blocks, (_, total) = self.take_blocks()
        # The tree of n leaves splits after the largest power of two, so the last ones come first.
        for _, left in reversed(blocks):
            total = self._node(left, total)
        return total

    def _node(self, left: Tensor, right: Tensor) -> Tensor:
        if self._contract.rounding == "node":
            return combine_leaves([left, right], "sum", (2,), self._contract)
        return left.add_(right)


class LeafSums:
    """Sums of flat gradients over the micro-batches of a step, of a slice of them on each rank.

    FSDP2 reduces over the shards by ``scatter``, then over the replicas, which is left out, and
    calls a hook, ``add``. There, replicas exchange slices of the shard. The leaves of a slice are
    added on one rank, in the order of micro-batches. After the last round the sums are FSDP2's
    result. DDP's ranks are replicas of one shard.
    """

    def __init__(self, contract: Contract, groups: Sequence[MeshplanProcessGroup], ddp: bool):
        self._contract = contract
        self.replicas, self._shards = (groups, []) if ddp else (groups[:-1], groups[-1:])
        self._width = self._shards[0].size() if self._shards else 1
        # On this thread.
        self._at_once = dist.ReduceScatterOptions()
        self._at_once.asyncOp = False
        # Of each FSDP module, and of each time that a round reduces it.
        self._trees: dict[tuple[object, int], TreeSum] = {}
        self._turns: Counter[object] = Counter()
        # What may be a collective of the round, in order.
        self.calls: list[str] = []
        self._blocks: list[tuple[int, Tensor]] = []
        # How often DDP's buckets of the round had each parameter, by ``id``.
        self.reached: Counter[int] = Counter()
        # Gradients of the round, and the whole parameters of called FSDP modules.
        self.counts: list[str] = []
        self.watched: dict[str, Tensor] = {}
        # Whether gradients are reduced now, and whether some are of no finished round.
        self.in_round = self.failed = False

    def begin(self, first: int, *, repeated: bool, last: bool) -> None:
        """Begin a round, or a step if ``first``, the micro-batch of rank 0, is 0."""
        self._first = first
        self._repeated = repeated
        self._last = last
        self._blocks = []
        self._turns.clear()
        self.calls.clear()
        self.reached.clear()
        self.counts.clear()
        self.in_round = self.failed = True
        if first == 0:
            self._trees.clear()

    def check_round(self) -> None:
        """Refuse gradients that are of no round."""
        if not self.in_round:
            self.failed = True
            raise ElasticError(
                "backward was called outside of GradientAccumulator.round; call it inside"
            )

    def scatter(self, output: Tensor, input: Tensor) -> None:
        """Keep the sums of the leaves of this rank's replica, for this rank's shard."""
        (shards,) = self._shards
        if self._repeated:
            input.fill_(_NO_LEAF)
        if self._width & (self._width - 1) == 0:
            # They are an aligned subtree, for any number of replicas.
            shards.reduce_scatter_single(output, input, self._at_once)
            self._blocks = [(self._width, output)]
            return
        # Replicas exchange sums, which are fewer.
        replica = sum(group.rank() for group in self.replicas)
        tree = TreeSum(self._contract, self._first + replica * self._width)
        for row in shards.exchange_rows(input.view(self._width, -1)):
            tree.add(row)
        self._blocks = tree.take_blocks()

    def add(self, name: object, output: Tensor) -> None:
        """Add the leaves of a round; in the last one, write the sums to ``output``."""
        blocks, self._blocks = self._blocks, []
        if self._width == 1:
            blocks = [(1, torch.full_like(output, _NO_LEAF) if self._repeated else output)]
        if not blocks:
            raise ElasticError(
                f"FSDP2 reduced the shards of module {name or 'root'!r} by another reduce-scatter; "
                "call integrations.fsdp.apply before GradientAccumulator, and set none after it"
            )
        self.calls.append(f"{name} reduced")
        self._turns[name] += 1
        tree = self._trees.setdefault((name, self._turns[name]), TreeSum(self._contract))
        for _, block in blocks:
            if block.is_cuda:
                # Its memory may belong to the stream of the reduce-scatter.
                block.record_stream(torch.cuda.current_stream(block.device))
        for group in self.replicas:
            blocks = self._exchange(group, [block for _, block in blocks])
        for size, block in blocks:
            tree.add(block, size)
        if self._last:
            total = tree.take()
            for group in self.replicas:
                # Each rank sends its slice to all.
                whole = group.exchange_rows(total.expand(group.size(), -1))
                total = whole.reshape(-1)[: output.numel()]
            output.copy_(total)

    def _exchange(
        self, replicas: MeshplanProcessGroup, blocks: Sequence[Tensor]
    ) -> list[tuple[int, Tensor]]:
        """The blocks of all replicas, for this replica's slice of the shard."""
        ranks = replicas.size() * self._width
        if ranks & (ranks - 1) == 0:
            # They are one aligned subtree.
            rows = split_equally(blocks[0], replicas.size())
            total = torch.empty_like(rows[0])
            replicas.reduce_scatter_single(total, rows.view(-1), self._at_once)
            return [(ranks, total)]
        starts = range(self._first, self._first + replicas.size() * self._width, self._width)
        covers = [cover_range(start, start + self._width) for start in starts]
        slices = [split_equally(block, replicas.size()) for block in blocks]
        # Replicas may have different numbers of blocks.
        slices += slices[:1] * (max(map(len, covers)) - len(slices))
        mine = torch.stack(slices, 1) if len(slices) > 1 else slices[0][:, None]
        rows = replicas.exchange_rows(mine)
        return [
            (stop - start, row[at])
            for cover, row in zip(covers, rows, strict=True)
            for at, (start, stop) in enumerate(cover)
        ]

    def add_buckets(self, gradients: Iterable[Tensor]) -> None:
        """``add`` gradients of DDP, and write the sums to them: the same ones in each round."""
        buckets: list[list[Tensor]] = []
        for one in gradients:
            last = buckets[-1] if buckets else []
            full = sum(map(Tensor.numel, last)) + one.numel() > _BUCKET_ELEMENTS
            if not last or full or (last[0].dtype, last[0].device) != (one.dtype, one.device):
                buckets.append(last := [])
            last.append(one)
        for at, bucket in enumerate(buckets):
            flat = torch.cat([one.reshape(-1) for one in bucket])
            self.add(at, flat)
            totals = torch.split(flat, [one.numel() for one in bucket])
            for one, total in zip(bucket, totals, strict=True) if self._last else ():
                one.copy_(total.view(one.shape))


def keep_bucket(
    sums: LeafSums,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook, which reduces nothing: ``add_buckets`` does after the backward."""
    sums.check_round()
    sums.reached.update(map(id, bucket.parameters()))
    buffer = check_bucket(bucket)
    _check_dtype(buffer.dtype)
    found: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    found.set_result(buffer)
    return found  # type: ignore[no-any-return]


def sum_shards(model: nn.Module, ranks: int, sums: LeafSums) -> None:
    """Have all FSDP modules of ``model``, on so many data-parallel ranks, reduce by ``sums``."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            # FSDP divides by 1 then, and asks for sums. On one rank it would divide in a pass of
            # its own, and divides by nothing without a factor.
            factor: Any = 1.0 if ranks > 1 else None
            FSDPModule.set_gradient_divide_factor(module, factor)
            module.set_gradient_divide_factor = _refuse  # type: ignore[method-assign]
            module.set_force_sum_reduction_for_comms(True)
            set_reduce_scatter(name, module, _SumScatter(sums))
            FSDPModule.set_all_reduce_hook(module, partial(sums.add, name))
            module.set_all_reduce_hook = _refuse  # type: ignore[method-assign]
            # Else ranks that use other parameters reduce other gradients.
            if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)


def watch_gradients(model: nn.Module, sums: LeafSums) -> None:
    """List the gradients that this rank computes for parameters of FSDP modules.

    FSDP2 reduces zeros for the others, and once more for each call of a module but the last one in
    the backward. A parameter is watched from the first forward of its module on. Listed too are
    calls, those that the backward reaches, and ``unshard``: else ranks may gather two modules.
    """
    names = {id(one): name for name, one in model.named_parameters()}

    def watch(called: str, parameters: list[Any], _: object) -> None:
        sums.calls.append(f"{called} called")
        for owner, attribute, name in parameters:
            # FSDP2 put the whole parameter here.
            parameter = getattr(owner, attribute)
            if parameter.requires_grad and sums.watched.get(name) is not parameter:
                sums.watched[name] = parameter
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: sums.counts.append(name)
                )

    def watch_outputs(called: str, _: object, outputs: object) -> None:
        # FSDP2 gathers at the first gradient.
        once = [f"{called} reached"]
        for one in tree_leaves(outputs):
            if getattr(one, "requires_grad", False):
                one.register_hook(lambda _: sums.calls.append(once.pop()) if once else None)

    def watch_unshard(called: str, _: object, __: object) -> None:
        sums.calls.append(f"{called} gathered")

    for called, module in model.named_modules():
        # Hooks of a module miss methods of register_fsdp_forward_method.
        group = fsdp_group_of(fsdp_state_of(module)) if isinstance(module, FSDPModule) else None
        if group is not None:
            parameters = [
                (owner, attribute, names[id(one)])
                for owner, attribute, one in own_parameters(module)
            ]
            for target, method, hook in (
                (group, "pre_forward", watch),
                (group, "post_forward", watch_outputs),
                (module, "unshard", watch_unshard),
            ):
                note = partial(hook, called, parameters)
                setattr(target, method, partial(_then, getattr(target, method), note))


def _then(call: Any, note: Any, *arguments: object, **options: object) -> Any:
    """The result of a call, which ``note`` gets too."""
    found = call(*arguments, **options)
    note(found)
    return found


def _refuse(*_: object, **__: object) -> None:
    raise ElasticError(
        "GradientAccumulator sets FSDP2's divide factor and all-reduce hook; pass a divisor to "
        "GradientAccumulator.finish, and set no hook"
    )


def check_batch_norms(norms: Iterable[tuple[str, Any]]) -> None:
    """Refuse modules that train, and whose statistics depend on the number of ranks."""
    for name, norm in norms:
        # The running ones are of a rank's micro-batches; SyncBatchNorm normalizes over a round.
        if norm.training and (norm.running_mean is not None or isinstance(norm, nn.SyncBatchNorm)):
            raise ElasticError(
                f"module {name!r} is a {type(norm).__name__}, whose statistics depend on the "
                "number of ranks; use LayerNorm or GroupNorm, or call eval() of the module"
            )


@contextmanager
def keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore at the end the buffers that the block writes or replaces."""
    kept = [
        (module, name, one, one.clone())
        for module in model.modules()
        for name, one in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    yield
    for module, name, one, before in kept:
        one.data.copy_(before)
        setattr(module, name, one)


def reset_shards(module: nn.Module) -> None:
    """Forget what an exception left of a step in FSDP modules: gradients, and where it was."""
    if not isinstance(module, FSDPModule):
        for child in module.children():
            reset_shards(child)
        return
    if not hasattr(module, "reset_iter_state"):
        raise ElasticError(
            f"torch {torch.__version__} does not reset FSDP2 after an exception; use torch 2.13 "
            "or newer, or make the model again from the last checkpoint"
        )
    # Of modules that the exception left unsharded.
    for parameter in module.parameters():
        parameter.grad = None
    module.reset_iter_state()


class _SumScatter(ReduceScatter):
    """FSDP's reduce-scatter, which accepts sums in float32 and float64 only."""

    def __init__(self, sums: LeafSums) -> None:
        self._sums = sums

    def allocate(self, *size: Any, **options: Any) -> Tensor:
        self._sums.check_round()
        found = super().allocate(*size, **options)
        setattr(found, LEFT_OUT, True)
        return found

    def reduce(self, output: Tensor, input: Tensor, group: Any, op: Any) -> None:
        self._sums.scatter(output, input)

    def check(self, dtype: torch.dtype, op: Any = None) -> None:
        _check_dtype(dtype)
        if op not in (None, dist.ReduceOp.SUM):
            raise ElasticError(
                "FSDP2 does not sum a round; leave set_force_sum_reduction_for_comms as "
                "GradientAccumulator sets it"
            )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ElasticError(
            f"gradients are reduced in {dtype}, which rounds the sum of each round; pass "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
