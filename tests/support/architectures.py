"""Tiny random models of the architectures that packed samples are tested with; nothing is written to disk.

Every parameter is random and wide, so that a token which sees what it must not changes its log-probability.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
import transformers

VOCABULARY: Final = 61
WINDOW: Final = 4

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING: Final[dict[str, Any]] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Name -> (prefix of the configuration's class, what differs from _SHAPE).
ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, **_SLIDING}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {**_SLIDING, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3Text", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3 window": ("Phi3", {"sliding_window": WINDOW}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_SLIDING, **_EXPERTS, "use_sliding_window": True, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),  # learned, absolute positions
}


def build(name: str, dtype: torch.dtype, **more: Any) -> Any:
    """Return a model in evaluation mode; the same name, and what `more` changes of its sizes, give the same weights."""
    family, changes = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **changes, **more})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.eval()
    model.set_experts_implementation("eager")  # the others have no float64
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)  # norms stay near their 1 or 0
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    return model


def know_float64_alone(patch: pytest.MonkeyPatch) -> None:
    """Make float32 mean float64: architectures compute norms, positions and softmax in it whatever the weights are."""
    for name in ("float32", "float"):
        patch.setattr(torch, name, torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
