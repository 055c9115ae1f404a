"""Inputs whose sum shows the order of additions, for every rank without communication.

Plain random data is a weak test: a bfloat16 sum in a float32 accumulator has the same bits in
nearly every order. Here each element has one big value on one rank and its negative on another,
both drawn per element. Small values added in between are lost in the big one, wholly or in its
last bits, so the order decides the result.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meshplan._bits import INTEGER_OF_SIZE
from meshplan.contract import check_dtype
from meshplan.errors import ContractError

# Named at each factory, so that torch.set_default_device does not move the draw elsewhere.
_CPU = torch.device("cpu")
# Per dtype: the least exponent of small values, then two for the big ones. The first big
# one keeps some bits of the small ones in the accumulator (float32 for 16-bit floats), the second
# none, in a float64 accumulator neither. float16 has no room for the second.
_SCALES = {
    torch.float32: (0, 22, 58),
    torch.bfloat16: (0, 22, 58),
    torch.float16: (-12, 11, 11),
    torch.float64: (0, 50, 58),
}
# Kinds of special columns, repeating with a period that no vector width divides, so that each
# kind falls into each vector lane. The columns of the other 11 kinds stay order sensitive.
_PERIOD = 17


def order_sensitive(
    numel: int,
    *,
    rank: int,
    world_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    specials: bool = False,
) -> Tensor:
    """This rank's leaf of a reduction whose bits depend on the order of additions.

    The same for the same arguments in every process and on every machine: drawn on the CPU as
    16-bit integers from a ``torch.Generator`` (Mersenne Twister), and scaled by powers of two
    only. Move it to a device afterwards. From three ranks on most sums change with the order;
    ``tree`` and ``rank`` are the same order up to three ranks, and differ from four on. Where the
    tree is its own mirror image (2, 4, 8, ... ranks), reversed leaves have the same sum under
    ``tree``: rotate them instead. Integer leaves are random over the full range (no order of a
    wrapping sum can be seen).

    Args:
        numel: number of elements.
        rank: position in the group, 0 to ``world_size - 1``.
        world_size: number of leaves.
        dtype: float32, float64, float16, bfloat16, int8 to int64 or uint8.
        seed: selects the values.
        specials: 7 of 17 columns hold -0.0 on all ranks, zeros of any sign, one infinity, two
            infinities, a NaN with a payload, subnormals, or the largest number with any sign.
            For integers 2 of 17 columns hold the smallest or the largest number.

    Returns:
        Contiguous CPU tensor [numel] of ``dtype``.

    Raises:
        ContractError: ``rank`` is not in the group, or ``numel`` is negative.
        ContractTypeError: a dtype outside the contract.
    """
    check_dtype("sum", dtype)
    if numel < 0 or not 0 <= rank < world_size:
        raise ContractError(
            f"numel={numel}, rank={rank}, world_size={world_size}; "
            "pass numel >= 0 and a rank from 0 to world_size - 1"
        )
    # A stream that is the same on all ranks places the big values; one of this rank fills the rest.
    key = (numel, world_size, dtype, seed)
    shared, own = _generator("shared", *key), _generator("own", rank, *key)
    first = _integers(shared, numel, 1) % world_size
    second = (first + 1 + _integers(shared, numel, 1) % max(world_size - 1, 1)) % world_size
    column = (torch.arange(numel, device=_CPU) + int(_integers(shared, 1, 1))) % _PERIOD
    if dtype not in _SCALES:
        leaf = _integers(own, numel, 4).to(dtype)
        if specials:
            limits = torch.iinfo(dtype)
            leaf = leaf.masked_fill(column == 0, limits.min).masked_fill(column == 1, limits.max)
        return leaf

    small, near, far = _SCALES[dtype]
    leaf = _scale(own, numel, small) * _sign(own, numel)
    big = torch.where(_integers(shared, numel, 1) % 2 == 0, near, far)
    big = _scale(shared, numel, 0) * _power_of_two(big)
    if world_size > 1:
        leaf = torch.where(first == rank, big, torch.where(second == rank, -big, leaf))
    # From float64 to 16 bits by way of float32: two roundings, but the same two on every rank, and
    # so a big value and its negative still cancel.
    rounded = leaf.to(torch.float32).to(dtype) if dtype.itemsize < 4 else leaf.to(dtype)
    if not specials:
        return rounded
    return _with_specials(rounded, own, column, first == rank, second == rank)


def _with_specials(
    leaf: Tensor,
    own: torch.Generator,
    column: Tensor,
    first: Tensor,
    second: Tensor,
) -> Tensor:
    integer = INTEGER_OF_SIZE[leaf.dtype.itemsize]
    limits = torch.finfo(leaf.dtype)
    infinity = int(torch.tensor(torch.inf, dtype=leaf.dtype, device=_CPU).view(integer))
    least_normal = int(torch.tensor(limits.tiny, dtype=leaf.dtype, device=_CPU).view(integer))
    negative = torch.iinfo(integer).min
    sign = torch.where(_sign(own, leaf.numel()) < 0, negative, 0).to(integer)
    # 1 to least_normal - 1: every subnormal, and as a payload both quiet and signalling NaNs.
    payload = (1 + _integers(own, leaf.numel(), 4).remainder(least_normal - 1)).to(integer)
    replacements = (
        (0, True, torch.full_like(sign, negative)),  # -0.0
        (1, True, sign),  # zeros of any sign
        (2, first, sign + infinity),
        (3, first | second, sign + infinity),
        (4, first, sign + infinity + payload),  # a NaN
        (5, True, sign + payload),  # subnormals
        (6, True, sign + (infinity - 1)),  # the largest number
    )
    bits = leaf.view(integer)
    for kind, where, pattern in replacements:
        bits = torch.where((column == kind) & where, pattern, bits)
    return bits.view(leaf.dtype)


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(_CPU).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _integers(generator: torch.Generator, numel: int, words: int) -> Tensor:
    """Random int64 [numel] of ``words`` times 16 bits; four words make any int64."""
    # Small ranges only: how torch draws from a large range has changed between releases.
    result = torch.zeros(numel, dtype=torch.int64, device=_CPU)
    for _ in range(words):
        draw = torch.randint(
            1 << 16,
            (numel,),
            generator=generator,
            device=_CPU,
        )
        result = (result << 16) | draw
    return result


def _sign(generator: torch.Generator, numel: int) -> Tensor:
    return 1 - 2 * (_integers(generator, numel, 1) % 2)


def _scale(generator: torch.Generator, numel: int, exponent: int) -> Tensor:
    """Random float64 [numel] from 2^exponent up to 16 times that, 48 random bits each."""
    significand = (1 << 48) + _integers(generator, numel, 3)
    power = exponent - 48 + _integers(generator, numel, 1) % 4
    return significand.to(torch.float64) * _power_of_two(power)


def _power_of_two(exponent: Tensor) -> Tensor:
    # Written as bits: exp2 is exact for whole numbers in some builds of torch only.
    return ((exponent + 1023) << 52).view(torch.float64)
