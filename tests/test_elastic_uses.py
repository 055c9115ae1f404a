"""What training loops do in rounds: the bits do not depend on the ranks, or an error says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import meshplan
from meshplan.elastic import GradientAccumulator
from meshplan.errors import ElasticError
from meshplan.testing import bits
from tests.processes import common_result, run_ranks
from tests.refusals import refusal
from tests.test_elastic_gradients import whole_gradients

pytestmark = [pytest.mark.processes, pytest.mark.full]

M = 8
refuse = partial(refusal, ElasticError)


class Model(nn.Module):
    """Three layers with dropout, of which the forward calls some."""

    def __init__(
        self,
        recompute: bool = False,
        shared: bool = False,
        skip: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        if tied:
            self.layers[2].weight = self.layers[0].weight
        self.tied = tied
        self.recompute, self.shared, self.skip = recompute, shared, skip

    def forward(self, g: int) -> Tensor:
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(g)) * 10.0 ** (g % 4)
        for at, layer in enumerate(self.layers):
            if self.skip and at == 1 and g % 4 < 2:
                continue

            def apply(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return nn.functional.dropout(torch.tanh(layer(x)), 0.3)

            x = checkpoint(apply, x, use_reentrant=False) if self.recompute else apply(x)
            if self.shared and at == 1:
                x = apply(x)
        return (x * 10.0 ** (g % 3)).square().sum()


def build(kind: str, ranks: int, **options: bool) -> tuple[nn.Module, GradientAccumulator]:
    torch.manual_seed(0)
    model = Model(**options)
    if kind == "ddp":
        whole = DistributedDataParallel(model)
        return whole, GradientAccumulator(whole, M, seed=1)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    # Modules that share a parameter are sharded together.
    for module in (*(() if model.tied else model.layers), model):
        fully_shard(module, mesh=mesh)
    return model, GradientAccumulator(model, M, mesh, seed=1)


def step(model: nn.Module, accumulator: GradientAccumulator, factor: float = 1.0) -> None:
    for round in range(accumulator.micro_batches.rounds):
        with accumulator.round():
            (model(accumulator.micro_batches.index(round)) * factor).backward()
    accumulator.finish()


def bits_of(model: nn.Module) -> list[Any]:
    return [bits(one).tolist() for one in whole_gradients(model)]


Use = Callable[[str, int], list[Any]]


def step_of(**options: bool) -> Use:
    """One step of a model with these options."""

    def run(kind: str, ranks: int) -> list[Any]:
        model, accumulator = build(kind, ranks, **options)
        assert len(list(model.parameters())) == (5 if "tied" in options else 6)
        step(model, accumulator)
        return bits_of(model)

    return run


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise KeyError


def begun_again(kind: str, ranks: int) -> list[Any]:
    """A step that fails in the forward or in the backward of its last round."""
    model, accumulator = build(kind, ranks)
    last = accumulator.micro_batches.rounds - 1

    def fail(*_: object) -> Any:
        raise KeyError

    layer = next(one for one in model.modules() if isinstance(one, nn.ModuleList))[1]
    # DDP goes on after a failure of the forward only.
    for hook in (fail, lambda *call: Fail.apply(call[-1]))[: 1 if kind == "ddp" else 2]:
        with pytest.raises(KeyError):  # noqa: PT012
            for round in range(last + 1):
                if round == last:
                    handle = layer.register_forward_hook(hook)
                with accumulator.round():
                    model(accumulator.micro_batches.index(round)).backward()
        handle.remove()
        accumulator.reset()
    step(model, accumulator)
    return bits_of(model)


def compiled(kind: str, ranks: int) -> list[Any]:
    """Compiled layers."""
    model, accumulator = build(kind, ranks)
    for layer in next(one for one in model.modules() if isinstance(one, nn.ModuleList)):
        layer.compile(backend="aot_eager")
    step(model, accumulator)
    return bits_of(model)


def by_tokens(kind: str, ranks: int) -> list[Any]:
    """A mean over the tokens of the step, whose number differs between micro-batches."""
    model, accumulator = build(kind, ranks)
    dealt = accumulator.micro_batches
    for round in range(dealt.rounds):
        with accumulator.round():
            (model(dealt.index(round)) * (dealt.index(round) + 1)).backward()
    tokens = [dealt.index(round) + 1.0 for round in range(dealt.rounds)]
    accumulator.finish(divisor=int(accumulator.sum_scalars(tokens)))
    return bits_of(model)


def scaled(kind: str, ranks: int) -> list[Any]:
    """A scaler of losses, clipping, and an optimizer."""
    model, accumulator = build(kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    norms = []
    for _ in range(2):
        for round in range(accumulator.micro_batches.rounds):
            with accumulator.round():
                scaler.scale(model(accumulator.micro_batches.index(round))).backward()
        accumulator.finish()
        scaler.unscale_(optimizer)
        norms.append(meshplan.clip_grad_norm_(model.parameters(), 0.5).item().hex())
        scaler.step(optimizer)
        scaler.update()
        found = bits_of(model)
        optimizer.zero_grad()
    return [found, norms]


def frozen(kind: str, ranks: int) -> list[Any]:
    """A layer is frozen after the first step, and trained again in the third."""
    model, accumulator = build(kind, ranks)
    found = []
    for trained in (True, False, True):
        list(model.parameters())[-1].requires_grad_(trained)
        step(model, accumulator)
        found += [
            bits(p.grad.full_tensor()).tolist() for p in model.parameters() if p.grad is not None
        ]  # type: ignore[attr-defined]
        model.zero_grad()
    return found


def two_models(kind: str, ranks: int) -> list[Any]:
    (one, first), (other, second) = build(kind, ranks), build(kind, ranks, recompute=True)
    for round in range(first.micro_batches.rounds):
        g = first.micro_batches.index(round)
        with first.round(), second.round():
            (one(g) + 0.5 * other(g)).backward()
    first.finish()
    second.finish()
    return bits_of(one) + bits_of(other)


def skipped(kind: str, ranks: int) -> list[Any]:
    """Some micro-batches do not use a layer, which is sharded with its parent."""
    torch.manual_seed(0)
    model: nn.Module = Model(skip=True)
    if kind == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
        accumulator = GradientAccumulator(model, M, seed=1)
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        accumulator = GradientAccumulator(fully_shard(model, mesh=mesh), M, mesh, seed=1)
    step(model, accumulator)
    return bits_of(model)


class Encoder(nn.Linear):
    """Runs by a method that FSDP2 has to be told of."""

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class Encoders(nn.Module):
    """Calls two layers of one size, in an order that depends on the micro-batch or not.

    FSDP2 reduces both at the end, in one order, as no input gets a gradient.
    """

    def __init__(self, order: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Encoder(6, 6, bias=False) for _ in range(2))
        self.order = order

    def forward(self, g: int) -> Tensor:
        x = torch.full((2, 6), g + 1.0)
        outputs = [self.layers[at].encode(x) * 3**at for at in ((0, 1), (1, 0))[g % self.order]]
        return torch.stack([one.square().sum() for one in outputs]).sum()


def shard_methods(model: nn.Module, ranks: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    for module in (*model.layers, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh)
        if isinstance(module, Encoder):
            register_fsdp_forward_method(module, "encode")
    return mesh


def by_method(kind: str, ranks: int) -> list[Any]:
    """Modules of which no forward is called."""
    torch.manual_seed(0)
    model = Encoders(order=1)
    step(model, GradientAccumulator(model, M, shard_methods(model, ranks)))
    return bits_of(model)


USES: dict[str, Use] = {
    "stored": step_of(),
    "recomputed": step_of(recompute=True),
    "a layer is called twice": step_of(shared=True),
    "layers share a weight": step_of(tied=True),
}
WRITTEN_OUT = begun_again, scaled, frozen, two_models, compiled, by_tokens, skipped, by_method
USES |= {use.__name__: use for use in WRITTEN_OUT}
# Where FSDP2 does not, an unused parameter is refused in FSDP2.
ADDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
# DDP counts on the gradients that it saw when it was constructed. Torch 2.11 does not reset FSDP2.
WITHOUT = {
    "ddp": ("frozen", "by_method"),
    "fsdp": ("begun_again",) * (not hasattr(FSDPModule, "reset_iter_state"))
    + ("skipped",) * (not ADDS_ZEROS),
}


# Dynamo of torch 2.15 reads it of every input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_uses_have_the_bits_of_one_rank(kind: str) -> None:
    uses = {name: use for name, use in USES.items() if name not in WITHOUT[kind]}

    def run(rank: int, ranks: int) -> dict[str, Any]:
        return {name: use(kind, ranks) for name, use in uses.items()}

    wanted = run_ranks(partial(run, ranks=1), 1, backend="meshplan")[0]
    assert wanted["stored"] == wanted["recomputed"]
    assert wanted["stored"] == wanted.get("begun_again", wanted["stored"])
    for ranks in (2, 3):
        for found in run_ranks(partial(run, ranks=ranks), ranks, backend="meshplan"):
            for name, value in found.items():
                assert value == wanted[name], f"{name}, {ranks} ranks"


class Branches(nn.Module):
    """Odd micro-batches use one weight, even ones the other; or a batch norm follows."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.norm = norm or nn.Identity()

    def forward(self, g: int) -> Tensor:
        x = torch.full((2, 6), g + 1.0)
        if not isinstance(self.norm, nn.Identity):
            return self.norm(self.layers[0](x) + self.layers[1](x)).sum()  # type: ignore[no-any-return]
        return self.layers[g % 2](x).sum()  # type: ignore[no-any-return]


