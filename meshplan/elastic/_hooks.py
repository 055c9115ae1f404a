"""Reductions of FSDP2 and DDP that sum each round and do not divide it."""

# No "from __future__ import annotations" here: torch compares a hook's annotations with types.

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from meshplan._torch import BatchNorm
from meshplan.errors import ElasticError
from meshplan.integrations.ddp import reduce_bucket
from meshplan.integrations.fsdp import ReduceScatter, set_reduce_scatter


@dataclass
class Buckets:
    """The state of DDP's hook: its group, and the ``id`` of each parameter that it reduced."""

    group: dist.ProcessGroup
    reduced: set[int] = field(default_factory=set)

    def check(self, parameters: Mapping[str, nn.Parameter], round: int) -> None:
        """Refuse parameters that have a gradient of this rank only."""
        for name, parameter in parameters.items():
            if id(parameter) not in self.reduced:
                raise ElasticError(
                    f"parameter {name!r} has a gradient that DDP did not reduce in round {round}; "
                    "freeze parameters before DDP is constructed, and have DDP ignore none that "
                    "is trained"
                )


def sum_buckets(model: DistributedDataParallel) -> Buckets:
    """Have a DDP model sum its gradients; the result notes what was reduced."""
    state = Buckets(model.process_group)
    model.register_comm_hook(state, _sum_bucket)
    return state


def _sum_bucket(
    state: Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    state.reduced.update(map(id, bucket.parameters()))
    _check_dtype(bucket.buffer().dtype)
    return reduce_bucket(state.group, bucket, dist.ReduceOp.SUM)


def sum_shards(model: nn.Module, ranks: int) -> None:
    """Have all FSDP modules of ``model``, on so many data-parallel ranks, sum their gradients."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            # FSDP divides by 1 then, and asks for sums. On one rank it would divide in a pass of
            # its own, and divides by nothing without a factor.
            factor: Any = 1.0 if ranks > 1 else None
            FSDPModule.set_gradient_divide_factor(module, factor)
            module.set_gradient_divide_factor = _refuse_factor  # type: ignore[method-assign]
            module.set_force_sum_reduction_for_comms(True)
            set_reduce_scatter(name, module, _SumScatter())
            # Ranks whose micro-batches use other parameters would reduce other gradients.
            if reduces_zeros():
                module.set_reduce_scatter_unused_params(True, recurse=False)


def reduces_zeros() -> bool:
    """Whether FSDP2 can reduce zeros in place of gradients that a rank does not have."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def watch_gradients(
    model: nn.Module,
    names: Mapping[int, str],
    counts: Counter[str],
    watched: set[str],
    calls: list[str],
) -> None:
    """Count the gradients that this rank computes for parameters of FSDP modules.

    FSDP2 reduces zeros for the others, and once more for each call of a module but the last one in
    the backward. A parameter is ``watched`` from the first forward of its module on. ``names`` are
    by ``id``. The names of called modules are appended to ``calls``.
    """
    hooks: Any = WeakIdKeyDictionary()

    def watch(module: nn.Module, _: object) -> None:
        called, parameters = places[module]
        calls.append(called)
        for owner, attribute, name in parameters:
            # FSDP2's own hook, which ran before, has put the whole parameter here.
            parameter = getattr(owner, attribute)
            if parameter.requires_grad and parameter not in hooks:
                hooks[parameter] = parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: counts.update((name,))
                )
                watched.add(name)

    hook = torch.compiler.disable(watch)  # type: ignore[no-untyped-call]
    places: dict[nn.Module, tuple[str, list[tuple[nn.Module, str, str]]]] = {}
    module: nn.Module
    for called, module in model.named_modules():
        if issubclass(type(module), FSDPModule):
            parameters = [
                (owner, attribute, names[id(parameter)])
                for owner in _own_modules(module)
                for attribute, parameter in owner.named_parameters(recurse=False)
            ]
            places[module] = called, parameters
            module.register_forward_pre_hook(hook)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside it, without FSDP modules."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def _refuse_factor(factor: float) -> None:
    raise ElasticError(
        f"set_gradient_divide_factor({factor}) would divide each round; divide once, by "
        "GradientAccumulator.finish(divisor=...)"
    )


def find_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose statistics, while they train, depend on the number of ranks, by name."""
    return {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, BatchNorm)
        # The running ones are of a rank's micro-batches; SyncBatchNorm normalizes over a round.
        and (one.running_mean is not None or isinstance(one, nn.SyncBatchNorm))
    }


def check_batch_norms(norms: Mapping[str, nn.Module]) -> None:
    """Refuse those of ``find_batch_norms`` that train."""
    for name, norm in norms.items():
        if norm.training:
            raise ElasticError(
                f"module {name!r} is a {type(norm).__name__}, whose statistics depend on the "
                "number of ranks; use LayerNorm or GroupNorm, or call eval() of the module"
            )


def reset_shards(module: nn.Module) -> None:
    """Forget what an exception left of a step in FSDP modules: gradients, and where it was.

    Raises:
        ElasticError: torch cannot do so.
    """
    if not isinstance(module, FSDPModule):
        for child in module.children():
            reset_shards(child)
        return
    if not hasattr(module, "reset_iter_state"):
        raise ElasticError(
            f"torch {torch.__version__} does not reset FSDP2 after an exception; use torch 2.13 "
            "or newer, or make the model again from the last checkpoint"
        )
    # Parameters of modules that the exception left unsharded, which keep their gradients.
    for parameter in module.parameters():
        parameter.grad = None
    module.reset_iter_state()


class _SumScatter(ReduceScatter):
    """FSDP's reduce-scatter, which accepts sums in float32 and float64 only."""

    def check(self, dtype: torch.dtype, op: Any = None) -> None:
        _check_dtype(dtype)
        if op not in (None, dist.ReduceOp.SUM):
            raise ElasticError(
                "FSDP2 does not sum a round; leave set_force_sum_reduction_for_comms as "
                "GradientAccumulator sets it"
            )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ElasticError(
            f"gradients are reduced in {dtype}, which rounds the sum of each round; pass "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
