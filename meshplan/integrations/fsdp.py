"""FSDP2 over the backend: HSDP with one rounding of each gradient.

FSDP2 reduces gradients over the shards and then over the replicas. Each reduction rounds its
result: 16-bit gradients, and averages over numbers other than powers of two, are rounded twice.
After ``apply``, the bits are those of one reduction over (replicas, shards).

    fully_shard(model, mesh=mesh["ddp", "fsdp"])
    meshplan.integrations.fsdp.apply(model)

Only public methods of FSDP2 are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshplan._dtypes import name_of
from meshplan.backend._reductions import has_partial_sums
from meshplan.collectives import Work
from meshplan.errors import IntegrationError
from meshplan.integrations.ddp import check_group

__all__ = ["apply"]


def apply(model: nn.Module, *, reduce_dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Reduce the gradients of HSDP modules with one division and one rounding.

    Call it on every rank, after ``fully_shard`` of the last module and before the first backward.
    It sets a custom reduce-scatter (``FSDPModule.set_custom_reduce_scatter``), which replaces one
    of yours. FSDP divides as before: by the number of shards and replicas, or by the factor of
    ``set_gradient_divide_factor``.

    Args:
        model: with modules that ``fully_shard`` was called on. Modules without replicas are left
            as they are: each gradient is rounded once there.
        reduce_dtype: that of the ``MixedPrecisionPolicy``: autograd keeps gradients of modules with
            tensor-parallel parameters in it from the start. Then a reduction over the
            tensor-parallel axis is not rounded to the parameters' dtype first (pytorch#190626;
            torch 2.15 does so by itself). ``None``: no change.

    Returns:
        The names of the modules with replicas, whose reductions have one rounding now; ``""`` is
        ``model`` itself.

    Raises:
        IntegrationError: no FSDP module, a mesh whose groups are not of the backend ``meshplan``
            or differ in their contract, a contract whose order cannot be reduced in two steps, or
            a module with parameters on several meshes. The last one is found when the modules
            before it have their reduce-scatter already.
    """
    modules: dict[str, Any] = {
        name: one for name, one in model.named_modules() if isinstance(one, FSDPModule)
    }
    if not modules:
        raise IntegrationError(
            "no module of the model is sharded; call torch.distributed.fsdp.fully_shard first"
        )
    replicated = [name for name, one in modules.items() if _check_replicas(name, one)]
    for name in replicated:
        set_reduce_scatter(name, modules[name], ReduceScatter())
    for module in modules.values():
        _keep_gradients(module, reduce_dtype)
    return tuple(replicated)


class ReduceScatter:
    """FSDP's reduce-scatter, continued by the all-reduce over the replicas."""

    def check(self, dtype: torch.dtype, op: Any = None) -> None:
        """Raise an error for reductions that a subclass does not accept. FSDP allocates before each
        reduction, also where one shard needs none.
        """

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        self.check(dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check(input_tensor.dtype, op)
        self.reduce(output_tensor, input_tensor, group, op)
        return Work([output_tensor]) if async_op else None

    def reduce(self, output: Tensor, input: Tensor, group: Any, op: Any) -> None:
        shards = check_group(group, "the reduce-scatter of FSDP2")
        shards.scatter_partial_sum(output, input, op)


def set_reduce_scatter(name: str, module: Any, comm: ReduceScatter) -> None:
    try:
        module.set_custom_reduce_scatter(comm)
    except ValueError as error:
        raise IntegrationError(
            f"{_label(name)} has parameters on several meshes, for which FSDP2 accepts no "
            "custom reduce-scatter; call apply on the other modules"
        ) from error


def _check_replicas(name: str, module: nn.Module) -> bool:
    found = False
    for *_, parameter in own_parameters(module):
        if not isinstance(parameter, DTensor):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        # FSDP2 puts the axis of the replicas before that of the shards, and tensor-parallel axes
        # behind both.
        if len(wide) < 2 or not placements[wide[0]].is_replicate():
            continue
        shards = next((axis for axis in wide if not placements[axis].is_replicate()), None)
        if shards is None:
            continue
        found = True
        groups = [
            check_group(mesh.get_group(axis), _label(name))
            for axis in (*wide[: wide.index(shards)], shards)
        ]
        contracts = {group.options.contract for group in groups}
        if len(contracts) > 1:
            ids = " and ".join(sorted(contract.id for contract in contracts))
            raise IntegrationError(
                f"{_label(name)} is reduced over groups of the contracts {ids}; pass the same "
                "BackendOptions to all groups of the mesh"
            )
        contract = groups[0].options.contract
        if not has_partial_sums(contract, name_of(parameter.dtype)):
            raise IntegrationError(
                f"{_label(name)} is reduced under {contract.id}, which has no partial sums: one "
                "reduction over shards and replicas cannot be made of two; pass "
                "BackendOptions(contract=Contract(order='tree')), or leave apply out"
            )
    return found


def own_parameters(
    module: nn.Module,
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that FSDP holds with the module, not with those inside it, and where."""
    for name, parameter in module.named_parameters(recurse=False):
        yield module, name, parameter
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)


def _label(name: str) -> str:
    return f"module {name!r}" if name else "the root module"


# The hook of an earlier call, by module. It ends with the module.
_hooks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _keep_gradients(module: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    earlier = _hooks.pop(module, None)
    if earlier is not None:
        earlier.remove()

    def keep(module: nn.Module, _: object) -> None:
        parameters = [parameter for *_, parameter in own_parameters(module)]
        # FSDP requires one dtype for all gradients of a module.
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            for parameter in parameters:
                if parameter.requires_grad and parameter.is_leaf and parameter.grad_dtype != dtype:
                    parameter.grad_dtype = dtype

    # After FSDP's own hook, which puts the whole parameters in place.
    _hooks[module] = module.register_forward_pre_hook(keep)
