"""Plain Muon for tests, in float64: from singular values, on whole matrices.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and the factor 0.2 sqrt(max(a, b)) of
Liu et al., "Muon is Scalable for LLM Training" (2025), section 2.2. No code of the trainer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.support.trainer_driver import LEARNING_RATE

MOMENTUM = 0.95
DECAY = 0.01


def orthogonal(matrix: Tensor) -> Tensor:
    """Return U p(p(p(p(p(S / |S|))))) V^T of U S V^T, with the odd polynomial p of the post; float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    result: Tensor = u @ torch.diag(s) @ v
    return result


def updated(weight: Tensor, gradients: list[Tensor], *, rate: float) -> Tensor:
    """Return a matrix after one update for each gradient, in float64."""
    weight, momentum = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + gradient.double()
        update = orthogonal(gradient.double() + MOMENTUM * momentum)
        weight = weight - rate * (0.2 * math.sqrt(max(weight.shape)) * update + DECAY * weight)
    return weight


class PlainMuon:
    """Muon for the seven matrices of each layer of a Llama, AdamW for the rest."""

    def __init__(self, model: Any) -> None:
        self._matrices = {name: p for name, p in model.named_parameters() if "_proj." in name}
        assert len(self._matrices) == 7 * len(model.model.layers)
        self._gradients: dict[str, list[Tensor]] = {name: [] for name in self._matrices}
        self._began = {name: p.detach().clone() for name, p in self._matrices.items()}
        others = [p for name, p in model.named_parameters() if name not in self._matrices]
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=LEARNING_RATE)
        self._all = list(model.parameters())

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._all:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update everything: the matrices from the first weights on, by all gradients so far."""
        self._adam.step()
        for name, matrix in self._matrices.items():
            assert matrix.grad is not None
            self._gradients[name].append(matrix.grad.clone())
            matrix.copy_(updated(self._began[name], self._gradients[name], rate=LEARNING_RATE))
