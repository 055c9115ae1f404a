"""The gradient of one sample: its bits depend on the sample, the model and its index only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from meshplan.errors import ContractTypeError, MeshplanError
from meshplan.testing import assert_bitwise_equal, bits
from meshplan.testing.dp import compare_gradients, sample_gradients
from tests.gradients import Dot, batch_of, dot_loss, mlp, mlp_batch, squared_error
from tests.refusals import refusal


def test_leaves_are_the_gradients_of_single_samples() -> None:
    model, (x, y) = mlp(), mlp_batch(5)
    found = list(sample_gradients(model, squared_error, x, y))
    assert len(found) == 5
    for i, gradients in enumerate(found):
        loss = squared_error(model(x[i : i + 1].clone()), y[i : i + 1].clone())
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        compare_gradients(gradients, dict(zip(names, wanted, strict=True)))
        for gradient in gradients.values():
            assert gradient is not None
            assert gradient.is_contiguous()
            gradient.zero_()


def test_leaf_may_hold_several_samples() -> None:
    model, (x, y) = mlp(), mlp_batch(6)
    found = list(sample_gradients(model, squared_error, x, y, samples_per_leaf=2))
    assert len(found) == 3
    loss = squared_error(model(x[2:4].clone()), y[2:4].clone())
    for name, parameter in model.named_parameters():
        wanted = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
        assert_bitwise_equal(found[1][name], wanted)


def test_frozen_parameters_are_left_out_and_unused_ones_are_none() -> None:
    model = Dot(3)
    model.never.requires_grad_(False)
    x, uses = batch_of(3, 3, torch.float32)
    found = list(sample_gradients(model, dot_loss, (x, uses), None))
    assert [list(one) for one in found] == [["weight", "extra"]] * 3
    assert [one["extra"] is None for one in found] == [True, False, True]
    for i, one in enumerate(found):
        assert_bitwise_equal(one["weight"], x[i])


def test_bits_do_not_depend_on_the_memory_of_a_sample() -> None:
    # Without a copy, kernels choose other algorithms: the views begin at other offsets in a line.
    model, (x, y) = mlp(), mlp_batch(8)
    apart = torch.full((8, 9), 1e9)
    apart[:, 1:8] = x
    columns = x.t().contiguous().t()
    wanted = list(sample_gradients(model, squared_error, x, y, samples_per_leaf=2))
    for other in (apart[:, 1:8], columns, torch.cat([torch.ones(3, 7), x])[3:]):
        assert torch.equal(other, x)
        found = list(sample_gradients(model, squared_error, other, y, samples_per_leaf=2))
        for one, two in zip(found, wanted, strict=True):
            compare_gradients(one, two)


class Recurrent(nn.Module):
    """Holds its parameters in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(0))[0][-1])


