"""Every way to reduce over a group of the backend has the contract's bits, and none is native."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nn_collectives
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import meshplan
import meshplan.backend
from meshplan._torch import REDUCE_SCATTER_SINGLE, c10d_operators
from meshplan._torch.c10d_operators import reducing_operators
from meshplan._torch.process_group import (
    FORWARDED,
    OWN,
    REDUCTIONS,
    REFUSED,
    WrappingProcessGroup,
)
from meshplan.backend._group import MeshplanProcessGroup
from meshplan.errors import BackendError
from meshplan.testing import bits
from tests.backend.native_calls import count_native_reductions
from tests.processes import run_ranks, start_all_reduce

pytestmark = pytest.mark.processes
RANKS, WIDTH = 3, 40
_functional = torch.ops._c10d_functional
Way = Callable[[Tensor], Tensor]


def summand(rank: int, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes: most sums of three of them depend on the order."""
    generator = torch.Generator().manual_seed(7 * rank + seed)
    exponents = torch.randint(-8, 8, (RANKS * WIDTH,), generator=generator).float()
    return torch.randn(RANKS * WIDTH, generator=generator) * 2**exponents


def contract_sum(seed: int = 0) -> Tensor:
    return meshplan.reduce_leaves([summand(r, seed) for r in range(RANKS)], "sum", [RANKS])


def world() -> Any:
    return dist.group.WORLD


def blocks(tensor: Tensor) -> list[Tensor]:
    return list(tensor.clone().chunk(RANKS))


def in_place(call: Callable[[Tensor], object]) -> Way:
    def run(x: Tensor) -> Tensor:
        call(x)
        return x

    return run


def into(call: Callable[[Tensor, Tensor], object]) -> Way:
    def run(x: Tensor) -> Tensor:
        call(out := torch.empty(WIDTH), x)
        return out

    return run


def compiled(way: Way) -> Way:
    return lambda x: torch.compile(way, backend="aot_eager", fullgraph=True)(x)


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x + 0


