"""Applies weights by reloading the model with the engine's own weight loaders, layer by layer."""

from __future__ import annotations

from typing import Protocol

import torch

from fourfold.errors import WrongState
from fourfold.weights.apply.base import ApplyReport, ModelState, TraceableModel
from fourfold.weights.apply.loader_trace import NamedTensors, check_fits, meta_tensors
from fourfold.weights.manifest import Manifest, Span


class ReloadableModel(TraceableModel, Protocol):
    """The methods of an engine's model that `ReloadApplier` calls."""

    def begin_load(self) -> None: ...

    def load(self, tensors: NamedTensors) -> None: ...

    def finish_load(self) -> None:
        """Finish loading; the model can run again."""

    def cancel_load(self) -> None:
        """Cancel loading; the model can run again, with whatever its parameters hold."""


class ReloadApplier:
    """Applies weights with the engine's own loaders, which take whole checkpoint tensors."""

    def __init__(self, model: ReloadableModel) -> None:
        self._model = model
        self._manifest: Manifest | None = None
        self._loading = False
        self._whole = True
        self._stable = False
        self._complete: list[tuple[str, torch.Tensor]] = []  # not loaded yet
        self._parts: dict[int, tuple[torch.Tensor, int]] = {}  # incomplete tensors, and their missing elements

    def bake(self, manifest: Manifest) -> ApplyReport:
        trace = self._model.trace(meta_tensors(manifest))
        check_fits(trace)
        self._manifest = manifest
        count = len(manifest.tensors)
        return ApplyReport(direct_tensor_count=0, reload_tensor_count=count, elsewhere=trace.elsewhere)

    def begin(self, *, stable: bool) -> None:
        if self._manifest is None:
            raise WrongState("no manifest was baked; open the epoch first")
        self._stable = stable
        self._complete = []
        self._parts = {}

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return None: the loaders need whole checkpoint tensors."""
        return None

    def take(self, span: Span, values: torch.Tensor) -> None:
        manifest = self._manifest
        assert manifest is not None, "begin was called"
        spec = manifest.tensors[span.tensor]
        if span.count == spec.count:
            whole = values if self._stable else values.clone()
            self._complete.append((spec.name, whole.view(spec.shape)))
            return
        begun = self._parts.pop(span.tensor, None)
        whole, missing = begun or (torch.empty(spec.count, dtype=values.dtype, device=values.device), spec.count)
        whole[span.start : span.stop].copy_(values)
        if missing > span.count:
            self._parts[span.tensor] = (whole, missing - span.count)
        else:
            self._complete.append((spec.name, whole.view(spec.shape)))

    def flush(self) -> None:
        if not self._complete:
            return
        if not self._loading:
            self._loading = True
            self._model.begin_load()
        # Some loaders write at once, others when a layer is complete, so the model is whole again only at the end.
        self._whole = False
        tensors, self._complete = self._complete, []
        self._model.load(tensors)

    def finish(self) -> None:
        self.flush()
        if not self._loading or self._parts:
            raise WrongState(f"{len(self._parts)} tensors did not arrive whole; abort the update")
        self._model.finish_load()
        self._loading = False
        self._whole = True

    def abort(self) -> ModelState:
        self._complete, self._parts = [], {}
        if self._loading:
            self._model.cancel_load()
            self._loading = False
        return "clean" if self._whole else "dirty"
