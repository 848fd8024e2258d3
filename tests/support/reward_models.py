"""Tiny random reward models for tests, and the score of each text alone by plain transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from tests.support.tiny_models import (
    FAMILIES,
    VOCABULARY_SIZE,
    make_tokenizer,
    randomise,
    save_tokenizer,
    tiny_config,
)

_TINY: Final[dict[str, Any]] = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "num_hidden_layers": 2}
_BERT: Final[dict[str, Any]] = {
    **_TINY,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
# Architectures without a causal model in `tiny_models`: name -> configuration class, and sizes.
OTHERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bert": ("BertConfig", _BERT),
    "deberta": ("DebertaV2Config", {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "roberta": ("RobertaConfig", _BERT),
    "bloom": ("BloomConfig", {**_TINY, "n_head": 2, "n_layer": 2}),
    "opt": (
        "OPTConfig",
        {**_TINY, "num_attention_heads": 2, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 512},
    ),
}


def write_reward_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    pad_token: bool = True,
    chat: bool = True,
    steps: bool = False,
    labels: int = 2,
) -> Path:
    """Write a sequence classifier with one label and its tokenizer into `folder`; return it.

    Args:
        folder: made if missing.
        family: one of FAMILIES, or of OTHERS.
        seed: of the weights.
        dtype: "bfloat16" or "float32".
        pad_token: whether config.json has a padding token.
        chat: whether the tokenizer has a chat template.
        steps: whether it is a process reward model, a token classifier with some `labels`.
    """
    tokenizer = make_tokenizer()
    pad = {"pad_token_id": tokenizer.token_to_id("<|endoftext|>") if pad_token else None}
    kind: Any = (
        transformers.AutoModelForTokenClassification if steps else transformers.AutoModelForSequenceClassification
    )
    model = kind.from_config(_config(family, labels if steps else 1, **pad), dtype=torch.float32)
    randomise(model, seed)
    model.to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    if not chat:
        (folder / "chat_template.jinja").unlink()
    return folder


def _config(family: str, labels: int, **more: Any) -> Any:
    if family in FAMILIES:
        return tiny_config(family, num_labels=labels, **more)
    name, sizes = OTHERS[family]
    return getattr(transformers, name)(**sizes, num_labels=labels, **more)


def plain_scores(
    folder: Path, token_ids: Sequence[Sequence[int]], *, dtype: str = "float32", attention: str | None = None
) -> list[float]:
    """Return the score of each text alone, as transformers computes it on CPU."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    model.eval()
    with torch.inference_mode():
        return [float(model(input_ids=torch.tensor([list(ids)])).logits[0, 0].float()) for ids in token_ids]


def plain_step_scores(folder: Path, token_ids: Sequence[int]) -> Any:
    """Return the score after every token of a text, float32 [n]: the logit of one label, or the log-odds of two."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return (logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]).numpy()


def change_config(folder: Path, **changes: Any) -> None:
    """Replace entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
