"""Finds the files of a repository of the hub that belong to a model, or to a split of a data set.

The rules are those of the hub: `configs` at the top of README.md, or else the names of files and folders, such as
data/train-00000-of-00003.parquet, CONFIG/test.jsonl and validation/a.csv. No script of a repository runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.text import choices, clean

README: Final = "README.md"
COMPRESSED: Final = (".gz", ".bz2", ".zst")
"""Ends of the names of text files that are read without being unpacked first."""
_TEXT_FILES: Final = (".jsonl", ".json", ".ndjson", ".csv", ".tsv")
_DATA_FILES: Final = (".parquet", *_TEXT_FILES, *(text + end for text in _TEXT_FILES for end in COMPRESSED))
_MODEL_FILES: Final = (".safetensors", ".json", ".txt", ".model", ".jinja")
ADDITIONAL_TEMPLATES: Final = "additional_chat_templates"
"""Folder of a model with chat templates besides chat_template.jinja, each a file NAME.jinja."""
_NO_DATA: Final = re.compile(r"(^|/)(dataset_infos?|dataset_dict|state|config)\.json$|(^|/)\.")
_SHARD: Final = re.compile(r"(?:^|/)([\w.]+?)-\d{5}-of-\d{5}(?:-\w+)?\.\w+(?:\.\w+)?$")
_SPLIT_WORDS: Final[Mapping[str, str]] = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_CONVERTED: Final = "@refs/convert/parquet"


def model_files(names: Iterable[str]) -> list[str]:
    """Return the files of a model and its tokenizer: no pickles, no code, no second copy of the weights."""
    return [
        name
        for name in names
        if ("/" not in name and name.endswith(_MODEL_FILES) and not name.startswith(("consolidated", ".")))
        or (name.startswith(f"{ADDITIONAL_TEMPLATES}/") and name.endswith(".jinja"))
    ]


def data_files(names: Iterable[str]) -> list[str]:
    """Return the files with rows."""
    return [name for name in names if name.endswith(_DATA_FILES) and not _NO_DATA.search(name)]


def split_files(names: Sequence[str], readme: str, *, config: str, split: str, where: str) -> list[str]:
    """Return the files of one split of a data set, in order.

    Args:
        names: all files of the repository, relative to it.
        readme: text of README.md; may be empty.
        config: configuration; empty: its default, or the only one.
        split: empty: the only one.
        where: name of the data set, for messages.

    Raises:
        ConfigError: there is no such configuration or split, or none is named and there are several.
    """
    files = data_files(names)
    if not files:
        raise ConfigError(
            f"{where}: no Parquet, JSONL or CSV file in it, and scripts of a data set are never run; try its converted "
            f"copy: add {_CONVERTED} to the name"
        )
    configs = _configs(readme, where)
    if configs:
        entry = _chosen_config(configs, config, where)
        splits = _listed_splits(entry, files, where)
    else:
        if config:
            folders = sorted({PurePosixPath(name).parts[0] for name in files if "/" in name})
            files = [name for name in files if name.startswith(f"{config}/")]
            if not files:
                raise ConfigError(f"{where}: config = {config!r} is no folder of it; {choices(config, folders)}")
        splits = _splits_by_name(files)
    return splits[choose_split(split, splits, where)]


def choose_split(split: str, known: Iterable[str], where: str) -> str:
    """Return a split of a data set; an empty one stands for the only one. Raises ConfigError: it is not known."""
    names = list(known)
    if split in names:
        return split
    if not split and len(names) == 1:
        return names[0]
    if not split:
        raise ConfigError(f"{where} holds several splits; set split to one of: {', '.join(names)}")
    raise ConfigError(f"{where}: split = {split!r} is unknown; {choices(split, names)}")


def _configs(readme: str, where: str) -> list[dict[str, Any]]:
    """Return the `configs` of the metadata at the top of README.md; empty if it has none."""
    head = re.match(r"---\r?\n(.*?)\r?\n---", readme, re.DOTALL)
    if head is None or "configs:" not in head.group(1):
        return []
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"{where}: its README.md has metadata in YAML; {install_command('fourfold[hub]')}") from None
    try:
        metadata = yaml.safe_load(head.group(1))
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        problem = clean(str(error), 100)
        raise ConfigError(
            f"{where}: the metadata of its README.md is no YAML ({problem}); give another revision"
        ) from None
    entries = metadata.get("configs") if isinstance(metadata, dict) else None
    found = entries if isinstance(entries, list) else []
    return [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("config_name"), str)]


def _chosen_config(configs: Sequence[dict[str, Any]], config: str, where: str) -> dict[str, Any]:
    names = [str(entry["config_name"]) for entry in configs]
    by_name = dict(zip(names, configs, strict=True))
    if config:
        if config not in by_name:
            raise ConfigError(f"{where}: config = {config!r} is unknown; {choices(config, names)}")
        return by_name[config]
    default = next((name for name in names if by_name[name].get("default") is True or name == "default"), "")
    if not default and len(names) > 1:
        raise ConfigError(f"{where} has several configurations; set config to one of: {', '.join(names)}")
    return by_name[default or names[0]]


def _listed_splits(entry: Mapping[str, Any], files: Sequence[str], where: str) -> dict[str, list[str]]:
    """Return the files of each split of an entry of `configs`."""
    data_dir, listed = entry.get("data_dir"), entry.get("data_files")
    folder = data_dir.strip("/") if isinstance(data_dir, str) else ""
    splits: dict[str, list[str]] = {}
    if listed is None:
        splits = _splits_by_name([name for name in files if not folder or name.startswith(f"{folder}/")])
    if isinstance(listed, str) or (isinstance(listed, list) and all(isinstance(one, str) for one in listed)):
        listed = [{"split": "train", "path": listed}]
    if isinstance(listed, dict):
        listed = [{"split": split, "path": path} for split, path in listed.items()]
    for part in listed if isinstance(listed, list) else []:
        if isinstance(part, dict) and isinstance(part.get("split"), str):
            paths = part.get("path")
            globs = [f"{folder}/{path}" if folder else path for path in _texts(paths)]
            found = [name for name in files if any(_matches(glob, name) for glob in globs)]
            if found:
                splits[part["split"]] = found
    if not splits:
        raise ConfigError(f"{where}: its README.md lists no file of it that can be read (Parquet, JSONL or CSV)")
    return splits


def _texts(value: object) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _matches(glob: str, name: str) -> bool:
    """Return whether a name fits a pattern of the hub, in which `*` ends at a slash and `**` does not.

    Not a regular expression, which a hostile README.md could make run for ever.
    """
    ends = {0}  # of the parts of the name that fit the pattern so far
    for part in filter(None, re.split(r"(\*\*/|\*\*|\*|\?)", glob.removeprefix("./"))):
        if part in ("*", "?"):
            widths = {end: len(name[end:].partition("/")[0]) for end in ends}
            first, last = (0, len(name)) if part == "*" else (1, 1)
            ends = {end + n for end in ends for n in range(first, min(last, widths[end]) + 1)}
        elif part == "**":
            ends = set(range(min(ends), len(name) + 1))
        elif part == "**/":
            ends |= {at + 1 for at in range(min(ends), len(name)) if name[at] == "/"}
        else:
            ends = {end + len(part) for end in ends if name.startswith(part, end)}
        if not ends:
            return False
    return len(name) in ends


def _splits_by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split by their names; files without the name of a split are training data."""
    splits = defaultdict[str, list[str]](list)
    shards = [(match.group(1), name) for name in files if (match := _SHARD.search(name))]
    for split, name in shards or [(_word(name) or "train", name) for name in files]:
        splits[split].append(name)
    return {split: sorted(splits[split]) for split in splits}


def _word(name: str) -> str:
    """Return the split that the words of a path name, those of the file first; empty if none does."""
    parts = PurePosixPath(name).parts
    for part in (PurePosixPath(name).stem, *reversed(parts[:-1])):
        for word in re.split(r"[-._ ]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return ""
