"""Reductions of CPU tensors over gloo in graphs: as one operator, which runs them later.

What torch traces holds ``meshplan::exchange`` or ``meshplan::reduction``, which runs the same code
as an eager call. So a rank that runs a compiled graph and one that does not issue the same
collectives, compiled graphs compare headers too, and no pass over a graph can drop the comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshplan._torch import functional_operators as _ops
from meshplan.contract import Contract, Op
from meshplan.execute._groups import StepGroups, resolve_group
from meshplan.execute._provenance import CollectiveLog
from meshplan.execute._shards import select_shard
from meshplan.execute.paths import Outcome, Path
from meshplan.execute.paths._exchange import PATH as EXCHANGE
from meshplan.kernel import OPERATORS
from meshplan.planner import Step

_Run = Callable[[Tensor, Step, StepGroups, str, bool, str], Outcome]


def trace_reduction(
    summand: Tensor,
    step: Step,
    groups: StepGroups,
    path: Path,
    is_complex: bool,
    calls: str,
) -> Outcome:
    """Put the reduction of a real CPU summand over gloo into the graph that torch traces. With
    ``is_complex``, its last dim holds real and imaginary parts. The operator takes a ticket by the
    name ``calls`` when it runs.
    """
    log, ops = CollectiveLog(), torch.ops.meshplan
    contract, flat = step.contract, not step.scatter and step.inner == 1
    if path is EXCHANGE and flat and step.norm is None and not is_complex:
        assert contract is not None
        contracted = contract.order, contract.accumulate, contract.rounding
        over = step.divisor, groups.flat.group_name, calls
        sizes = list(step.sizes)
        exchanged = log.issue(ops.exchange, summand, step.op, sizes, *contracted, *over)
        return Outcome(exchanged, log)
    found = (groups.whole, groups.inner, groups.outer, groups.gather)
    names = ["" if group is None else group.group_name for group in found]
    return Outcome(
        log.issue(ops.reduction, summand, _written(step), path.name, is_complex, names, calls),
        log,
    )


def define_operators(run: _Run) -> None:
    """Define both operators. ``run`` reduces over gloo by the path of a name. Its last arguments
    are ``is_complex`` and the name by which a ticket is taken.
    """

    def exchange(
        message: Tensor,
        op: Op,
        shape: list[int],
        order: str,
        accumulate: str,
        rounding: str,
        divisor: int | None,
        group: str,
        calls: str = "",
    ) -> Tensor:
        step = Step(
            kind="all_reduce",
            axes=tuple(range(len(shape))),
            sizes=tuple(shape),
            move="",
            why="",
            op=op,
            path=EXCHANGE.name,
            contract=Contract(order, accumulate, rounding),  # type: ignore[arg-type]
            divisor=divisor,
        )
        groups = StepGroups(resolve_group(group, math.prod(shape)))
        return _finished(run(message, step, groups, EXCHANGE.name, False, calls))

    def reduction(
        message: Tensor,
        step: str,
        path: str,
        is_complex: bool,
        groups: list[str],
        calls: str = "",
    ) -> Tensor:
        return _finished(run(message, _read(step), _groups(groups), path, is_complex, calls))

    OPERATORS.define(  # type: ignore[no-untyped-call]
        "exchange(Tensor message, str op, int[] shape, str order, str accumulate, str rounding, "
        'int? divisor, str group, str calls="") -> Tensor',
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    OPERATORS.impl("exchange", exchange, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("meshplan::exchange", _same, lib=OPERATORS)
    OPERATORS.define(  # type: ignore[no-untyped-call]
        "reduction(Tensor message, str step, str path, bool is_complex, str[] groups, "
        'str calls="") -> Tensor',
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    OPERATORS.impl("reduction", reduction, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake("meshplan::reduction", _result, lib=OPERATORS)


def _finished(reduced: Outcome) -> Tensor:
    waited: Tensor = _ops.wait_tensor(reduced.tensor)
    return waited


def _same(message: Tensor, *_: object) -> Tensor:
    return torch.empty_like(message, memory_format=torch.contiguous_format)


def _result(
    message: Tensor,
    step: str,
    path: str,
    is_complex: bool,
    groups: list[str],
    calls: str = "",
) -> Tensor:
    shard = select_shard(message, _read(step), _groups(groups).position)
    return shard.new_empty(shard.shape)


def _groups(names: list[str]) -> StepGroups:
    whole, inner, outer, gather = (resolve_group(name) if name else None for name in names)
    return StepGroups(whole, inner=inner, outer=outer, gather=gather)


def _written(step: Step) -> str:
    """What runs of a step, as text."""
    return json.dumps(
        {
            "kind": step.kind,
            "axes": step.axes,
            "sizes": step.sizes,
            "op": step.op,
            "divisor": step.divisor,
            "path": step.path,
            "contract": step.contract and step.contract.id,
            "norm": step.norm,
            "scatter": step.scatter,
            "lengths": step.lengths,
            "inner": step.inner,
            "between": step.between,
            "halving": step.halving,
            "chunk": step.chunk,
            "leaves": step.leaves,
        }
    )


def _read(text: str) -> Step:
    words = json.loads(text)
    contract = words.pop("contract")
    return Step(
        **words
        | {
            "axes": tuple(words["axes"]),
            "sizes": tuple(words["sizes"]),
            "scatter": tuple((axis, dim) for axis, dim in words["scatter"]),
            "lengths": tuple(words["lengths"]),
            "halving": words["halving"] and tuple(map(tuple, words["halving"])),
        },
        contract=contract and Contract.of_id(contract),
        move="",
        why="",
    )
