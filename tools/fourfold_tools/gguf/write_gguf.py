"""Writes a Hugging Face model folder as one GGUF file, which llama.cpp and the programs around it run.

It reverses `convert_gguf.py`, with the same names of tensors. It reads and writes one tensor at a time, so that it
needs memory for the largest tensor only. It needs the packages `gguf` and `tokenizers`, and no tensor library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from fourfold.errors import ConfigError
from fourfold.model.folder import ModelShape, TensorEntry, folder_shape, llama_shapes, read_json, tensor_entries
from fourfold.model.tokenizer import chat_template
from fourfold_tools.gguf.convert_gguf import LAYER_NAMES, OUTER_NAMES, bfloat16
from fourfold_tools.gguf.gguf_tokenizer import read_tokenizer

DTYPES: Final = ("bf16", "f16", "f32")
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Values of `model_type` in config.json. GGUF calls them the same."""

# By the names of safetensors. NumPy has no bfloat16: its bits are unsigned integers.
_NUMPY_DTYPES: Final = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_OUTER_GGUF_NAMES: Final = {name: gguf_name for gguf_name, name in OUTER_NAMES.items()}
_LAYER_GGUF_NAMES: Final = {name: gguf_name for gguf_name, name in LAYER_NAMES.items()}
_FILE_TYPES: Final = {"bf16": "MOSTLY_BF16", "f16": "MOSTLY_F16", "f32": "ALL_F32"}
_ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

Values = NDArray[Any]


def write(folder: Path, path: Path, *, dtype: str = "bf16", name: str = "") -> None:
    """Write the model in a folder, with its tokenizer and chat template, as one GGUF file.

    The file appears under its name when it is complete. An existing file is replaced.

    Args:
        folder: Hugging Face model folder.
        dtype: one of DTYPES, for matrices; vectors (norms and biases) are float32 always.
        name: of the model, for programs that show it; by default that of the folder.

    Raises:
        ConfigError: llama.cpp would compute something else, a file of the model is damaged, or the disk is full.
    """
    config = read_json(folder / "config.json")
    _check_config(config, folder / "config.json")
    shape = folder_shape(folder)
    entries = _checked_entries(folder, _expected_shapes(config, shape))
    writer = gguf.GGUFWriter(None, config["model_type"])
    _add_model(writer, config, shape, folder / "config.json")
    writer.add_name(name or folder.resolve().name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
    _add_tokenizer(writer, folder, shape.vocabulary)
    targets = {tensor: "F32" if len(entry.shape) == 1 else dtype.upper() for tensor, entry in entries.items()}
    for tensor, entry in entries.items():
        _add_tensor(writer, gguf_name(tensor), entry.shape, targets[tensor])
    factors = _rope_factors(config, shape.head_dim)
    if factors is not None:
        _add_tensor(writer, "rope_freqs.weight", factors.shape, "F32")
    with _replaced(path) as partial:
        try:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, entry in entries.items():
                writer.write_tensor_data(_tensor(tensor, entry, targets[tensor], config["model_type"], shape))
            if factors is not None:
                writer.write_tensor_data(factors)
        finally:
            writer.close()


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor of a Hugging Face model, such as `model.layers.0.mlp.up_proj.weight`."""
    if name in _OUTER_GGUF_NAMES:
        return _OUTER_GGUF_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_GGUF_NAMES[module]}.{kind}"


def permute(values: Values, heads: int) -> Values:
    """Return the rows of a query or key projection, [heads * head_dim, ...], in GGUF's order for Llama.

    Hugging Face separates the two halves of each head. GGUF interleaves them, so that rotary pairs are neighbours.
    """
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    """Check that llama.cpp computes what the model computes."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: model_type is {kind!r}; GGUF is written of {', '.join(ARCHITECTURES)} models only. The export "
            f"itself is a Hugging Face folder: use the converter of llama.cpp for it"
        )
    values: dict[str, tuple[object, tuple[object, ...]]] = {
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "quantization_config": (config.get("quantization_config"), (None,)),
        "use_sliding_window": (config.get("use_sliding_window"), (None, False)),
        "attention_bias": (config.get("attention_bias"), (None, False, True) if kind == "llama" else (None, False)),
        "rope_type": (_rope(config)[0], ("default", "llama3")),
    }
    for key, (value, known) in values.items():
        if value not in known:
            words = " or ".join(str(one) for one in known if one is not None) or "absent"
            raise ConfigError(f"{path}: {key} is {str(value)[:200]}; to be written as GGUF it must be {words}")


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and the parameters of the rotary embedding, which older versions of transformers spread."""
    scaling, parameters = config.get("rope_scaling") or {}, config.get("rope_parameters")
    if not isinstance(scaling, dict) or not isinstance(parameters or {}, dict):
        return "unreadable", {}
    rope = parameters or {"rope_theta": config.get("rope_theta", 10_000.0), **scaling}
    return str(rope.get("rope_type") or rope.get("type") or "default"), rope


def _rope_factors(config: Mapping[str, Any], head_dim: int) -> NDArray[np.float32] | None:
    """Return by how much Llama 3 divides each frequency of the rotary embedding, float32 [head_dim / 2]."""
    kind, rope = _rope(config)
    if kind != "llama3":
        return None
    try:
        base, factor, context = (float(rope[k]) for k in ("rope_theta", "factor", "original_max_position_embeddings"))
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"rope parameters of kind llama3 are incomplete ({error}); save the model again") from None
    turns = context / (2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim))  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _expected_shapes(config: Mapping[str, Any], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the model by name."""
    expected = llama_shapes(shape)
    modules: list[str] = []
    if config["model_type"] == "qwen2":
        modules += _ATTENTION[:3]
    if config["model_type"] == "llama":
        modules += _ATTENTION * bool(config.get("attention_bias")) + _MLP * bool(config.get("mlp_bias"))
    for layer in (f"model.layers.{i}" for i in range(shape.layers)):
        for module in modules:
            expected[f"{layer}.{module}.bias"] = expected[f"{layer}.{module}.weight"][:1]
        if config["model_type"] == "qwen3":
            expected |= {f"{layer}.self_attn.{norm}.weight": (shape.head_dim,) for norm in ("q_norm", "k_norm")}
    return expected


