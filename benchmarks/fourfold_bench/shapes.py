"""Shapes of models, and folders of them without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN2: Final = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
_POSITIONS: Final = 4096


def _shape(base: dict[str, Any], sizes: tuple[int, int, int, int, int, int], *, tied: bool) -> dict[str, Any]:
    """Return a configuration; sizes are hidden, layers, heads, key and value heads, intermediate, vocabulary."""
    hidden, layers, heads, kv_heads, inner, words = sizes
    return base | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": words,
        "tie_word_embeddings": tied,
        "max_position_embeddings": _POSITIONS,
        "hidden_act": "silu",
        # No token ends a sample: all run to the limit.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


# Configurations of Hugging Face folders.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": _shape(_LLAMA, (64, 2, 2, 1, 128, 512), tied=True),
    "0.135b": _shape(_LLAMA, (576, 30, 9, 3, 1536, 49_152), tied=True),  # SmolLM2-135M
    "0.43b": _shape(_LLAMA, (1024, 24, 16, 8, 4096, 49_152), tied=True),
    "1.5b": _shape(_QWEN2, (1536, 28, 12, 2, 8960, 151_936), tied=True),  # Qwen2.5-1.5B
    "7b": _shape(_QWEN2, (3584, 28, 28, 4, 18_944, 152_064), tied=False),  # Qwen2.5-7B
}


def write_config(folder: Path, shape: str, *, context: int = _POSITIONS) -> Path:
    """Write config.json of a model into `folder`, made if missing; return the folder.

    Args:
        folder: of the model.
        shape: one of SHAPES.
        context: tokens that it must have positions for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"max_position_embeddings": max(_POSITIONS, context)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def kv_bytes_per_token(shape: str) -> int:
    """Return what keys and values of one token take in an engine, in bytes."""
    config = SHAPES[shape]
    head_size = config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_size)
