"""Liger's kernels compute what the layers do without them."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import transformers

from fourfold.nn import forward

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
]


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma"])
def test_a_model_with_liger_equals_one_without(family: str) -> None:
    from fourfold_trainer.zero.load_model import apply_liger

    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 64, "intermediate_size": 512, "vocab_size": 1000}
    torch.manual_seed(0)
    make: Any = getattr(transformers, f"{family}ForCausalLM")
    plain = make(getattr(transformers, f"{family}Config")(**shape)).to("cuda", torch.bfloat16)
    fused = copy.deepcopy(plain)
    ids = torch.randint(0, 1000, (300,), device="cuda")
    arguments = {"token_ids": ids, "lengths": torch.tensor([200, 100]), "rows": torch.arange(299, device="cuda")}
    arguments |= {"targets": ids[1:], "temperatures": torch.ones(299, device="cuda")}
    results = []
    for model, liger in ((plain, False), (fused, True)):
        forward.install(model)
        if liger:
            apply_liger(model)
        logprobs, _ = model(**arguments)
        weights = [w for w in model.parameters() if w.requires_grad]
        results.append([logprobs, *torch.autograd.grad(logprobs.mean(), weights)])
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
