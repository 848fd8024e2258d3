"""Reads the rows of a data set: JSON, CSV, Parquet, a dataset folder, one of the hub, or a reasoning-gym generator.

A row is a plain dictionary; `load_prompts.py` interprets its columns. Dataset folders are read as the Arrow files that
they consist of, because the `datasets` library would bring pandas and an HTTP client into the coordinator.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, TextIO

from fourfold import hub
from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.paths import expand_home
from fourfold.text import choices, clean

Row = dict[str, Any]

_STATE: Final = "state.json"  # file of a folder that `Dataset.save_to_disk` wrote
_DICT: Final = "dataset_dict.json"  # file of a `DatasetDict.save_to_disk` folder, which has a folder for each split

_PART: Final = 1 << 20  # number of characters of a JSON array that are read at once
_GAP: Final = re.compile(r"[\s,]*")  # allowed between the elements of a JSON array

_KINDS: Final = (
    "give a .jsonl, .json, .csv or .tsv file, also one that ends in .gz, .bz2 or .zst, a .parquet file, a "
    "dataset folder, or hf:OWNER/NAME"
)


def read_rows(source: DataSourceConfig) -> Iterator[Row]:
    """Yield the rows of `source`, at most `source.size` of them if that is set."""
    if source.reasoning_gym:
        yield from _reasoning_gym(source)
        return
    rows = itertools.chain.from_iterable(map(_file_rows, source_files(source)))
    yield from itertools.islice(rows, source.size) if source.size else rows


def count_rows(source: DataSourceConfig) -> int | None:
    """Return about how many rows `read_rows` yields, without parsing them; None: unknown."""
    counts = [source.size] if source.reasoning_gym else [_count(path) for path in source_files(source)]
    total = None if None in counts else sum(filter(None, counts))
    return min(total, source.size) if total is not None and source.size else total


def _count(path: Path) -> int | None:
    """Return the rows of Parquet, and the lines of text files; None for folders, JSON arrays and damaged files."""
    if path.suffix.lower() in hub.COMPRESSED:
        return None
    try:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        with path.open("rb") as file:
            first = file.read(_PART)
            if first.lstrip().startswith(b"["):
                return None
            return first.count(b"\n") + sum(part.count(b"\n") for part in iter(lambda: file.read(_PART), b""))
    except (OSError, ValueError):
        return None


def describe(source: DataSourceConfig) -> str:
    """Return the source's name for messages."""
    return source.path or f"reasoning_gym {source.reasoning_gym!r}"


def source_files(source: DataSourceConfig) -> list[Path]:
    """Return the files of a source in order, or its dataset folder; a generator has none. Downloads those of the hub.

    Raises ConfigError: there are none.
    """
    if source.reasoning_gym:
        return []
    if source.path.startswith(hub.PREFIX):
        return hub.dataset_files(source.path, config=source.config, split=source.split)
    where = f"path = {source.path!r}"
    path = expand_home(source.path, where)
    if not path.exists():
        raise ConfigError(f"{where} does not exist; {_KINDS}")
    if path.is_dir() and not any((path / name).exists() for name in (_DICT, _STATE)):
        return _repository_files(path, source, where)
    if source.config or (source.split and not (path / _DICT).exists()):
        raise ConfigError(f"{where} is one file or one split; remove split and config")
    if path.is_dir() and (path / _DICT).exists():
        splits = sorted(p.name for p in path.iterdir() if (p / _STATE).is_file())
        return [path / hub.choose_split(source.split, splits, where)]
    return [path]


def _repository_files(path: Path, source: DataSourceConfig, where: str) -> list[Path]:
    """Return the files of a split in a folder with the hub's layout of data sets."""
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    if not names:
        raise ConfigError(f"{where} is an empty folder; {_KINDS}")
    readme = path / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return [path / n for n in hub.split_files(names, text, config=source.config, split=source.split, where=where)]


