"""Run one planned reduction on one tensor. Out of place; the only choice left is the path."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshplan.collectives import _paths
from meshplan.collectives._provenance import MAX_RECORDS, Event, Source, record
from meshplan.collectives._scatter import (
    exchange_scatter,
    native_scatter,
    reference_scatter,
    shard_of,
)
from meshplan.contract import check_dtype
from meshplan.errors import ContractTypeError, FallbackRefusedError
from meshplan.planner import Step

__all__ = ["run_reduction"]

_PathFunction = Callable[[Tensor, Step, ProcessGroup], Tensor]
_ScatterFunction = Callable[[Tensor, Step, ProcessGroup, ProcessGroup | None], Tensor]

_PATHS: dict[str, tuple[_PathFunction, tuple[str, ...]]] = {
    "exchange": (_paths.exchange, ("all_to_all_single", "all_gather_into_tensor")),
    "reference": (_paths.reference, ("all_gather_into_tensor",)),
    "native": (_paths.native, ("all_reduce",)),
}
_SCATTER_PATHS: dict[str, tuple[_ScatterFunction, tuple[str, ...]]] = {
    "exchange": (exchange_scatter, ("all_to_all_single", "all_gather_into_tensor")),
    "reference": (reference_scatter, ("all_gather_into_tensor",)),
    "native": (native_scatter, ("all_reduce",)),
}


def run_reduction(
    tensor: Tensor,
    step: Step,
    group: ProcessGroup,
    *,
    source: Source,
    gather: ProcessGroup | None = None,
    strict: bool = False,
) -> Tensor:
    """Reduce ``tensor`` over ``group`` as ``step`` says; each rank gets the result or its shard.

    Args:
        tensor: this rank's summand, any shape and strides; left as it is. The dtypes of the
            contract, and complex for sum and avg (real and imaginary parts are two elements).
            Others run on the backend's own all-reduce, which the report shows as a fallback.
        step: an ``all_reduce`` or ``reduce_scatter``.
        group: its group ranks follow mesh coordinates.
        gather: the group over ``step.gather_axes``, where there are any.
        source: what was asked and planned, for the report.
        strict: refuse a fallback.

    Returns:
        A contiguous tensor of the same dtype, of the tensor's shape or the shard's. Its last
        collective may be under way: ``torch.ops._c10d_functional.wait_tensor`` waits for it.

    Raises:
        ContractTypeError: ``avg`` of integers.
        FallbackRefusedError: ``strict``, and a dtype outside the contract.
    """
    assert step.op is not None
    started = time.perf_counter()
    path, why = step.path or "native", step.why
    fallback = False
    sends: tuple[str, ...] = ()
    numbers = _as_reals(tensor, step)
    if step.op == "avg" or step.contract is not None:
        try:
            check_dtype(step.op, numbers.dtype)
        except ContractTypeError as error:
            if step.op == "avg" and not tensor.dtype.is_floating_point:
                raise
            path, why, fallback = "native", str(error), step.contract is not None
            if fallback and strict:
                raise FallbackRefusedError(
                    f"{source.asked}: {tensor.dtype} would run on the backend's own {step.op}, in "
                    "its own order; convert the tensor, or install with strict=False"
                ) from error
    summand = numbers if step.norm is None else numbers**step.norm
    if summand.numel() == 0:
        shard = shard_of(summand, step, group.rank())
        result = shard.clone(memory_format=torch.contiguous_format)
    elif step.scatter:
        scatter, sends = _SCATTER_PATHS[path]
        sends = sends if gather is not None or path != "exchange" else sends[:1]
        result = scatter(summand, step, group, gather)
    else:
        reduce, sends = _PATHS[path]
        result = reduce(summand, step, group)
    if step.norm is not None:
        result = torch.ops._c10d_functional.wait_tensor(result) ** (1.0 / step.norm)
    if tensor.is_complex() and not numbers.is_complex():
        result = torch.view_as_complex(result)
    event = _event(source, path, sends, tensor.dtype, why, fallback)
    record(event, elements=tensor.numel(), seconds=time.perf_counter() - started)
    return result


@lru_cache(maxsize=MAX_RECORDS)
def _event(
    source: Source, path: str, sends: tuple[str, ...], dtype: torch.dtype, why: str, fallback: bool
) -> Event:
    return Event(
        asked=source.asked,
        planned=source.planned,
        ran=path,
        sends=sends,
        group=source.group,
        dtype=str(dtype).removeprefix("torch."),
        why=why,
        fallback=fallback,
    )


def _as_reals(tensor: Tensor, step: Step) -> Tensor:
    if tensor.is_complex() and step.op in ("sum", "avg") and step.norm is None:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()
