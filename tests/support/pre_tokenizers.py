"""Tiny models with the pre-tokenizers that GGUF files may have, and texts on which they differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}


def _split(digits: str) -> dict[str, Any]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES | {"use_regex": False}]}


PRE_TOKENIZERS: Final[dict[str, dict[str, Any]]] = {
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
    "qwen2": _split(""),
    "llama-bpe": _split("{1,3}"),
}
"""Definitions in tokenizer.json, by their names in llama.cpp."""

TEXTS: Final = (
    "What is 9 * 9? The answer is 81.",
    "In 2024, 1234567 people'll PAY $3.50; they've said: DON'T!",
    "Gr\u00fc\u00dfe, \u4f60\u597d\u4e16\u754c \u0417\u0434\u0440\u0430\u0432! \u2460\u00b2 \u0663\u0664 e\u0301",
    "\U0001f600\U0001f44d\U0001f3fd \u00bd\u00a0x",
    "  two   spaces\n\n\n\tand a tab \r\n end   ",
    "def f(x):\n    return x**2  # 10 ** 100\n",
    "<|im_start|>user\nWhat is 7 * 8?<|im_end|>\n<|im_start|>assistant\n",
)


def set_pre_tokenizer(model: Path, folder: Path, name: str, *, unk_token: str = "", **parts: Any) -> Path:
    """Copy a tiny model, with this pre-tokenizer and other parts of tokenizer.json; return the new folder."""
    shutil.copytree(model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer |= {"pre_tokenizer": PRE_TOKENIZERS[name], **parts}
    tokenizer["model"]["ignore_merges"] = name == "llama-bpe"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if unk_token:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": unk_token}))
    return folder