def _file_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or dataset folder. Raises ConfigError: it cannot be read, or is damaged."""
    try:
        yield from _parsed_rows(path)
    except ConfigError:
        raise
    # Decoders and pyarrow raise ValueError, OSError and NotImplementedError; deeply nested JSON exceeds the recursion.
    except (OSError, ValueError, NotImplementedError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {clean(str(error), 200)}; write it again, or give another file"
        ) from None


def _parsed_rows(path: Path) -> Iterator[Row]:
    if path.is_dir():
        return _dataset_folder(path)
    compressed = path.suffix.lower() in hub.COMPRESSED
    kind = (path.with_suffix("") if compressed else path).suffix.lower()
    match kind:
        case ".jsonl" | ".json" | ".ndjson":
            return _json(path)
        case ".csv" | ".tsv":
            return _csv(path, "\t" if kind == ".tsv" else "")
        case ".parquet" if not compressed:
            return _parquet(path)
    raise ConfigError(f"path = {str(path)!r}: unknown kind {path.suffix!r}; {_KINDS}")


def _bytes(path: Path) -> IO[bytes]:
    """Open a file, which may be compressed. It cannot be moved to another position."""
    if path.suffix.lower() not in hub.COMPRESSED:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path)))  # unpacked by the end of the name


def _json(path: Path) -> Iterator[Row]:
    """Yield the rows of a file with one JSON object in each line, or with one JSON array of objects."""
    with _bytes(path) as file:
        while (first := file.read(1)) and (first.isspace() or first in codecs.BOM_UTF8):
            pass
        if first == b"[":
            with io.TextIOWrapper(file, encoding="utf-8") as text:
                yield from _json_array(path, text)
            return
    with _bytes(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text_line = line.decode("utf-8-sig")  # here, so that an error has the number of its line
                yield _checked(json.loads(text_line), text_line)
            except ValueError as error:
                raise ConfigError(
                    f"{path}:{number}: not valid JSON: {error}; each line is one JSON object, or the file is one array"
                ) from None


def _json_array(path: Path, file: TextIO) -> Iterator[Row]:
    """Yield the objects of a JSON array after its bracket; only a part of the array is in memory at a time."""
    decoder, text, number, start = json.JSONDecoder(), "", 0, 0
    while not text.startswith("]", start := _GAP.search(text, start).end()):  # type: ignore[union-attr]
        try:
            row, end = decoder.raw_decode(text, start)
            row = _checked(row, text[start:end])
        except ValueError as error:
            # Double the part each time, so that a long row is parsed only a few times.
            if not (more := file.read(max(_PART, len(text)))):
                raise ConfigError(f"{path}: element {number} of the array: not valid JSON: {error}") from None
            text, start = text[start:] + more, 0
        else:
            yield row
            number, start = number + 1, end
    if (text[start + 1 :] + file.read()).strip():
        raise ConfigError(f"{path}: there is text after the array; a file has one array, or one object in each line")


def _checked(row: Any, text: str) -> Row:
    """Return a row of JSON. Raises ValueError: it is no object, or has an unpaired UTF-16 surrogate."""
    match row:  # Open-Reasoner-Zero: the messages, and the reference answer in place of the last one
        case [*messages, {"ground_truth": {"value": answer}}]:
            row = {"conversations": messages, "answer": answer}
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} in place of an object")
    if "\\ud" in text.lower():  # tokenizers and messages refuse an unpaired surrogate
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _csv(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a file with a header line; all values are texts. An empty delimiter is found in that line."""
    csv.field_size_limit(1 << 30)  # the default of 131,072 characters is less than a long prompt has
    with _bytes(path) as raw:
        names = raw.readline()
    # Spreadsheets separate by semicolons where a comma is the decimal point.
    delimiter = delimiter or (";" if b";" in names and b"," not in names else ",")
    with io.TextIOWrapper(_bytes(path), encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            if len(set(header)) < len(header):
                raise ConfigError(f"{path}:1: a column is there twice: {', '.join(header)}; rename one")
            for row in rows:
                if row and len(row) != len(header):
                    raise ConfigError(
                        f"{path}:{rows.line_num}: {len(row)} values, and the header has {len(header)} columns; quote "
                        f"values that contain the separator"
                    )
                if row:
                    yield dict(zip(header, row, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{rows.line_num}: not valid CSV in UTF-8: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _dataset_folder(path: Path) -> Iterator[Row]:
    """Return the rows of a folder that `datasets.Dataset.save_to_disk` wrote: state.json lists its Arrow files."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"path = {str(path)!r} is no dataset folder: it has no readable state.json; write one with "
            f"`dataset.save_to_disk(...)`, or give a JSONL or Parquet file"
        ) from None
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"path = {str(path)!r} was saved with an indices file; call `flatten_indices()` before saving"
        )
    for name in names:
        yield from _arrow(path / name)


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:  # `datasets` writes the stream format; other tools write the file format
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def _reasoning_gym(source: DataSourceConfig) -> Iterator[Row]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore SyntaxWarnings of a dependency with invalid escape sequences
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            "the key reasoning_gym of a data source needs a package: "
            f"{install_command('fourfold-coordinator[reasoning-gym]')}"
        ) from None
    task = source.reasoning_gym
    if task not in DATASETS:
        raise ConfigError(f"reasoning_gym = {task!r}: there is no such task; {choices(task, DATASETS)}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("size", "seed")]
    where = f"options of reasoning_gym {task!r}"
    for name in source.options:
        if name in ("size", "seed"):
            raise ConfigError(f"{where}: {name!r} is a key next to reasoning_gym; move it there")
        if name not in known:
            raise ConfigError(f"{where}: it has no {name!r}; {choices(name, known)}")
    try:
        yield from reasoning_gym.create_dataset(task, size=source.size, seed=source.seed, **source.options)
    # Generators check their options by assertions, or raise any error later because of a wrong value.
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError) as error:
        raise ConfigError(f"reasoning_gym {task!r} with options {source.options}: {error}") from None
