"""Writes a model folder in the format of Hugging Face, tensor by tensor.

    model.safetensors, or model-00001-of-00003.safetensors ... and model.safetensors.index.json
    config.json, generation_config.json                             of the model
    tokenizer.json, tokenizer_config.json, chat_template.jinja ...  copied from the folder that the model came from

Every function raises Unavailable when the disk refuses.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import tokenizers
import torch
from torch import Tensor

from fourfold import hub
from fourfold.model.folder import WEIGHTS_FILE, WEIGHTS_INDEX
from fourfold.model.tokenizer import special_tokens
from fourfold_trainer.checkpoint import store
from fourfold_trainer.checkpoint.tensor_files import TensorFileWriter

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
Specs: TypeAlias = Mapping[str, Spec]
"""Dtypes and shapes of tensors, by name."""

MAX_FILE_BYTES: Final = 5 * 10**9
# Suffixes of the files besides weights in a Hugging Face folder: tokenizer, chat template, configuration.
_COMPANIONS: Final = (".json", ".jinja", ".model", ".txt")


class WeightsWriter:
    """Writes the weights of a model into one or several files, each durable once all of its tensors are written."""

    def __init__(self, folder: Path, tensors: Specs, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Plan the files for these tensors, which fill them in this order. Nothing is written.

        A tensor larger than `max_file_bytes` has a file of its own.
        """
        self._folder = folder
        files = _split(tensors, max_file_bytes)
        count = len(files)
        names = (
            [WEIGHTS_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        self._files: dict[str, Specs] = dict(zip(names, files, strict=True))
        self._file_of = {tensor: name for name, specs in self._files.items() for tensor in specs}
        self._missing = {name: len(specs) for name, specs in self._files.items()}
        self._open: dict[str, TensorFileWriter] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, contiguous, on any device."""
        file = self._file_of[name]
        with store.writing(self._folder / file):
            if file not in self._open:
                self._open[file] = TensorFileWriter(self._folder / file, self._files[file], metadata={"format": "pt"})
            self._open[file].write(name, tensor)
            self._missing[file] -= 1
            if not self._missing[file]:
                self._open.pop(file).close()

    def write_zeros(self) -> None:
        """Write all tensors as zeros, as holes of sparse files that take no space, and the index."""
        for file, specs in self._files.items():
            TensorFileWriter(self._folder / file, specs, metadata={"format": "pt"}).abandon()
            self._missing[file] = 0
        self.finish()

    def finish(self) -> None:
        """Write the index of several files, after all tensors."""
        assert not any(self._missing.values()), f"files lack tensors: {self._missing}"
        if len(self._files) > 1:
            every = [spec for specs in self._files.values() for spec in specs.values()]
            metadata = {
                "total_parameters": sum(math.prod(shape) for _, shape in every),
                "total_size": sum(_size(spec) for spec in every),
            }
            index = {"metadata": metadata, "weight_map": self._file_of}
            store.write_text(self._folder / WEIGHTS_INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.abandon()
        self._open.clear()


def write_companions(model: Any, folder: Path, *, source: Path, settings: Mapping[str, Any]) -> None:
    """Write the other files of a model folder, durably: configuration of `model`, tokenizer files of `source`.

    `settings` replaces keys of config.json.
    """
    with store.writing(folder):
        model.save_pretrained(folder, state_dict={})
        config = folder / "config.json"
        found = json.loads(config.read_text(encoding="utf-8")) | dict(settings)
        config.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for path in (*source.iterdir(), *(source / hub.ADDITIONAL_TEMPLATES).glob("*.jinja")):
            wanted = path.suffix in _COMPANIONS and not path.name.endswith(".index.json")
            if path.is_file() and wanted and path.name != "config.json":
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        for path in folder.rglob("*"):
            store.sync(path)


def pad_token_id(config: Any, source: Path) -> int | None:
    """Return the id that fills up shorter texts of a batch: the model's, the tokenizer's, or the end of a text.

    transformers refuses batches of a classifier whose config has none.
    """
    if (own := getattr(config, "pad_token_id", None)) is not None:
        return int(own)
    tokenizer, text = source / "tokenizer.json", special_tokens(source).get("pad_token")
    if text is not None and (found := tokenizers.Tokenizer.from_file(str(tokenizer)).token_to_id(text)) is not None:
        return int(found)
    end = getattr(config, "eos_token_id", None)
    return end[0] if isinstance(end, list) else end


def _split(tensors: Specs, max_file_bytes: int) -> list[Specs]:
    """Return the tensors of each file, in order."""
    files: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in tensors.items():
        if files[-1] and size + _size(spec) > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = spec
        size += _size(spec)
    return list(files)


def _size(spec: Spec) -> int:
    """Return the bytes of a tensor."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize
