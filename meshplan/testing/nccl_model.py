"""The c10d backend ``nccl_model``: CPU processes that add in the order NCCL would.

It is the model of `meshplan.planner.nccl_order` with 1 channel: NVSwitch hosts, no NVLS; not NCCL.
It shows that two groups *may* disagree on a rank-to-node map, and nothing about a real machine.

Every addition rounds to the storage dtype, as NCCL's Ring and Tree kernels do. The float average
multiplies each contribution by ``1/n`` in the storage dtype and then adds (NCCL 2.30.7,
src/enqueue.cc); that a device compiler may fuse this multiplication with the next addition is not
modelled. PREMUL_SUM multiplies each rank's contribution by that rank's factor, which is rounded to
the storage dtype, rounds the product to it as well, and then adds; the integer average divides the
sum, toward zero (src/device/reduce_kernel.h). MIN and MAX return the operand that is not a NaN. A
coalesced call is modelled as separate calls. Reduce-scatter and reduce have no Tree in NCCL: they
go round the ring whatever the configured algorithm.

All other collectives only move data and are those of gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from meshplan._bits import FLOATS
from meshplan._torch import (
    ALL_GATHER_SINGLE,
    DistributedBackendOptions,
    gather_bytes,
)
from meshplan._torch.process_group import PythonProcessGroup, factor_of, forward
from meshplan._uncompiled import never_compiled
from meshplan.collectives import Work
from meshplan.errors import LayoutError
from meshplan.planner import nccl_order as order

_NAME = "nccl_model"
ABOUT = "model of NCCL 2.30 association order: 1 channel, NVSwitch hosts, no NVLS; not NCCL"
"""The model in one line, for reports."""
_OTHERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
_List: TypeAlias = list[Tensor]


@dataclass(frozen=True)
class NcclModelConfig:
    node_of_rank: tuple[int, ...] | None
    domain_size: int | None
    algorithm: Literal["ring", "tree"]

    def node_of(self, rank: int) -> int:
        if self.domain_size is not None:
            return rank // self.domain_size
        nodes = self.node_of_rank or ()
        if not 0 <= rank < len(nodes):
            raise LayoutError(
                f"node_of_rank has {len(nodes)} entries, but rank {rank} is in the group; "
                "configure one node number per global rank"
            )
        return nodes[rank]


_config: NcclModelConfig | None = None


def configure(
    *,
    node_of_rank: Sequence[int] | None = None,
    domain_size: int | None = None,
    algorithm: Literal["ring", "tree"] = "ring",
) -> NcclModelConfig:
    """Set the model of this process. Every rank must set the same, at the same point.

    Args:
        node_of_rank: node number of each global rank; or
        domain_size: consecutive global ranks per node. Exactly one of the two.
        algorithm: of all-reduce, from the next call on.

    Raises:
        LayoutError: both or none of the two maps, a domain size below 1, an unknown algorithm.
    """
    global _config
    if (node_of_rank is None) == (domain_size is None):
        found = "neither" if node_of_rank is None else "both"
        raise LayoutError(f"pass exactly one of node_of_rank and domain_size; got {found}")
    if domain_size is not None and domain_size < 1:
        raise LayoutError(f"domain_size is {domain_size}; pass the ranks per node, 1 or more")
    if algorithm not in ("ring", "tree"):
        raise LayoutError(f"algorithm {algorithm!r} is not modelled; pass 'ring' or 'tree'")
    nodes = None if node_of_rank is None else tuple(node_of_rank)
    _config = NcclModelConfig(nodes, domain_size, algorithm)
    return _config


def current_config() -> NcclModelConfig:
    """The last configuration of this process; `LayoutError` without one."""
    if _config is None:
        raise LayoutError(f"{_NAME} has no nodes; call configure(node_of_rank=...) on every rank")
    return _config


def register() -> None:
    """Register the backend for ``init_process_group("nccl_model")``; idempotent."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, NcclModelProcessGroup, True, ["cpu"])


