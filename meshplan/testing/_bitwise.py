"""Compare tensors by their bits, on one rank and between ranks.

For ``torch.equal`` and ``==``, -0.0 equals 0.0 and a NaN differs from itself; ``allclose`` hides
the last bits. So these functions compare integers only.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from meshplan._bits import (
    FLOATS,
    bytes_of,
    element_index,
    element_text,
    max_ulps,
)
from meshplan._message_text import format_runs
from meshplan._torch import AsyncCollectiveTensor
from meshplan.kernel import integers
from meshplan.testing._ranks import RankGroup
from meshplan.topology._reading import group_values


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers of the same size.

    Returns:
        Contiguous uint8 (for 1-byte dtypes, bool too), int16, int32 or int64 tensor of the same
        shape on the same device. A complex tensor has one more axis of size 2, for the real and
        the imaginary part. A view where the tensor is contiguous, else a copy.
    """
    # A view of an unfinished asynchronous result would be read too early.
    finished = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return integers(finished).contiguous()


def first_difference(actual: Tensor, expected: Tensor) -> str | None:
    """The first difference of two tensors as text; ``None`` if dtype, shape and all bits agree.

    Names a difference in dtype or shape, else the number of elements that differ and the first of
    them: flat index and multi-index, both values and bit patterns, and for float16, bfloat16,
    float32 and float64 the distance in units in the last place (0 between -0.0 and +0.0). The last
    index of a complex tensor is 0 for the real and 1 for the imaginary part. Devices may differ.

    Args:
        actual, expected: tensors of any dtype and device.
    """
    for what, found, wanted in (
        ("dtype", actual.dtype, expected.dtype),
        ("shape", tuple(actual.shape), tuple(expected.shape)),
    ):
        if found != wanted:
            return f"{what} differs: {found}, expected {wanted}"
    found_bits, wanted_bits = bits(actual), bits(expected)
    if found_bits.device != wanted_bits.device:
        found_bits, wanted_bits = found_bits.cpu(), wanted_bits.cpu()
    differs = (found_bits != wanted_bits).flatten()
    count = int(differs.sum())
    if count == 0:
        return None
    flat = int(differs.to(torch.uint8).argmax())
    real = actual.dtype.to_real()
    pair = [one.flatten()[flat : flat + 1].cpu() for one in (found_bits, wanted_bits)]
    found_text, wanted_text = (element_text(one.view(torch.uint8), real) for one in pair)
    ulps = ""
    if real in FLOATS:
        has_nan = any(bool(one.view(real).isnan()) for one in pair)
        ulps = ", NaN" if has_nan else f", {max_ulps(*pair)} ulp apart"
    return (
        f"{count} of {differs.numel()} elements differ; first at flat index {flat}, "
        f"index {element_index(flat, found_bits.shape)}: {found_text}, expected {wanted_text}{ulps}"
    )


def assert_bitwise_equal(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Assert that dtype, shape and every bit agree; NaN payloads and signs of zeros count.

    Args:
        actual, expected: as for ``first_difference``.
        what: the name in the message.

    Raises:
        AssertionError: with ``what`` and the text of ``first_difference``.
    """
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")


def assert_replicas_equal(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    what: str = "tensor",
) -> None:
    """Assert that ``tensor`` has the same dtype, shape and bits on all ranks of ``group``.

    Every rank of ``group`` must call it.

    Args:
        tensor: this rank's.
        group: ``None``: all ranks.
        what: the name in the message.

    Raises:
        AssertionError: the same on every rank, with the global ranks by equal bits, e.g.
            ``3 different replicas: ranks 0-4,6 | 5 | 7``.
        GroupStateError: no process group is initialised, or this rank is not in ``group``.
    """
    ranks = RankGroup(group)
    classes = group_values(zip(ranks.gather_records(digest(tensor)), ranks.ranks, strict=True))
    if len(classes) > 1:
        shown = " | ".join(",".join(format_runs(ranks)) for ranks in classes.values())
        raise AssertionError(f"{what}: {len(classes)} different replicas: ranks {shown}")


def digest(tensor: Tensor) -> str:
    """The sha256 of dtype, shape and bits, in hexadecimal digits."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + bytes_of(bits(tensor))).hexdigest()
