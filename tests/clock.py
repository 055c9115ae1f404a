"""A clock for the messages that a path sends: simulated ranks, in one process and without threads.

The path's own code runs for each rank, on tensors without data, and its messages are recorded. Then
all ranks run at once on a simulated clock. The model is like LogGP (Alexandrov et al., 1995), with
the planner's links:

* Each collective takes the launch before it sends anything, and a batch of messages the time of a
  batch too. Those of one process group run sequentially on a rank, those of several groups
  concurrently.
* A rank has one port for each class of links. A message of a collective takes latency +
  n / bandwidth there. One of a batch takes n / bandwidth, and arrives a latency later.
* A message takes the receiver's port for n / bandwidth too, once the receiver has started the
  collective or the batch that expects it.
* A wait ends when all messages of the collective have arrived, and its own have left.

As in the planner's model, collectives are direct exchanges, and arithmetic takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshplan.execute._groups import StepGroups
from meshplan.execute._wire import Message, Wire
from meshplan.execute.paths import Path, get_path
from meshplan.planner import Step
from meshplan.topology import Topology
from tests.replay import Operation, Program, Replay, Send


class ClockTime(NamedTuple):
    """What the clock shows.

    Attributes:
        seconds: when the last rank has finished.
        launches: collectives and batches of the rank that issues the most.
        messages, bytes: of the rank that sends the most.
    """

    seconds: float
    launches: int
    messages: int
    bytes: int


@dataclass(frozen=True, eq=False)
class _Group:
    """Stands for a process group of simulated ranks."""

    ranks: tuple[int, ...]
    at: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.at

    @property
    def group_name(self) -> str:
        return ",".join(map(str, self.ranks))


def clock(
    step: Step,
    topology: Topology,
    numel: int,
    dtype: torch.dtype = torch.float32,
    *,
    path: str | None = None,
    lanes: bool = False,
) -> ClockTime:
    """The time of one all-reduce or reduce-scatter over all ranks of ``topology``.

    All messages are kept in memory: about W^2 for an exchange, 2 W log2 W for halving.

    Args:
        step: of a plan, over as many ranks, which ascend with their position. A reduce-scatter
            shards dim 0.
        path: of a step without blocks; ``None``: that of the plan, with its blocks.
        lanes: simulate one rank of each block only. The others do the same at the same time where
            every block is on a node of its own, so that thousands of ranks take seconds.
    """
    ranks, inner = step.group_size, step.inner
    flat = path or ("halving" if step.between == "halving" else "exchange")
    found = get_path("hierarchical" if inner > 1 else flat)
    stride = inner if lanes else 1
    programs = {
        rank: _record(found, step, _make_groups(step, rank), numel, dtype)
        for rank in range(0, ranks, stride)
    }
    seconds = Replay(programs, topology, stride).run()
    sent = [[one for one in program if not isinstance(one, int)] for program in programs.values()]
    return ClockTime(
        seconds,
        max(len(one) for one in sent),
        max(sum(len(op.sends) for op in one) for one in sent),
        max(sum(send.size for op in one for send in op.sends) for one in sent),
    )


def _make_groups(step: Step, rank: int) -> StepGroups:
    ranks, inner = step.group_size, step.inner
    gather: Any = None
    if step.gather_axes:
        where = np.unravel_index(rank, step.sizes)
        at = tuple(
            slice(None) if axis in step.gather_axes else int(index)
            for axis, index in zip(step.axes, where, strict=True)
        )
        sharers = np.arange(ranks).reshape(step.sizes)[at].ravel().tolist()
        gather = _Group(tuple(sharers), sharers.index(rank))
    if inner == 1:
        whole: Any = _Group(tuple(range(ranks)), rank)
        return StepGroups(whole, gather=gather)
    block, place = divmod(rank, inner)
    inside: Any = _Group(tuple(range(rank - place, rank - place + inner)), place)
    across: Any = _Group(tuple(range(place, ranks, inner)), block)
    return StepGroups(None, inside, across, gather)


def _record(path: Path, step: Step, groups: StepGroups, numel: int, dtype: torch.dtype) -> Program:
    recorder = _Recorder(groups)
    summand = torch.empty(numel, dtype=dtype, device="meta")
    with recorder:
        reduce = path.reduce_scatter if step.scatter else path.all_reduce
        outcome = reduce(summand, step, groups, _RecordingWire(recorder))
        recorder.wait(outcome.tensor)
    return recorder.program


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records functional collectives and waits; tensors hold no data."""

    def __init__(self, groups: StepGroups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program: Program = []
        self._groups: dict[str, Any] = {group.group_name: group for group in groups.all}
        # By the memory of a result: a wait may be for a view of it.
        self._pending: dict[int, int] = {}

    def issue(
        self, group: Any, sends: Sequence[Send], receives: Sequence[int], *, paired: bool
    ) -> int:
        self.program.append(Operation(group.ranks, tuple(sends), tuple(receives), paired))
        return len(self.program) - 1

    def wait(self, tensor: Tensor) -> None:
        found = self._pending.pop(id(tensor.untyped_storage()), None)
        if found is not None:
            self.program.append(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name == "_c10d_functional::wait_tensor":
            self.wait(args[0])
            return args[0]
        if name == "_c10d_functional::all_to_all_single":
            tensor, receives, sends, group = args
            result = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        elif name == "_c10d_functional::all_gather_into_tensor":
            tensor, _, group = args
            ranks = self._groups[group].size()
            sends = receives = [len(tensor)] * ranks
            result = tensor.new_empty((ranks * tensor.shape[0], *tensor.shape[1:]))
        else:
            assert "c10d" not in name, f"{name} is not recorded"
            return func(*args, **(kwargs or {}))
        pg = self._groups[group]
        width = tensor[:1].numel() * tensor.element_size()
        others = [i for i in range(pg.size()) if i != pg.at]
        sent = [Send(pg.ranks[i], sends[i] * width) for i in others if sends[i]]
        came = [pg.ranks[i] for i in others if receives[i]]
        # Rounds between pairs are all-to-alls in which most ranks have nothing for each other.
        sparse = len(sent) < len(others) or len(came) < len(others)
        number = self.issue(pg, sent, came, paired=sparse)
        self._pending[id(result.untyped_storage())] = number
        return result


class _RecordingWire(Wire):
    """The wire without headers, whose batches of messages are recorded."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def start_round(
        self, messages: Sequence[Message], group: Any, device: torch.device
    ) -> Callable[[], None]:
        sends = [
            Send(group.ranks[one.peer], one.tensor.numel() * one.tensor.element_size())
            for one in messages
            if one.sends
        ]
        receives = [group.ranks[one.peer] for one in messages if not one.sends]
        number = self._recorder.issue(group, sends, receives, paired=True)
        return lambda: self._recorder.program.append(number)
