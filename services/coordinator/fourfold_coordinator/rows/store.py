"""Keeps the tokens of a data set on the disk: made once, mapped into memory, shared by runs.

    DIR/<digest>/   meta.json    counts, and the SHA-256 of each other file; a store without it does not exist
                    ids.bin      int32, the tokens of all samples one after another
                    loss.bin     uint8, 1: in the loss
                    labels.bin   float32, labels of steps; only of rows with steps
                    index.bin    `encode.INDEX`, one record per sample; the samples of a unit are neighbours

The digest is that of everything that decides a token. A store is written in a locked folder beside its place and is
renamed when it is whole: a killed build leaves nothing that a later run would read, and of two builds at once one is
kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from fourfold.arrays import EMPTY_FLOATS, BoolArray, Float32Array, Int32Array
from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.host.disk import is_full
from fourfold.host.scratch import Scratch
from fourfold.model.conversation import ENCODING_VERSION
from fourfold.model.tokenizer import Tokenizer
from fourfold.text import clean

from ..data.sources import count_rows, describe, read_rows, source_files
from .encode import INDEX, Block, EncodingSettings, encode_block, render_block
from .forms import Row
from .normal import READS, Form, Reason
from .progress import EncodingProgress

FORMAT_VERSION: Final = 1
META_FILE: Final = "meta.json"
_BLOCK_ROWS: Final = 2000  # about 40 MB of Python objects with 500 tokens each
_SHOWN_ROWS: Final = 5  # of each reason
_SCARCE_LABELS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeta:
    """What meta.json holds."""

    format_version: int
    digest: str
    source: str
    form: Form
    rows: int
    samples: int
    units: int
    tokens: int
    loss_tokens: int
    longest_unit: int  # tokens; they have to fit in a micro-batch
    doubled_begins: int  # samples with two begin tokens, one of which was removed: an error of the template
    dropped: Mapping[str, int]  # by reason
    examples: Mapping[str, list[str]]  # "row 17: text" of the first dropped rows, by reason
    files: Mapping[str, tuple[str, int]]  # SHA-256 (hex) and bytes

    @property
    def kept_rows(self) -> int:
        """Number of rows that have samples."""
        return self.rows - sum(self.dropped.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSample:
    """The tokens of one sample of n tokens; views of the mapped files."""

    token_ids: Int32Array  # [n]
    loss_mask: BoolArray  # [n]
    labels: Float32Array  # [n], or [0] without steps
    prompt_length: int
    row: int
    value: float | None


class TokenStore:
    """The tokens of a data set, mapped into memory."""

    def __init__(self, folder: Path, meta: StoreMeta) -> None:
        """Map the files of a folder that `open_store` has checked."""
        self.folder, self.meta = folder, meta
        self.index = _mapped(folder / "index.bin", INDEX)
        self._ids = _mapped(folder / "ids.bin", np.dtype("<i4"))
        self._loss = _mapped(folder / "loss.bin", np.dtype("u1"))
        has_labels = "labels.bin" in meta.files
        self._labels = _mapped(folder / "labels.bin", np.dtype("<f4")) if has_labels else EMPTY_FLOATS
        # The first sample of each unit: units are numbered from 0 without a gap.
        self._starts = np.searchsorted(self.index["unit"], np.arange(meta.units + 1), side="left")

    def __len__(self) -> int:
        """Return the number of units."""
        return self.meta.units

    def samples_of(self, unit: int) -> range:
        """Return the numbers of the samples of a unit; of a pair, the chosen answer is the first."""
        return range(int(self._starts[unit]), int(self._starts[unit + 1]))

    def sample(self, number: int) -> StoredSample:
        """Return a sample."""
        record = self.index[number]
        begin, end = int(record["offset"]), int(record["offset"]) + int(record["length"])
        value = float(record["value"])
        return StoredSample(
            token_ids=self._ids[begin:end],
            loss_mask=self._loss[begin:end].view(np.bool_),
            labels=self._labels[begin:end],
            prompt_length=int(record["prompt"]),
            row=int(record["row"]),
            value=None if np.isnan(value) else value,
        )

    def groups(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return a number for each unit, equal for those with equal prompts, uint64 [units]."""
        groups: np.ndarray[Any, np.dtype[np.uint64]] = self.index["group"][self._starts[:-1]]
        return groups