@never_compiled
class NcclModelProcessGroup(PythonProcessGroup):
    """A model of NCCL's order of additions, see the module's docstring; not NCCL.

    Reductions are complete when they return, also with ``async_op=True``. They take strided CPU
    tensors of any size, of float16, bfloat16, float32, float64, uint8, int8, int32, int64 or bool,
    and SUM, PREMUL_SUM, AVG, PRODUCT, MIN or MAX. Anything else, or no usable `configure`, is a
    `LayoutError`.
    """

    def __init__(self, options: DistributedBackendOptions, _: object = None) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size, options.store, options.timeout)
        # torch gives the default group an empty list.
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(size))

    def __repr__(self) -> str:
        return f"<{_NAME} process group of ranks {self._ranks}: {ABOUT}>"

    # torch runs what is not overridden here while it holds the GIL, and gloo's threads may need the
    # GIL to free a tensor: a deadlock. Called from Python, gloo's own methods release it. Where a
    # method has two names, the second one is that of later torch versions.
    broadcast, barrier = forward("broadcast"), forward("barrier")
    gather, scatter = forward("gather"), forward("scatter")
    gather_single = gather_into_tensor = forward("gather_single")
    allgather, allgather_coalesced = (
        forward("allgather"),
        forward("allgather_coalesced"),
    )
    all_gather_single = forward(ALL_GATHER_SINGLE)
    send, recv, recv_anysource = (
        forward("send"),
        forward("recv"),
        forward("recv_anysource"),
    )
    alltoall, alltoall_base = forward("alltoall"), forward("alltoall_base")
    all_to_all_single = alltoall_base

    def all_gather_single_coalesced(self, outputs: _List, inputs: _List, _: Any = None) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            gather_bytes(self.inner, output, source).wait()
        return Work(outputs)

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        return _NAME

    def allreduce(self, tensors: _List, opts: Any = ReduceOp.SUM) -> Work:  # type: ignore[override]
        """All-reduce each tensor in place, in the configured algorithm's order.

        Source: NCCL's src/device/all_reduce.h.
        """
        for tensor in tensors:
            self._all_reduce(tensor, _Algebra.of(opts, tensor, self.size()), self._nodes())
        return Work(tensors)

    allreduce_coalesced = allreduce

    def reduce_scatter(self, outputs: _List, inputs: list[_List], opts: Any) -> Work:  # type: ignore[override]
        """Reduce one tensor per rank; sizes may differ between ranks, as with NCCL under torch."""
        for output, blocks in zip(outputs, inputs, strict=True):
            send = torch.cat([block.reshape(-1) for block in blocks])
            self._reduce_blocks(output, send, [block.numel() for block in blocks], opts)
        return Work(outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        """Reduce equal blocks of a flat input; the block of rank R starts behind R, ends at R.

        Source: NCCL's src/device/reduce_scatter.h.
        """
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: _List, inputs: _List, opts: Any) -> Work:  # type: ignore[override]
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_blocks(output, source.reshape(-1), [output.numel()] * self.size(), opts)
        return Work(outputs)

    def reduce(self, tensors: _List, opts: dist.ReduceOptions) -> Work:  # type: ignore[override]
        """Reduce in place at the root; starts behind the root on the ring.

        Source: NCCL's src/device/reduce.h.
        """
        for tensor in tensors:
            # Everything goes to the root; the other ranks receive nothing.
            splits = [0] * self.size()
            splits[opts.rootRank] = tensor.numel()
            target = tensor if self.rank() == opts.rootRank else tensor.new_empty(0)
            self._reduce_blocks(target, tensor.reshape(-1), splits, opts)
        return Work(tensors)

    def _nodes(self) -> tuple[int, ...]:
        config = current_config()
        return tuple(config.node_of(rank) for rank in self._ranks)

    def _exchange(self, send: Tensor, splits: list[int], own: int) -> Tensor:
        """Send split r of ``send`` (elements) to rank r; return ``(size, own)``, row = sender."""
        received = send.new_empty(self.size(), own)
        item = send.element_size()
        # Bytes, because gloo does not know every dtype.
        sink, source = (
            received.view(-1).view(torch.uint8),
            send.contiguous().view(torch.uint8),
        )
        sizes = [own * item] * self.size(), [split * item for split in splits]
        self.inner.alltoall_base(sink, source, *sizes).wait()
        return received

    @torch.no_grad()
    def _all_reduce(self, tensor: Tensor, rules: _Algebra, nodes: tuple[int, ...]) -> None:
        # Each rank evaluates a contiguous slice of the result, from the summands of all ranks. That
        # is not how NCCL moves data; only the order of additions is NCCL's.
        size, rank, numel = self.size(), self.rank(), tensor.numel()
        width = -(-numel // size)
        splits = [min(width, max(numel - width * r, 0)) for r in range(size)]
        begin = min(width * rank, numel)
        end = begin + splits[rank]
        parts = self._exchange(rules.scale(tensor.reshape(-1)), splits, splits[rank])
        finished = tensor.new_empty(width)
        if current_config().algorithm == "tree":
            pieces = [(begin, end, order.tree_tree(nodes))]
        else:
            # The ring of each chunk starts at another rank, so a slice may hold several orders.
            ring = order.ring_order(nodes)
            pieces = [
                (
                    max(start, begin),
                    min(stop, end),
                    order.ring_tree(ring, chunk),
                )
                for start, stop, chunk in order.ring_chunks(numel, size, tensor.element_size())
                if start < end and begin < stop
            ]
        for start, stop, tree in pieces:
            here = slice(start - begin, stop - begin)
            finished[here] = rules.evaluate(tree, parts[:, here])
        # All slices have one width, which the gather needs; the rest of the last ones is dropped.
        gathered = tensor.new_empty(width * size)
        gather_bytes(self.inner, gathered.view(torch.uint8), finished.view(torch.uint8)).wait()
        tensor.copy_(gathered[:numel].view(tensor.shape))

    @torch.no_grad()
    def _reduce_blocks(
        self,
        output: Tensor,
        send: Tensor,
        splits: list[int],
        opts: Any,
    ) -> None:
        rules, nodes = _Algebra.of(opts, send, self.size()), self._nodes()
        if (send.numel(), output.numel()) != (sum(splits), splits[self.rank()]):
            raise LayoutError(
                f"blocks of {splits} elements do not fit an input of {send.numel()} and an output "
                f"of {output.numel()} elements"
            )
        parts = self._exchange(rules.scale(send), splits, output.numel())
        if output.numel():
            # A reduce passes the root's block only, so the block's owner is always this rank.
            tree = order.root_tree(order.ring_order(nodes), self.rank())
            output.copy_(rules.evaluate(tree, parts).view(output.shape))


@dataclass(frozen=True)
class _Algebra:
    """One operation on one dtype: each leaf times ``factor`` before it is sent, in which ranks may
    differ; joins; the result by ``divisor``.
    """

    join: Callable[..., Tensor]
    factor: Tensor | None = None
    divisor: int | None = None

    @staticmethod
    def of(opts: Any, tensor: Tensor, size: int) -> _Algebra:
        op = getattr(opts, "reduceOp", opts)
        dtype = tensor.dtype
        if tensor.layout is not torch.strided or dtype not in FLOATS + _OTHERS:
            raise LayoutError(
                f"{_NAME} does not reduce {dtype} with layout {tensor.layout}; pass e.g. strided "
                "float32"
            )
        floating = dtype in FLOATS
        if op == ReduceOp.AVG and dtype is not torch.bool:
            # 1/n is rounded to the dtype before it multiplies.
            factor = _read_factor(1.0 / size, dtype) if floating else None
            return _Algebra(torch.add, factor, None if floating else size)
        if op == ReduceOp.PREMUL_SUM and floating:
            return _Algebra(torch.add, _read_factor(factor_of(op), dtype))
        joins: list[tuple[Any, Callable[..., Tensor]]] = [
            (ReduceOp.SUM, torch.add),
            (ReduceOp.PRODUCT, torch.mul),
            (ReduceOp.MIN, torch.fmin if floating else torch.minimum),
            (ReduceOp.MAX, torch.fmax if floating else torch.maximum),
        ]
        for candidate, join in joins:
            if op == candidate:
                return _Algebra(join)
        raise LayoutError(
            f"{_NAME} does not reduce {dtype} with {op}; use SUM, PRODUCT, MAX or MIN, AVG on a "
            "dtype other than bool, or PREMUL_SUM on floats"
        )

    def scale(self, leaf: Tensor) -> Tensor:
        return leaf if self.factor is None else leaf * self.factor

    def evaluate(self, tree: order.Tree, parts: Tensor) -> Tensor:
        """Fold ``parts`` of shape (group size, elements); overwrites them."""
        # Each rank is one leaf only, so the right operand's storage is free once it is used.
        total = order.fold(
            tree,
            lambda rank: parts[rank],
            lambda left, right: self.join(left, right, out=right),
        )
        return total if self.divisor is None else total.div_(self.divisor, rounding_mode="trunc")


def _read_factor(given: float | Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(given, Tensor):
        return torch.tensor(given, dtype=torch.float64).to(dtype)
    if given.dtype != dtype or given.numel() != 1:
        raise LayoutError(
            f"a PREMUL_SUM of {dtype} got a factor of {given.numel()} elements of {given.dtype}; "
            f"pass one element of {dtype}"
        )
    return given.detach().reshape(())
