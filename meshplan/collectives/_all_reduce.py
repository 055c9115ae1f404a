"""All-reduce of plain tensors over any process group."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan._calls import Ticket
from meshplan.collectives._lanes import Work, finished
from meshplan.collectives._options import (
    AnyOp,
    ReductionOptions,
    check_destination,
    check_no_gradient,
    check_summand,
    read_options,
)
from meshplan.collectives._reduction import (
    GroupLike,
    compare_calls,
    counts_refused,
    read_group,
    reduce_tensor,
    start,
)
from meshplan.contract import Contract


@counts_refused
def deterministic_all_reduce(
    tensor: Tensor,
    *,
    op: AnyOp = "sum",
    path: str = "auto",
    contract: Contract | None = None,
    group: GroupLike | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    strict: bool = False,
    verify: Literal["checksum"] | None = None,
    debug: bool = False,
) -> Tensor | Work:
    """Reduce ``tensor`` over the ranks of a group, in place or to ``out``.

    Every rank of the group calls it with a tensor of the same shape and dtype and equal arguments.
    With one rank (or without a process group, if ``WORLD_SIZE`` is unset or 1) the result is
    ``tensor``, also for ``avg``. The members of the group hold an agreement round at the first call
    with a path other than ``native``.

    Args:
        tensor: any shape and strides. float16, bfloat16, float32, float64, int8 to int64, uint8,
            and complex for ``sum`` and ``avg``; by path ``native`` the dtypes of the backend. Not a
            DTensor.
        op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"product"``, or the
            ``torch.distributed.ReduceOp`` of that name. ``avg`` is the sum, and one division by the
            number of ranks before the result is rounded.
        path: how data moves, one of ``meshplan.execute.PATHS``, such as ``"auto"``,
            ``"one_shot"``, ``"two_shot"``, ``"exchange"``, ``"halving"`` or ``"reference"``. No bit
            depends on it, except by ``"native"``: the backend's own order, outside every contract.
        contract: the order and the rounding of additions, ``Contract()`` if ``None``. Path
            ``native`` reads its ``rounding``: ``once`` adds 16-bit floats in float32.
        group: a ``ProcessGroup``, a ``DeviceMesh`` of one axis, or ``(mesh, axis)``; all ranks if
            ``None``. The summands are in the order of the group's ranks.
        out: the result is written to it, and ``tensor`` is left as it is unless they share memory.
        async_op: return a ``Work`` at once.
        strict: raise an error instead of taking another path than ``path``.
        verify: with path ``integer``: ``"checksum"`` finds every flipped bit in its messages. A
            call that cannot run so raises an error, with ``strict`` or without.
        debug: hold an agreement round over the store before the call.

    Returns:
        ``out``, or ``tensor`` itself without ``out``. With ``async_op`` a ``Work``: do not touch
        the tensors before its ``wait`` has returned.

    Raises:
        ContractTypeError, ContractError, PolicyError, ContractStateError: an unsupported argument.
            They are checked first, whatever the state of the process groups.
        GroupStateError: no process group in a job of several ranks, or a rank outside the group.
        AxisNameError: ``group`` names no axis of its mesh.
        GroupAgreementError, GroupCreationError: at the first use of a group.
        FallbackRefusedError: ``strict`` or ``verify``, and the path is unavailable or ``native``.
        ChecksumError: ``verify``, and a bit has changed; on every rank.
        PeerTimeoutError, SignatureMismatchError: ranks that are missing, or came with another call.
    """
    options = read_options(op, path, contract, strict, verify)
    check_all_reduce(tensor, out, options)
    found = read_group(group)
    result = tensor if out is None else out
    if found is None:
        if out is not None:
            out.detach().copy_(tensor.detach().clone())
        return finished(result) if async_op else result
    if torch.compiler.is_compiling() and not async_op:
        if out is None:
            torch.ops.meshplan.all_reduce_(tensor, *options.operands(found))
        else:
            out.copy_(torch.ops.meshplan.all_reduce(tensor, *options.operands(found)))
        return result
    if debug:
        compare_calls(found, tensor, f"deterministic_all_reduce by {options}")
    run = partial(all_reduce_into, result, tensor, options, found)
    return start("all_reduce", run, [tensor], options, found, async_op)


def all_reduce_into(
    out: Tensor,
    tensor: Tensor,
    options: ReductionOptions,
    group: ProcessGroup,
    apart: bool,
    ticket: Ticket,
) -> Tensor:
    """Write the reduction of ``tensor`` to ``out``; all arguments are checked."""
    request = f"deterministic_all_reduce {options.op}"
    value = reduce_tensor(
        tensor, options, group, request, ticket, apart=apart, in_place=out is tensor
    )
    return out if value is out else out.copy_(value)


def check_all_reduce(tensor: Tensor, out: Tensor | None, options: ReductionOptions) -> None:
    """Refuse a tensor that cannot be reduced with these options, or a result that cannot be
    written. Raises as ``check_summand`` and ``check_destination``.
    """
    check_summand(tensor, options)
    if out is None:
        check_destination(tensor)
    else:
        check_destination(out, tensor, tuple(tensor.shape))
        check_no_gradient(tensor, "all_reduce")