def prepare_store(
    source: DataSourceConfig,
    settings: EncodingSettings,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    keys: Mapping[str, str] | None = None,
    block_rows: int = _BLOCK_ROWS,
) -> TokenStore:
    """Return the store of a source: the one that is there, or a new one. Takes minutes: call it in a thread.

    Args:
        source: where the rows come from.
        settings: what decides their tokens.
        tokenizer: with the chat template.
        folder: of all stores, as data.cache.
        keys: what else decides a token, such as the date that the template writes; part of the digest.
        block_rows: rows that are in memory at a time.

    Raises:
        ConfigError: the source cannot be read or has keys of prompts, a row is bad, the store was changed, or the disk
            is full.
    """
    if source.skip:
        raise ConfigError(
            f"{describe(source)}: skip = {source.skip!r:.200} is for prompts of a policy, and every row of the "
            f"file is read; remove it, and change the rows of the file"
        )
    digest = store_digest(source, settings, tokenizer, keys or {})
    target = folder / digest
    if not (target / META_FILE).exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = Scratch("tokens", root=folder)
            try:
                progress = EncodingProgress(describe(source), count_rows(source), sys.stderr)
                builder = _Builder(scratch.path, settings, tokenizer, describe(source), progress)
                builder.build(enumerate(read_rows(source)), digest, block_rows)
                try:
                    scratch.path.rename(target)
                except OSError:
                    if not target.is_dir():
                        raise
                    # Another run was faster, and its store has the same bytes.
            finally:
                scratch.remove()
        except OSError as error:
            if not is_full(error) and not is_unwritable(error):
                raise
            raise ConfigError(
                f"{folder}: cannot write the tokens of {describe(source)} ({error.strerror}); make room, or set "
                f"data.cache to another folder"
            ) from None
    return open_store(target)


def is_unwritable(error: OSError) -> bool:
    """Return whether an error says that files in a folder cannot be written for another reason than a full disk."""
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def open_store(folder: Path, *, verify: bool = True) -> TokenStore:
    """Open a store.

    Raises:
        ConfigError: a file is missing or cut, or, with `verify`, has other bytes than when it was written; this reads
            all of them.
    """
    try:
        found = json.loads((folder / META_FILE).read_bytes())
        files = {str(name): (str(digest), int(size)) for name, (digest, size) in found["files"].items()}
        meta = StoreMeta(**{**found, "form": Form(found["form"]), "files": files})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{META_FILE} cannot be read ({clean(str(error), 100)})") from None
    for name, (digest, size) in meta.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise _damaged(folder, f"{name} has not the {size:,} bytes that were written")
        with path.open("rb") as file:
            if verify and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise _damaged(folder, f"{name} has other bytes than were written: its SHA-256 is not {digest[:16]}")
    return TokenStore(folder, meta)


def _damaged(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"{folder}: {what}; remove the folder, and the next start makes it again")


