"""Write the golden files of the contract: inputs and outputs of reductions, as little-endian hex.

The outputs come from ``meshplan.testing.reference_reduce`` (exact rationals, rounded by hand), and
never from ``meshplan.contract``, which they test. The inputs come from ``random.getrandbits``
alone, so that every machine writes the same files. They change only with the contract's version.

    python tools/make_golden.py            write the files of tests/golden
    python tools/make_golden.py --check    exit with 1 if a file would change

``contract_v1.json`` has the operations of ``meshplan.contract`` in the orders of additions,
``exact_v1.json`` those of ``order="exact"``, and ``premul_sum_v1.json`` torch's ``PREMUL_SUM``,
with a factor for each leaf.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from meshplan.contract import CONTRACT_VERSION, Contract, Op
from meshplan.testing import reference_reduce

DEFAULT_FOLDER = Path(__file__).parent.parent / "tests" / "golden"

# Width and trailing significand bits.
FLOATS = {
    torch.float32: (32, 23),
    torch.bfloat16: (16, 7),
    torch.float16: (16, 10),
    torch.float64: (64, 52),
}
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)
SHAPES = (
    *((n,) for n in (1, 2, 3, 4, 5, 7, 8, 9, 16)),
    *((2, 2), (3, 2), (2, 3), (8, 5), (5, 8), (2, 3, 2), (2, 1, 3)),
)
# Shorter and longer than the vectors of any CPU, and never a multiple of them.
NUMELS = (9, 11, 13, 17, 19, 23, 29, 37)
LARGEST_CASE = 3600  # hex digits of all leaves together


class Case(NamedTuple):
    dtype: torch.dtype
    op: Op
    shape: tuple[int, ...]
    contract: Contract
    divisor: int | None = None
    factors: tuple[float, ...] | None = None


ORDERS: tuple[Literal["tree", "rank"], ...] = ("tree", "rank")
TREE, RANK = (Contract(order) for order in ORDERS)
Kind = tuple[Op, tuple[int, ...], Contract]
FLOAT_KINDS: list[Kind] = [
    *(("sum", shape, TREE) for shape in SHAPES),
    *(("sum", shape, RANK) for shape in ((4,), (7,), (5, 8), (2, 3, 2))),
    *(("avg", shape, TREE) for shape in ((7,), (3, 2))),
    *(("product", shape, TREE) for shape in ((5,), (2, 3))),
    ("avg", (5,), RANK),
    ("product", (9,), RANK),
    ("max", (5,), TREE),
    ("max", (1,), RANK),
    ("min", (2, 3), TREE),
]
INTEGER_KINDS: list[Kind] = [
    ("sum", (7,), TREE),
    ("sum", (8, 5), RANK),
    ("product", (3, 2), TREE),
    ("max", (5,), TREE),
    ("min", (2, 1, 3), TREE),
]
NODE_KINDS: list[Kind] = [
    *(("sum", (7,), Contract(order, rounding="node")) for order in ORDERS),
    *(("avg", (2, 3), Contract(order, rounding="node")) for order in ORDERS),
    *(("product", (5,), Contract(order, rounding="node")) for order in ORDERS),
]
FLOAT64_KINDS: list[Kind] = [
    *(("sum", (9,), Contract(order, "float64", "node")) for order in ORDERS),
    *(("sum", (8,), Contract(order, "float64")) for order in ORDERS),
    *(("sum", (5, 8), Contract(order, "float64")) for order in ORDERS),
    *(("avg", (2, 3), Contract(order, "float64")) for order in ORDERS),
    *(("product", (5,), Contract(order, "float64")) for order in ORDERS),
]


def cases() -> Iterator[Case]:
    """Every shape with every floating dtype; then each option on shapes that tell it apart."""
    for kinds, dtypes in (
        (FLOAT_KINDS, tuple(FLOATS)),
        (INTEGER_KINDS, INTEGERS),
        (NODE_KINDS, (torch.bfloat16, torch.float16)),
        (FLOAT64_KINDS, (torch.float32,)),
    ):
        for dtype, kind in itertools.product(dtypes, kinds):
            yield Case(dtype, *kind)
    for dtype in FLOATS:
        yield Case(dtype, "avg", (2, 3), TREE, 3)
    # 2^24 + 1 is no float32: the divisor is rounded to the accumulator as well.
    yield Case(torch.float32, "avg", (2, 3, 2), RANK, 16777217)
    yield Case(torch.bfloat16, "avg", (3, 2), RANK, 2)


EXACT, EXACT64 = Contract("exact"), Contract("exact", "float64")


def exact_cases() -> Iterator[Case]:
    """Every dtype in order ``exact``; integers as in any order."""
    shapes = ((1,), (2,), (3,), (5,), (8,), (16,), (2, 3), (8, 5))
    for dtype, shape in itertools.product(FLOATS, shapes):
        yield Case(dtype, "sum", shape, EXACT)
    for dtype in FLOATS:
        yield Case(dtype, "avg", (7,), EXACT)
        yield Case(dtype, "avg", (2, 3), EXACT, 3)
        yield Case(dtype, "max", (5,), EXACT)
    for op, shape in (("sum", (8,)), ("sum", (3, 3)), ("avg", (5,))):
        yield Case(torch.float32, op, shape, EXACT64)  # type: ignore[arg-type]
    yield Case(torch.int32, "sum", (7,), EXACT)
    yield Case(torch.int8, "product", (3, 2), EXACT)


# Powers of two, of which a product is exact, and others; two that no float32 is.
FACTORS = (1 / 3, -0.7, 0.5, 1e-3, 3.0, -0.0, 1 + 2**-30, 1e-40)


def premul_cases() -> Iterator[Case]:
    """Groups of 2 to 4 ranks, by every contract."""
    words = itertools.product(ORDERS, ("wide", "float64"), ("once", "node"))
    contracts = [Contract(order, wide, rounding) for order, wide, rounding in words]  # type: ignore[arg-type]
    for i, (dtype, contract) in enumerate(itertools.product(FLOATS, contracts)):
        if contract.accumulate == "float64" and dtype is not torch.float32:
            continue
        for leaves in (2, 3, 4):
            factors = tuple(FACTORS[(i + leaves + k) % len(FACTORS)] for k in range(leaves))
            yield Case(dtype, "sum", (leaves,), contract, factors=factors)


def float_columns(
    draw: random.Random, leaves: int, numel: int, width: int, fraction: int, depth: int
) -> list[list[int]]:
    """``numel`` shuffled columns of one bit pattern per leaf: a third of them special values.

    Most others cancel: a big value, its negative, and values 2^-depth as big, of which an
    accumulator with ``depth`` significand bits keeps more or less by the order of additions.
    """
    sign = 1 << (width - 1)
    infinity = sign - (1 << fraction)
    bias = (1 << (width - fraction - 2)) - 1

    def near_one(spread: int, middle: int = bias) -> int:
        exponent = middle - spread + draw.getrandbits(8) % (2 * spread + 1)
        return sign * draw.getrandbits(1) | exponent << fraction | draw.getrandbits(fraction)

    def cancelling() -> list[int]:
        up = min(depth, bias - 1)
        column = [near_one(2, bias + up - depth) for _ in range(leaves)]
        big = (bias + up) << fraction | draw.getrandbits(fraction)
        first = draw.getrandbits(16) % leaves
        column[first] = big
        column[(first + 1 + draw.getrandbits(16) % max(leaves - 1, 1)) % leaves] = big | sign
        return column

    def one_of(*patterns: int) -> list[int]:
        signs = [sign * draw.getrandbits(1) for _ in range(leaves)]
        return [s | patterns[draw.getrandbits(16) % len(patterns)] for s in signs]

    def with_one(pattern: int) -> list[int]:
        column = [near_one(4) for _ in range(leaves)]
        column[draw.getrandbits(16) % leaves] = pattern | sign * draw.getrandbits(1)
        return column

    subnormal = [1 + draw.getrandbits(fraction - 1) for _ in range(4)]
    special = [
        [sign] * leaves,
        one_of(0),
        one_of(*subnormal, 1, (1 << fraction) - 1, 1 << fraction),
        one_of(infinity - 1, infinity - 2),
        with_one(infinity),
        one_of(infinity, bias << fraction),
        with_one(infinity | subnormal[0]),
        [draw.getrandbits(width) for _ in range(leaves)],
    ]
    start = draw.getrandbits(3)
    columns = [special[(start + i) % 8] for i in range(min(numel // 3, 8))]
    columns += [cancelling() if i % 3 else with_one(bias) for i in range(numel - len(columns))]
    for i in range(numel - 1, 0, -1):
        j = draw.getrandbits(16) % (i + 1)
        columns[i], columns[j] = columns[j], columns[i]
    return columns


def render(cases: Iterable[Case], seed: str) -> str:
    """The text of a golden file, one case a line."""
    lines = []
    for number, case in enumerate(cases):
        draw = random.Random(f"{seed} {CONTRACT_VERSION} case {number}")
        leaves = math.prod(case.shape)
        width, fraction = FLOATS.get(case.dtype, (8 * case.dtype.itemsize, 0))
        fitting = [n for n in NUMELS if leaves * n * width // 4 <= LARGEST_CASE]
        numel = fitting[number % len(fitting)] if fitting else NUMELS[0]
        if fraction:
            wide = width == 64 or case.contract.accumulate == "float64"
            columns = float_columns(draw, leaves, numel, width, fraction, 52 if wide else 23)
        else:
            columns = [[draw.getrandbits(width) for _ in range(leaves)] for _ in range(numel)]
        inputs = [list(leaf) for leaf in zip(*columns, strict=True)]
        output = reference_reduce(
            inputs,
            case.dtype,
            case.op,
            case.shape,
            case.contract,
            divisor=case.divisor,
            factors=case.factors,
        )

        def as_hex(patterns: list[int], size: int = width // 8) -> str:
            return b"".join(bits.to_bytes(size, "little") for bits in patterns).hex()

        fields = {
            "dtype": str(case.dtype).removeprefix("torch."),
            "op": case.op,
            "order": case.contract.order,
            "accumulate": case.contract.accumulate,
            "rounding": case.contract.rounding,
            "shape": list(case.shape),
            "divisor": case.divisor,
            "inputs": [as_hex(leaf) for leaf in inputs],
            "output": as_hex(output),
        }
        if case.factors is not None:
            # Of float64, whatever the dtype of the leaves.
            del fields["divisor"]
            packed = [struct.pack("<d", factor).hex() for factor in case.factors]
            fields |= {"op": "premul_sum", "factors": packed}
        lines.append(json.dumps(fields))
    head = f'"contract": "{CONTRACT_VERSION}", "byte_order": "little"'
    return f'{{{head}, "cases": [\n' + ",\n".join(lines) + "\n]}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the golden files of the contract.")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="of the files")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file would change"
    )
    options = parser.parse_args(arguments)
    texts = {
        "contract_v1.json": render(cases(), "contract"),
        "exact_v1.json": render(exact_cases(), "exact"),
        "premul_sum_v1.json": render(premul_cases(), "premul_sum"),
    }
    differ = False
    for name, text in texts.items():
        path = options.folder / name
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {text.count('dtype')} cases, {len(text)} bytes")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is not what this script writes; run it without --check", file=sys.stderr)
            differ = True
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
