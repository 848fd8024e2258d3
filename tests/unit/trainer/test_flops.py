"""Tests the FLOP of a step against numbers worked out by hand, and their share of a GPU's peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import transformers

from fourfold import metrics
from fourfold.nn import forward
from fourfold_trainer.flops import size_of, speed
from fourfold_trainer.work import Machine, ModelSize, Work

SIZE = ModelSize(parameters=100, trained_parameters=100, head=30, trained_head=30, attention=4)


def test_an_update_costs_three_forward_passes() -> None:
    once, update = Work(), Work()
    once.add([3, 5], rows=6, backward=False)
    update.add([3, 5], rows=6, backward=True)
    # 2 * N * T + 2 * M * K + 2 * L * H * (3^2 + 5^2)
    assert once.flops(SIZE) == 2 * 100 * 8 + 2 * 30 * 6 + 2 * 4 * 34
    assert update.flops(SIZE) == 6 * 100 * 8 + 6 * 30 * 6 + 12 * 4 * 34 / 2 == 3 * once.flops(SIZE)


def test_frozen_parameters_have_no_gradient_of_their_own() -> None:
    work = Work()
    work.add([8], rows=5, backward=True)
    adapter = ModelSize(parameters=100, trained_parameters=1, head=30, attention=0)
    assert work.flops(adapter) == (2 * 100 + 2 * 100 + 2 * 1) * 8 + 4 * 30 * 5


def test_a_gpu_of_an_unknown_peak_has_a_rate_but_no_utilisation() -> None:
    work = Work()
    work.add([1000], rows=900, backward=True)
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


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_looked_up_and_the_head_is_apart(tied: bool) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "vocab_size": 64, "tie_word_embeddings": tied})
    body, head = 3 * (2 * 8 * 12 + 2 * 8 * 6 + 3 * 8 * 12 + 2 * 8) + 8, 64 * 8
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert sum(p.numel() for p in model.parameters()) == body + head * (1 if tied else 2)
    size = ModelSize(parameters=body, trained_parameters=body, head=head, trained_head=head, attention=3 * 2 * 6)
    assert size_of(model) == size
    model.lm_head.weight.requires_grad_(False)
    assert size_of(model) == replace(size, trained_head=0)
    forward.install_values(model)
    assert size_of(model) == replace(size, head=8, trained_head=8), "one row, of the head of values"


def test_a_token_uses_the_experts_that_it_is_routed_to() -> None:
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=1)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    total = sum(p.numel() for p in model.parameters())
    experts = 3 * 4 * (3 * 8 * 12)  # layers, experts, three matrices
    assert size_of(model).parameters == total - experts * 3 // 4 - 2 * 11 * 8


def test_the_heads_of_mla_are_wider_than_their_rotary_part() -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=16, hidden_size=32, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert size_of(model).attention == 2 * 4 * (16 + 8 + 16) // 2
