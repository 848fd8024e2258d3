"""Tiny random Hugging Face model folders for tests: real configs, weights and tokenizers, about 300 KB each.

Every tensor is random, biases and norms included, so that a weight which is dropped, swapped
or stale changes the log-probabilities; and wide enough that distributions are not flat.
The same family, seed and dtype give the same bytes.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE: Final = 512
CONTEXT_TOKENS: Final = 512
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
}

_EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GEMMA: Final[dict[str, Any]] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}

# Family -> (config class, model class, what differs from _SHAPE).
_FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),  # has q, k, v biases
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": False}),  # has q and k norms
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_untied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": False}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"tie_word_embeddings": False, "sliding_window": None}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"tie_word_embeddings": False, "sliding_window": None}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"tie_word_embeddings": False, **_EXPERTS, "num_experts": 3},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "tie_word_embeddings": False,
            **_EXPERTS,
            "moe_intermediate_size": 48,  # vLLM's CPU kernels pad it
            "shared_expert_intermediate_size": 96,
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"tie_word_embeddings": False}),  # vLLM has no class of it
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT_TOKENS}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
}
FAMILIES: Final = tuple(_FAMILIES)


def write_tiny_model(
    folder: Path, family: str, *, seed: int = 0, dtype: str = "bfloat16", sizes: Mapping[str, int] | None = None
) -> Path:
    """Write config.json, model.safetensors, generation_config.json and the tokenizer into `folder`; return it.

    Args:
        folder: made if missing.
        family: one of FAMILIES.
        seed: of the weights.
        dtype: "bfloat16" or "float32".
        sizes: entries of config.json that replace the tiny ones.
    """
    torch_dtype = getattr(torch, dtype)
    tokenizer = make_tokenizer()
    special = {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    config = tiny_config(family, **(sizes or {}), **special, dtype=torch_dtype)
    model = getattr(transformers, _FAMILIES[family][1])(config)
    randomise(model, seed)
    model.to(torch_dtype)
    model.generation_config = transformers.GenerationConfig(**special)  # type: ignore[no-untyped-call]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def write_awq_model(folder: Path, unquantised: Path) -> Path:
    """Write a model with random AWQ tensors of 4 bits in the place of its linear layers, and return its folder."""
    shutil.copytree(unquantised, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(unquantised / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        outputs, inputs = tensor.shape
        layer, groups = name.removesuffix(".weight"), inputs // 32
        words = torch.arange(inputs * outputs // 8, dtype=torch.int32) * 2_654_435
        tensors[f"{layer}.qweight"] = words.reshape(inputs, outputs // 8)
        tensors[f"{layer}.qzeros"] = words[: groups * outputs // 8].reshape(groups, outputs // 8).clone()
        tensors[f"{layer}.scales"] = torch.full((groups, outputs), 0.01, dtype=tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": awq}))
    return folder


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the configuration of one of FAMILIES, with other sizes or entries."""
    config_class, _, own = _FAMILIES[family]
    shape = dict(_SHAPE)
    if family == "gpt_neox":
        shape = {k: v for k, v in shape.items() if k not in ("num_key_value_heads", "head_dim", "rms_norm_eps")}
    if family == "gpt2":
        shape = {"vocab_size": VOCABULARY_SIZE}
    return getattr(transformers, config_class)(**{**shape, **own, **changes})


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter random values that depend on its name and the seed alone."""
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, name)) * 7919 + len(name))
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)  # norms stay near their 1 or 0, biases leave 0
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of exactly VOCABULARY_SIZE ids, trained on made-up words and sums."""
    rng = random.Random(0)
    syllables = [a + b + c for a in "bdgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(600)]
    corpus = [" ".join(rng.choices(words, k=12)) for _ in range(400)]
    corpus += [f"What is {a} * {b}? The answer is {a * b}." for a in range(10) for b in range(10)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens; it must give {VOCABULARY_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    fast = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
