"""DeepSpeed's settings, and the optimizer.

What DeepSpeed does on its own and we do not want: it divides the loss by its accumulation
steps (set to 1, boundaries are given explicitly, which stages 1 and 2 need) and averages
gradients over ranks (update.py multiplies by their number).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from fourfold.config import Config, CriticConfig, TrainerConfig
from fourfold_trainer.optim import muon
from fourfold_trainer.zero.offload import offload_settings

_ADAM_EPSILON: Final = 1e-8
# Elements of one gradient reduction: its buffer is allocated once, in the weights' dtype. On a GPU fewer and larger
# ones cost less time, on a CPU memory is what is short.
_BUCKET_ELEMENTS: Final = {"cpu": 20_000_000, "cuda": 200_000_000}
# DeepSpeed's own stage3_param_persistence_threshold: smaller parameters stay whole between steps.
_WHOLE_ELEMENTS: Final = 100_000


def make_optimizer(config: Config, table: TrainerConfig | CriticConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """Return the recipe's optimizer; weight decay, where there is any, spares biases and norms.

    Args:
        config: of the run.
        table: of the model, for its weight decay.
        model: whole.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay, betas = table.weight_decay, config.trainer.adam_betas
    if config.trainer.optimizer == "muon":
        return _make_muon(config, parameters, muon.matrices(model), decay)
    groups = _adam_groups(parameters, decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=_ADAM_EPSILON, fused=True)


def _adam_groups(parameters: list[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{"params": parameters, "weight_decay": 0.0}]
    if decay:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
    return [group for group in groups if group["params"]]


def _make_muon(
    config: Config,
    parameters: list[torch.nn.Parameter],
    matrices: dict[str, torch.nn.Parameter],
    decay: float,
) -> muon.Muon:
    taken = {id(p) for p in matrices.values()}
    others = _adam_groups([p for p in parameters if id(p) not in taken], decay)
    groups = [{"params": list(matrices.values()), "weight_decay": decay, "muon": True}] if matrices else []
    return muon.Muon(
        groups + [{**group, "muon": False} for group in others],
        {name: (p.shape[0], p.shape[1]) for name, p in matrices.items()},
        momentum=config.trainer.muon_momentum,
        betas=config.trainer.adam_betas,
        eps=_ADAM_EPSILON,
    )


def deepspeed_settings(config: Config, model: torch.nn.Module, *, max_grad_norm: float) -> dict[str, Any]:
    """Return the `config` of `deepspeed.initialize` for a model that is whole on this rank."""
    stage = config.trainer.zero_stage
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": config.trainer.device == "cuda",
            "reduce_bucket_size": _BUCKET_ELEMENTS[config.trainer.device],
            **offload_settings(config),
        },
        "steps_per_print": 1 << 40,
        "zero_allow_untested_optimizer": True,  # it knows torch's AdamW and not Muon, which is one
        "zero_force_ds_cpu_optimizer": False,  # its own one is compiled
    }
    if stage:  # stage 0 has no such buffer and sums micro-batches in the weights' dtype
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3 and not all(p.requires_grad for p in model.parameters()):
        # Adapters are small and many: whole on every rank between steps, they cost no gathering in the passes, and
        # none when weights are sent, where a rank that was told to abort would leave the others waiting.
        largest = max(p.numel() for p in model.parameters() if p.requires_grad)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = max(largest, _WHOLE_ELEMENTS)
    return settings
