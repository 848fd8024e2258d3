"""Reads the rows of a data set: JSONL, Parquet, a Hugging Face dataset folder, or a reasoning-gym generator.

A row is a plain dictionary; `prompts.py` interprets its columns. Dataset folders are read as the Arrow files that they
consist of, because the `datasets` library would bring pandas and an HTTP client into the coordinator.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fourfold.config import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.text import nearest_name

Row = dict[str, Any]


def read_rows(source: DataSourceConfig) -> Iterator[Row]:
    """Yield the rows of `source`, at most `source.size` of them if that is set."""
    if source.reasoning_gym:
        yield from _reasoning_gym(source)
        return
    rows = _file_rows(Path(source.path))
    yield from itertools.islice(rows, source.size) if source.size else rows


def describe(source: DataSourceConfig) -> str:
    """Return the source's name for messages."""
    return source.path or f"reasoning_gym {source.reasoning_gym!r}"


def _file_rows(path: Path) -> Iterator[Row]:
    if path.is_dir():
        return _dataset_folder(path)
    if not path.exists():
        raise ConfigError(f"data path {str(path)!r} does not exist; give a JSONL or Parquet file, or a dataset folder")
    match path.suffix.lower():
        case ".jsonl" | ".json" | ".ndjson":
            return _jsonl(path)
        case ".parquet":
            return _parquet(path)
    raise ConfigError(
        f"data path {str(path)!r}: unknown kind {path.suffix!r}; give a .jsonl or .parquet file, or a dataset folder"
    )


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not valid JSON: {error}; each line is one JSON object") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a {type(row).__name__}; each line is one JSON object")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file: {error}") from None


def _dataset_folder(path: Path) -> Iterator[Row]:
    """Return the rows of a folder that `datasets.Dataset.save_to_disk` wrote: state.json lists its Arrow files."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise ConfigError(f"data path {str(path)!r} holds several splits; give one of them: {', '.join(splits)}")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"data path {str(path)!r} is no dataset folder: it has no readable state.json; write one with "
            f"`dataset.save_to_disk(...)`, or give a JSONL or Parquet file"
        ) from None
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"data path {str(path)!r} was saved with an indices file; call `flatten_indices()` before saving"
        )
    for name in names:
        yield from _arrow(path / name)


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                batches: Any = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:  # `datasets` writes the stream format; other tools write the file format
                file = pyarrow.ipc.open_file(source)
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
            for batch in batches:
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ConfigError(f"{path}: not a readable Arrow file: {error}") from None


def _reasoning_gym(source: DataSourceConfig) -> Iterator[Row]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarnings: a dependency has invalid escape sequences
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            "the key reasoning_gym of a data source needs a package: pip install 'fourfold-coordinator[reasoning-gym]'"
        ) from None
    task = source.reasoning_gym
    if task not in DATASETS:
        raise ConfigError(f"reasoning_gym = {task!r}: there is no such task; {_hint(task, DATASETS)}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("size", "seed")]
    where = f"options of reasoning_gym {task!r}"
    for name in source.options:
        if name in ("size", "seed"):
            raise ConfigError(f"{where}: {name!r} is a key next to reasoning_gym; move it there")
        if name not in known:
            raise ConfigError(f"{where}: it has no {name!r}; {_hint(name, known)}")
    try:
        yield from reasoning_gym.create_dataset(task, size=source.size, seed=source.seed, **source.options)
    # Generators check their options by assertions, or fail later with whatever a wrong value causes.
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
        raise ConfigError(f"reasoning_gym {task!r} with options {source.options}: {error}") from None


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest_name(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
