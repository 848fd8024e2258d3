"""GGUF files of model folders, read by transformers and by the converter back."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold_tools.gguf import convert_gguf, write_gguf
from fourfold_tools.gguf.gguf_tokenizer import read_tokenizer
from tests.support.pre_tokenizers import TEXTS, set_pre_tokenizer
from tests.support.tiny_models import VOCABULARY_SIZE, write_tiny_model

# transformers takes the head size of Qwen3 from its own default.
SIZES = {"qwen3": {"head_dim": 128}, "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}}
FAMILIES = ("llama", "llama_tied", "qwen2", "qwen2_untied", "qwen3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        folder = root / family
        return folder if folder.is_dir() else write_tiny_model(folder, family, sizes=SIZES.get(family))

    return make


def written(folder: Path, to: Path, **options: Any) -> Path:
    path = to / "model.gguf"
    write_gguf.write(folder, path, **options)
    return path


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 67)[None]).logits
    return found


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model(folders: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    path = written(folders(family), tmp_path)
    wanted = logits(folders(family))
    torch.testing.assert_close(logits(tmp_path, gguf_file=path.name), wanted, rtol=1e-5, atol=1e-5)
    assert float(wanted.std()) > 0.5
    kinds = {len(t.shape): t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds == {1: "F32", 2: "BF16"}


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 0.0), ("bf16", 0.1), ("f16", 0.02)])
def test_float32_weights_are_rounded_to_the_dtype(dtype: str, tolerance: float, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama", dtype="float32")
    path = written(folder, tmp_path, dtype=dtype)
    difference = (logits(tmp_path, gguf_file=path.name) - logits(folder)).abs().max().item()
    assert difference <= tolerance + 1e-5
    assert tolerance == 0 or difference > 1e-4


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe"])
def test_transformers_reads_the_same_tokenizer(folders: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    folder = set_pre_tokenizer(folders("qwen2"), tmp_path / "model", name)
    path = written(folder, tmp_path)
    assert fields(path)["tokenizer.ggml.pre"] == name
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text), text
    assert theirs.chat_template == (folder / "chat_template.jinja").read_text()
    assert (theirs.eos_token, theirs.bos_token) == ("<|im_end|>", "<|endoftext|>")


def test_converter_reads_back_the_same_tensors_and_token_ids(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = set_pre_tokenizer(folders("llama"), tmp_path / "model", "smollm", unk_token="<|endoftext|>")
    path = written(folder, tmp_path, name="my-run")
    assert fields(path)["general.name"] == "my-run"
    convert_gguf.convert(path, tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(tmp_path / "back")
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["max_position_embeddings"]) == (1e-5, 10_000.0, 512)


@pytest.mark.parametrize("architecture", write_gguf.ARCHITECTURES)
def test_names_of_tensors_are_those_of_the_gguf_package(architecture: str) -> None:
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, 2)
    modules = [name.removesuffix(".weight") for name in convert_gguf.OUTER_NAMES.values()]
    modules += [f"model.layers.1.{name}" for name in convert_gguf.LAYER_NAMES.values()]
    for module in modules:
        if architecture == "qwen3" or not module.endswith(("q_norm", "k_norm")):
            assert write_gguf.gguf_name(f"{module}.weight") == f"{names.get_name(module)}.weight"


def test_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = write_tiny_model(tmp_path / "model", "llama", sizes={"head_dim": 128})
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    path = written(folder, tmp_path)
    factors = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**config), torch.device("cpu"))
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / factors, expected.numpy(), rtol=1e-6)
    assert fields(path)["llama.rope.freq_base"] == 500_000.0
    assert factors.min() == 1 and factors.max() == 8


def test_rows_without_a_token_and_begin_tokens_are_kept(folders: Callable[[str], Path], tmp_path: Path) -> None:
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor: dict[str, Any] = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text]}
    processor["special_tokens"] = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    folder = set_pre_tokenizer(folders("llama"), tmp_path / "model", "gpt-2", post_processor=processor)
    found = read_tokenizer(folder, VOCABULARY_SIZE + 3)
    assert (found.add_bos, found.add_eos) == (True, False)
    assert found.tokens[-3:] == ["[PAD512]", "[PAD513]", "[PAD514]"]
    assert found.types[0] == 3 and found.types[-4:] == [1, 5, 5, 5]


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def changed_tokenizer(part: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        parts = json.loads((folder / "tokenizer.json").read_text())
        *outer, name = part.split(".")
        (parts[outer[0]] if outer else parts)[name] = value
        (folder / "tokenizer.json").write_text(json.dumps(parts))

    return change


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


NORM = "model.norm.weight"
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (changed_config(model_type="gemma3"), "model_type is 'gemma3'.*llama, qwen2, qwen3"),
    "rope": (changed_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type is yarn"),
    "llama3": (changed_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "incomplete"),
    "rope of no kind": (changed_config(rope_parameters=[1]), "rope_type is unreadable"),
    "activation": (changed_config(hidden_act="gelu"), "hidden_act is gelu"),
    "quantised": (changed_config(quantization_config={"quant_method": "awq"}), "quantization_config"),
    "no number": (changed_config(rms_norm_eps=None), "missing or damaged"),
    "sizes": (changed_config(num_attention_heads="x"), "no number"),
    "other sizes": (changed_config(intermediate_size=96), r"is \[128, 64\]; config.json makes it \[96, 64\]"),
    "layers": (changed_config(num_hidden_layers=3), "no tensor 'model.layers.2"),
    "more tensors": (changed_tensors(lambda t: t.update(extra=t[NORM].clone())), "'extra' is no tensor"),
    "dtype": (changed_tensors(lambda t: t.update({NORM: t[NORM].double()})), "is F64"),
    "infinite": (changed_tensors(lambda t: t[NORM].fill_(torch.inf)), f"{NORM} has values"),
    "pre-tokenizer": (changed_tokenizer("pre_tokenizer", {"type": "Whitespace"}), "Whitespace.*gpt-2, smollm, qwen2"),
    "no pre-tokenizer": (changed_tokenizer("pre_tokenizer", None), "pre_tokenizer is None"),
    "normalizer": (changed_tokenizer("normalizer", {"type": "Lowercase"}), "normalizer is"),
    "merges": (changed_tokenizer("model.ignore_merges", True), "ignore_merges is True"),
    "option": (changed_tokenizer("model.dropout", 0.5), "dropout is 0.5"),
    "model": (changed_tokenizer("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}), "'Unigram'"),
    "rows": (changed_config(vocab_size=500), "tensor|rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_llama_cpp_would_compute_differently_are_refused(
    folders: Callable[[str], Path], case: str, tmp_path: Path
) -> None:
    change, message = REFUSED[case]
    folder = set_pre_tokenizer(folders("llama"), tmp_path / "model", "gpt-2")
    change(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=message):
        written(folder, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    changed_tensors(lambda tensors: tensors["lm_head.weight"].fill_(1e6))(folder)
    with pytest.raises(ConfigError, match=r"lm_head.weight has values .* of F16"):
        written(folder, tmp_path, dtype="f16")
    written(folder, tmp_path)


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 8, "intermediate_size": 512}
    folder = write_tiny_model(tmp_path / "model", "llama", sizes=sizes)
    largest = 512 * 64 * 2
    assert (folder / "model.safetensors").stat().st_size > 20 * largest
    read, used = write_gguf._tensor, list[int]()

    def measured(*arguments: Any) -> Any:
        if not used:
            tracemalloc.reset_peak()
            used.append(tracemalloc.get_traced_memory()[0])
        return read(*arguments)

    monkeypatch.setattr(write_gguf, "_tensor", measured)
    tracemalloc.start()
    try:
        written(folder, tmp_path)
        used.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert used[1] - used[0] < 4 * largest


def test_an_interrupt_leaves_the_old_file_and_no_part(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_text("old")

    def interrupt(*_: Any) -> Any:
        assert len(list(tmp_path.iterdir())) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(write_gguf, "_tensor", interrupt)
    with pytest.raises(KeyboardInterrupt):
        written(folders("llama"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_text() == "old"


def test_a_folder_that_is_missing_is_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/model.gguf: cannot be written \(No such file or directory\)"):
        written(folders("llama"), tmp_path / "none")
