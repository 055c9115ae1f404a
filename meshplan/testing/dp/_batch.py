"""A batch: tensors whose first dim counts samples, in any tuples, lists and dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshplan._torch import tree_leaves, tree_map_only
from meshplan.errors import ContractError


def split_batch(
    batch: Any, world: int, *, uneven: bool = False, samples_per_leaf: int = 1
) -> list[Any]:
    """The part of each rank of a global batch: ranges of samples in the order of ranks.

    Args:
        batch: a tensor [samples, ...], or tuples, lists and dicts of such tensors; every rank gets
            all other values unchanged. ``(inputs, targets)`` is split in the same way.
        world: number of ranks.
        uneven: allow parts that differ by one leaf, the longer ones first; with fewer leaves than
            ranks, the last ranks get no samples.
        samples_per_leaf: samples that stay together, as in ``dp_gradients``.

    Returns:
        One batch per rank, of views.

    Raises:
        ContractError: (a ValueError) no tensors, sizes that differ, a number of samples that is
            not a multiple of ``samples_per_leaf``, or of it times ``world`` (unless ``uneven``).
    """
    start, parts = 0, []
    for count in samples_per_rank(batch_size(batch), world, uneven, samples_per_leaf):
        parts.append(_range(batch, start, start + count))
        start += count
    return parts


def samples_per_rank(samples: int, world: int, uneven: bool, samples_per_leaf: int) -> list[int]:
    """How many samples each rank holds; arguments and errors as those of ``split_batch``."""
    if world < 1:
        raise ContractError(f"world={world}; pass the number of ranks, at least 1")
    each, more = divmod(count_leaves(samples, samples_per_leaf), world)
    if more and not uneven:
        unit = "" if samples_per_leaf == 1 else f" in leaves of {samples_per_leaf}"
        raise ContractError(
            f"a batch of {samples} samples{unit} does not divide by {world} ranks, {more} would be "
            "left over; pass another batch, or uneven=True for parts that differ by one"
        )
    return [(each + (rank < more)) * samples_per_leaf for rank in range(world)]


def count_leaves(samples: int, samples_per_leaf: int) -> int:
    if samples_per_leaf < 1:
        raise ContractError(
            f"samples_per_leaf={samples_per_leaf}; pass the number of samples of a leaf, at least 1"
        )
    if samples % samples_per_leaf:
        raise ContractError(
            f"{samples} samples are not a multiple of samples_per_leaf={samples_per_leaf}, and a "
            "leaf of another size has other bits; pass a multiple on every rank"
        )
    return samples // samples_per_leaf


def batch_size(batch: Any) -> int:
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
    if not shapes:
        raise ContractError("a batch without tensors has no samples; pass e.g. inputs [8, 3]")
    if () in shapes or len({shape[0] for shape in shapes}) > 1:
        found = ", ".join(map(str, shapes))
        raise ContractError(
            "the first dim of every tensor of a batch counts the samples, got shapes "
            f"{found}; pass e.g. inputs of (8, 3) and targets of (8,)"
        )
    return shapes[0][0]


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def copy_range(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop - 1`` in new memory, contiguous and detached.

    The place of a sample in its batch differs between ranks, and kernels may choose another
    algorithm for memory of other strides or alignment.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, _range(batch, start, stop))


def _range(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop], batch)
