"""Path ``reference``: all-gather of everything, reduction of everything: the plain definition.

(W - 1) times the tensor's bytes leave each rank, and W times its memory is needed. Over gloo a
small message travels behind its header, so that the all-gather is one collective in all.
"""

from __future__ import annotations

from torch import Tensor

from meshplan._bits import flatten
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire, fold
from meshplan.execute.paths._path import Outcome, Path
from meshplan.planner import Step


class ReferencePath(Path):
    name = "reference"

    def all_reduce(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        rows = wire.gather(flatten(tensor), groups.flat)
        return Outcome(fold(rows, step).view(tensor.shape), wire.log)

    def reduce_scatter(self, tensor: Tensor, step: Step, groups: StepGroups, wire: Wire) -> Outcome:
        group = groups.flat
        rows = wire.gather(flatten(tensor), group)
        shards = [select_shard(row.view(tensor.shape), step, group.rank()) for row in rows]
        return Outcome(fold(shards, step), wire.log)


PATH = ReferencePath()
