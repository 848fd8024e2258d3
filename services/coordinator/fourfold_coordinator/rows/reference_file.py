"""Keeps the reference log-probabilities of rows beside their token stores: computed once, before the first step.

A file has a slot for each sample of the stores, one float32 per token, and as many again for each answer under the
prompt of another. A slot begins with a checksum of the sample's tokens and log-probabilities, and has those of the
answer after it, which fit because each prompt has a token. So a sample counts as computed only if all of it is there,
after a kill in the middle of a write, too, and only for the tokens that it was computed for. Runs that write one file
at once write the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array
from fourfold.config.schema import Config
from fourfold.errors import ConfigError, WrongState
from fourfold.model import folder as model_folder
from fourfold.model.classifier import folder_digest
from fourfold.sample import Sample

from .open_rows import cache_folder
from .row_source import RowBatch, RowSource
from .store import is_unwritable

FORMAT_VERSION: Final = 1
# Keys of [trainer] that decide how a log-probability is rounded.
_TRAINER_KEYS: Final = ("device", "gpu", "ranks", "sequence_parallel_size", "liger_kernels")
_FLOAT_BYTES: Final = 4


class ReferenceFile:
    """The reference log-probabilities of the samples of a `RowSource`, each at its slot."""

    def __init__(self, path: Path, *, served: bool = False) -> None:
        """Name a file, which `write` makes; with `served`, reference services compute what it has."""
        self.path, self._served = path, served

    def read(self, slot: int, sample: Sample) -> Float32Array | None:
        """Return the log-probabilities of a sample of n tokens, float32 [n]; None: they are not there.

        The first is NaN, and those of the prompt are 0.

        Raises:
            OSError: the file cannot be read.
        """
        begin, count = _answer(sample), len(sample.token_ids)
        size = (1 + count - begin) * _FLOAT_BYTES
        try:
            with self.path.open("rb") as file:
                file.seek(slot * _FLOAT_BYTES)
                data = file.read(size)
        except FileNotFoundError:
            return None
        if len(data) < size or data[:_FLOAT_BYTES] != _checksum(sample, data[_FLOAT_BYTES:]):
            return None
        values = np.zeros(count, np.float32)
        values[0], values[begin:] = np.nan, np.frombuffer(data, "<f4", offset=_FLOAT_BYTES)
        return values

    def has(self, batch: RowBatch) -> bool:
        """Return whether all samples of a step are there."""
        found = zip(batch.slots, batch.samples, strict=True)
        return self.path.exists() and all(self.read(slot, sample) is not None for slot, sample in found)

    def write(self, batch: RowBatch, rows: Sequence[Float32Array]) -> None:
        """Write the log-probabilities of the samples of a step, float32 [n] each; a write may be repeated.

        Raises:
            ConfigError: the folder cannot be written to.
            OSError: the disk is full, or another error.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError as error:
            if not is_unwritable(error):
                raise
            raise ConfigError(
                f"{self.path}: cannot write the reference log-probabilities ({error.strerror}); set data.cache to "
                f"another folder"
            ) from None
        try:
            with os.fdopen(descriptor, "wb") as file:
                for slot, sample, row in zip(batch.slots, batch.samples, rows, strict=True):
                    data = row[_answer(sample) :].astype("<f4").tobytes()
                    file.seek(slot * _FLOAT_BYTES)
                    file.write(_checksum(sample, data) + data)
        except OSError as error:
            error.filename = str(self.path)  # the full disk may be another one than that of the run's folder
            raise

    def attach(self, batch: RowBatch, step: int) -> tuple[Sample, ...]:
        """Return the samples of a step with their reference log-probabilities.

        Raises:
            WrongState: those of a sample were not computed, or are damaged.
        """
        found = list[Sample]()
        for slot, sample in zip(batch.slots, batch.samples, strict=True):
            logprobs = self.read(slot, sample)
            if logprobs is None:
                raise self.lost(step, f"it has none, or damaged ones, for sample {sample.sample_id}")
            found.append(replace(sample, reference_logprobs=logprobs))
        return tuple(found)

    def lost(self, step: int, what: str) -> WrongState:
        """Return the error of a step that needs log-probabilities which are no longer there."""
        if self._served:
            return WrongState(
                f"step {step} needs the reference log-probabilities of {self.path}, and {what}; resume the run, whose "
                f"reference services then compute what is missing"
            )
        return WrongState(
            f"step {step} needs the reference log-probabilities of {self.path}, and {what}. They are those of "
            f"the weights before step 1, which the trainer has no more: start a run of the recipe that this one began "
            f"with, for as many steps, under another name; stop it when its step 1 begins, and resume this run"
        )

    def sync(self) -> None:
        """Return when what was written survives a loss of power."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


def _answer(sample: Sample) -> int:
    """Return the place of the first token of the answer; the first token of a sample has no log-probability."""
    return max(int(np.argmax(sample.action_mask)), 1)


def _checksum(sample: Sample, data: bytes) -> bytes:
    found = zlib.crc32(data, zlib.crc32(sample.token_ids.astype("<i4").tobytes()))
    return (found or 1).to_bytes(_FLOAT_BYTES, "little")  # 0 is a place that was never written


def reference_path(config: Config, rows: RowSource, weights: str | None) -> Path:
    """Return the file for a recipe: of everything that decides a log-probability to the last bit.

    That is the model, the rows with their order, and the sizes that decide which samples share a micro-batch; or, of
    reference services, whose micro-batches depend on when calls arrive, the keys of their table. `weights` is the
    digest of the folder of the reference. None: it is computed, which reads the whole model; call this in a thread.
    """
    served, key = config.needs_reference, "reference.source" if config.needs_reference else "model.source"
    source = config.reference.source if served else config.model.source
    parts = {
        "version": FORMAT_VERSION,
        "weights": weights or folder_digest(model_folder.resolve(source, key=key)),
        "model": config.model.model_dump(mode="json", exclude={"source"}),
        "seed": config.seed,
        "rows": rows.digest(),
    }
    if served:  # the answers that KTO joins with prompts are those of a step
        parts["reference"] = config.reference.model_dump(mode="json", exclude={"source", "replicas"})
        parts["rows_per_step"] = config.batch.rows_per_step
    else:
        parts["batch"] = config.batch.model_dump(mode="json")
        parts["trainer"] = config.trainer.model_dump(mode="json", include=set(_TRAINER_KEYS))
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return cache_folder(config) / f"reference-{digest}.bin"
