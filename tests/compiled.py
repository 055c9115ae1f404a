"""What tests of compiled code have in common: backends that show their graphs, and bits."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from meshplan.kernel import Communicator
from tests.processes import warm_compiler

# The operators that a planned reduction is traced as: each reduction is one of them. A call of
# ``fold`` stands between torch's all-to-all and all-gather, on other backends than gloo.
REDUCTIONS = ("meshplan.peer_reduce", "meshplan.reduction", "meshplan.fold")
NATIVE = ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor")


@cache
def warm_inductor() -> None:
    """As ``warm_compiler``, with inductor, whose modules warn when they are imported."""
    warm_compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
    # No pool of processes, which would have to be forked from every rank.
    torch._inductor.config.compile_threads = 1


class Graphs:
    """A backend that runs the graphs of AOTAutograd unchanged, and keeps them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        from torch._dynamo.backends.common import aot_autograd

        self.backend: Callable[..., Any] = aot_autograd(
            fw_compiler=self._keep, bw_compiler=self._keep
        )

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func

        self.calls += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return make_boxed_func(graph.forward)

    def count(self, names: Iterable[str]) -> int:
        """How many calls of these operators there are in all graphs so far."""
        return sum(call.startswith(tuple(f"{name}." for name in names)) for call in self.calls)


def bits(*tensors: Tensor) -> bytes:
    """All bits of tensors, to be compared between processes."""
    return b"".join(
        bytes(t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors
    )


def compiles() -> int:
    """How often dynamo has compiled anything in this process since it was last reset."""
    return int(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.total())


def orders_run() -> list[str]:
    """The order of each reduction through shared memory that this process runs from now."""
    found: list[str] = []
    prepare = Communicator.prepare

    # An operator prepares its call each time, which is mostly known.
    def counted(self: Any, key: Any) -> Any:
        found.append(key.how.order)
        return prepare(self, key)

    Communicator.prepare = counted  # type: ignore[method-assign]
    return found
