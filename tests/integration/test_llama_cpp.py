"""GGUF files in llama.cpp itself; skipped where xllamacpp, which has it, is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.model import folder as model_folder
from tests.support.llama_cpp import BUILTIN, compare
from tests.support.pre_tokenizers import set_pre_tokenizer
from tests.support.tiny_models import write_tiny_model

pytest.importorskip("xllamacpp")


@pytest.mark.parametrize(
    ("family", "pre_tokenizer"),
    [
        ("llama", "llama-bpe"),
        ("llama_tied", "smollm"),
        ("qwen2", "qwen2"),
        ("qwen2_untied", "gpt-2"),
        ("qwen3", "qwen2"),
    ],
)
def test_llama_cpp_has_our_token_ids_and_greedy_tokens(family: str, pre_tokenizer: str, tmp_path: Path) -> None:
    tiny = write_tiny_model(tmp_path / "tiny", family)
    folder = set_pre_tokenizer(tiny, tmp_path / "model", pre_tokenizer)
    found = compare(folder, tmp_path / "model.gguf", dtype="f32", count=32)
    assert found["chat"][0] == found["chat"][1]
    for name in ("token_ids", "greedy"):
        assert [ours for ours, _ in found[name]] == [theirs for _, theirs in found[name]]
    assert sum(len(ours) for ours, _ in found["greedy"]) > 100


@pytest.mark.slow
def test_llama_cpp_has_our_greedy_tokens_of_the_built_in_model(tmp_path: Path) -> None:
    found = compare(model_folder.resolve(BUILTIN), tmp_path / "model.gguf", dtype="f32", count=32)
    assert found["chat"][0] == found["chat"][1]
    for name in ("token_ids", "greedy"):
        assert [ours for ours, _ in found[name]] == [theirs for _, theirs in found[name]]
