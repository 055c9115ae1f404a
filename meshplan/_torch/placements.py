"""Placements whose reductions and moves meshplan takes over, under names of its own.

Torch's executor calls private methods on the placements of a step. A subclass of these classes
defines the method without the underscore, and is called instead; ``super()`` has torch's own. This
module alone maps one to the other: subclasses name the arguments that they read, and pass the rest.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import Partial, Shard

from meshplan._torch import (
    REDUCE_SHARD_VALUE,
    REDUCE_VALUE,
    REPLICATE_TO_SHARD,
    TO_NEW_SHARD_DIM,
    TO_REPLICATE_TENSOR,
)

_HOOKS = {
    "reduce_value": REDUCE_VALUE,
    "reduce_shard_value": REDUCE_SHARD_VALUE,
    "replicate_to_shard": REPLICATE_TO_SHARD,
    "to_replicate_tensor": TO_REPLICATE_TENSOR,
    "to_new_shard_dim": TO_NEW_SHARD_DIM,
}


class _Hooks:
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Bound here once: no call is added to those that torch makes.
        for ours, theirs in _HOOKS.items() if cls.__module__ != __name__ else ():
            if ours in vars(cls):
                setattr(cls, theirs, vars(cls)[ours])


class PartialHooks(_Hooks, Partial):
    """A ``Partial`` whose reductions subclasses may define."""

    # Torch's own, for ``super()``. ``install`` refuses a torch without it.
    reduce_value: Any = getattr(Partial, REDUCE_VALUE, None)
    reduce_shard_value: Any = getattr(Partial, REDUCE_SHARD_VALUE, None)


class ShardHooks(_Hooks, Shard):
    """A ``Shard`` whose moves subclasses may define. ``_names`` lists their parameters."""

    replicate_to_shard: Any = getattr(Shard, REPLICATE_TO_SHARD, None)
    to_replicate_tensor: Any = getattr(Shard, TO_REPLICATE_TENSOR, None)
    to_new_shard_dim: Any = getattr(Shard, TO_NEW_SHARD_DIM, None)
