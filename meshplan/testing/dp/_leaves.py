"""The leaves of a batch gradient: the gradient of one sample, computed alone.

A batch of one has the same shapes on every rank and for every number of ranks, so that it runs
through the same kernels. Everything else that its bits depend on is the same too: memory layout,
buffers, random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from meshplan._torch import BatchNorm, tree_leaves, tree_map_only
from meshplan.contract import check_dtype
from meshplan.errors import ContractError, ContractTypeError

# A batch: tensors whose first dim counts samples, in any tuples, lists and dicts.


def split_batch(
    batch: Any,
    world: int,
    *,
    uneven: bool = False,
    samples_per_leaf: int = 1,
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
    counts = samples_per_rank(batch_size(batch), world, uneven, samples_per_leaf)
    return [_range(batch, *ends) for ends in pairwise(accumulate(counts, initial=0))]


def samples_per_rank(
    samples: int,
    world: int,
    uneven: bool,
    samples_per_leaf: int,
) -> list[int]:
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
    """Samples ``start`` to ``stop - 1`` in new memory, contiguous and detached: the place of a
    sample differs between ranks, and kernels may choose another algorithm for other strides or
    alignment.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, _range(batch, start, stop))


def _range(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop], batch)


LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(outputs, targets)`` of one leaf: a tensor of one element."""

# Bytes; what torch aligns its own allocations to, at least.
_LINE = 64
_REDUCE_THEMSELVES = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
)


def sample_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    *,
    start: int = 0,
    samples_per_leaf: int = 1,
    seed: int = 0,
) -> Iterator[dict[str, Tensor | None]]:
    """The gradients of each sample of a batch, in order.

    Args:
        model: called as ``model(inputs)``; a tuple or list of inputs as ``model(*inputs)``, a dict
            as ``model(**inputs)``. Parameters, ``.grad`` and buffers stay as they are.
        loss_fn: ``loss_fn(outputs, targets)`` of one leaf returns a tensor of one element.
        inputs, targets: this part of the global batch: tensors [samples, ...], or tuples, lists
            and dicts of such. ``targets`` may hold no tensors.
        start: index in the global batch of the first of these samples.
        samples_per_leaf: how many samples are one leaf, run through the model together.
        seed: leaf i draws its random numbers (dropout) from torch generators seeded by
            ``(seed, i)``, i being its index in the global batch. The state of the generators is
            restored.

    Yields:
        For each leaf, by parameter name, a new contiguous tensor of the parameter's shape and
        dtype, or ``None`` where the leaf does not use the parameter. Names are those of
        ``model.named_parameters()``, frozen ones left out.

    Raises:
        ContractError: batch norm that normalises over the batch, a model that reduces gradients
            itself, no parameters to train, a loss that is not one number or does not depend on any
            parameter, or an invalid batch as in ``split_batch``.
        ContractTypeError: parameters outside the contract, sparse gradients, sharded parameters,
            or devices other than CPUs and CUDA/HIP GPUs.
    """
    if start < 0:
        raise ContractError(f"start={start}; pass the index of the first sample, 0 or more")
    leaves = SampleLeaves(model, loss_fn, inputs, targets, samples_per_leaf, seed)
    leaves.first = count_leaves(start, samples_per_leaf)
    return (
        {
            name: None if g is None else g.clone(memory_format=torch.contiguous_format)
            for name, g in leaves.gradients(index).items()
        }
        for index in range(leaves.first, leaves.first + leaves.count)
    )


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    for name, module in model.named_modules():
        shown = f"'{name}'" if name else "the model"
        if any(cls.__name__ in _REDUCE_THEMSELVES for cls in type(module).__mro__):
            raise ContractError(
                f"{shown} is a {type(module).__name__}, which reduces gradients in another order; "
                "pass the model inside, e.g. ddp.module"
            )
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
            raise ContractError(
                f"{shown} is a {type(module).__name__} that normalises over the batch, so "
                "the gradient is not a sum over samples; call eval() on it (with running "
                "statistics), or use a norm of one sample, e.g. GroupNorm or LayerNorm"
            )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ContractError("the model has no parameters with requires_grad=True; unfreeze some")
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise ContractError(f"'{name}' has no shape yet; run the model once first")
        if isinstance(parameter, DTensor):
            raise ContractTypeError(
                f"'{name}' is a DTensor, whose gradient torch reduces; pass a model of plain "
                "tensors, the same on every rank"
            )
        check_dtype("sum", parameter.dtype)
    return parameters


class SampleLeaves:
    """Gradients of the leaves of a part of a batch; arguments and errors as of
    ``sample_gradients``. ``parameters`` have gradients, by name; ``count`` leaves are here, of
    which the ``first`` has that index in the global batch, 0 until it is set.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        inputs: Any,
        targets: Any,
        samples_per_leaf: int,
        seed: int,
    ) -> None:
        self.parameters = _trained_parameters(model)
        self.count = count_leaves(batch_size((inputs, targets)), samples_per_leaf)
        self.first = 0
        self._model, self._loss_fn = model, loss_fn
        self._batch = inputs, targets
        self._size, self._seed = samples_per_leaf, seed
        self._gpus = _gpus([*model.parameters(), *model.buffers(), *tensors_of(self._batch)])
        self._displaced = [
            (p, p.detach().clone()) for p in model.parameters() if p.data_ptr() % _LINE
        ]

    def gradients(self, index: int) -> dict[str, Tensor | None]:
        start = (index - self.first) * self._size
        # Leaving inference mode first: copies made in it could not be differentiated.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(self._gpus),
            _copy_aligned(self._displaced),
        ):
            inputs, targets = copy_range(self._batch, start, start + self._size)
            self._seed_generators(index)
            loss = self._loss_fn(self._run_model(inputs), targets)
            _check_loss(loss)
            found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        gradients: dict[str, Tensor | None] = dict(zip(self.parameters, found, strict=True))
        for name, gradient in gradients.items():
            if gradient is not None and gradient.layout is not torch.strided:
                raise ContractTypeError(
                    f"the gradient of '{name}' has layout {gradient.layout}, whose sums have no "
                    "fixed order; make it dense, e.g. Embedding(sparse=False)"
                )
        return gradients

    def _run_model(self, inputs: Any) -> Any:
        # Every leaf starts from the model's own buffers, and its writes into them are dropped:
        # else a leaf would depend on those that ran before it on the same rank.
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        if isinstance(inputs, dict):
            return functional_call(self._model, buffers, (), inputs)
        arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        return functional_call(self._model, buffers, arguments)

    def _seed_generators(self, index: int) -> None:
        digest = hashlib.sha256(f"leaf {self._seed} {index}".encode()).digest()
        number = int.from_bytes(digest[:8], "little") >> 1
        torch.default_generator.manual_seed(number)
        for gpu in self._gpus:
            torch.cuda.default_generators[gpu].manual_seed(number)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ContractError(
            f"the loss of a leaf must be one number, got {found}; return e.g. losses.mean() from "
            "loss_fn"
        )
    if not loss.requires_grad:
        raise ContractError(
            "the loss does not depend on any parameter with requires_grad=True; look for "
            "detach(), no_grad() or item() in the model and in loss_fn"
        )


@contextmanager
def _copy_aligned(
    displaced: list[tuple[nn.Parameter, Tensor]],
) -> Iterator[None]:
    """Inside, every parameter begins at the start of a line of memory: in another process it may be
    in the middle of a file or of a flat buffer, for which kernels may choose another algorithm.
    """
    kept = [parameter.data for parameter, _ in displaced]
    try:
        for parameter, copy in displaced:
            parameter.data = copy
        yield
    finally:
        for (parameter, _), data in zip(displaced, kept, strict=True):
            parameter.data = data


def _gpus(tensors: list[Tensor]) -> list[int]:
    devices = {tensor.device for tensor in tensors}
    for device in sorted(devices, key=str):
        if device.type not in ("cpu", "cuda"):
            raise ContractTypeError(
                f"tensors on {device.type} are not supported; move model and batch to 'cpu' or "
                "'cuda'"
            )
    return sorted(device.index for device in devices if device.type == "cuda")
