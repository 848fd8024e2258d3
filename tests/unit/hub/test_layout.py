"""Which files of a repository are a model, or a split of a data set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fourfold.errors import ConfigError
from fourfold.hub.layout import model_files, split_files

GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  default: true
  data_files:
  - split: train
    path: ["socratic/train-*", "more/**/*.parquet"]
---
# Text
"""
GSM8K_FILES = [
    "README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet", "more/a/b/x.parquet", "more/y.parquet",
]  # fmt: skip


def files(names: Sequence[str], split: str = "train", config: str = "", readme: str = "") -> list[str]:
    return split_files(names, readme, config=config, split=split, where="hf:o/n")


def test_compressed_files_are_data() -> None:
    names = ["README.md", "good/train.jsonl.gz", "good/test.jsonl.gz", "b/x-00000-of-00001.jsonl.zst", "b/model.bin.gz"]
    assert files(names[:3], "test", "good") == ["good/test.jsonl.gz"]
    assert files(names[3:], "x") == ["b/x-00000-of-00001.jsonl.zst"]


def test_the_metadata_of_the_readme_names_files_of_configurations_and_splits() -> None:
    assert files(GSM8K_FILES, "test", "main", GSM8K) == ["main/test-00000-of-00001.parquet"]
    default = ["socratic/train-00000-of-00001.parquet", "more/a/b/x.parquet", "more/y.parquet"]
    assert files(GSM8K_FILES, "train", "", GSM8K) == default
    with pytest.raises(ConfigError, match=r"hf:o/n: config = 'mian' is unknown; did you mean `main`\?"):
        files(GSM8K_FILES, "train", "mian", GSM8K)
    with pytest.raises(ConfigError, match="has several configurations; set config to one of: main, socratic"):
        files(GSM8K_FILES, "train", "", GSM8K.replace("default: true", "x: 1"))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("data_files: a.csv", ["a.csv"]),
        ("data_files: ['a.csv', 'd/*.jsonl']", ["a.csv", "d/b.jsonl"]),
        ("data_dir: d", ["d/b.jsonl"]),
        ("data_dir: d\n  data_files: {train: b.jsonl}", ["d/b.jsonl"]),
        ("data_files: '?.csv'", ["a.csv"]),
        ("data_files: 'd/**'", ["d/b.jsonl", "d/e/c.jsonl"]),
        ("data_files: '**/*.jsonl'", ["d/b.jsonl", "d/e/c.jsonl"]),
        ("data_files: 'd/*'", ["d/b.jsonl"]),
    ],
)
def test_every_form_of_the_metadata_is_read(entry: str, expected: list[str]) -> None:
    readme = f"---\nconfigs:\n- config_name: x\n  {entry}\n---\n"
    assert (
        files(["a.csv", "d/b.jsonl", "d/e/c.jsonl"] if "dir" not in entry else ["a.csv", "d/b.jsonl"], readme=readme)
        == expected
    )


@pytest.mark.parametrize(
    ("readme", "words"),
    [
        ("---\nconfigs: [\n---\n", "the metadata of its README.md is no YAML"),
        ("---\nconfigs: !!python/object/apply:os.getcwd []\n---\n", "the metadata of its README.md is no YAML"),
        ("---\nconfigs:\n- config_name: x\n  data_files: none.csv\n---\n", "lists no file of it that can be read"),
        ("---\nconfigs:\n- config_name: x\n  data_files: 3\n---\n", "lists no file of it that can be read"),
        ("---\nconfigs:\n- config_name: x\n  data_dir: none\n---\n", "lists no file of it that can be read"),
        ("---\nday: 2026-13-01\nconfigs: []\n---\n", "the metadata of its README.md is no YAML"),
        ("---\nconfigs: " + "[" * 3000 + "\n---\n", "the metadata of its README.md is no YAML"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(readme: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        files(["train.csv"], readme=readme)


@pytest.mark.parametrize(
    "readme", ["", "no metadata", "---\nconfigs: 3\n---\n", "---\n- configs: x\n---\n", "---\nconfigs: [1]\n---"]
)
def test_without_configurations_names_of_files_decide(readme: str) -> None:
    assert files(["train.csv", "test.csv"], "test", readme=readme) == ["test.csv"]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "data/hard-00000-of-00001.parquet"],
         "train", ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["data/hard-00000-of-00001-ab12.parquet", "data/train-00000-of-00001-cd34.parquet"],
         "hard", ["data/hard-00000-of-00001-ab12.parquet"]),
        (["my_train_file.jsonl", "dev.jsonl", "evaluation/x.jsonl"], "validation", ["dev.jsonl"]),
        (["training/1.csv", "training/0.csv", "valid/0.csv"], "train", ["training/0.csv", "training/1.csv"]),
        (["rows.parquet", "dataset_infos.json", ".hidden/train.csv", "README.md"], "", ["rows.parquet"]),
        (["main/train/0000.parquet", "main/test/0000.parquet"], "test", ["main/test/0000.parquet"]),
    ],
)  # fmt: skip
def test_names_of_files_and_folders_are_splits(names: list[str], split: str, expected: list[str]) -> None:
    assert files(names, split) == expected


def test_a_configuration_may_be_a_folder() -> None:
    names = ["en/train.csv", "de/train.csv"]
    assert files(names, "train", "de") == ["de/train.csv"]
    with pytest.raises(ConfigError, match="config = 'fr' is no folder of it; choose one of de, en"):
        files(names, "train", "fr")


def test_files_of_a_model() -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    wanted.append("additional_chat_templates/tool_use.jinja")
    unwanted = ["pytorch_model.bin", "x.py", "onnx/model.json", "consolidated.safetensors", ".gitattributes", "a.md"]
    assert model_files([*wanted, *unwanted]) == wanted


@pytest.mark.timeout(20)
def test_metadata_cannot_keep_a_program_busy() -> None:
    stars = "---\nconfigs:\n- config_name: x\n  data_files: '" + "*a" * 30 + "b'\n---\n"
    aliases = "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    bomb = f"---\nmore:\n- &a0 [x]\n{aliases}configs:\n- config_name: x\n  data_dir: *a11\n---\n"
    name = "a" * 200 + ".csv"
    with pytest.raises(ConfigError, match="lists no file of it"):
        files([name], readme=stars)
    assert files([name], readme=bomb) == [name]
