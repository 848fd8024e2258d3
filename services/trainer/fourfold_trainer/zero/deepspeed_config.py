"""Builds DeepSpeed's configuration and the optimizer from the recipe."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from fourfold.config import Config, CriticConfig, TrainerConfig
from fourfold.weights.source.fused_params import whole_shape
from fourfold_trainer.optim import muon

_ADAM_EPSILON: Final = 1e-8
# Elements of one gradient reduction; DeepSpeed allocates a buffer of that size once, in the weights' dtype. A GPU needs
# less time for fewer, larger reductions; a CPU machine is short of memory.
_BUCKET_ELEMENTS: Final = {"cpu": 20_000_000, "cuda": 200_000_000}
# DeepSpeed's own stage3_param_persistence_threshold: smaller parameters stay whole between steps.
_PERSISTENT_ELEMENTS: Final = 100_000


def make_optimizer(config: Config, table: TrainerConfig | CriticConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the recipe's optimizer for a model, with the weight decay of `table`; biases and norms have none."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay, betas = table.weight_decay, config.trainer.adam_betas
    if config.trainer.optimizer != "muon":
        # Each update sets the learning rate. It starts at 0, because some ZeRO stages run an empty step at the start.
        return torch.optim.AdamW(_adam_groups(parameters, decay), lr=0.0, betas=betas, eps=_ADAM_EPSILON, fused=True)
    matrices = muon.matrices(model)
    taken = {id(p) for p in matrices.values()}
    groups = [{"params": list(matrices.values()), "weight_decay": decay, "muon": True}] if matrices else []
    groups += [{**g, "muon": False} for g in _adam_groups([p for p in parameters if id(p) not in taken], decay)]
    return muon.Muon(
        groups,
        {name: (whole_shape(p)[0], whole_shape(p)[1]) for name, p in matrices.items()},
        momentum=config.trainer.muon_momentum,
        betas=betas,
        eps=_ADAM_EPSILON,
    )


def _adam_groups(parameters: list[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    if not decay:
        return [{"params": parameters, "weight_decay": 0.0}] if parameters else []
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if len(whole_shape(p)) >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def deepspeed_config(config: Config, model: torch.nn.Module, *, max_grad_norm: float) -> dict[str, Any]:
    """Return the `config` of `deepspeed.initialize` for a model."""
    stage = config.trainer.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": config.trainer.device == "cuda",
        "reduce_bucket_size": _BUCKET_ELEMENTS[config.trainer.device],
        "zero_hpz_partition_size": config.trainer.zero_hpz_partition_size,
    }
    in_main_memory = {"device": "cpu", "pin_memory": config.trainer.device == "cuda"}
    if config.trainer.offload != "none":
        zero["offload_optimizer"] = in_main_memory
    if config.trainer.offload == "optimizer+parameters":
        zero["offload_param"] = in_main_memory
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # DeepSpeed divides the loss by this number. We mark accumulation boundaries ourselves, as stages 1 and 2 need.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": zero,
        # Otherwise gradients are summed in the weights' dtype. Float32 costs nothing measurable on two H200.
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 40,
        "zero_allow_untested_optimizer": True,  # DeepSpeed accepts torch's AdamW; but not Muon, our subclass of it
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU optimizer is compiled; we use torch's fused AdamW
    }
    if stage:  # stage 0 has no such buffer and sums micro-batches in the weights' dtype
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3 and not all(p.requires_grad for p in model.parameters()):
        # Keep LoRA adapters whole on every rank between steps: they are small and many. The passes then gather nothing
        # for them, and neither does a weight transfer, in which an aborted rank would leave the others waiting.
        largest = max(math.prod(whole_shape(p)) for p in model.parameters() if p.requires_grad)
        zero["stage3_param_persistence_threshold"] = max(largest, _PERSISTENT_ELEMENTS)
    return settings
