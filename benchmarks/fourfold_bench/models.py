"""Writes model folders with random weights, and counts parameters, FLOP and bytes of their shapes.

    python -m fourfold_bench.models FOLDER SHAPE CONTEXT

Word number i of the tokenizer is the text `w<i>`, so that a text of n words has exactly n tokens. The weights are the
initial ones of transformers: at temperature 1 all tokens are about equally likely.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

_SEED: Final = 0
_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN2: Final = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
_POSITIONS: Final = 4096


def _shape(base: dict[str, Any], sizes: tuple[int, int, int, int, int, int], *, tied: bool) -> dict[str, Any]:
    """Return a configuration; sizes are hidden, layers, heads, key and value heads, intermediate, vocabulary."""
    hidden, layers, heads, kv_heads, inner, vocabulary = sizes
    return base | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": _POSITIONS,
        "hidden_act": "silu",
        # Without a token that ends a sample, all samples run to the limit.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": _shape(_LLAMA, (64, 2, 2, 1, 128, 512), tied=True),
    "0.135b": _shape(_LLAMA, (576, 30, 9, 3, 1536, 49_152), tied=True),  # SmolLM2-135M
    "0.43b": _shape(_LLAMA, (1024, 24, 16, 8, 4096, 49_152), tied=True),
    "0.5b": _shape(_QWEN2, (896, 24, 14, 2, 4864, 151_936), tied=True),  # Qwen2.5-0.5B
    "1.5b": _shape(_QWEN2, (1536, 28, 12, 2, 8960, 151_936), tied=True),  # Qwen2.5-1.5B
    "3b": _shape(_QWEN2, (2048, 36, 16, 2, 11_008, 151_936), tied=True),  # Qwen2.5-3B
    "7b": _shape(_QWEN2, (3584, 28, 28, 4, 18_944, 152_064), tied=False),  # Qwen2.5-7B
    "70b": _shape(_LLAMA, (8192, 80, 64, 8, 28_672, 128_256), tied=False),  # Llama 3.1 70B
}
"""Contents of config.json by name."""
SHAPE_NAMES: Final = sorted(SHAPES)


def write_config(folder: Path, shape: str, *, context: int = _POSITIONS) -> Path:
    """Write config.json of a model into `folder`, made if missing; return the folder.

    `context` is the number of tokens of the longest sequence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"max_position_embeddings": max(_POSITIONS, context)}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def write_model(folder: Path, shape: str, *, context: int, dtype: str = "bfloat16") -> None:
    """Write config.json, the weights and the tokenizer; the arguments are those of `write_config`."""
    import torch
    import transformers

    write_config(folder, shape, context=context)
    torch.manual_seed(_SEED)
    make: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    make.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    # transformers writes its defaults into both files, among them ids that end a sample.
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_config(folder, shape, context=context)
    write_tokenizer(folder, shape)


def write_tokenizer(folder: Path, shape: str) -> None:
    """Write the tokenizer alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{index}": index for index in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def text_of(token_ids: list[int]) -> str:
    """Return the text that has these tokens."""
    return " ".join(f"w{token}" for token in token_ids)


def kv_cache_gib(shape: str, tokens: int) -> int:
    """Return the GiB that an engine needs for keys and values of `tokens` tokens, with a quarter to spare."""
    config = SHAPES[shape]
    head_size = config["hidden_size"] // config["num_attention_heads"]
    # Keys and values, 2 bytes each in bfloat16.
    bytes_per_token = 2 * 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_size)
    return max(1, -(-tokens * bytes_per_token * 5 // 4 // (1 << 30)))


def parameter_count(shape: str) -> int:
    """Return the parameters of a Llama or Qwen2; a tied matrix counts once."""
    config = SHAPES[shape]
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    biases = hidden + 2 * keys if config["model_type"] == "qwen2" else 0
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden + biases
    matrices = 1 if config["tie_word_embeddings"] else 2
    return int(layers * layer + matrices * config["vocab_size"] * hidden + hidden)


def forward_flop(shape: str, *, tokens: float, squares: float, with_head: bool = True) -> float:
    """Return the FLOP of a forward pass: 2 N T + 2 L H sum(t^2). Forward and backward together have three times that.

    N are the parameters without an embedding that is only looked up, L layers, H the width of the attention, under a
    causal mask (PaLM, arXiv 2204.02311, appendix B). Recomputed activations do not count.

    Args:
        tokens: T, of all samples, prompts included.
        squares: sum of the squared lengths t of the samples.
        with_head: whether the model has an output embedding; that of a reward model is one row.
    """
    config = SHAPES[shape]
    width: int = config["num_hidden_layers"] * config["hidden_size"]  # heads times head size is the hidden size here
    unused = (not config["tie_word_embeddings"]) + (not with_head)  # matrices of the vocabulary
    used: int = parameter_count(shape) - unused * config["vocab_size"] * config["hidden_size"]
    return 2.0 * used * tokens + 2.0 * width * squares


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2], context=int(sys.argv[3]))
