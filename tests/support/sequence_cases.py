"""Provides the models and packed rows of the tests of sequence parallelism, and compares a group of ranks with one.

Without an `Exchange`, `run` computes the whole row on one rank. With one it computes the row on a rank of a group, and
the gradients are that rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fourfold.nn import forward
from fourfold.nn.batching import TokenBatch, pack
from fourfold.nn.sequence import Exchange
from tests.support.architectures import VOCABULARY, build

CPU: Final = torch.device("cpu")
# 37 tokens need padding for 2 and for 4 ranks; the third sample is in three of four slices.
LENGTHS: Final = (7, 2, 16, 3, 9)
TEMPERATURES: Final = (1.0, 0.5, 1.25, 2.0, 0.75)  # exact in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a row, and the outputs to compute."""

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)  # to the model's configuration
    # gaps: most tokens of all samples; first: tokens of the first sample only, so that other slices have none; dummy:
    # the shortest row.
    rows: str = "gaps"
    values: bool = False  # a critic's values instead of log-probabilities
    checkpointing: bool = False


CASES: Final = (
    Case(architecture="llama"),
    Case(architecture="llama", changes={"num_key_value_heads": 1}),
    Case(architecture="llama", changes={"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}),
    Case(architecture="llama", rows="first", checkpointing=True),
    Case(architecture="llama", rows="dummy"),
    Case(architecture="llama", rows="first", values=True),
    Case(architecture="qwen2 window", checkpointing=True),
    Case(architecture="gemma2"),
    Case(architecture="gpt2"),
    Case(architecture="qwen3_moe"),
)


@contextmanager
def float64_alone() -> Iterator[None]:
    """Replace float32 by float64, in which architectures otherwise compute norms, positions and softmax."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def batch(case: Case, *, seed: int = 0) -> TokenBatch:
    """Return the row of a case."""
    rng = np.random.default_rng(seed)
    lengths = (2,) if case.rows == "dummy" else LENGTHS
    ids = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]
    positions = [np.array([p for p in range(1, n) if p % 4 != 2 or p == n - 1]) for n in lengths]
    if case.rows == "first":
        positions[1:] = [np.zeros(0, np.int64)] * (len(lengths) - 1)
    return pack(ids, positions, TEMPERATURES[: len(lengths)])


def make_model(case: Case) -> Any:
    """Return the installed model of a case, in float64; the same on every call."""
    model = build(case.architecture, torch.float64, **case.changes)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        model.train()
        forward.disable_dropout(model)
    if case.values:
        size = model.config.get_text_config().hidden_size
        forward.install_values(model, torch.linspace(-1, 1, size, dtype=torch.float64)[None])
    else:
        forward.install(model)
    return model


def outputs(case: Case, model: Any, *, seed: int = 0) -> list[Tensor]:
    """Return the model's outputs for the row: log-probabilities and entropies, or values, [k] each."""
    if case.values:
        return [model(**forward.value_arguments(batch(case, seed=seed), CPU))]
    return list(model(**forward.batch_arguments(batch(case, seed=seed), CPU), entropy=True))


def run(case: Case, model: Any, exchange: Exchange | None = None, *, seed: int = 0) -> dict[str, Tensor]:
    """Return outputs without and with gradients, and the gradient of every parameter.

    Like GSPO's, the loss is not a sum over tokens, so that each rank needs the outputs of all tokens.
    """
    if exchange is not None:
        forward.share_rows(model, exchange)
    with torch.no_grad():
        found = {f"looked up {i}": output for i, output in enumerate(outputs(case, model, seed=seed))}
    made = outputs(case, model, seed=seed)
    loss = sum((((i + 1) * _weights(one) * one).sum() ** 2 for i, one in enumerate(made)), made[0].new_zeros(()))
    torch.autograd.backward(loss)
    found |= {f"output {i}": output.detach() for i, output in enumerate(made)}
    found["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        found[f"gradient {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def check(parts: list[dict[str, Tensor]], wanted: dict[str, Tensor], *, tolerance: float = 1e-12) -> None:
    """Assert that every rank has the outputs of one rank alone, and that the ranks' gradients add up to its own."""
    for name, value in wanted.items():
        if name.startswith("gradient"):
            total = torch.stack([part[name] for part in parts]).sum(0)
            assert float((total - value).norm()) <= tolerance * max(float(value.norm()), 1.0), name
            continue
        for part in parts:
            torch.testing.assert_close(part[name], value, atol=tolerance, rtol=tolerance, msg=name)
            assert torch.equal(part[name], parts[0][name]), name


def _weights(output: Tensor) -> Tensor:
    return torch.linspace(-1, 2, len(output), dtype=output.dtype)
