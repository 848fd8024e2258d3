"""The model of a folder, ready to be trained."""

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
    """Return the model, ready to give log-probabilities.

    Raises:
        ConfigError: the folder holds no model that can be trained.
    """
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
        # With adapters alone the first layer's inputs need no gradient: checkpoints then give none, and DeepSpeed lets
        # the layer's weights go before its backward pass: it does so when the gradient of the inputs is there.
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
    return model.train()


def speed_up(config: Config, model: Any) -> None:
    """Change what a model's layers do on the device into what does the same faster, in place.

    Raises:
        ConfigError: the recipe asks for kernels that are not installed, or that the architecture has none of.
    """
    if config.trainer.zero_stage == 3:
        # Gather a decoder layer as a whole: hooks of each of its dozen modules cost more than their communication.
        names = [name for name in model._no_split_modules or () if name in {type(m).__name__ for m in model.modules()}]
        if names:
            set_z3_leaf_modules(model, names)
    if config.trainer.liger_kernels:
        apply_liger(model)


def apply_liger(model: Any) -> None:
    """Put Liger's kernels into a model, in place.

    Raises:
        ConfigError: they are not installed, or there are none for the architecture.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "trainer.liger_kernels is on, but liger-kernel is not installed; pip install liger-kernel, or switch it off"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"trainer.liger_kernels is on, but Liger has none for model type {kind!r}; switch it off")
    # Log-probabilities are ours: fourfold/nn/logprobs.py.
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