def functional_all_reduce(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


def functional_all_reduce_coalesced(x: Tensor) -> Tensor:
    parts = funcol.all_reduce_coalesced(list(x.chunk(4)), "sum", world())
    return torch.cat([part + 0 for part in parts])


def operator_all_reduce(x: Tensor) -> Tensor:
    found = _functional.all_reduce_(x, "sum", world().group_name)
    return _functional.wait_tensor(found)  # type: ignore[no-any-return]


def functional_reduce_scatter_coalesced(x: Tensor) -> Tensor:
    halves = [half.reshape(-1) for half in x.view(RANKS, 2, WIDTH // 2).transpose(0, 1)]
    parts = funcol.reduce_scatter_tensor_coalesced(halves, "sum", [0, 0], world())
    return torch.cat([part + 0 for part in parts])


def native(name: str, *arguments: Any) -> None:
    """Call a method of C++'s own class, as C++ does; it asks Python for some of them."""
    getattr(dist.ProcessGroup, name)(world(), *arguments).wait()


def c10d(name: str, *tensors: Any, more: tuple[Any, ...] = ()) -> None:
    """Call ``torch.ops.c10d``; only the work holds the reduction."""
    found = getattr(torch.ops.c10d, name)(
        *tensors, world().boxed(), torch.classes.c10d.ReduceOp(), *more, async_op=True
    )
    work = found[1] if isinstance(found, tuple) else found
    dist.Work.unbox(work).wait()


def reduce_to(root: int, part: Tensor) -> None:
    options = dist.ReduceOptions()
    options.rootRank = root
    native("reduce", [part], options)


def each_root(call: Callable[[int, Tensor], object]) -> Way:
    """Reduce a part to each rank."""

    def run(x: Tensor) -> Tensor:
        for root, part in enumerate(x.chunk(RANKS)):
            call(root, part)
        return own(x)

    return run


def all_reduce_in_block(x: Tensor) -> None:
    with _coalescing_manager():
        for part in x.chunk(4):
            dist.all_reduce(part)


def reduce_scatter_in_block(out: Tensor, x: Tensor) -> None:
    halves = x.view(RANKS, 2, WIDTH // 2).transpose(0, 1)
    with _coalescing_manager():
        for part, half in zip(out.chunk(2), halves, strict=True):
            dist.reduce_scatter_tensor(part, half.reshape(-1))


def own(tensor: Tensor) -> Tensor:
    return tensor.chunk(RANKS)[dist.get_rank()]


def in_inference_mode(x: Tensor) -> None:
    with torch.inference_mode():
        y = x.clone()
        c10d("allreduce_", [y], more=(None,))
    x.copy_(y)


ALL_REDUCES: dict[str, Way] = {
    "all_reduce": all_reduce,
    "asynchronous": in_place(lambda x: start_all_reduce(x).wait()),
    "coalesced": in_place(lambda x: dist.all_reduce_coalesced(list(x.chunk(4)))),
    "block": in_place(all_reduce_in_block),
    "method": in_place(lambda x: world().allreduce([x]).wait()),
    "functional": functional_all_reduce,
    "functional coalesced": functional_all_reduce_coalesced,
    "compiled": compiled(functional_all_reduce),
    "compiled in place": compiled(all_reduce),
    "operator": operator_all_reduce,
    "differentiable": nn_collectives.all_reduce,
    "native": in_place(lambda x: native("allreduce", [x])),
    "native coalesced": in_place(lambda x: native("allreduce_coalesced", list(x.chunk(4)))),
    "c10d": in_place(lambda x: c10d("allreduce_", [x], more=(None,))),
    "c10d coalesced": in_place(lambda x: c10d("allreduce_coalesced_", list(x.chunk(4)))),
    "c10d in inference mode": in_place(in_inference_mode),
}
_options = dist.ReduceScatterOptions
REDUCE_SCATTERS: dict[str, Way] = {
    "reduce_scatter": into(lambda out, x: dist.reduce_scatter(out, blocks(x))),
    "tensor": into(lambda out, x: dist.reduce_scatter_tensor(out, x)),
    "asynchronous": into(lambda out, x: dist.reduce_scatter_tensor(out, x, async_op=True).wait()),
    "base": into(lambda out, x: dist._reduce_scatter_base(out, x)),
    "block": into(reduce_scatter_in_block),
    "functional": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, world()) + 0,
    "functional coalesced": functional_reduce_scatter_coalesced,
    "differentiable": lambda x: nn_collectives.reduce_scatter(torch.empty(WIDTH), blocks(x)),
    "native reduce": each_root(reduce_to),
    "native": into(lambda out, x: native("reduce_scatter", [out], [blocks(x)], _options())),
    "native tensor": into(lambda out, x: native(REDUCE_SCATTER_SINGLE, out, x, _options())),
    "native coalesced": into(
        lambda out, x: native("reduce_scatter_tensor_coalesced", [out], [x], _options())
    ),
    "c10d reduce": each_root(lambda root, part: c10d("reduce_", [part], more=(root, 0))),
    "c10d": into(lambda out, x: c10d("reduce_scatter_", [out], [blocks(x)])),
    "c10d base": into(lambda out, x: c10d("_reduce_scatter_base_", out, x)),
    "c10d coalesced": into(lambda out, x: c10d("reduce_scatter_tensor_coalesced_", [out], [x])),
}


def difference(run: Way, expected: Tensor) -> str:
    """Empty if ``run`` has the bits of ``expected`` without a native reduction."""
    with count_native_reductions() as counts, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = run(summand(dist.get_rank()))
    wrong = int((found.detach().view(torch.int32) != expected.view(torch.int32)).sum())
    return f"{wrong} elements differ, native {dict(counts)}" * bool(wrong or any(counts))


def compare_all(_: int) -> dict[str, str]:
    whole = contract_sum()
    found = {name: difference(run, whole) for name, run in ALL_REDUCES.items()}
    mine = own(whole)
    found |= {f"scatter, {name}": difference(run, mine) for name, run in REDUCE_SCATTERS.items()}
    return {name: text for name, text in found.items() if text}


def test_every_entry_point_has_the_bits_of_the_contract() -> None:
    assert run_ranks(compare_all, RANKS, backend="meshplan") == [{}] * RANKS


def compare_gloo(_: int) -> int:
    return int((all_reduce(summand(dist.get_rank())) != contract_sum()).sum())


def test_gloo_has_other_bits_for_the_same_summands() -> None:
    assert all(run_ranks(compare_gloo, RANKS))


def fail_in_operator(rank: int) -> str:
    try:
        c10d("allreduce_", [torch.ones(2 + rank)], more=(None,))
    except meshplan.MeshplanError as error:
        return error.code
    return ""


def test_errors_reach_the_work_of_an_operator() -> None:
    assert run_ranks(fail_in_operator, 2, backend="meshplan") == ["MP703"] * 2


def move(rank: int) -> list[Any]:
    """Operators that move data: over the inner backend, from C++."""
    ops = torch.ops.c10d
    boxed, x = world().boxed(), torch.full((2,), float(rank + 1))
    gathered = [torch.empty(2) for _ in range(2)]
    flat, mixed, same, scattered = torch.empty(4), torch.empty(2), x.clone(), torch.empty(2)
    peer, source = torch.empty(2), [[x, x * 10]] if rank == 0 else []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ops.allgather_([gathered], [x], boxed)[1],
        lambda: ops._allgather_base_(flat, x, boxed)[1],
        lambda: ops.alltoall_base_(mixed, x + torch.arange(2), boxed, [], []),
        lambda: ops.broadcast_([same], boxed, 1, 0)[1],
        lambda: ops.scatter_([scattered], source, boxed, 0)[1],
        lambda: ops.send([x], boxed, 1, 3) if rank == 0 else ops.recv_([peer], boxed, 0, 3),
        lambda: ops.barrier(torch.empty(1), boxed, []),
    )
    for call in calls:
        dist.Work.unbox(call()).wait()
    found = [torch.cat(gathered), flat, mixed, same, scattered, peer if rank else x]
    return [one.tolist() for one in found]


def test_operators_move_data_over_the_inner_backend() -> None:
    gathered = [1.0, 1.0, 2.0, 2.0]
    assert run_ranks(move, 2, backend="meshplan") == [
        [gathered, gathered, [1.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]],
        [gathered, gathered, [2.0, 3.0], [2.0, 2.0], [10.0, 10.0], [1.0, 1.0]],
    ]


def test_every_operator_that_adds_has_a_method() -> None:
    every = torch._C._dispatch_get_all_op_names()
    adds = {name for name in every if name.startswith("c10d::") and "reduce" in name}
    assert {f"c10d::{name}" for name in reducing_operators()} == adds
    assert set(reducing_operators()) == set(c10d_operators._METHODS)


def refuse_operator(rank: int) -> str:
    c10d_operators._METHODS.pop("allreduce_")
    try:
        c10d("allreduce_", [torch.ones(2)], more=(None,))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def test_an_operator_of_a_later_torch_is_refused() -> None:
    (found,) = run_ranks(refuse_operator, 1, backend="meshplan")
    assert found == (
        "MP505: a group of backend 'meshplan' does not support the operator "
        "torch.ops.c10d.allreduce_; call the function of torch.distributed for it"
    )


def test_every_method_of_a_process_group_is_decided() -> None:
    names = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    features = {name for name in names if name.startswith("supports_")}
    assert names - features <= {*FORWARDED, *OWN, *REDUCTIONS, *REFUSED}
    inherited = {
        name for name in REDUCTIONS if name in names and name not in vars(MeshplanProcessGroup)
    }
    assert inherited == set()


def test_features_of_a_later_torch_are_refused() -> None:
    feature = {"supports_later": property(lambda _: True), "later": lambda *_: None}
    with mock.patch.multiple(dist.ProcessGroup, create=True, **feature):

        class Group(WrappingProcessGroup):
            def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
                return "meshplan"

    found = Group.__new__(Group)
    dist.ProcessGroup.__init__(found, 0, 1)
    assert found.supports_later is False  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="does not support later"):
        found.later()  # type: ignore[attr-defined]


def train(_: int) -> list[str]:
    """DDP's reducer, with buckets of several sizes: each gradient is the contract's sum."""
    rank, wrong = dist.get_rank(), []

    def gradients(r: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        torch.manual_seed(r + 1)
        model(torch.randn(8, 16)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    # DDP multiplies each gradient by 1 / RANKS on the way to its bucket.
    leaves = [[g * (1 / RANKS) for g in gradients(r)] for r in range(RANKS)]
    expected = [meshplan.reduce_leaves(row, "sum", [RANKS]) for row in zip(*leaves, strict=True)]
    options: dict[str, Any]
    for options in (
        {},
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        ddp = DistributedDataParallel(model, **options)
        torch.manual_seed(rank + 1)
        with count_native_reductions() as counts:
            ddp(torch.randn(8, 16)).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        pairs = zip(found, expected, strict=True)
        same = all(torch.equal(bits(a), bits(b)) for a, b in pairs)  # type: ignore[arg-type]
        wrong += [f"{options} {same} {dict(counts)}"] * (not same or any(counts))
    return wrong


def test_gradients_of_ddp_have_the_bits_of_the_contract() -> None:
    assert run_ranks(train, RANKS, backend="meshplan") == [[]] * RANKS
