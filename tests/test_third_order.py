"""A third order of additions, added by the recipe of CONTRIBUTING.md: one place on each side, no call site."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan import definition, kernel, orders
from meshplan.contract import Contract
from meshplan.errors import ContractError, SignatureMismatchError
from meshplan.kernel import _library
from meshplan.orders import Order, order_named, register
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-fast-math", "-shared", "-fPIC"]
_T = TypeVar("_T")


def reversed_rank(
    shape: Sequence[int], leaf: Callable[[int], _T], node: Callable[[_T, _T], _T]
) -> _T:
    count = torch.Size(shape).numel()
    result = leaf(count - 1)
    for i in range(count - 2, -1, -1):
        result = node(result, leaf(i))
    return result


ORDER = Order("reversed", 7, reversed_rank, undivided="is one fold from the last leaf to the first")
# What a new order adds to csrc/order.h: a struct, a code and a line.
STRUCT = """
struct ReversedOrder {
  MP_FN static void list(Schedule& into, const i32* shape, i32 axes) {
    i32 i = leaves_of(shape, axes) - 1;
    into.emit(Do::load, i, 0);
    while (--i >= 0) into.emit(Do::with, i, 0);
  }
};

"""
LINE = (
    "  MP_ORDER(rank, 1, RankOrder)",
    "  MP_ORDER(rank, 1, RankOrder) MP_ORDER(reversed, 7, ReversedOrder)",
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = dict(orders._orders)
    yield
    orders._orders.clear()
    orders._orders.update(before)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of csrc with the order, and its library for CPUs."""
    folder = tmp_path_factory.mktemp("third") / "csrc"
    shutil.copytree(ROOT / "csrc", folder)
    path = folder / "order.h"
    text = path.read_text()
    place = "#define MP_CASE(name"
    for old, new in (LINE, (place, STRUCT.lstrip() + place)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    sources = sorted(map(str, folder.glob("*.cpp")))
    subprocess.run(["g++", *FLAGS, *sources, "-o", str(folder / "_cpu.so")], check=True)
    return folder


@pytest.fixture
def library(extended: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_library, "__file__", str(extended / "_library.py"))
    _library.load.cache_clear()
    yield
    monkeypatch.undo()
    _library.load.cache_clear()


def leaves_for(world: int, numel: int = 50, dtype: torch.dtype = torch.float32) -> list:
    return [order_sensitive(numel, rank=r, world_size=world, dtype=dtype) for r in range(world)]


def by_hand(leaves: list) -> torch.Tensor:
    total = leaves[-1]
    for leaf in reversed(leaves[:-1]):
        total = total + leaf
    return total


def test_codes_match_the_library() -> None:
    if not kernel.available():
        pytest.skip("no compiled library")
    fold, one = _library.library().mp_fold, (ctypes.c_int * 1)(1)
    calls = {code: (None, None, 1, 0, 0, 0, code, 0, 0, one, 1, 0, 0) for code in range(256)}
    assert {code for code, call in calls.items() if fold(*call) == 0} == {
        o.code for o in orders.ORDERS.values() if o.compiled
    }


def test_new_order_is_reduced_by_the_definition() -> None:
    register(ORDER)
    contract = Contract("reversed")
    assert contract.id == "v1/reversed/wide/once"
    assert Contract.of_id(contract.id) == contract
    leaves = leaves_for(5)
    found = definition.reduce_leaves(leaves, "sum", (5,), contract)
    assert_bitwise_equal(found, by_hand(leaves))
    assert not torch.equal(found, definition.reduce_leaves(leaves, "sum", (5,), Contract("rank")))
    with pytest.raises(ContractError) as caught:
        definition.combine_leaves(leaves, "sum", (5,), contract)
    assert_expected_inline(
        str(caught.value),
        """MP411: sum of torch.float32 in order='reversed' is one fold from the last leaf to the first and has no parts; use order='tree' or order='exact', or pass all leaves to reduce_leaves""",
    )


def test_duplicate_names_and_codes_are_refused() -> None:
    rows = []
    for order in (
        replace(ORDER, name="tree"),
        replace(ORDER, code=1),
        replace(ORDER, code=256),
        replace(ORDER, name="a/b"),
    ):
        with pytest.raises(ContractError) as caught:
            register(order)
        rows.append(str(caught.value))
    with pytest.raises(ContractError) as caught:
        order_named("reversed")
    assert_expected_inline(
        "\n".join([*rows, str(caught.value)]),
        """\
MP411: order 'tree' has code 7, and there is 'tree' of code 0; use a name and a code that no other order has
MP411: order 'reversed' has code 1, and there is 'rank' of code 1; use a name and a code that no other order has
MP411: order 'reversed' has code 256; use one from 0 to 255
MP411: 'a/b' is not a name of an order; use letters and digits
MP411: no order 'reversed' in the contract; use 'tree' or 'rank' or 'exact'""",
    )


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("library")
def test_new_order_is_reduced_by_the_library(dtype: torch.dtype) -> None:
    register(ORDER)
    assert kernel.why_not() is None
    for shape in ((2,), (5,), (3, 2), (1, 1), (9,)):
        for op in ("sum", "avg", "product", "max"):
            leaves = leaves_for(torch.Size(shape).numel(), dtype=dtype)
            for contract in (Contract("reversed"), Contract("reversed", rounding="node")):
                found = kernel.reduce_leaves(leaves, op, shape, contract)
                expected = definition.reduce_leaves(leaves, op, shape, contract)
                assert_bitwise_equal(found, expected)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("path", ["auto", "exchange", "reference"])
@pytest.mark.usefixtures("library")
def test_new_order_is_reported_and_compared(path: str) -> None:
    """Through memory that ranks share (auto) and over the backend."""

    def ranks(rank: int) -> tuple[str, str]:
        register(ORDER)
        mesh = init_device_mesh("cpu", (4,))
        leaves = leaves_for(4)
        with meshplan.installed(path=path, contract=Contract("reversed"), strict=True):
            d = DTensor.from_local(leaves[rank], mesh, (Partial(),), run_check=False)
            full = d.redistribute(mesh, (Replicate(),)).to_local()
            assert_bitwise_equal(full, by_hand(leaves))
            report = str(meshplan.report())
            odd = torch.ones(3 + (rank == 1))
            d = DTensor.from_local(odd, mesh, (Partial(),), run_check=False)
            with pytest.raises(SignatureMismatchError) as caught:
                d.redistribute(mesh, (Replicate(),)).to_local()
        dist.barrier()
        return report, str(caught.value)

    for report, text in run_ranks(ranks, 4):
        assert "v1/reversed/wide/once" in report
        assert "contract v1/reversed/wide/once" in text
        assert "Different: shape [" in text
        if path == "auto":
            assert "path exchange" not in text


def test_an_order_without_kernels_is_not_compiled() -> None:
    """Python only: no memory is shared, and the bits and the report are right."""

    def ranks(rank: int) -> str:
        register(replace(ORDER, compiled=False))
        mesh = init_device_mesh("cpu", (3,))
        leaves = leaves_for(3)
        with meshplan.installed(contract=Contract("reversed")):
            d = DTensor.from_local(leaves[rank], mesh, (Partial(),), run_check=False)
            assert_bitwise_equal(d.redistribute(mesh, (Replicate(),)).to_local(), by_hand(leaves))
            return str(meshplan.report())

    for report in run_ranks(ranks, 3):
        assert "the compiled library has no order 'reversed'" in report
