"""Models whose gradients are known to the bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.inputs import draw_leaves


class Dot(nn.Module):
    """The gradient of ``weight`` by a sample is the sample; ``extra`` is used by some of them."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.extra = nn.Parameter(torch.zeros(numel, dtype=dtype))
        self.never = nn.Parameter(torch.zeros(2, dtype=dtype))

    def forward(self, x: Tensor, uses_extra: Tensor) -> Tensor:
        total = (x[0] * self.weight).sum()
        return total + (x[0] * self.extra).sum() if bool(uses_extra[0]) else total


def dot_loss(output: Tensor, _: Any) -> Tensor:
    return output


def batch_of(
    samples: int, numel: int, dtype: torch.dtype, *, seed: int = 0, specials: bool = False
) -> tuple[Tensor, Tensor]:
    """Inputs of ``Dot`` [samples, numel] whose sums show their order; one sample of three uses
    ``extra``."""
    rows = draw_leaves(samples, numel, dtype, seed=seed, specials=specials)
    return torch.stack(rows), torch.arange(samples) % 3 == 1


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """7 -> 16 -> 3, with parameters by formula."""
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            values = torch.linspace(-1.0, 1.0, parameter.numel(), dtype=torch.float64)
            parameter.copy_(torch.cos(17 * values + k).view_as(parameter) / 3)
    return model


def mlp_batch(samples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs [samples, 7] and targets [samples, 3], by formula."""
    line = torch.linspace(-2.0, 3.0, samples * 7, dtype=torch.float64)
    inputs = torch.cos(line * math.pi * 5).view(samples, 7)
    targets = torch.cos(torch.linspace(0.0, 9.0, samples * 3, dtype=torch.float64))
    return inputs.to(dtype), targets.view(samples, 3).to(dtype)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