class Twice(Branches):
    """Calls a layer twice; the backward of some micro-batches does not reach its second call."""

    def forward(self, g: int) -> Tensor:
        first, layer = self.layers
        once = layer(first(torch.full((2, 6), g + 1.0)))
        twice = layer(once)
        return (once + (twice.detach() if g // 2 % 2 else twice)).sum()  # type: ignore[no-any-return]


class Heads(Branches):
    """Calls three layers; the backward reaches one, and FSDP2 gathers it and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(6, 6, bias=False))

    def forward(self, g: int) -> Tensor:
        x = torch.full((2, 6), g + 1.0)
        return [layer(x) for layer in self.layers][1 + g % 2].sum()


class Inputs(Branches):
    """FSDP2 reduces a layer when the gradient of its input is there, or at the end if none is."""

    def forward(self, g: int) -> Tensor:
        x = torch.full((2, 6), g + 1.0, requires_grad=g % 2 == 0)
        return torch.stack([layer(x).sum() * 3**at for at, layer in enumerate(self.layers)]).sum()


class Gathered(Branches):
    """Gathers layers by hand, of which one rank has the shards of the other layer then."""

    def forward(self, g: int) -> Tensor:
        for layer in (self.layers, self.layers[::-1])[g % 2]:
            layer.unshard()
        x = torch.full((2, 6), g + 1.0)
        return torch.stack([layer(x).square().sum() for layer in self.layers]).sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_that_reduce_different_gradients_are_refused(ranks: int) -> None:
    """The sums would be of gradients of different modules, or of different calls of one."""
    text = (
        "MP902: micro-batches of the step call or unshard different FSDP modules, or their backward "
        "reaches different calls; do the same in the same order in each, or shard a module that "
        "differs with its parent"
    )

    def run(rank: int) -> None:
        for kind in (Branches, Twice, Heads, Inputs, Encoders, Gathered):
            model = kind()
            mesh = shard_methods(model, ranks)
            found = refuse(step, model, GradientAccumulator(model, M, mesh))
            # Or before, for its unused parameter.
            assert found == text or (not ADDS_ZEROS and "use torch 2.13 or newer" in found), kind

    run_ranks(run, ranks, backend="meshplan")


def test_torch_without_zeros_for_unused_parameters_refuses_them() -> None:
    """There FSDP2 would add the gradient of one weight on a rank to that of another on its peer."""

    def run(rank: int) -> str:
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            del FSDPModule.set_reduce_scatter_unused_params
        assert frozen("fsdp", 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        model = fully_shard(Branches(), mesh=mesh)
        return refuse(step, model, GradientAccumulator(model, M, mesh))

    found = run_ranks(run, 2, backend="meshplan")
    for rank, text in enumerate(found):
        assert text.startswith(
            f"MP902: no gradient of parameter 'layers.{1 - rank}.weight' in round 0"
        )


def load_other_checkpoint(rank: int) -> str:
    model, accumulator = build("ddp", 2)
    accumulator.micro_batches.load_state_dict({"step": 7 + rank, "micro_batches": M})
    return refuse(step, model, accumulator)


def freeze_in_a_bucket(rank: int) -> str:
    """One bucket waits for a parameter that was frozen; torch says so in the next forward only."""
    # Of more than 1 MiB each, so that each has a bucket.
    layers = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    accumulator = GradientAccumulator(model, 2)

    def backward() -> None:
        with accumulator.round():
            model(torch.ones(600)).sum().backward()

    # In the first one all parameters are in one bucket.
    backward()
    accumulator.finish()
    model.zero_grad()
    layers[0].bias.requires_grad_(False)
    return refuse(backward)


def replace_a_parameter(rank: int) -> str:
    """A sum of rounds would be in a new parameter."""
    model, accumulator = build("fsdp", 2)
    layer: Any = model.layers[1]  # type: ignore[index]
    layer.load_state_dict({**layer.state_dict()}, assign=True)
    return refuse(step, model, accumulator)


def reduce_no_gradient_of_a_layer(rank: int) -> str:
    """The layer would never be trained."""
    model, accumulator = build("fsdp", 2)
    model.layers[1].set_requires_gradient_sync(False, recurse=False)  # type: ignore[index]
    return refuse(step, model, accumulator)


def test_steps_that_would_lose_gradients_are_refused() -> None:
    uses = (
        load_other_checkpoint,
        freeze_in_a_bucket,
        replace_a_parameter,
        reduce_no_gradient_of_a_layer,
    )
    found = common_result(lambda rank: [use(rank) for use in uses], 2, backend="meshplan")
    assert_expected_inline(
        "\n".join(found),
        """\
MP902: data-parallel rank 1 has (divisor, finished steps) = (8, 8), rank 0 (8, 7); pass the same divisor and load the same checkpoint on all ranks
MP902: parameter 'module.0.weight' has a gradient that DDP did not reduce in round 0; freeze parameters before DDP is constructed, and have DDP ignore none that is trained
MP902: no gradient of 'layers.1.bias' was reduced in round 0; call backward once in it, without no_sync, and with set_requires_gradient_sync(True); replace no parameter
MP902: no gradient of 'layers.1.bias' was reduced in round 0; call backward once in it, without no_sync, and with set_requires_gradient_sync(True); replace no parameter""",
    )


def test_replicas_with_shards_in_another_order_are_refused() -> None:
    """FSDP2 would add the first shard of a replica and the second one of another."""

    def run(rank: int) -> str:
        for ranks in ([[0, 1], [3, 2]], [[1, 0], [3, 2]]):
            mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("ddp", "fsdp"))
            model = fully_shard(Model(), mesh=mesh)
            if ranks[0] == [0, 1]:
                text = refuse(GradientAccumulator, model, M, mesh)
        step(model, GradientAccumulator(model, M, mesh))
        return text

    assert (
        run_ranks(run, 4, backend="meshplan")
        == [
            "MP902: the groups of DeviceMesh((ddp=2, fsdp=2), 'cpu', stride=(2, 1)) along axis 1 have "
            "ranks in different orders: [[0, 1], [3, 2]]. Torch sorts them, and FSDP2 then adds other "
            "shards; pass a mesh with the same order in all groups of an axis"
        ]
        * 4
    )


def fail_in_backward(rank: int) -> list[str]:
    """Gradients are in the whole parameters then, and FSDP2 would add them to the next ones."""
    model, accumulator = build("fsdp", 1)

    def forward() -> None:
        with accumulator.round():
            model(0).backward()

    # The first module of the backward gets gradients, and the second one fails.
    layer = next(one for one in model.modules() if isinstance(one, nn.ModuleList))[1]
    handle = layer.register_forward_hook(lambda *call: Fail.apply(call[-1]))
    with pytest.raises(KeyError):
        forward()
    handle.remove()
    return [refuse(forward)]


def train_batch_norms(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    texts = []
    for norm in (nn.BatchNorm1d(6), nn.SyncBatchNorm(6, track_running_stats=False)):
        model = fully_shard(Branches(norm), mesh=mesh)
        texts.append(refuse(step, model, GradientAccumulator(model, M, mesh)))
    for norm in (nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6, track_running_stats=False)):
        model = fully_shard(Branches(norm), mesh=mesh)
        step(model, GradientAccumulator(model, M, mesh))
    return texts


def reset_by_older_torch(rank: int) -> list[str]:
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    return [refuse(build("fsdp", 1)[1].reset).replace(torch.__version__, "VERSION")]


def test_what_one_rank_cannot_do_is_refused() -> None:
    uses = fail_in_backward, train_batch_norms, reset_by_older_torch
    (found,) = run_ranks(lambda rank: [use(rank) for use in uses], 1, backend="meshplan")
    assert_expected_inline(
        "\n".join(text for texts in found for text in texts),
        """\
MP902: an exception ended round 0, or backward was called outside of it; call reset on every rank, and begin the step again
MP902: module 'norm' is a BatchNorm1d, whose statistics depend on the number of ranks; use LayerNorm or GroupNorm, or call eval() of the module
MP902: module 'norm' is a SyncBatchNorm, whose statistics depend on the number of ranks; use LayerNorm or GroupNorm, or call eval() of the module
MP902: torch VERSION does not reset FSDP2 after an exception; use torch 2.13 or newer, or make the model again from the last checkpoint""",
    )
