"""Tests the FLOP of a step against numbers worked out by hand, and their share of a GPU's peak."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

from fourfold import metrics
from fourfold_trainer.flops import Machine, ModelSize, Work, speed

SIZE = ModelSize(parameters=100, trained_parameters=100, attention=4)


def test_an_update_costs_three_forward_passes() -> None:
    forward, update = Work(), Work()
    forward.add([3, 5], backward=False)
    update.add([3, 5], backward=True)
    # 2 * N * T + 2 * L * H * (3^2 + 5^2)
    assert forward.flops(SIZE) == 2 * 100 * 8 + 2 * 4 * 34
    assert update.flops(SIZE) == 6 * 100 * 8 + 12 * 4 * 34 / 2 == 3 * forward.flops(SIZE)


def test_frozen_parameters_have_no_gradient_of_their_own() -> None:
    work = Work()
    work.add([8], backward=True)
    adapter = ModelSize(parameters=100, trained_parameters=1, attention=0)
    assert work.flops(adapter) == (2 * 100 + 2 * 100 + 2 * 1) * 8


def test_a_gpu_of_an_unknown_peak_has_a_rate_but_no_utilisation() -> None:
    work = Work()
    work.add([1000], backward=True)
    flops = work.flops(SIZE)
    found = speed(Machine(policy=SIZE, gpu="NVIDIA H100 80GB HBM3"), work, Work(), seconds=2.0, rank_count=4)
    assert found == {metrics.TRAIN_TFLOPS: flops / 8 / 1e12, metrics.MFU: flops / 8 / 989.5e12}
    machine = Machine(policy=SIZE, critic=SIZE, gpu="Some GPU 9000")
    assert speed(machine, work, work, seconds=1.0, rank_count=1) == {metrics.TRAIN_TFLOPS: 2 * flops / 1e12}
    assert speed(Machine(policy=SIZE), work, Work(), seconds=1.0, rank_count=1) == {}


SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_size_of_a_dense_model_is_its_parameters() -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))  # type: ignore[no-untyped-call]
    model.lm_head.weight.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    assert ModelSize.of(model) == ModelSize(parameters=total, trained_parameters=total - 11 * 8, attention=3 * 2 * 6)


def test_a_token_uses_the_experts_that_it_is_routed_to() -> None:
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=1)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    total = sum(p.numel() for p in model.parameters())
    experts = 3 * 4 * (3 * 8 * 12)  # layers, experts, three matrices
    assert ModelSize.of(model).parameters == total - experts * 3 // 4