def spectral() -> nn.Module:
    """Each forward in training writes new singular vectors into its buffers."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 3)))


@pytest.mark.parametrize("build", [mlp, Recurrent, spectral])
def test_bits_do_not_depend_on_the_memory_of_a_parameter(build: Callable[[], nn.Module]) -> None:
    model, (x, y) = build(), mlp_batch(4)
    other = copy.deepcopy(model)
    flat = torch.zeros(sum(p.numel() for p in other.parameters()) + 1)
    offset = 1
    for parameter in other.parameters():
        place = flat[offset : offset + parameter.numel()].view_as(parameter)
        parameter.data = place.copy_(parameter.data)
        offset += parameter.numel()
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    assert any(address % 64 for address in addresses)
    inside: list[int] = []

    def looks(output: Tensor, target: Tensor) -> Tensor:
        inside.extend(parameter.data_ptr() % 64 for parameter in other.parameters())
        return squared_error(output, target)

    found = list(sample_gradients(other, looks, x, y, samples_per_leaf=2))
    assert set(inside) == {0}
    wanted = list(sample_gradients(model, squared_error, x, y, samples_per_leaf=2))
    for one, two in zip(found, wanted, strict=True):
        compare_gradients(one, two)
        assert None not in one.values()
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
    if isinstance(other, Recurrent):
        assert other.lstm._flat_weights[0] is other.lstm.weight_ih_l0


class Counting(nn.Module):
    """Writes into its buffers, in both ways, and its output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("total", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.total += self.linear(x).detach().sum(0)
        return self.linear(x) * self.seen + self.total


def test_buffers_written_by_one_sample_do_not_reach_the_next() -> None:
    model, (x, y) = Counting(), mlp_batch(4)
    seen, total = model.seen, model.total
    together = list(sample_gradients(model, squared_error, x, y))
    for i in range(4):
        alone = sample_gradients(model, squared_error, x[i : i + 1], y[i : i + 1], start=i)
        compare_gradients(next(alone), together[i])
    assert model.seen is seen
    assert model.total is total
    assert (float(seen), total.tolist()) == (1.0, [0.0] * 3)


def test_random_numbers_depend_on_the_index_only() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(7, 3))
    x, y = mlp_batch(1)[0].expand(4, 7), mlp_batch(4)[1][:1].expand(4, 3)
    before = torch.get_rng_state()
    together = list(sample_gradients(model, squared_error, x, y, seed=3))
    again = list(sample_gradients(model, squared_error, x[2:], y[2:], seed=3, start=2))
    other = list(sample_gradients(model, squared_error, x, y, seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    for one, two in zip(together[2:], again, strict=True):
        compare_gradients(one, two)
    weights = [bits(one["1.weight"]).tolist() for one in (*together, *other)]  # type: ignore[arg-type]
    assert len({str(one) for one in weights}) > 4


def test_model_and_generators_are_restored() -> None:
    model, (x, y) = mlp(), mlp_batch(3)
    kept = [p.detach().clone() for p in model.parameters()]
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7.0)
    x.requires_grad_()
    list(sample_gradients(model, squared_error, x, y))
    for parameter, value in zip(model.parameters(), kept, strict=True):
        assert_bitwise_equal(parameter, value)
    assert bool((first.grad == 7.0).all())
    assert [p.grad is None for p in model.parameters()] == [False, True, True, True]
    assert x.grad is None

    def fails(*_: Any) -> Tensor:
        torch.rand(3)
        raise ArithmeticError

    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        list(sample_gradients(model, fails, x, y))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_do_not_change_gradients(mode: Callable[[], Any]) -> None:
    model, (x, y) = mlp(), mlp_batch(2)
    wanted = list(sample_gradients(model, squared_error, x, y))
    with mode():
        found = list(sample_gradients(model, squared_error, x * 1, y))
    for one, two in zip(found, wanted, strict=True):
        compare_gradients(one, two)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, x: Tensor, *, scale: float, mask: Tensor) -> Tensor:
        return self.linear(x) * scale * mask


def test_dict_inputs_are_keyword_arguments() -> None:
    model, (x, y) = Named(), mlp_batch(2)
    inputs = {"x": x, "scale": 2.0, "mask": torch.ones(2, 3)}
    found = list(sample_gradients(model, lambda o, t: (o - t["y"]).sum(), inputs, {"y": y}))
    loss = model(x[1:].clone(), scale=2.0, mask=torch.ones(1, 3)).sum()
    assert_bitwise_equal(
        found[1]["linear.weight"], torch.autograd.grad(loss, model.linear.weight)[0]
    )


def test_tied_parameters_have_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = list(sample_gradients(model, lambda o, _: o.sum(), torch.ones(2, 3), None))
    assert list(found[0]) == ["0.weight", "0.bias", "1.bias"]


class DistributedDataParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(7, 3)


class Wrapped(DistributedDataParallel):
    pass


def norm(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3, **options))


