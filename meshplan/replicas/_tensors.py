"""Named tensors of modules, optimizers, mappings and lists."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from meshplan._torch import (
    AsyncCollectiveTensor,
    FakeTensor,
    is_traceable_wrapper_subclass,
    local_tensor_of,
)
from meshplan.errors import ReplicaInputError

TensorSource = (
    nn.Module | torch.optim.Optimizer | Tensor | Mapping[str, Any] | Iterable[Tensor | nn.Module]
)


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    name: str  # its path, e.g. ``layers.0.weight``
    local: Tensor  # its data on this rank
    shape: tuple[int, ...]  # of the whole tensor, the same on all ranks
    # mesh, placements: of a DTensor.
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def __str__(self) -> str:
        dtype = str(self.local.dtype).removeprefix("torch.")
        placed = f" {self.placements}" if self.mesh is not None else ""
        return f"{self.name}: {dtype}{list(self.shape)}{placed}"


def named_tensors(source: TensorSource, *, grads: bool = False) -> list[NamedTensor]:
    """All tensors of ``source``, in an order that does not depend on the containers: by name,
    numbers in names by their value. Numbers in the state of an optimizer count as tensors.
    """
    every = [pair for one in _leaves("", source) for pair in _collect(*one, grads)]
    found = [one for name, value in every for one in _unwrap(name, value)]
    return sorted(found, key=lambda one: [_key(part) for part in re.split(r"(\d+)", one.name)])


def holds_fsdp(source: Any) -> bool:
    # Of a module that torch has not imported there are no instances.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    leaves = (one for _, one in _leaves("", source) if isinstance(one, nn.Module))
    every = (module for one in leaves for module in one.modules())
    return fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for one in every)


def _key(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | nn.Module | torch.optim.Optimizer):
        yield name, value
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for below, one in pairs:
            yield from _leaves(_join(name, str(below)), one)
    else:
        raise ReplicaInputError(
            f"{name or 'source'} is of type {type(value).__name__}, and only tensors are compared; "
            "pass a module, an optimizer, a tensor, or a mapping or list of them"
        )


def _collect(name: str, value: Any, grads: bool) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name or "tensor", value
        if grads and isinstance(value, nn.Parameter) and value.grad is not None:
            yield f"{name or 'tensor'}.grad", value.grad
    elif isinstance(value, nn.Module):
        for below, parameter in value.named_parameters():
            yield from _collect(_join(name, below), parameter, grads)
        for below, buffer in value.named_buffers():
            yield _join(name, below), buffer
    else:
        # By group and number of the parameter: optimizers have no names.
        for g, group in enumerate(value.param_groups):
            for p, parameter in enumerate(group["params"]):
                state = value.state.get(parameter, {})
                yield from collect_values(_join(name, f"group{g}.param{p}"), state)


def collect_values(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, float | int):
        yield name, torch.tensor(float(value), dtype=torch.float64, device="cpu")
    elif isinstance(value, Mapping):
        for below, one in value.items():
            yield from collect_values(f"{name}.{below}", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from collect_values(f"{name}.{number}", one)


def _join(name: str, below: str) -> str:
    return f"{name}.{below}" if name else below


def _unwrap(name: str, tensor: Tensor) -> Iterator[NamedTensor]:
    """The plain tensor inside, or the tensors of a wrapper subclass."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise _no_data(name, "not initialised yet", "the module after its first forward")
    if tensor.is_nested:
        raise _no_data(name, "nested", "the tensors that it is made of")
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        tensor = local_tensor_of(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    # Subclasses such as those of quantization: each inner tensor is compared on its own, with the
    # placements of a DTensor around them.
    if not isinstance(tensor, FakeTensor) and is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            for inner in _unwrap(f"{name}.{part}", getattr(tensor, part)):
                below = shape if mesh is None else inner.shape
                yield NamedTensor(inner.name, inner.local, below, mesh, placements)
        return
    _check(name, tensor)
    yield NamedTensor(name, tensor, shape, mesh, placements)


def _check(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, FakeTensor):
        raise _no_data(name, "fake", "tensors outside of tracing")
    if tensor.device.type == "meta":
        raise _no_data(name, "on the meta device", "the module after to_empty and its first values")
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise _no_data(name, kind, "its indices and values as tensors of their own")
    if tensor.is_quantized:
        raise _no_data(name, "quantized", "its int_repr() and its scales")


def _no_data(name: str, kind: str, instead: str) -> ReplicaInputError:
    return ReplicaInputError(
        f"{name} is {kind}, so it has no elements of its own to compare; pass {instead}"
    )
