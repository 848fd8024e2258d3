"""The CUDA kernels of log-probabilities against the form that runs everywhere."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fourfold.nn import logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, HIDDEN, VOCABULARY = 37, 64, 10_007


@pytest.mark.parametrize("chunk_rows", [0, 8])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_kernels_equal_the_other_form(
    float32_logits: bool, dtype: torch.dtype, softcap: float, chunk_rows: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN, device="cuda") / 4).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    temperatures = torch.rand(ROWS, device="cuda") + 0.5
    upstream = torch.randn(2, ROWS, device="cuda")
    options: dict[str, Any] = {
        "softcap": softcap,
        "entropy": True,
        "chunk_rows": chunk_rows,
        "float32_logits": float32_logits,
    }
    results = []
    for has_kernels in (True, False):
        with mock.patch.object(logprobs, "_has_kernels", return_value=has_kernels):
            found, entropies = logprobs.token_logprobs(hidden, weight, bias, targets, temperatures, **options)
            assert entropies is not None
            loss = (upstream[0] * found + upstream[1] * entropies).sum()
            gradients = torch.autograd.grad(loss, (hidden, weight, bias))
        results.append([found, entropies, *gradients])
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for mine, wanted in zip(*results, strict=True):
        assert float((mine - wanted).norm() / wanted.norm()) < tolerance