def test_unsupported_models_losses_and_batches_are_errors() -> None:
    x, y = mlp_batch(2)
    frozen = nn.Linear(7, 3).requires_grad_(False)
    complex_model = nn.ParameterList([torch.ones(3, dtype=torch.complex64)])
    calls: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (norm(), squared_error, {}),
        (norm(track_running_stats=False).eval(), squared_error, {}),
        (nn.BatchNorm1d(7), squared_error, {}),
        (Wrapped(), squared_error, {}),
        (nn.Sequential(nn.DataParallel(nn.Linear(7, 3))), squared_error, {}),
        (frozen, squared_error, {}),
        (nn.LazyLinear(3), squared_error, {}),
        (complex_model, squared_error, {}),
        (mlp().to("meta"), squared_error, {}),
        (mlp(), lambda o, t: o - t, {}),
        (mlp(), lambda o, t: 3.5, {}),
        (mlp(), lambda o, t: (o.detach() - t).sum(), {}),
        (mlp(), squared_error, {"start": -1}),
        (mlp(), squared_error, {"start": 3, "samples_per_leaf": 2}),
    ]

    def run(model: nn.Module, loss: Any, options: dict[str, Any]) -> None:
        list(sample_gradients(model, loss, x, y, **options))

    messages = [refusal(MeshplanError, run, *call) for call in calls]
    embedding, ids = nn.Embedding(5, 2, sparse=True), torch.ones(2, 3).long()
    leaves = sample_gradients(embedding, lambda o, _: o.sum(), ids, None)
    messages.append(refusal(ContractTypeError, next, leaves))
    assert_expected_inline(
        "\n".join(messages),
        """\
MP411: '1' is a BatchNorm1d that normalises over the batch, so the gradient is not a sum over samples; call eval() on it (with running statistics), or use a norm of one sample, e.g. GroupNorm or LayerNorm
MP411: '1' is a BatchNorm1d that normalises over the batch, so the gradient is not a sum over samples; call eval() on it (with running statistics), or use a norm of one sample, e.g. GroupNorm or LayerNorm
MP411: the model is a BatchNorm1d that normalises over the batch, so the gradient is not a sum over samples; call eval() on it (with running statistics), or use a norm of one sample, e.g. GroupNorm or LayerNorm
MP411: the model is a Wrapped, which reduces gradients in another order; pass the model inside, e.g. ddp.module
MP411: '0' is a DataParallel, which reduces gradients in another order; pass the model inside, e.g. ddp.module
MP411: the model has no parameters with requires_grad=True; unfreeze some
MP411: 'weight' has no shape yet; run the model once first
MP412: torch.complex64 is outside the contract; convert to one of float32, bfloat16, float16, float64, int8, int16, int32, int64, uint8
MP412: tensors on meta are not supported; move model and batch to 'cpu' or 'cuda'
MP411: the loss of a leaf must be one number, got (1, 3); return e.g. losses.mean() from loss_fn
MP411: the loss of a leaf must be one number, got float; return e.g. losses.mean() from loss_fn
MP411: the loss does not depend on any parameter with requires_grad=True; look for detach(), no_grad() or item() in the model and in loss_fn
MP411: start=-1; pass the index of the first sample, 0 or more
MP411: 3 samples are not a multiple of samples_per_leaf=2, and a leaf of another size has other bits; pass a multiple on every rank
MP412: the gradient of 'weight' has layout torch.sparse_coo, whose sums have no fixed order; make it dense, e.g. Embedding(sparse=False)""",
    )


def test_arguments_are_checked_before_the_first_sample() -> None:
    with pytest.raises(MeshplanError, match="BatchNorm1d"):
        sample_gradients(norm(), squared_error, *mlp_batch(2))


@pytest.mark.parametrize(
    "model", [norm().eval(), nn.Sequential(nn.Linear(7, 3), nn.GroupNorm(1, 3))]
)
def test_norms_of_one_sample_are_supported(model: nn.Module) -> None:
    assert len(list(sample_gradients(model, squared_error, *mlp_batch(2)))) == 2