def store_digest(
    source: DataSourceConfig, settings: EncodingSettings, tokenizer: Tokenizer, keys: Mapping[str, str]
) -> str:
    """Return the SHA-256 (hex) of everything that decides the tokens: also of the contents of all files."""
    files = []
    for path in source_files(source):
        inner = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in inner:
            with file.open("rb") as opened:
                files.append([file.name, hashlib.file_digest(opened, "sha256").hexdigest()])
    generator = [source.reasoning_gym, source.options, source.seed] if source.reasoning_gym else []
    parts = {
        "versions": [FORMAT_VERSION, ENCODING_VERSION],
        "tokenizer": tokenizer.sha256.hex(),
        "end": [list(tokenizer.stop_token_ids), tokenizer.end_token_id, tokenizer.vocabulary_size],
        "files": files,
        "generator": generator,
        "size": source.size,
        "settings": dataclasses.asdict(settings),
        "keys": dict(keys),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_dropped(meta: StoreMeta, max_dropped: float) -> None:
    """Raise ConfigError when more than a share of the rows was dropped for one reason, or no row is left."""
    for reason, count in meta.dropped.items():
        if count > max_dropped * meta.rows or not meta.samples:
            examples = "; ".join(meta.examples[reason])
            raise ConfigError(
                f"{meta.source}: {count:,} of {meta.rows:,} rows ({count / meta.rows:.1%}) were dropped as {reason}: "
                f"{examples}. At most {max_dropped:.0%} may be: {_FIXES[Reason(reason)]}, or raise data.max_dropped"
            )
    if not meta.samples:
        raise ConfigError(f"{meta.source}: it has no row; give more data")


_FIXES: Final = {
    Reason.BAD_ROW: "correct the rows",
    Reason.NO_LOSS_TOKENS: "give them answers, or change data.loss_on",
    Reason.EQUAL_PAIR: "remove pairs of equal answers",
    Reason.EMPTY_SIDE: "remove pairs with an empty answer",
    Reason.TOO_LONG: 'raise model.max_context_tokens, or set data.too_long = "cut"',
}


def check_labels(store: TokenStore) -> str:
    """Return a warning if one label of labelled answers is scarce; raise ConfigError when all labels are equal."""
    if READS[store.meta.form] != "labels":
        return ""
    good = int(np.count_nonzero(store.index["value"] == 1.0))
    count = len(store.index)
    if good in (0, count):
        raise ConfigError(
            f"{store.meta.source}: all {count:,} labels are {int(good > 0)}; a loss of labelled answers needs both: "
            f"add answers with the other label"
        )
    share = good / count
    if min(share, 1 - share) >= _SCARCE_LABELS:
        return ""
    scarce, factor = ("desirable", (count - good) / good) if share < 0.5 else ("undesirable", good / (count - good))
    return (
        f"{store.meta.source}: {min(share, 1 - share):.1%} of the answers are {scarce}; algorithm.loss."
        f"{scarce}_weight = {factor:.3g} makes both labels count alike"
    )


class _Builder:
    """Writes the files of a store."""

    def __init__(
        self, folder: Path, settings: EncodingSettings, tokenizer: Tokenizer, where: str, progress: EncodingProgress
    ) -> None:
        self._folder, self._settings, self._tokenizer, self._where = folder, settings, tokenizer, where
        self._progress = progress
        self._rows = self._samples = self._units = self._tokens = self._loss_tokens = self._longest = 0
        self._doubled = 0
        self._dropped = Counter[str]()
        self._examples: dict[str, list[str]] = {}
        self._files: dict[str, _HashedFile] = {}

    def build(self, rows: Iterator[tuple[int, Row]], digest: str, block_rows: int) -> None:
        """Encode all rows and write everything; meta.json last.

        Jinja renders a block in this thread while another one waits for the encoding of the block before it, which
        takes all cores and releases the interpreter.
        """
        with contextlib.ExitStack() as stack:
            for name in ("ids.bin", "loss.bin", "index.bin"):
                self._files[name] = stack.enter_context(_HashedFile(self._folder / name))
            if READS[self._settings.form] == "steps":
                self._files["labels.bin"] = stack.enter_context(_HashedFile(self._folder / "labels.bin"))
            with ThreadPoolExecutor(1, thread_name_prefix="encode") as pool:
                pending: Future[Block] | None = None
                while rows_of_block := list(islice(rows, block_rows)):
                    self._rows += len(rows_of_block)
                    rendered, block = render_block(rows_of_block, self._settings, self._tokenizer, self._where)
                    if pending is not None:
                        self._write(pending.result())
                        self._progress.show(self._rows - len(rows_of_block))
                    pending = pool.submit(encode_block, rendered, block, self._settings, self._tokenizer, self._where)
                if pending is not None:
                    self._write(pending.result())
        self._write_meta(digest)

    def _write(self, block: Block) -> None:
        self._files["ids.bin"].write(array.astype("<i4", copy=False) for array in block.ids)
        self._files["loss.bin"].write(block.loss)
        if "labels.bin" in self._files:
            self._files["labels.bin"].write(array.astype("<f4", copy=False) for array in block.labels)
        index = np.array(block.index, INDEX)
        if len(index):
            lengths = np.bincount(index["unit"], weights=index["length"])
            self._longest = max(self._longest, int(lengths.max()))
        index["offset"] += self._tokens
        index["unit"] += self._units
        self._files["index.bin"].write([index])
        self._samples += len(index)
        self._units += block.units
        self._tokens += block.tokens
        self._loss_tokens += block.loss_tokens
        self._doubled += block.doubled_begins
        for row, reason, text in sorted(block.dropped):
            self._dropped[reason] += 1
            shown = self._examples.setdefault(reason, [])
            if len(shown) < _SHOWN_ROWS:
                shown.append(f"row {row}" + (f": {text}" if text else ""))

    def _write_meta(self, digest: str) -> None:
        meta = StoreMeta(
            format_version=FORMAT_VERSION,
            digest=digest,
            source=self._where,
            form=self._settings.form,
            rows=self._rows,
            samples=self._samples,
            units=self._units,
            tokens=self._tokens,
            loss_tokens=self._loss_tokens,
            longest_unit=self._longest,
            doubled_begins=self._doubled,
            dropped=dict(self._dropped),
            examples=self._examples,
            files={name: (file.sha256.hexdigest(), file.size) for name, file in self._files.items()},
        )
        with _HashedFile(self._folder / META_FILE) as file:
            file.write([json.dumps(dataclasses.asdict(meta), indent=1).encode()])


class _HashedFile:
    """A new file whose SHA-256 is computed while it is written."""

    def __init__(self, path: Path) -> None:
        self.sha256, self.size = hashlib.sha256(), 0
        self._path = path
        self._file: BinaryIO

    def __enter__(self) -> _HashedFile:
        self._file = self._path.open("xb")
        return self

    def write(self, parts: Iterable[bytes | np.ndarray[Any, np.dtype[Any]]]) -> None:
        """Append arrays or bytes."""
        for part in parts:
            data = part if isinstance(part, bytes) else part.tobytes()
            self._file.write(data)
            self.sha256.update(data)
            self.size += len(data)

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())  # otherwise a power loss may leave meta.json beside an empty file


def _mapped(path: Path, dtype: np.dtype[Any]) -> Any:
    """Return a file as a read-only array whose pages are read when they are used; an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
