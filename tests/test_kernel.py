"""The compiled reductions against the definition: integer views, all elements."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from expecttest import TestCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from meshplan import definition, kernel
from meshplan._installation import Installation
from meshplan.contract import Contract
from meshplan.definition import partial_dtype
from meshplan.errors import ContractError, ContractTypeError
from meshplan.kernel import _library
from meshplan.orders import ORDERS
from meshplan.testing import assert_bitwise_equal, order_sensitive
from tests.inputs import FLOATS, INTEGERS, OPS, at_byte, draw_leaves, golden_cases
from tests.strategies import CONTRACTS

pytestmark = pytest.mark.skipif(not kernel.available(), reason=str(kernel.why_not()))


def test_compiled_reductions_match_the_golden_files() -> None:
    for case in golden_cases("contract_v1", "exact_v1"):
        leaves, op, shape, contract, divisor, result = case
        found = kernel.reduce_leaves(leaves, op, shape, contract, divisor=divisor)  # type: ignore[arg-type]
        assert_bitwise_equal(found, result, str(case))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (9,), (16,), (2, 3), (3, 1, 2), (4, 2, 2), (72,)],
    ids=str,
)
def test_all_contracts_match_the_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    count = math.prod(shape)
    leaves = draw_leaves(count, 1037, dtype, specials=True)
    for op, contract in itertools.product(OPS, CONTRACTS):
        if op == "avg" and dtype in INTEGERS:
            continue
        expected = definition.reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
        found = kernel.reduce_leaves(leaves, op, shape, contract)  # type: ignore[arg-type]
        assert found.dtype is dtype
        assert_bitwise_equal(found, expected, f"{op} {contract.id}")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str
)
def test_any_length_and_alignment_match_the_definition(dtype: torch.dtype) -> None:
    """Tiles that are not full, and leaves that start at any byte."""

    for numel in (0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 1023, 1024, 1025, 4095, 4097):
        leaves = draw_leaves(5, numel, dtype, specials=True)
        expected = definition.reduce_leaves(leaves, "sum", (5,))
        for offset in range(16 if numel == 17 else 1):
            moved = [at_byte(leaf, offset) for leaf in leaves] if numel else leaves
            assert_bitwise_equal(kernel.reduce_leaves(moved, "sum", (5,)), expected, f"{offset}")
    whole = draw_leaves(5, 5000, dtype)
    full = kernel.reduce_leaves(whole, "sum", (5,))
    for start, stop in ((0, 1), (1, 1030), (1019, 3000), (4990, 5000)):
        part = kernel.reduce_leaves([leaf[start:stop] for leaf in whole], "sum", (5,))
        assert_bitwise_equal(part, full[start:stop])


def test_output_may_differ_in_strides_from_the_leaves() -> None:
    leaves = [torch.ones(2, 3), torch.ones(2, 3)]
    for out in (
        torch.empty(3, 3),
        torch.empty(6),
        torch.empty(2, 3, dtype=torch.float64),
        torch.empty(3, 2).t(),
    ):
        with pytest.raises(ContractTypeError, match=r"out is torch\.float.* and the leaves are"):
            kernel.reduce_into(out, leaves, "sum", (2,))


def test_any_strides_are_reduced_and_inputs_stay() -> None:
    leaves = [order_sensitive(60, rank=r, world_size=3).view(6, 10) for r in range(3)]
    before = [leaf.clone() for leaf in leaves]
    for view in (
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[2, 3],
        lambda t: t[:1].expand(4, 10),
        lambda t: t[:0],
    ):
        views = [view(leaf) for leaf in leaves]
        found = kernel.reduce_leaves(views, "sum", (3,))
        assert found.is_contiguous()
        assert_bitwise_equal(found, definition.reduce_leaves(views, "sum", (3,)))
    for leaf, same in zip(leaves, before, strict=True):
        assert_bitwise_equal(leaf, same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_and_tie_matches_the_definition(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = definition.reduce_leaves([patterns], "sum", (1,))
    assert_bitwise_equal(kernel.reduce_leaves([patterns], "sum", (1,)), expected)
    # Half of the last place above and below each pattern, from float32 partials.
    raised = patterns.float()
    near = [raised, raised * (1 + 2**-11), raised * (1 - 2**-11), raised * (1 + 2**-8)]
    near += [torch.nextafter(value, torch.tensor(math.inf)) for value in tuple(near)]
    for partial in near:
        for sign in (1.0, -1.0):
            given = [partial * sign]
            expected = definition.finish_partials(given, "sum", (1,), Contract(), dtype)
            found = kernel.finish_partials(given, "sum", (1,), Contract(), dtype)
            assert_bitwise_equal(found, expected)


@pytest.mark.soak
@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_bit_pattern_matches_the_definition(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([*FLOATS, *INTEGERS]))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    op = data.draw(st.sampled_from(["sum", "product", "max", "min"]))
    contract = data.draw(st.sampled_from(CONTRACTS))
    width = dtype.itemsize
    numel = data.draw(st.integers(0, 9))
    size = numel * width
    count = math.prod(shape)
    raw = data.draw(
        st.lists(st.binary(min_size=size, max_size=size), min_size=count, max_size=count)
    )
    leaves = [
        torch.frombuffer(bytearray(r), dtype=dtype) if r else torch.empty(0, dtype=dtype)
        for r in raw
    ]
    assert_bitwise_equal(
        kernel.reduce_leaves(leaves, op, shape, contract),
        definition.reduce_leaves(leaves, op, shape, contract),
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_two_parts_equal_one_reduction(dtype: torch.dtype) -> None:
    leaves = draw_leaves(8, 333, dtype, specials=True)
    for op, contract in itertools.product(("sum", "product", "max"), CONTRACTS):
        if contract.order == "rank" and op != "max" and dtype.is_floating_point:
            continue
        expected = definition.reduce_leaves(leaves, op, (2, 4), contract)  # type: ignore[arg-type]
        partials = [
            kernel.combine_leaves(leaves[i : i + 4], op, (4,), contract)  # type: ignore[arg-type]
            for i in (0, 4)
        ]
        assert partials[0].dtype is partial_dtype(op, dtype, contract)
        found = kernel.finish_partials(partials, op, (2,), contract, dtype)  # type: ignore[arg-type]
        assert_bitwise_equal(found, expected, f"{op} {contract.id}")


def test_errors_match_the_definition() -> None:
    x = torch.ones(3)
    for wrong in (
        lambda m: m.reduce_leaves([], "sum", ()),
        lambda m: m.reduce_leaves([x, x], "sum", (3,)),
        lambda m: m.reduce_leaves([x, x[:2]], "sum", (2,)),
        lambda m: m.reduce_leaves([x.int(), x.int()], "avg", (2,)),
        lambda m: m.reduce_leaves([x.bool(), x.bool()], "sum", (2,)),
        lambda m: m.reduce_leaves([x, x], "mean", (2,)),
        lambda m: m.reduce_leaves([x, x], "sum", (2,), divisor=2),
        lambda m: m.combine_leaves([x, x], "sum", (2,), Contract(order="rank")),
        lambda m: m.finish_partials([x, x], "sum", (2,), Contract(), torch.float64),
        lambda m: m.finish_partials([x, x], "avg", (2,), Contract(), torch.float32),
    ):
        messages = []
        for module in (definition, kernel):
            with pytest.raises((ContractError, ContractTypeError)) as caught:
                wrong(module)
            messages.append((type(caught.value), str(caught.value)))
        assert messages[0] == messages[1]


def test_orders_have_the_codes_of_the_library() -> None:
    fold, one = _library.library().mp_fold, (ctypes.c_int * 1)(1)
    calls = {code: (None, None, 1, 0, 0, 0, code, 0, 0, one, 1, 0, 0) for code in range(256)}
    found = {code for code, call in calls.items() if fold(*call) == 0}
    assert found == {order.code for order in ORDERS.values()}


def test_torch_tools_see_one_operator() -> None:
    def reduce(x: Tensor, y: Tensor) -> Tensor:
        return kernel.reduce_leaves([x, y, x], "avg", (3,))

    x, y = order_sensitive(9, rank=0, world_size=2), order_sensitive(9, rank=1, world_size=2)
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(reduce, tracing_mode=mode)(x, y)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert names.count("meshplan.fold.default") == 1, names
        assert_bitwise_equal(graph(y, x), reduce(y, x))
    half = x.to(torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(half)
        partial = kernel.combine_leaves([fake, fake], "sum", (2,))
        assert (partial.dtype, partial.shape) == (torch.float32, x.shape)
    torch.library.opcheck(
        torch.ops.meshplan.fold.default,
        ([x, y], "sum", [2], "tree", "wide", "once", torch.float32, None, 0),
    )
    exact = "exact", "wide", "once", torch.float32
    words = kernel.combine_leaves([x, y], "sum", (2,), Contract("exact"))
    for leaves, divisor, part in (([x, y], None, 1), ([words, words], 3, 2)):
        op = "sum" if divisor is None else "avg"
        call = leaves, op, [2], *exact, divisor, part
        torch.library.opcheck(torch.ops.meshplan.fold.default, call)


class TestMissingLibrary(TestCase):
    def test_definition_replaces_the_library_and_the_reason_is_logged(self) -> None:
        found = _library.load
        reasons = []
        try:
            for names in ([], ["_cpu.broken.so"]):
                _library.load.cache_clear()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Path, "glob", lambda self, pattern, names=names: map(Path, names))
                    here = Installation(
                        "installed in /site-packages",
                        "meshplan was installed without a C++ compiler",
                        "pip install --force-reinstall --no-deps /src",
                    )
                    patch.setattr(_library, "installation", lambda here=here: here)
                    assert not kernel.available()
                    reasons.append(re.sub(r" \(.*\)", "", str(kernel.why_not())))
                    leaves = draw_leaves(3, 5)
                    expected = definition.reduce_leaves(leaves, "sum", (3,))
                    assert_bitwise_equal(kernel.reduce_leaves(leaves, "sum", (3,)), expected)
                    with pytest.raises(RuntimeError):
                        _library.library()
        finally:
            found.cache_clear()
        assert kernel.available()
        self.assertExpectedInline(
            "\n".join(reasons),
            """\
meshplan was installed without a C++ compiler, so that reductions on CPUs run in plain torch; install g++ or clang++, and then: pip install --force-reinstall --no-deps /src
_cpu.broken.so cannot be loaded; pip install --force-reinstall --no-deps /src""",
        )
