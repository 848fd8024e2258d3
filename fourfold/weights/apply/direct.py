"""Applies weights by writing into the running model's parameters.

Nothing is allocated and no address changes, so CUDA graphs stay valid. The copies that the engine's loaders would make
are traced once per epoch (`loader_trace`). They are valid if every parameter of the running model still has the shape,
strides and dtype that the loader would see, and no layer prepares its weights for its kernels afterwards. Otherwise the
model must be reloaded.

A direct update is not atomic: from the first element written until `finish` the weights are mixed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Protocol

import torch

from fourfold.errors import WrongState
from fourfold.weights.apply.base import ApplyReport, CannotApply, ModelState, TraceableModel
from fourfold.weights.apply.loader_trace import Region, check_fits, meta_tensors
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import synchronize

# Smaller copies are launched together, because the launch of one takes longer than the copy.
_SMALL_BYTES: Final = 1 << 20


class DirectModel(TraceableModel, Protocol):
    """The methods of an engine's model that `DirectApplier` calls."""

    @property
    def device(self) -> torch.device: ...

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter of the running model that a trace names."""

    def obstacle(self) -> str:
        """Return why the model's weights cannot be written in place; empty: they can."""


class DirectApplier:
    """Applies weights in place."""

    def __init__(self, model: DirectModel) -> None:
        self._model = model
        self._regions: list[list[Region]] = []  # of each tensor of the manifest, sorted by source
        self._flat: dict[str, torch.Tensor] = {}
        self._slots: dict[tuple[int, int, int], torch.Tensor | None] = {}
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._state: ModelState = "clean"

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Trace the loaders and check that their copies can be repeated in place; otherwise raise CannotApply."""
        if obstacle := self._model.obstacle():
            raise CannotApply(obstacle)
        trace = self._model.trace(meta_tensors(manifest))
        check_fits(trace)
        if trace.irregular:
            raise CannotApply(trace.irregular)
        by_name: dict[str, list[Region]] = defaultdict(list)
        for region in trace.regions:
            by_name[region.tensor].append(region)
        flat = {region.parameter: _flat(self._model.parameter(region.parameter)) for region in trace.regions}
        self._regions = [sorted(by_name[spec.name], key=lambda r: r.source) for spec in manifest.tensors]
        self._flat, self._slots = flat, {}
        count = len(manifest.tensors)
        return ApplyReport(direct_tensor_count=count, reload_tensor_count=0, elsewhere=trace.elsewhere)

    def begin(self, *, stable: bool) -> None:
        if not self._flat:
            raise WrongState("no manifest was baked; open the epoch first")
        synchronize(self._model.device)

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return the place of a span whose only copy goes to one contiguous run of a parameter."""
        self._state = "dirty"
        key = (span.tensor, span.start, span.count)
        if key not in self._slots:
            self._slots[key] = self._find_slot(span)
        return self._slots[key]

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Copy the elements to their places; drop those of other workers (tensor and pipeline parallelism)."""
        if (slot := self.slot(span)) is not None:
            self._copy(slot, values)
            return
        for region in self._regions[span.tensor]:
            for part in clip(region, span.start, span.stop):
                shape = (part.rows, part.columns)
                target = self._flat[part.parameter].as_strided(
                    shape, (part.target_stride, 1), self._flat[part.parameter].storage_offset() + part.target
                )
                source = values.as_strided(
                    shape, (part.source_stride, 1), values.storage_offset() + part.source - span.start
                )
                target.copy_(source, non_blocking=True)

    def flush(self) -> None:
        targets, sources = self._small
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
            self._small = ([], [])

    def finish(self) -> None:
        self.flush()
        synchronize(self._model.device)
        self._state = "clean"

    def abort(self) -> ModelState:
        self._small = ([], [])
        return self._state

    def _copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if values.numel() * values.element_size() < _SMALL_BYTES and values.device == target.device:
            self._small[0].append(target)
            self._small[1].append(values)
        else:
            target.copy_(values, non_blocking=True)

    def _find_slot(self, span: Span) -> torch.Tensor | None:
        copies = [part for region in self._regions[span.tensor] for part in clip(region, span.start, span.stop)]
        if len(copies) != 1 or copies[0].columns != span.count:
            return None
        place = copies[0].target
        return self._flat[copies[0].parameter][place : place + span.count]


def clip(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield the part of a region that lies in elements [start, stop) of its tensor, as at most three regions.

    The first and the last row may be incomplete; the rows between them form one rectangle.
    """
    first, last = max(start, region.source) - region.source, stop - region.source
    row, stride = first // region.source_stride, region.source_stride
    rows = min(region.rows, -(-last // stride))
    if row < region.rows and (skipped := first - row * stride) > 0:
        yield from _rows(region, row, row + 1, skipped, min(region.columns, last - row * stride))
        row += 1
    whole = rows
    if rows > row and last - (rows - 1) * stride < region.columns:
        whole = rows - 1
    yield from _rows(region, row, whole, 0, region.columns)
    if whole < rows and whole >= row:
        yield from _rows(region, whole, rows, 0, last - whole * stride)


def _rows(region: Region, first: int, stop: int, begin: int, end: int) -> Iterator[Region]:
    """Yield columns [begin, end) of rows [first, stop) of a region, unless they are empty."""
    if first < stop and begin < end:
        yield replace(
            region,
            rows=stop - first,
            columns=end - begin,
            source=region.source + first * region.source_stride + begin,
            target=region.target + first * region.target_stride + begin,
        )


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's memory as a 1-D view, from its first element to its last."""
    parameter = parameter.detach()
    extent = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.as_strided((extent,), (1,), parameter.storage_offset())
