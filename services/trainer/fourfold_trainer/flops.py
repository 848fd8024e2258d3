"""Counts the FLOP of a training step, and its share of the GPUs' peak (MFU, model FLOP utilisation).

    MFU = FLOP of the models' passes / (seconds of the whole train phase x GPUs of the trainer x peak of a GPU)

The train phase is the step in the trainer: passes before the updates, updates, its own work on the CPU and the return
of cached memory, without a comparison of gradients for shadow scores. The peak is that of dense products in bfloat16.

A forward pass over samples of t_1, t_2, ... tokens takes

    2 N sum(t) + 2 M sum(k) + 2 L H sum(t^2)        FLOP

    N   parameters of products with every token: no embedding, which is looked up, and in a mixture of experts only
        those of the token's top-k experts
    M   parameters of the output embedding, tied or not, or of a reward model's head; a critic's is left out
    k   tokens of a sample whose log-probabilities are computed: those in the loss; 1 of a sample that is scored
    L   layers
    H   width of the attention: heads times head size. QK' and AV take 4 L H t for a token that reads t others, and half
        of it under a causal mask. In MLA the head size is the mean of those of QK' and AV.

A backward pass takes twice that when all parameters are trained: 6 N sum(t) + 6 M sum(k) + 6 L H sum(t^2) for an update
(PaLM, arXiv 2204.02311, appendix B, with the causal half). Frozen parameters need no gradient. Recomputation of
gradient checkpointing and dummies are not counted.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fourfold import metrics
from fourfold.host.gpu_speed import gpu_speed
from fourfold.weights.source.fused_params import whole_shape
from fourfold_trainer.work import Machine, ModelSize, Work


def utilisation(flops: float, *, seconds: float, gpu_count: int, gpu: str) -> float | None:
    """Return the MFU of `gpu_count` GPUs with this name in CUDA, or None when its peak is unknown."""
    speed = gpu_speed(gpu)
    return flops / (seconds * gpu_count * speed.flops) if speed else None


def size_of(model: Any) -> ModelSize:
    """Count the parameters of a model."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if queries := getattr(config, "qk_head_dim", None):  # MLA, where head_dim is that of the rotary part
        head_size = (queries + config.v_head_dim) / 2
    head = getattr(getattr(model, "score", None) or model.get_output_embeddings(), "weight", None)
    excluded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} | {id(head)}
    counts = [(_used(p, config), p.requires_grad) for p in model.parameters() if id(p) not in excluded]
    output = 0 if head is None else math.prod(whole_shape(head))
    return ModelSize(
        parameters=round(sum(count for count, _ in counts)),
        trained_parameters=round(sum(count for count, trained in counts if trained)),
        head=output,
        trained_head=output if head is not None and head.requires_grad else 0,
        attention=round(config.num_hidden_layers * heads * head_size),
    )


def _used(parameter: Any, config: Any) -> float:
    """Return the numbers of a parameter that a token uses: transformers keeps all experts of a layer in one tensor."""
    shape = whole_shape(parameter)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not experts or not chosen or len(shape) != 3 or shape[0] != experts:
        return math.prod(shape)
    return math.prod(shape) * float(chosen) / float(experts)


def speed(machine: Machine, policy: Work, critic: Work, *, seconds: float, rank_count: int) -> dict[str, float]:
    """Return the metrics of a step's speed: none on CPUs, and no MFU on a GPU whose peak is unknown."""
    if not machine.gpu:
        return {}
    flops = policy.flops(machine.policy) + (critic.flops(machine.critic) if machine.critic else 0.0)
    mfu = utilisation(flops, seconds=seconds, gpu_count=rank_count, gpu=machine.gpu)
    found = {metrics.TRAIN_TFLOPS: flops / seconds / rank_count / 1e12}
    return found if mfu is None else found | {metrics.MFU: mfu}
