"""Reductions of CPU tensors over gloo in graphs: as one operator, which runs them later.

What torch traces holds ``meshplan::reduction``, which runs the same code as an eager call. So a
rank that runs a compiled graph and one that does not issue the same collectives, compiled graphs
compare headers too, and no pass over a graph can drop the comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshplan._torch import functional_operators as _ops
from meshplan.contract import Contract
from meshplan.execute._groups import StepGroups, resolve_group
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import Outcome, Path
from meshplan.kernel import OPERATORS
from meshplan.planner import Reach, Step
from meshplan.planner._path_costs import PeerCounts
from meshplan.topology import Link, Links

_Run = Callable[[Tensor, Step, StepGroups, str, bool, str], Outcome]


def trace_reduction(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    path: Path,
    is_complex: bool,
    calls: str,
) -> Outcome:
    """Put the reduction of a real summand over gloo into the graph that torch traces. With
    ``is_complex``, its last dim holds real and imaginary parts. The operator takes a ticket by the
    name ``calls`` when it runs.
    """
    log = CollectiveLog()
    found = (groups.whole, groups.inner, groups.outer, groups.gather)
    names = ["" if group is None else group.group_name for group in found]
    how = write_step(step), path.name, is_complex, names, calls
    return Outcome(log.issue(torch.ops.meshplan.reduction, summand, *how), log)


def define_operator(run: _Run) -> None:
    """Define the operator. ``run`` reduces over gloo by the path of a name. Its last arguments are
    ``is_complex`` and the name by which a ticket is taken.
    """

    def reduction(
        message: Tensor,
        step: str,
        path: str,
        is_complex: bool,
        groups: list[str],
        calls: str = "",
    ) -> Tensor:
        read = _read(step)
        reduced = run(message, read, _groups(groups, read), path, is_complex, calls)
        waited: Tensor = _ops.wait_tensor(reduced.tensor)
        return waited

    OPERATORS.define(
        "reduction(Tensor message, str step, str path, bool is_complex, str[] groups, "
        'str calls="") -> Tensor',
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        OPERATORS.impl("reduction", reduction, key)
    torch.library.register_fake("meshplan::reduction", _result, lib=OPERATORS)


def _result(
    message: Tensor,
    step: str,
    path: str,
    is_complex: bool,
    groups: list[str],
    calls: str = "",
) -> Tensor:
    read = _read(step)
    if read.scatter:
        message = select_shard(message, read, _groups(groups, read).position)
    return torch.empty_like(message, memory_format=torch.contiguous_format)


def _groups(names: list[str], step: Step) -> StepGroups:
    ranks = math.prod(step.sizes)
    sizes = ranks, step.inner, ranks // step.inner, None
    pairs = zip(names, sizes, strict=True)
    whole, inner, outer, gather = (resolve_group(*pair) if pair[0] else None for pair in pairs)
    return StepGroups(whole, inner=inner, outer=outer, gather=gather)


def write_step(step: Step) -> str:
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    contract = step.contract and step.contract.id
    return json.dumps(values | {"contract": contract, "move": "", "why": ""}, default=_pack)


_PACKED = {kind.__name__: kind for kind in (Reach, PeerCounts, Links, Link)}


def _pack(one: Any) -> dict[str, list[Any]]:
    return {type(one).__name__: [getattr(one, field.name) for field in fields(one)]}


# In each call of a compiled graph.
@lru_cache(maxsize=1024)
def _read(text: str) -> Step:
    values = {name: _read_value(value) for name, value in json.loads(text).items()}
    contract = values.pop("contract")
    return Step(**values, contract=contract and Contract.of_id(contract))


def _read_value(value: Any) -> Any:
    if isinstance(value, dict):
        ((kind, parts),) = value.items()
        return _PACKED[kind](*_read_value(parts))
    return tuple(map(_read_value, value)) if isinstance(value, list) else value
