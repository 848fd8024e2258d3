"""Reads parts of tensors from safetensors files, and writes such files piece by piece.

    8 bytes        length of the header, little-endian
    header         JSON: name -> dtype, shape, first and last byte of the tensor; padded with spaces to 8 bytes
    tensors        one after another, by dtype (wide ones first), then by name: as `safetensors.torch.save_file` orders

Both read and write with system calls on a few mebibytes at a time, not through a memory map: pages of a map count as
memory of the process, and a rank must never hold more than its own part of a model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from fourfold.errors import ConfigError
from fourfold.model.folder import TensorEntry, tensor_entries
from fourfold.weights.source.fused_params import ParameterSlice

# Bytes that are read or written at once.
_CHUNK_BYTES: Final = 1 << 24
# Names of dtypes in safetensors, in the order in which it writes them.
_NAMES: Final[dict[torch.dtype, str]] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}


class ModelFiles:
    """The weights in a model folder. Close it after use."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises ConfigError: a file is damaged."""
        self.folder = folder
        self.entries = tensor_entries(folder)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises ConfigError: it is quantized, or of another kind that is not read."""
        entry = self.entries[name]
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise ConfigError(
                f"model.source: {entry.file} holds {name} as {entry.dtype}; only {', '.join(_DTYPES)} can be trained: "
                f"convert the model to BF16 or F32"
            )
        return dtype

    @torch.no_grad()
    def read(self, name: str, first: int, target: Tensor) -> None:
        """Read elements of a flattened tensor, from `first` on, into `target`: 1-D, of any dtype, on any device."""
        entry, dtype = self.entries[name], self.dtype(name)
        if first < 0 or first + len(target) > math.prod(entry.shape):
            raise IndexError(f"{name} {entry.shape} has no elements {first} to {first + len(target)}")
        size = dtype.itemsize
        in_place = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        step = _CHUNK_BYTES // size
        buffer = torch.empty(0 if in_place else min(step, len(target)), dtype=dtype)
        for begin in range(0, len(target), step):
            part = target[begin : begin + step]
            chunk = part if in_place else buffer[: len(part)]
            self._fill(entry, entry.begin + (first + begin) * size, chunk)
            if not in_place:
                part.copy_(chunk)

    def _fill(self, entry: TensorEntry, offset: int, chunk: Tensor) -> None:
        if entry.file not in self._descriptors:
            self._descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
        view = chunk.view(torch.uint8).numpy().data
        while view:
            count = os.preadv(self._descriptors[entry.file], [view], offset)
            if not count:
                raise ConfigError(f"{entry.file} ended at byte {offset}; it was cut while it was read: copy it again")
            view, offset = view[count:], offset + count


def read_shard(files: ModelFiles, slices: Sequence[ParameterSlice], first: int, target: Tensor) -> None:
    """Read elements [first, first + len(target)) of a flattened parameter into `target`, and nothing else.

    `slices` are the tensors in the files that the parameter consists of; they tile it.
    """
    end = first + len(target)
    for one in slices:
        begin, stop = max(first, one.start), min(end, one.start + one.count)
        if begin < stop:
            files.read(one.name, begin - one.start, target[begin - first : stop - first])


class TensorFileWriter:
    """Writes one safetensors file, its tensors in any order and one after another. Raises OSError."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header of a file that will hold these tensors."""
        order = list(_NAMES)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: (order.index(one[1][0]), one[0])):
            self._offsets[name], end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [self._offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._path, self._missing = path, set(tensors)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self._write_at(0, memoryview(len(text).to_bytes(8, "little") + text))
            os.ftruncate(self._descriptor, self._data + end)
        except OSError:
            self.abandon()
            raise

    def close(self) -> None:
        """Flush the file, whose tensors must all be written, to the disk."""
        assert not self._missing, f"{self._path} lacks {sorted(self._missing)}"
        try:
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        os.close(self._descriptor)

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor, contiguous, on any device."""
        self._missing.remove(name)
        flat = tensor.detach().reshape(-1)
        offset = self._data + self._offsets[name]
        for part in torch.split(flat, _CHUNK_BYTES // flat.itemsize):
            chunk = part.cpu()
            self._write_at(offset, chunk.view(torch.uint8).numpy().data)
            offset += chunk.nbytes

    def _write_at(self, offset: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count
