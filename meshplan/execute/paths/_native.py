"""Path ``native``: the backend's own all-reduce, outside the contract."""

from __future__ import annotations

from torch import Tensor

from meshplan._torch import functional_operators as _ops
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire
from meshplan.execute.paths._path import Outcome, Path
from meshplan.planner import Step


class NativePath(Path):
    """The backend's all-reduce. An average is a sum and a division. A hierarchical step has no
    group of all its ranks: one all-reduce over the inner group, then one over the outer, both in
    the backend's order.
    """

    name = "native"
    in_contract = False
    asynchronous = True

    def why_not(self, step: Step, groups: StepGroups, tensor: Tensor) -> str:
        return ""

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        wire.compare()
        op = "sum" if step.op == "avg" else step.op
        *first, last = groups.levels
        for group in first:
            tensor = _ops.wait_tensor(wire.issue(_ops.all_reduce, tensor, op, group.group_name))
        reduced: Tensor = wire.issue(_ops.all_reduce, tensor, op, last.group_name)
        if step.divisor is None:
            return Outcome(reduced, wire.log, pending=True)
        return Outcome(_ops.wait_tensor(reduced) / step.divisor, wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        reduced = self.all_reduce(tensor, step, groups, wire)
        whole = _ops.wait_tensor(reduced.tensor) if reduced.pending else reduced.tensor
        return Outcome(select_shard(whole, step, groups.position).contiguous(), wire.log)


PATH = NativePath()
