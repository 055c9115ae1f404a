"""The traffic of one rank: the functional collectives that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import c10d_collective_ops
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.execute._gloo import Channel
from meshplan.execute._provenance import CollectiveLog
from meshplan.planner._halving import Halving, HalvingMessage

_COUNTED = CommDebugMode().comm_registry | c10d_collective_ops


class Operators(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Issued(TorchDispatchMode):
    """Counts the collectives issued, of which torch's own ``CommDebugMode`` sees reductions as one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "_overloadpacket", None)
        if kind in _COUNTED:
            self.counts[str(kind).rpartition(".")[2]] += 1
        return result

    @property
    def total(self) -> int:
        return self.counts.total()


def counts(calls: Issued) -> dict[str, int]:
    """How often each collective was issued, under the names of the report."""
    names = {
        "allgather_": "all_gather_into_tensor",
        "alltoall_base_": "all_to_all_single",
        "broadcast_": "broadcast",
    }
    return {names.get(name, name): n for name, n in calls.counts.items()}


def count_sent(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What ``function`` returns, and the bytes of each message of its reductions to another rank.

    Messages between pairs, headers included, and parts of all-to-alls and gathers behind headers.
    """
    issue, sent = CollectiveLog.issue, list[int]()

    def counted(log: CollectiveLog, call: Any, *arguments: Any, **options: Any) -> Any:
        if call.__name__ == "send":
            sent.append(arguments[0][0].nbytes)
        elif call is dist.all_to_all_single:
            _, message, _, lengths, group = arguments
            others = [n for r, n in enumerate(lengths) if r != group.rank()]
            sent.extend(n * message.element_size() for n in others)
        elif call is dist.all_gather:
            places, mine = arguments
            sent.extend([mine.nbytes] * (len(places) - 1))
        return issue(log, call, *arguments, **options)

    CollectiveLog.issue = counted  # type: ignore[method-assign]
    try:
        return function(), sent
    finally:
        CollectiveLog.issue = issue  # type: ignore[method-assign]


class Sent(TorchDispatchMode):
    """The data that this rank sends, in order, and how many bytes of it to ranks on other nodes.

    An all-to-all and an all-gather send each peer its own part directly. Headers are not counted.
    """

    def __init__(self, per_node: int = 1) -> None:
        super().__init__()
        self.per_node = per_node
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.elements: list[int] = []
        self.off_node = 0
        self._exchange = Channel.exchange

    def __enter__(self) -> Sent:
        right, this = self._exchange, self

        def seen(channel: Channel, group: Any, headers: Any, parts: Any, *rest: Any) -> Any:
            this.names.append("all_to_all_single")
            lengths = [0] * group.size() if parts is None else [part.numel() for part in parts]
            dtype = torch.uint8 if parts is None else parts[0].dtype
            this.dtypes.append(dtype)
            this.elements.append(sum(lengths))
            this._count(dist.get_process_group_ranks(group), lengths, dtype.itemsize)
            return right(channel, group, headers, parts, *rest)

        Channel.exchange = seen  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Channel.exchange = self._exchange  # type: ignore[method-assign]
        super().__exit__(*error)

    def _count(self, peers: Sequence[int], lengths: Sequence[int], item: int) -> None:
        node = dist.get_rank() // self.per_node
        others = (
            n for peer, n in zip(peers, lengths, strict=True) if peer // self.per_node != node
        )
        self.off_node += sum(others) * item

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if func._schema.name == "c10d::allgather_":
            (sent,), peers = args[1], dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[2]))
            self.names.append("all_gather_into_tensor")
            self.dtypes.append(sent.dtype)
            self.elements.append(sent.numel())
            self._count(peers, [sent.numel()] * len(peers), sent.element_size())
        elif space == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name.removesuffix("_out"))
            self.dtypes.append(args[0].dtype)
            self.elements.append(args[0].numel())
            peers = dist.get_process_group_ranks(_resolve_process_group(args[-1]))
            split = args[2] if name == "all_to_all_single" else [args[0].numel()] * len(peers)
            self._count(peers, split, args[0].element_size())
        return func(*args, **(kwargs or {}))


class HalvingTraffic(NamedTuple):
    """What one rank sends in a reduction by halving."""

    messages: int
    bytes: int


def count_halving(
    plan: Halving, elements: int, leaf: int, partial: int, *, scatter: bool = False
) -> HalvingTraffic:
    """Of ``leaf`` bytes for each of ``elements``, and ``partial`` in a sum; ``scatter``: without
    the gather."""
    width = {"": 0, "leaf": leaf, "partial": partial}
    messages = total = 0

    def count(message: HalvingMessage) -> int:
        return elements * message.stop // plan.parts - elements * message.start // plan.parts

    for one in plan.rounds:
        backs = () if scatter else one.receives
        total += sum((width[m.sum] + width[m.tail]) * count(m) for m in one.sends)
        total += sum(leaf * count(back) for back in backs)
        messages += len(one.sends) + len(backs)
    return HalvingTraffic(messages, total)
