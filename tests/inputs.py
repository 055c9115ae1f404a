"""Inputs of reductions: what paths and kernels have to take, and the golden files of the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshplan.contract import Contract
from meshplan.testing import order_sensitive

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
OPS = ("sum", "avg", "product", "max", "min")


def at_byte(values: Tensor, offset: int) -> Tensor:
    """The same values on a CPU, at an address that is ``offset`` beyond a multiple of 16."""
    store = torch.empty(values.nbytes + 32, dtype=torch.uint8)
    first = -store.data_ptr() % 16 + offset
    raw = store[first : first + values.nbytes]
    raw.copy_(values.view(torch.uint8))
    return torch.frombuffer(
        store.numpy().data, dtype=values.dtype, count=values.numel(), offset=first
    )


def draw_leaves(
    ranks: int, numel: int, dtype: torch.dtype = torch.float32, **more: Any
) -> list[Tensor]:
    """The summands of all ranks; ``more``: as for ``order_sensitive``."""
    size = max(2, ranks)
    return [
        order_sensitive(numel, rank=rank, world_size=size, dtype=dtype, **more)
        for rank in range(ranks)
    ]


def arithmetics(
    dtype: torch.dtype, contracts: Sequence[Contract]
) -> Iterator[tuple[str, Contract]]:
    """The operations that each contract defines; the first two show all where nothing is rounded."""
    for op in OPS:
        linear = dtype in FLOATS and op in ("sum", "avg", "product")
        for contract in contracts if linear else contracts[:2]:
            if not (
                (op == "avg" and dtype in INTEGERS) or (op == "product" and contract.ordering.exact)
            ):
                yield op, contract


class GoldenCase(NamedTuple):
    """A reduction of a golden file. ``divisor``: of an average."""

    leaves: list[Tensor]
    op: str
    shape: tuple[int, ...]
    contract: Contract
    divisor: int | None
    result: Tensor


def golden_cases(*names: str, ranks: int | None = None) -> list[GoldenCase]:
    """The cases of the golden files, of ``contract_v1`` by default; of so many ranks, if given."""
    folder, cases = Path(__file__).parent / "golden", []
    for name in names or ("contract_v1",):
        for case in json.loads((folder / f"{name}.json").read_text())["cases"]:
            dtype = getattr(torch, case["dtype"])
            leaves, (result,) = (
                [torch.frombuffer(bytearray.fromhex(text), dtype=dtype) for text in texts]
                for texts in (case["inputs"], [case["output"]])
            )
            if ranks in (None, len(leaves)):
                contract = Contract(case["order"], case["accumulate"], case["rounding"])
                divisor = (case["divisor"] or len(leaves)) if case["op"] == "avg" else None
                shape = tuple(case["shape"])
                cases.append(GoldenCase(leaves, case["op"], shape, contract, divisor, result))
    return cases
