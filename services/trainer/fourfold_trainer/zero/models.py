"""The model of a folder, ready to be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

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
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
    return model.train()
