"""Names of tensors, and tensors that cannot be compared."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from meshplan.errors import ReplicaInputError
from meshplan.replicas._tensors import named_tensors
from tests.refusals import refusal


def names(source: object, **options: bool) -> list[str]:
    return [one.name for one in named_tensors(source, **options)]  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(11))
        self.norm = nn.BatchNorm1d(2)
        self.tied = self.layers[0].weight


def test_numbers_in_names_sort_by_value() -> None:
    model = Model()
    found = names(model)
    assert found[:2] == ["layers.1.weight", "layers.2.weight"]
    assert found[8:10] == ["layers.9.weight", "layers.10.weight"]
    assert found[10:] == [
        "norm.bias",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
        # Under the name that the module gives it first; it is compared once.
        "tied",
    ]
    model.layers[3](torch.ones(1, 2)).sum().backward()
    assert [name for name in names(model, grads=True) if "grad" in name] == ["layers.3.weight.grad"]


def test_names_follow_the_containers() -> None:
    one = torch.ones(2)
    assert names(one) == ["tensor"]
    assert names([one, {"b": one, "a": [one]}]) == ["0", "1.a.0", "1.b"]
    assert names({"model": nn.Linear(1, 1), "ema": {"w": one}}) == [
        "ema.w",
        "model.bias",
        "model.weight",
    ]
    assert names(iter([one, one])) == ["0", "1"]
    assert names([]) == []
    # In one order, whatever the order of the mapping.
    assert names({"x": one, "y": one}) == names({"y": one, "x": one})


def test_optimizer_state_is_named_by_group_and_parameter() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    assert names(optimizer) == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert names(optimizer) == [
        f"group0.param{p}.{key}" for p in (0, 1) for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    optimizer.state[model.bias] = {"step": 3, "blocks": [torch.ones(1), None], "how": "so"}
    found = {one.name: one.local for one in named_tensors({"o": optimizer})}
    assert found["o.group0.param1.step"].item() == 3.0
    assert "o.group0.param1.blocks.0" in found
    assert len(found) == 5


def test_wrapper_subclass_is_split_into_its_tensors() -> None:
    two = TwoTensor(torch.ones(2), torch.zeros(2))
    assert names({"w": two}) == ["w.a", "w.b"]
    assert names({"w": nn.Parameter(two)}) == ["w.a", "w.b"]


def test_tensor_is_printed() -> None:
    (one,) = named_tensors({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert str(one) == "w: bfloat16[2, 3]"


@pytest.mark.filterwarnings("ignore:.*")
def test_tensors_without_data_are_errors() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    odd: list[Tensor | object] = [
        {"w": fake},
        {"w": torch.ones(2, device="meta")},
        nn.LazyLinear(2),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        {"lr": 0.1},
        "model",
        None,
    ]
    assert_expected_inline(
        "\n".join(refusal(ReplicaInputError, named_tensors, one) for one in odd),
        """\
MP421: w is fake, so it has no elements of its own to compare; pass tensors outside of tracing
MP421: w is on the meta device, so it has no elements of its own to compare; pass the module after to_empty and its first values
MP421: weight is not initialised yet, so it has no elements of its own to compare; pass the module after its first forward
MP421: tensor is sparse_coo, so it has no elements of its own to compare; pass its indices and values as tensors of their own
MP421: tensor is nested, so it has no elements of its own to compare; pass the tensors that it is made of
MP421: tensor is nested, so it has no elements of its own to compare; pass the tensors that it is made of
MP421: tensor is quantized, so it has no elements of its own to compare; pass its int_repr() and its scales
MP421: lr is of type float, and only tensors are compared; pass a module, an optimizer, a tensor, or a mapping or list of them
MP421: source is of type str, and only tensors are compared; pass a module, an optimizer, a tensor, or a mapping or list of them
MP421: source is of type NoneType, and only tensors are compared; pass a module, an optimizer, a tensor, or a mapping or list of them""",
    )