def _checked_entries(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Return where each expected tensor is. Raises ConfigError: one is missing or another is there."""
    found = tensor_entries(folder)
    if missing := sorted(expected.keys() - found.keys()):
        raise ConfigError(f"{folder}: has no tensor {missing[0]!r}, nor {len(missing) - 1} others; export it again")
    # A tied model may hold its output matrix a second time; buffers are not weights.
    others = {
        n for n in found.keys() - expected.keys() if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")
    }
    if others:
        raise ConfigError(f"{folder}: {min(others)!r} is no tensor of this architecture, and would be lost in GGUF")
    for name, shape in expected.items():
        entry = found[name]
        if entry.dtype not in _NUMPY_DTYPES:
            raise ConfigError(f"{entry.file}: {name} is {entry.dtype}; it must be one of {', '.join(_NUMPY_DTYPES)}")
        size = math.prod(shape) * np.dtype(_NUMPY_DTYPES[entry.dtype]).itemsize
        if entry.shape != shape or entry.end - entry.begin != size:
            raise ConfigError(f"{entry.file}: {name} is {list(entry.shape)}; config.json makes it {list(shape)}")
    return {name: found[name] for name in expected}


def _add_model(writer: Any, config: Mapping[str, Any], shape: ModelShape, path: Path) -> None:
    """Add the sizes of the model."""
    try:
        writer.add_context_length(int(config["max_position_embeddings"]))
        writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
        writer.add_rope_freq_base(float(_rope(config)[1]["rope_theta"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a number is missing or damaged ({error}); save the model again") from None
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    tokenizer = read_tokenizer(folder, vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre_tokenizer)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for name, token_id in tokenizer.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(tokenizer.add_bos)
    writer.add_add_eos_token(tokenizer.add_eos)
    if template := chat_template(folder):
        writer.add_chat_template(template)


def _add_tensor(writer: Any, name: str, shape: tuple[int, ...], dtype: str) -> None:
    kind = np.dtype(_NUMPY_DTYPES[dtype])
    size = math.prod(shape) * kind.itemsize
    writer.add_tensor_info(name, shape, kind, size, raw_dtype=gguf.GGMLQuantizationType[dtype])


def _tensor(name: str, entry: TensorEntry, dtype: str, architecture: str, shape: ModelShape) -> Values:
    """Return a tensor as GGUF stores it."""
    kind = np.dtype(_NUMPY_DTYPES[entry.dtype])
    values = np.fromfile(entry.file, kind, math.prod(entry.shape), offset=entry.begin).reshape(entry.shape)
    if architecture == "llama" and ".q_proj." in name:
        values = permute(values, shape.heads)
    if architecture == "llama" and ".k_proj." in name:
        values = permute(values, shape.kv_heads)
    if entry.dtype == dtype:
        return values
    wide = (values.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "BF16" else values.astype(np.float32)
    with np.errstate(over="ignore"):
        converted = wide.astype(np.float16) if dtype == "F16" else wide
    if not np.isfinite(converted).all():
        raise ConfigError(f"{entry.file}: {name} has values that are no numbers of {dtype}; export as bf16 or f32")
    return bfloat16(wide) if dtype == "BF16" else converted


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield a name in the same folder; afterwards give the file there its own name, or remove it after an error."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error}); choose another folder") from None
    finally:
        partial.unlink(missing_ok=True)
