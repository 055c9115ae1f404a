"""The paths over real gloo processes: golden bits, any size, any strides, any dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from meshplan.collectives import Source, clear_report, report, run_reduction
from meshplan.contract import Contract, reduce_leaves
from meshplan.errors import ContractTypeError, FallbackRefusedError
from meshplan.planner import Step
from meshplan.testing import assert_bitwise_equal, bits, order_sensitive
from tests.processes import run_ranks

pytestmark = [pytest.mark.timeout(120), pytest.mark.processes]

GOLDEN = Path(__file__).parent / "golden" / "contract_v1.json"


def step(path: str, op: str = "sum", sizes: tuple[int, ...] = (3,), **more: Any) -> Step:
    options: dict[str, Any] = {"contract": Contract()} | more
    return Step(
        kind="all_reduce",
        axes=tuple(range(len(sizes))),
        sizes=sizes,
        move="P -> R",
        why="a test",
        op=op,  # type: ignore[arg-type]
        path=path,  # type: ignore[arg-type]
        **options,
    )


def run(tensor: Tensor, wanted: Step, **options: Any) -> Tensor:
    result = run_reduction(
        tensor, wanted, dist.group.WORLD, source=Source("asked", "planned", "world"), **options
    )
    return torch.ops._c10d_functional.wait_tensor(result)


def tensor_of(text: str, dtype: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=getattr(torch, dtype))


def golden_mismatches(file: Path, world_size: int) -> tuple[int, list[str]]:
    """Cases of ``world_size`` leaves in a golden file, and those that some path gets wrong."""
    cases = [c for c in json.loads(file.read_text())["cases"] if len(c["inputs"]) == world_size]

    def ranks(rank: int) -> list[str]:
        wrong = []
        for number, case in enumerate(cases):
            expected = tensor_of(case["output"], case["dtype"])
            contract = Contract(case["order"], case["accumulate"], case["rounding"])
            divisor = case.get("divisor")
            if case["op"] == "avg" and divisor is None:
                divisor = world_size
            for path in ("exchange", "reference"):
                wanted = step(
                    path, case["op"], tuple(case["shape"]), contract=contract, divisor=divisor
                )
                found = run(tensor_of(case["inputs"][rank], case["dtype"]), wanted)
                if bits(found).tolist() != bits(expected).tolist():
                    wrong.append(f"case {number} {path} on rank {rank}")
        return wrong

    return len(cases), [line for lines in run_ranks(ranks, world_size) for line in lines]


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8])
def test_golden(world_size: int) -> None:
    count, wrong = golden_mismatches(GOLDEN, world_size)
    assert count >= 4
    assert wrong == []


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)


@pytest.mark.parametrize(("world_size", "sizes"), [(3, (3,)), (6, (2, 3)), (5, (5,))])
def test_any_number_of_elements(world_size: int, sizes: tuple[int, ...]) -> None:
    """Fewer elements than ranks, slices that do not come out even, none at all."""

    def ranks(rank: int) -> None:
        for numel in (0, 1, 2, 3, 5, 7, 16, 17, 31, 1000):
            for dtype in DTYPES:
                leaves = [
                    order_sensitive(
                        numel, rank=r, world_size=world_size, dtype=dtype, specials=True
                    )
                    for r in range(world_size)
                ]
                for order in ("tree", "rank"):
                    contract = Contract(order=order)  # type: ignore[arg-type]
                    expected = reduce_leaves(leaves, "sum", sizes, contract)
                    for path in ("exchange", "reference"):
                        wanted = step(path, "sum", sizes, contract=contract)
                        found = run(leaves[rank], wanted)
                        assert_bitwise_equal(found, expected, f"{path} {dtype} {numel} {order}")

    run_ranks(ranks, world_size)


def test_strides_shapes_and_inputs_that_stay() -> None:
    def ranks(rank: int) -> None:
        def leaf(r: int) -> Tensor:
            return order_sensitive(60, rank=r, world_size=3).view(6, 10)

        views = [
            lambda t: t[:, ::2],
            lambda t: t.t(),
            lambda t: t[1],
            lambda t: t[2:3, 3:4].squeeze(),
            lambda t: t[:1].expand(4, 10),
            lambda t: t.view(1, 6, 10, 1).permute(3, 2, 0, 1),
        ]
        for view in views:
            mine = leaf(rank)
            before = mine.clone()
            expected = reduce_leaves([view(leaf(r)) for r in range(3)], "sum", (3,))
            for path in ("exchange", "reference", "native"):
                found = run(view(mine), step(path))
                assert found.is_contiguous()
                assert found.shape == expected.shape
                if path != "native":
                    assert_bitwise_equal(found, expected)
                assert_bitwise_equal(mine, before)
                assert found.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()

    run_ranks(ranks, 3)


def test_bits_do_not_depend_on_message_size() -> None:
    """A slice reduced alone and inside a larger tensor."""

    def ranks(rank: int) -> None:
        whole = order_sensitive(4099, rank=rank, world_size=5)
        for path in ("exchange", "reference"):
            wanted = step(path, sizes=(5,))
            full = run(whole, wanted)
            for start, stop in ((0, 1), (1, 18), (4090, 4099), (17, 1041)):
                assert_bitwise_equal(run(whole[start:stop], wanted), full[start:stop])

    run_ranks(ranks, 5)


def test_sends_are_what_the_report_says() -> None:
    def ranks(rank: int) -> list[tuple[str, dict[str, int], tuple[str, ...], int]]:
        found = []
        for path in ("exchange", "reference", "native"):
            clear_report()
            with CommDebugMode() as calls:
                run(torch.ones(7), step(path))
            counted = {str(k).split(".")[-1]: n for k, n in calls.get_comm_counts().items()}
            (entry,) = report().entries
            found.append((entry["ran"], counted, entry["sends"], entry["elements"]))
        return found

    for found in run_ranks(ranks, 3):
        for path, counted, sends, elements in found:
            assert counted == dict.fromkeys(sends, 1), path
            assert elements == 7


def test_wire_dtype_is_the_tensors_own() -> None:
    """16-bit values travel as 16 bits."""

    def ranks(rank: int) -> set[torch.dtype]:
        seen: set[torch.dtype] = set()

        class Spy(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if "c10d" in str(func) and "wait" not in str(func):
                    seen.add(args[0].dtype)
                return func(*args, **(kwargs or {}))

        with Spy():
            run(torch.ones(7, dtype=torch.bfloat16), step("exchange"))
            run(torch.ones(7, dtype=torch.bfloat16), step("reference"))
        return seen

    assert run_ranks(ranks, 3) == [{torch.bfloat16}] * 3


def test_native_average_is_a_sum_and_one_division() -> None:
    def ranks(rank: int) -> list[float]:
        wanted = step("native", "avg", (2, 3), contract=None, divisor=3)
        return run(torch.full((2,), float(rank)), wanted).tolist()

    assert run_ranks(ranks, 6) == [[5.0, 5.0]] * 6


def test_complex_is_two_reals_and_norms_are_power_sums() -> None:
    def ranks(rank: int) -> None:
        reals = [order_sensitive(14, rank=r, world_size=3) for r in range(3)]
        expected = reduce_leaves(reals, "sum", (3,))
        mine = torch.view_as_complex(reals[rank].view(7, 2))
        assert_bitwise_equal(torch.view_as_real(run(mine, step("exchange"))).flatten(), expected)
        conjugated = torch.view_as_real(run(mine.conj(), step("exchange")))
        assert_bitwise_equal(conjugated[:, 0].contiguous(), expected.view(7, 2)[:, 0].contiguous())

        small = [order_sensitive(5, rank=r, world_size=3, seed=3).clamp(-9, 9) for r in range(3)]
        wanted = reduce_leaves([leaf**2.0 for leaf in small], "sum", (3,)) ** 0.5
        assert_bitwise_equal(run(small[rank], step("exchange", norm=2.0)), wanted)

    run_ranks(ranks, 3)


class TestRefusals(TestCase):
    def test_average_of_integers(self) -> None:
        def ranks(rank: int) -> list[str]:
            messages = []
            for path, contract in (("exchange", Contract()), ("native", None)):
                with pytest.raises(ContractTypeError) as caught:
                    run(torch.ones(3, dtype=torch.int32), step(path, "avg", contract=contract))
                messages.append(str(caught.value))
            return messages

        (first, second), _ = run_ranks(ranks, 2)
        assert first == second
        self.assertExpectedInline(
            first,
            """MP412: avg of torch.int32 has no exact result, the contract defines avg for floats only; reduce with 'sum' and divide as you need, or convert to a floating dtype first""",
        )

    def test_a_dtype_outside_the_contract(self) -> None:
        def ranks(rank: int) -> tuple[list[bool], list[dict[str, Any]], str]:
            mine = torch.tensor([rank == 0, False, True])
            found = run(mine, step("exchange", "max", sizes=(2,)))
            entries = list(report().fallbacks)
            with pytest.raises(FallbackRefusedError) as caught:
                run(mine, step("exchange", "max", sizes=(2,)), strict=True)
            return found.tolist(), entries, str(caught.value)

        found = run_ranks(ranks, 2)
        for values, entries, _ in found:
            assert values == [True, False, True]
            (entry,) = entries
            assert (entry["ran"], entry["dtype"], entry["sends"]) == (
                "native",
                "bool",
                ("all_reduce",),
            )
        self.assertExpectedInline(
            found[0][2],
            """MP701: asked: torch.bool would run on the backend's own max, in its own order; convert the tensor, or install with strict=False""",
        )
        self.assertExpectedInline(
            entry["why"],
            """MP412: torch.bool is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8""",
        )
