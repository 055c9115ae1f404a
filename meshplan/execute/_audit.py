"""The audit of one reduction: its result, compared bit for bit with the plain definition.

The reference is the contract in plain torch over the summands of all ranks, gathered piece by
piece, without the kernel and without any path. The ranks then exchange their findings, so that all
of them raise, or none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshplan._bits import flatten
from meshplan._message_text import format_first
from meshplan._torch import functional_operators as _ops
from meshplan.definition import reduce_leaves
from meshplan.errors import AuditError
from meshplan.execute._groups import StepGroups
from meshplan.execute._shards import select_shard
from meshplan.execute._wire import Wire
from meshplan.planner import Step

# Of the pieces of all ranks together, while they are folded.
PIECE_BYTES = 64 << 20

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def audit(
    summand: Tensor,
    result: Tensor,
    step: Step,
    groups: StepGroups,
    *,
    request: str,
    path: str,
    dtype: torch.dtype,  # of the tensor that was reduced, whose summand is real
    call: int,  # the number of the call among those of this reduction
) -> AuditError | None:
    """Compare ``result``, waited for here, with the reference, on all ranks of the step. Returns
    the error that all ranks raise, if an element of any rank has other bits. ``W`` ranks gather
    ``W`` times the bytes of the summand, ``PIECE_BYTES`` at a time. Each rank folds all of it and
    needs the memory of one more summand.
    """
    assert step.contract is not None
    expected = _reference(summand, step, groups)
    wanted = _bits(select_shard(expected, step, groups.position))
    found = _bits(_ops.wait_tensor(result))
    # For each rank: how many elements differ, and of the first one its position and both bits.
    row = [groups.rank, 0, 0, 0, 0]
    differs = found != wanted
    count = int(differs.sum())
    if count:
        first = int(differs.to(torch.uint8).argmax())
        row = [row[0], count, first, int(found[first]), int(wanted[first])]
    rows = _gathered(torch.tensor(row, device=summand.device), groups).view(-1, len(row)).tolist()
    wrong = [row for row in rows if row[1]]
    if not wrong:
        return None
    _, _, position, *bits = wrong[0]
    ranks, elements = tuple(row[0] for row in wrong), sum(row[1] for row in wrong)
    element = f"{position}"
    if dtype.is_complex:
        part = ("real", "imaginary")[position % 2]
        element, dtype = f"{position // 2} ({part} part)", dtype.to_real()
    differ = "element differs" if elements == 1 else "elements differ"
    shown = format_first(ranks, 16)
    got, correct = (_shown(one, dtype) for one in bits)
    return AuditError(
        f"call {call} of {request}: path {path} does not give the bits of contract "
        f"{step.contract.id}: {elements} {differ} on {len(ranks)} of {len(rows)} ranks ({shown}); "
        f"the first is element {element} of the result of rank {ranks[0]}, {got} "
        f"instead of {correct}; do not trust what was computed since the last audit: look for "
        "failing hardware on these ranks, and compare path='reference'",
        ranks=ranks,
        elements=elements,
    )


def _reference(summand: Tensor, step: Step, groups: StepGroups) -> Tensor:
    """The whole result, on every rank."""
    assert step.op is not None
    assert step.contract is not None
    flat = flatten(summand.detach())
    whole = torch.empty_like(flat)
    members = math.prod(step.sizes)
    width = max(1, PIECE_BYTES // (members * flat.element_size()))
    for start in range(0, flat.numel(), width):
        piece = flat[start : start + width]
        rows = _gathered(piece, groups).view(members, -1).unbind(0)
        whole[start : start + width] = reduce_leaves(
            rows, step.op, step.sizes, step.contract, divisor=step.divisor
        )
    return whole.view(summand.shape)


def _gathered(tensor: Tensor, groups: StepGroups) -> Tensor:
    """Of all ranks in the order of their positions: by inner groups, then by the outer one."""
    wire = Wire()
    for group in groups.levels:
        tensor = _ops.wait_tensor(wire.all_gather(tensor.contiguous(), group))
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    return flatten(tensor).view(_INTEGERS[tensor.element_size()])


def _shown(bits: int, dtype: torch.dtype) -> str:
    width = dtype.itemsize
    unsigned = bits % (1 << (8 * width))
    value = torch.frombuffer(bytearray(unsigned.to_bytes(width, "little")), dtype=dtype)
    return f"{value.item()} (0x{unsigned:0{2 * width}x})"
