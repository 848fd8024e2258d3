"""Reads the tokenizer of a Hugging Face model folder in the terms of GGUF: tokens, types, merges and a pre-tokenizer.

GGUF has only the name of the pre-tokenizer, the rule that cuts a text into words before the merges. llama.cpp has the
rules. So only byte-level BPE with a rule that llama.cpp knows can be written. Anything else is refused with the reason,
because another rule gives other token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.model.folder import read_json
from fourfold.model.tokenizer import Tokenizer, special_tokens

# GGUF's types of tokens.
NORMAL_TOKEN: Final = 1
CONTROL_TOKEN: Final = 3
USER_DEFINED_TOKEN: Final = 4
UNUSED_TOKEN: Final = 5

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES: Final = ("ByteLevel", True)  # cuts by the expression of GPT-2
_BYTES_ONLY: Final = ("ByteLevel", False)
# Steps of a pre-tokenizer -> its name in llama.cpp, and whether llama.cpp then leaves words alone that are tokens.
_PRE_TOKENIZERS: Final[Mapping[tuple[tuple[object, ...], ...], tuple[str, bool]]] = {
    (_BYTES,): ("gpt-2", False),
    (("Digits", True), _BYTES): ("smollm", False),
    (("Split", _SPLIT % ""), _BYTES_ONLY): ("qwen2", False),
    (("Split", _SPLIT % "{1,3}"), _BYTES_ONLY): ("llama-bpe", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """A byte-level BPE tokenizer as GGUF stores it."""

    pre_tokenizer: str
    tokens: list[str]  # by id; ids without a token have a placeholder
    types: list[int]
    merges: list[str]  # "left right", the first is applied first
    special_ids: Mapping[str, int] = field(default_factory=dict)  # "bos", "eos", "eot", "pad" and "unk", those it has
    add_bos: bool  # before plain text
    add_eos: bool


def read_tokenizer(folder: Path, vocabulary: int) -> GgufTokenizer:
    """Return the tokenizer of a model folder.

    Args:
        vocabulary: rows of the embedding matrix. The tokenizer may have fewer tokens.

    Raises:
        ConfigError: llama.cpp would make other token ids of a text, or the files are damaged.
    """
    path = folder / "tokenizer.json"
    tokenizer, parts = Tokenizer.load(folder), read_json(path)
    model = parts.get("model") or {}
    pre_tokenizer, ignore_merges = _pre_tokenizer(parts.get("pre_tokenizer"), path)
    _check_bpe(model, parts.get("normalizer"), ignore_merges=ignore_merges, path=path)
    tokens, types = _tokens(model["vocab"], parts.get("added_tokens") or [], vocabulary, path)
    ids = _special_ids(folder, tokenizer, {token: i for i, token in enumerate(tokens)}, path)
    add_bos, add_eos = _added_ends(tokenizer, ids, path)
    return GgufTokenizer(
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        types=types,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        special_ids=ids,
        add_bos=add_bos,
        add_eos=add_eos,
    )


def _pre_tokenizer(definition: Any, path: Path) -> tuple[str, bool]:
    """Return llama.cpp's name of a pre-tokenizer, and whether it is used with `ignore_merges`."""
    steps = definition.get("pretokenizers") if isinstance(definition, dict) and "pretokenizers" in definition else None
    found = tuple(map(_step, steps if steps is not None else [definition]))
    if found not in _PRE_TOKENIZERS:
        known = ", ".join(name for name, _ in _PRE_TOKENIZERS.values())
        raise ConfigError(
            f"{path}: pre_tokenizer is {str(definition)[:300]}; llama.cpp must know it by name to make the same token "
            f"ids, and the known ones are {known}. Use the converter of llama.cpp if it knows this model"
        )
    return _PRE_TOKENIZERS[found]


def _step(step: Any) -> tuple[object, ...]:
    """Return the relevant settings of one step of a pre-tokenizer."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "ByteLevel", step.get("use_regex", True)
        case {"type": "Digits", "individual_digits": bool(individual)}:
            return "Digits", individual
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return "Split", pattern
    return ("unknown",)


def _check_bpe(model: Any, normalizer: Any, *, ignore_merges: bool, path: Path) -> None:
    """Check that the model is a byte-level BPE without options that llama.cpp lacks."""
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise ConfigError(f"{path}: model.type is {kind!r:.100}; it must be 'BPE'")
    if not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise ConfigError(f"{path}: the model has no vocab and merges; save the tokenizer again")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if used := [name for name in options if model.get(name)]:
        raise ConfigError(f"{path}: model.{used[0]} is {model[used[0]]!r}; llama.cpp has no such option for this model")
    if bool(model.get("ignore_merges")) != ignore_merges:
        raise ConfigError(
            f"{path}: model.ignore_merges is {model.get('ignore_merges')!r}; with this pre-tokenizer llama.cpp uses "
            f"{ignore_merges}"
        )
    # llama.cpp normalises no text. Qwen's NFC changes only texts that are not composed, which are rare.
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise ConfigError(f"{path}: normalizer is {str(normalizer)[:200]}; it must be absent or NFC")


def _tokens(
    vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], vocabulary: int, path: Path
) -> tuple[list[str], list[int]]:
    """Return the texts and the types of all token ids."""
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [UNUSED_TOKEN] * vocabulary
    try:
        entries = [(token_id, token, NORMAL_TOKEN) for token, token_id in vocab.items()]
        for token in added:
            entries.append((token["id"], token["content"], CONTROL_TOKEN if token["special"] else USER_DEFINED_TOKEN))
            if any(token.get(option) for option in ("lstrip", "rstrip", "single_word")):
                raise ConfigError(f"{path}: {token['content']!r} has lstrip, rstrip or single_word; llama.cpp has none")
        for token_id, text, kind in entries:
            if not 0 <= token_id < vocabulary:
                raise ConfigError(f"{path}: {text!r} has id {token_id}; the model has {vocabulary} rows: resize it")
            tokens[token_id], types[token_id] = text, kind
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: a token is damaged ({error}); save the tokenizer again") from None
    return tokens, types


def _special_ids(folder: Path, tokenizer: Tokenizer, id_of: Mapping[str, int], path: Path) -> dict[str, int]:
    """Return the ids of the special tokens by GGUF's names. A second stop token is `eot`, the end of a turn."""
    texts = special_tokens(folder)
    named = {name: texts[f"{name}_token"] for name in ("bos", "eos", "pad", "unk") if f"{name}_token" in texts}
    if unknown := [text for text in named.values() if text not in id_of]:
        raise ConfigError(f"{path}: has no token {unknown[0]!r}, which tokenizer_config.json names; save it again")
    ids = {name: id_of[text] for name, text in named.items()}
    stops = [i for i in tokenizer.stop_token_ids if i != ids.get("eos")]
    for name in ("eos", "eot"):
        if name not in ids and stops:
            ids[name] = stops.pop(0)
    return ids


def _added_ends(tokenizer: Tokenizer, ids: Mapping[str, int], path: Path) -> tuple[bool, bool]:
    """Return whether the tokenizer puts the begin token before plain text, and the end token after it."""
    plain, full = tokenizer.encode("a"), tokenizer.encode("a", add_special=True)
    for add_bos, add_eos in itertools.product((False, True), repeat=2):
        if full == [ids.get("bos")] * add_bos + plain + [ids.get("eos")] * add_eos:
            return add_bos, add_eos
    raise ConfigError(f"{path}: the tokens {full} stand for the text 'a'; llama.cpp adds begin and end tokens alone")
