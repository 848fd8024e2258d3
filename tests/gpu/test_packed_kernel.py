"""The CUDA kernel of packed attention, and a whole model through it, against the form that runs everywhere.

Skipped on a machine without a GPU. Run them with `pytest tests/gpu`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

from fourfold.nn import attention, forward
from fourfold.nn.attention import Segments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [700, 1, 30, 129, 64, 5]


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the L2 distance, relative where there is something to relate it to."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1.0))


@pytest.mark.parametrize("window", [None, 1, 16, 700])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
def test_kernel_equals_definition(key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    segments = Segments(torch.tensor(LENGTHS), torch.device("cuda"))
    shapes = [(1, heads, sum(LENGTHS), 64) for heads in (8, key_heads, key_heads)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    upstream = torch.randn(1, sum(LENGTHS), 8, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):  # the kernel has no float64
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        query, key, value = leaves
        packed, _ = attention.attend(torch.nn.Module(), query, key, value, window, segments=segments)
        results.append([packed, *torch.autograd.grad((packed * upstream.to(dtype)).sum(), leaves)])
    for found, wanted in zip(*results, strict=True):
        assert error(found, wanted) < 0.01


def test_model_equals_the_other_form() -> None:
    config = transformers.Qwen2Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    make: Any = transformers.Qwen2ForCausalLM
    model = make(config).to("cuda", torch.bfloat16)
    forward.install(model)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(0, 1000, (sum(LENGTHS),), device="cuda")
    rows = torch.arange(sum(LENGTHS) - 1, device="cuda")
    arguments = {"token_ids": ids, "lengths": lengths, "rows": rows, "targets": ids[1:]}
    arguments["temperatures"] = torch.ones(len(rows), device="cuda")
    results = []
    for has_kernel in (True, False):
        with mock.patch.object(attention, "_has_varlen", return_value=has_kernel):
            logprobs, _ = model(**arguments)
        weights = [w for w in model.parameters() if w.requires_grad]
        results.append([logprobs, *torch.autograd.grad(logprobs.mean(), weights)])
    assert float((results[0][0] - results[1][0]).abs().max()) < 0.05
    for found, wanted in zip(results[0][1:], results[1][1:], strict=True):
        assert error(found, wanted) < 0.05
