"""``DistributedDataParallel`` over the backend, with one rounding instead of one for each summand.

DDP divides each gradient by the number of ranks before the sum: every summand is rounded, and the
sum once more. The hook sums first. Without it the replicas have equal bits too.
"""

# No "from __future__ import annotations" here: torch compares a hook's annotations with types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from meshplan.backend import NAME
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.errors import IntegrationError

__all__ = ["average_bucket", "register"]


def register(model: DistributedDataParallel) -> None:
    """Have a DDP model average its gradients with one division and one rounding.

    Call it on every rank, before the first backward. Contract, path and other settings are those
    of the model's group (``BackendOptions``). Buckets are reduced concurrently with the backward.

    Args:
        model: without a communication hook, over a process group of the backend ``meshplan``.

    Raises:
        IntegrationError: not a DDP model, or a group of another backend.
        RuntimeError: torch's own, if the model has a hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise IntegrationError(
            f"model is a {type(model).__name__}; pass the "
            "torch.nn.parallel.DistributedDataParallel around it"
        )
    check_group(model.process_group, "the model")
    model.register_comm_hook(model.process_group, average_bucket)


def average_bucket(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook for ``DistributedDataParallel.register_comm_hook``.

    Args:
        group: the model's.
        bucket: from torch; its gradients are averaged in place.

    Returns:
        A future of the bucket's flat tensor. A failure comes out of the backward, as torch's
        ``RuntimeError`` with the text of the error.

    Raises:
        IntegrationError: a bucket that is not dense.
    """
    work = dist.all_reduce(check_bucket(bucket), dist.ReduceOp.AVG, group, async_op=True)
    assert work is not None
    # In a callback: DDP takes an error that is set on a future for a value. The value is a list of
    # real and imaginary parts, if the bucket is complex; DDP reads its own memory then.
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return found


def check_bucket(bucket: dist.GradBucket) -> Tensor:  # type: ignore[name-defined]
    """The flat gradients of a bucket. Raises IntegrationError if they are not dense."""
    gradients: Tensor = bucket.buffer()
    if gradients.layout is not torch.strided:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in bucket.parameters())
        raise IntegrationError(
            f"the gradient of a parameter of shape {shapes} is {gradients.layout}, and the "
            "contract is for dense ones; pass sparse=False to its module"
        )
    return gradients


def check_group(group: Any, owner: str) -> MeshplanProcessGroup:
    """``group``, if it is one of the backend."""
    if isinstance(group, MeshplanProcessGroup):
        return group
    raise IntegrationError(
        f"{owner} has a group of the backend {dist.get_backend(group)!r}, which reduces in its own "
        f"order; call torch.distributed.init_process_group({NAME!r}), or pass a group of "
        f"new_group(backend={NAME!r})"
    )
