"""Short words for tensors in tests of formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

F64 = torch.float64


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def leaf(values: list[float], dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def slopes(loss: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return [float(number) for number in gradient]


def near(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-12)
