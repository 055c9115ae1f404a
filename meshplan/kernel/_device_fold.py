"""Reductions of leaves in the memory of one GPU: one launch on the current stream, and no wait.

A capture may hold it: the addresses of the leaves are parameters of the launch. More leaves than
these have room for take one more launch for each 256 of them, which writes the addresses to memory
of torch's allocator.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from meshplan.contract import Contract
from meshplan.definition import partial_dtype
from meshplan.kernel._batches import TABLE_LEAVES, Plan, plan_of
from meshplan.kernel._compilers import CompileError
from meshplan.kernel._device_code import Device, device_of, kernel_name
from meshplan.kernel._driver import DriverError

_LOG = logging.getLogger("meshplan")
# As csrc/fold.h has them.
_DIMS = 5
_TABLE_KERNEL = "mp_fold_table"
# Lanes of a block where blocks for every processor are full, and else: more blocks of fewer lanes.
_LANES, _FEW_LANES = 256, 64
_BLOCKS_PER_PROCESSOR = 4


class LeafTable(ctypes.Structure):
    """Addresses of leaves, and the plan of their batches."""

    _fields_ = (
        ("leaf", ctypes.c_void_p * TABLE_LEAVES),
        ("plan", ctypes.c_ubyte * TABLE_LEAVES),
    )


class FoldCall(ctypes.Structure):
    """The only parameter of the kernels."""

    _fields_ = (
        ("table", LeafTable),
        ("tables", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("numel", ctypes.c_longlong),
        ("divisor", ctypes.c_ulonglong),
        ("size", ctypes.c_longlong * _DIMS),
        ("stride", ctypes.c_longlong * _DIMS),
        ("leaves", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("chain", ctypes.c_int),
        ("waiting", ctypes.c_int),
    )


@lru_cache(maxsize=64)
def fold_device(index: int) -> Device | None:
    """The GPU of that index with its kernels; ``None`` if it has none, which is reported once."""
    try:
        device = device_of(index)
        with device.driver.current():
            device.kernel(_TABLE_KERNEL)
    except (DriverError, CompileError) as error:
        _LOG.warning("reductions on cuda:%d run in plain torch, slower: %s", index, error)
        return None
    return device


@lru_cache(maxsize=256)
def fold_plan(order: str, shape: tuple[int, ...]) -> Plan | None:
    """As ``plan_of``; that there is no plan is reported once."""
    found = plan_of(order, shape)
    if found is None:
        _LOG.warning(
            "order %r over axes of %s runs in plain torch on GPUs, slower: it has no batches",
            order,
            list(shape),
        )
    return found


def launch_fold(
    device: Device,
    out: Tensor,
    leaves: Sequence[Tensor],
    op: str,
    shape: Sequence[int],
    contract: Contract,
    dtype: torch.dtype,
    divisor: int | None,
    part: int,
) -> None:
    """Start the fold of ``leaves`` of a reduction in ``dtype`` into ``out``: contiguous, one of the
    leaves or in memory apart from them all. Arguments are those of
    ``meshplan.definition.reduce_leaves``, and checked; ``part`` is 0 for a whole reduction, 1 for
    ``combine_leaves``, 2 for ``finish_partials``. ``DriverError`` if the driver refuses the launch.
    """
    if out.numel() == 0:
        return
    plan = fold_plan(contract.order, tuple(shape))
    assert plan is not None, contract.order
    leaves, sizes, strides = _in_one_layout(leaves)
    call = FoldCall(
        out=out.data_ptr(),
        numel=out.numel(),
        divisor=divisor or 0,
        leaves=len(leaves),
        dims=len(sizes),
        chain=plan.chain,
        waiting=plan.waiting,
    )
    call.size[: len(sizes)], call.stride[: len(strides)] = sizes, strides
    addresses = [leaf.data_ptr() for leaf in leaves]
    words = -(-out.numel() * leaves[0].itemsize // 16)
    lanes = _LANES if words >= _LANES * device.processors else _FEW_LANES
    blocks = min(-(-words // lanes), _BLOCKS_PER_PROCESSOR * device.processors)
    kernel = _kernel_name(dtype, op, contract, part)
    stream = device.stream()
    with device.driver.current():
        if len(leaves) <= TABLE_LEAVES:
            _fill(call.table, addresses, plan.batches)
        else:
            tables = _write_tables(device, stream, out, addresses, plan.batches)
            call.tables = tables.data_ptr()
        _launch(device, kernel, blocks, lanes, stream, call)


def _kernel_name(dtype: torch.dtype, op: str, contract: Contract, part: int) -> str:
    name = kernel_name(dtype, op, contract)
    # Partial results of the leaves' dtype are folded as the leaves are.
    whole = part == 0 or partial_dtype(op, dtype, contract) is dtype
    return f"{name}_{'fold' if whole else ('combine', 'finish')[part - 1]}"


def _in_one_layout(
    leaves: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[int], Sequence[int]]:
    """Leaves that the kernels can read; and sizes and strides of all, empty if contiguous."""
    first = leaves[0]
    itemsize = first.itemsize
    if any(leaf.data_ptr() % itemsize for leaf in leaves):
        # Of other libraries: torch's own elements are aligned.
        leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
    if all(leaf.is_contiguous() for leaf in leaves):
        return leaves, (), ()
    strides = first.stride()
    dims = _merged(first.shape, strides)
    if (
        len(dims) <= _DIMS
        and first.numel() < 1 << 32
        and all(leaf.stride() == strides for leaf in leaves)
    ):
        return leaves, [size for size, _ in dims], [stride for _, stride in dims]
    return [leaf.contiguous() for leaf in leaves], (), ()


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides without dims of size 1; dims that follow each other in memory are one."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found


def _write_tables(
    device: Device, stream: int, out: Tensor, addresses: Sequence[int], batches: bytes
) -> Tensor:
    """Tables in memory of the device, which the allocator keeps for work on this stream."""
    each = ctypes.sizeof(LeafTable)
    starts = range(0, len(addresses), TABLE_LEAVES)
    tables = torch.empty(len(starts) * each, dtype=torch.uint8, device=out.device)
    for number, start in enumerate(starts):
        call, some = (
            FoldCall(out=tables.data_ptr() + number * each),
            slice(start, start + TABLE_LEAVES),
        )
        _fill(call.table, addresses[some], batches[some])
        _launch(device, _TABLE_KERNEL, 1, _LANES, stream, call)
    return tables


def _fill(table: LeafTable, addresses: Sequence[int], batches: bytes) -> None:
    table.leaf[: len(addresses)] = addresses
    table.plan[: len(batches)] = batches


def _launch(
    device: Device, kernel: str, blocks: int, lanes: int, stream: int, call: FoldCall
) -> None:
    # A launch copies its parameters.
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    device.driver.launch(device.kernel(kernel), blocks, lanes, stream, arguments)
