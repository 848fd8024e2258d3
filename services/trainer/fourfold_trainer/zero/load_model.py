"""Loads a causal language model for training, and applies faster layers: ZeRO-3 leaf modules, Liger kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from deepspeed.utils import set_z3_leaf_modules

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.nn import forward


def load_model(config: Config, folder: Path) -> Any:
    """Return the model of a folder in training mode. Raises ConfigError if it cannot be trained with this recipe."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = getattr(torch, config.model.dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.source: {folder} cannot be loaded as a causal language model ({error}); give a Hugging Face "
            f"folder with config.json and safetensors weights"
        ) from None
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.model.max_context_tokens > longest:
        raise ConfigError(
            f"model.max_context_tokens = {config.model.max_context_tokens}, but {folder} was made for at most "
            f"{longest} tokens; lower it"
        )
    forward.disable_dropout(model)
    if config.trainer.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if config.trainer.gradient_checkpointing or config.trainer.zero_stage == 3:
        # If only adapters are trained, the inputs of the first layer need no gradient. Gradient checkpoints then return
        # none, and ZeRO-3, which waits for the gradient of the inputs, releases the layer before its backward pass.
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
    return model.train()


def speed_up(config: Config, model: Any) -> None:
    """Make the layers of a model faster, in place. Raises ConfigError if the recipe's kernels are not available."""
    if config.trainer.zero_stage == 3:
        # Gather each decoder layer as a whole: the hooks of its dozen modules cost more than their communication.
        names = [name for name in model._no_split_modules or () if name in {type(m).__name__ for m in model.modules()}]
        if names:
            set_z3_leaf_modules(model, names)
    if config.trainer.liger_kernels:
        apply_liger(model)


def apply_liger(model: Any) -> None:
    """Replace layers by Liger's kernels, in place. Raises ConfigError if there are none for the architecture."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "trainer.liger_kernels is on, but liger-kernel is not installed; pip install liger-kernel, or switch it off"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"trainer.liger_kernels is on, but Liger has none for model type {kind!r}; switch it off")
    # Not Liger's losses: fourfold/nn/logprobs.py computes the log-probabilities.
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
