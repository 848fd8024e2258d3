"""Applies LoRA adapters: the engine adds them to the weights that it has loaded, which stay as they are.

    bake     every adapter has a layer in the engine, fits it, and belongs to the engine's weights
    take     collects A and B in main memory
    finish   replaces the adapter that requests name, in one call

An engine is started either for adapters or for whole weights; it refuses manifests of the other kind.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from fourfold.errors import MODEL_MISMATCH, WrongState
from fourfold.model.folder import tensor_entries
from fourfold.weights.apply.base import ApplyReport, ModelState
from fourfold.weights.base_fingerprint import sampled
from fourfold.weights.digest import join_names
from fourfold.weights.manifest import AdapterSpec, Manifest, Span, TensorSpec

POLICY_ADAPTER: Final = 1
"""The number under which the engine has the adapter of the policy. Every request names it, also before an update."""
_TENSOR: Final = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
# Checkpoint tensors that the trainer does not send: output embeddings, if they are tied, and tables that old
# checkpoints hold and models compute from config.json.
_HEADS: Final = ("lm_head.weight", "embed_out.weight")
_TABLES: Final = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
# The types of weights in safetensors files.
_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NAMES_SHOWN: Final = 5
_SAME_MODEL: Final = "start trainer and engine with one model.source"
_OR_MERGED: Final = 'or set weights.adapters = "merged"'


class AdapterModel(Protocol):
    """The methods of an engine's model that `AdapterApplier` calls."""

    @property
    def max_rank(self) -> int:
        """Return the highest rank that the engine was started for."""

    @property
    def base(self) -> str:
        """Return the fingerprint of the loaded weights (`fourfold.weights.base_fingerprint`)."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the model's weights by checkpoint name."""

    def takes(self, layer: str) -> bool:
        """Return whether the engine was started with room for an adapter of `layer`, a name of the checkpoint."""

    def prepare(self, number: int, adapter: AdapterSpec, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a function that replaces adapter `number`. `tensors`, in main memory, belong to the model then."""


class AdapterApplier:
    """Replaces one LoRA adapter of an engine. Implements `base.Applier`."""

    def __init__(self, model: AdapterModel, number: int = POLICY_ADAPTER) -> None:
        """`number`: of the adapter in the engine, from 1."""
        self._model, self._number = model, number
        self._manifest: Manifest | None = None
        self._values: dict[int, Tensor] = {}  # flat, of each tensor of the manifest
        self._missing = 0  # elements that have not arrived
        self._state: ModelState = "clean"

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check that the engine can add these adapters to its weights. Raises WrongState: the message has the rule."""
        adapter = manifest.adapter
        if adapter is None:
            raise _refusal(
                "the trainer sends whole weights, and this engine was started for LoRA adapters",
                "start trainer and engine with the same trainer.lora and weights.adapters",
            )
        if adapter.rank > self._model.max_rank:
            raise _refusal(
                f"the trainer's adapters have rank {adapter.rank}, and this engine was started for at most "
                f"{self._model.max_rank}",
                "start trainer and engine with the same trainer.lora.rank",
            )
        for layer, factors in _layers(manifest).items():
            self._check_layer(layer, factors, adapter.rank)
        if adapter.base != self._model.base:
            raise _refusal(
                f"the trainer's adapters belong to other weights (fingerprint {adapter.base[:12]}) than those of this "
                f"engine ({self._model.base[:12]})",
                f"{_SAME_MODEL}, {_OR_MERGED}",
            )
        self._manifest = manifest
        return ApplyReport(direct_tensor_count=len(manifest.tensors), reload_tensor_count=0)

    def begin(self, *, stable: bool) -> None:
        if self._manifest is None:
            raise WrongState("no manifest was baked; open the epoch first")
        self._values, self._missing = {}, sum(spec.count for spec in self._manifest.tensors)

    def slot(self, span: Span) -> Tensor | None:
        """Return None: vLLM scales B where it lies, but sums are taken of what was sent."""
        return None

    def take(self, span: Span, values: Tensor) -> None:
        assert self._manifest is not None, "begin was called"
        if span.tensor not in self._values:
            self._values[span.tensor] = torch.empty(self._manifest.tensors[span.tensor].count, dtype=values.dtype)
        self._values[span.tensor][span.start : span.stop].copy_(values)
        self._missing -= span.count

    def flush(self) -> None:
        """Do nothing: `take` copies at once."""

    def finish(self) -> None:
        if self._manifest is None or self._manifest.adapter is None or self._missing:
            raise WrongState(f"{self._missing} elements of the adapters did not arrive; abort the update")
        specs, values = self._manifest.tensors, self._values
        tensors = {specs[index].name: flat.view(specs[index].shape) for index, flat in values.items()}
        self._values = {}
        replace = self._model.prepare(self._number, self._manifest.adapter, tensors)
        self._state = "dirty"
        replace()
        self._state = "clean"

    def abort(self) -> ModelState:
        """Forget what has arrived. The engine is "clean", unless vLLM itself failed while it replaced the adapter."""
        self._values = {}
        return self._state

    def _check_layer(self, layer: str, factors: Mapping[str, TensorSpec], rank: int) -> None:
        shape = self._model.shapes.get(f"{layer}.weight", ())
        if ".experts." in f".{layer}." or not any(part.isdecimal() for part in layer.split(".")):
            raise _refusal(
                f"the trainer sends an adapter of {layer}; engines take none of embeddings, output embeddings and "
                f"experts",
                f"let trainer.lora.target_modules name linear layers of the blocks alone, {_OR_MERGED}",
            )
        if len(shape) != 2:
            raise _refusal(
                f"the trainer sends an adapter of {layer}, and the engine's model has no such layer",
                f"{_SAME_MODEL}, {_OR_MERGED}",
            )
        if not self._model.takes(layer):
            raise _refusal(
                f"the trainer sends an adapter of {layer}, and this engine was started without room for it",
                f"start trainer and engine with the same trainer.lora.target_modules, {_OR_MERGED}",
            )
        wanted = {"A": (rank, shape[1]), "B": (shape[0], rank)}
        found = {factor: spec.shape for factor, spec in factors.items()}
        if found != wanted:
            raise _refusal(
                f"the trainer sends {_shapes(found)} as the adapter of {layer}; with rank {rank} the engine's layer "
                f"needs {_shapes(wanted)}"
            )


def folder_samples(folder: Path, *, tied: bool) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Return shape and sampled elements of the weights in a model folder that a trainer sends, for `fingerprint`.

    The files are mapped into memory, and only the pages with sampled elements are read.

    Args:
        folder: a Hugging Face model folder.
        tied: whether the output embeddings are the input embeddings, so that the trainer sends them once.

    Raises:
        ConfigError: a file is damaged.
        WrongState: the weights are quantised.
    """
    left_out = (*_TABLES, *(_HEADS if tied else ()))
    files: dict[Path, mmap.mmap] = {}
    samples: dict[str, tuple[tuple[int, ...], Tensor]] = {}
    for name, entry in tensor_entries(folder).items():
        if name.endswith(left_out):
            continue
        if (dtype := _DTYPES.get(entry.dtype)) is None:
            raise WrongState(
                f"{entry.file}: {name} is stored as {entry.dtype}; adapters need weights of {', '.join(_DTYPES)}: "
                f"serve the model that is trained, {_OR_MERGED}"
            )
        if entry.file not in files:
            with entry.file.open("rb") as stream:
                files[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to write
            files[entry.file].madvise(mmap.MADV_RANDOM)
        # safetensors itself would read the whole tensor.
        flat = torch.frombuffer(files[entry.file], dtype=dtype, count=math.prod(entry.shape), offset=entry.begin)
        samples[name] = entry.shape, flat[sampled(flat.numel())]
    return samples


def _layers(manifest: Manifest) -> dict[str, dict[str, TensorSpec]]:
    """Return A and B of every layer. Raises WrongState: a tensor has another name."""
    layers: dict[str, dict[str, TensorSpec]] = {}
    strange = [spec.name for spec in manifest.tensors if not _TENSOR.fullmatch(spec.name)]
    if strange:
        raise _refusal(
            f"{join_names(strange, _NAMES_SHOWN)}: not a name base_model.model.LAYER.lora_A.weight or lora_B of an "
            f"adapter of a linear layer",
            f"adapt linear layers of the blocks alone, {_OR_MERGED}",
        )
    for spec in manifest.tensors:
        if match := _TENSOR.fullmatch(spec.name):
            layers.setdefault(match["layer"], {})[match["factor"]] = spec
    return layers


def _shapes(factors: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{factor} {list(shape)}" for factor, shape in sorted(factors.items()))


def _refusal(what: str, fix: str = _SAME_MODEL) -> WrongState:
    return WrongState(f"{what}; {fix}", reason=MODEL_MISMATCH)
