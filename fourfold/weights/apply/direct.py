"""Weights written straight into the model's parameters: no copy in between, nothing allocated, CUDA graphs stay valid.

What the engine's loaders would copy where is traced once per epoch (`applier.Region`), on tensors
without memory. It holds when every parameter of the running model still has the shape, strides and
type that the loader would see, and no layer prepares its weights for its kernels afterwards.
Otherwise the model is reloaded.

Not atomic: from the first element written until the end the weights are mixed, and an error leaves
them "dirty".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, Protocol

import torch

from fourfold.errors import WrongState
from fourfold.weights.apply.reload import (
    ApplyReport,
    CannotApply,
    ModelState,
    NamedTensors,
    Region,
    Trace,
    check_fits,
    check_verified,
    meta_tensors,
)
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.source.base import synchronize

# Copies below this are launched together: each costs more to launch than to run.
_SMALL_BYTES: Final = 1 << 20


class DirectModel(Protocol):
    """What `DirectApplier` needs of an engine's model."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """As in `ReloadableModel`."""

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""

    def trace(self, tensors: NamedTensors) -> Trace:
        """As in `ReloadableModel`."""

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter that a trace names, as the running model has it."""

    def obstacle(self) -> str:
        """Return why weights of this model cannot be written in place, for people; empty: they can."""


class DirectApplier:
    """Applies weights in place."""

    def __init__(self, model: DirectModel) -> None:
        """Wrap a model that holds whole weights now."""
        self._model = model
        self._regions: list[list[Region]] = []  # of each tensor of the manifest, by source
        self._flat: dict[str, torch.Tensor] = {}
        self._slots: dict[tuple[int, int, int], torch.Tensor | None] = {}
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._state: ModelState = "clean"

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Trace the loading, and check that it can be done in place.

        Raises:
            WrongState: the architecture is not verified, or names or shapes do not fit the model.
            CannotApply: the model must be reloaded.
        """
        check_verified(self._model.architectures)
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
        return ApplyReport(direct_tensor_count=len(manifest.tensors), reload_tensor_count=0)

    def begin(self, *, stable: bool) -> None:
        """Wait until the model has done what it was asked for."""
        if not self._flat:
            raise WrongState("weights were announced by no manifest; open the epoch first")
        synchronize(self._model.device)

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return the place of a span that goes into one run of a parameter."""
        self._state = "dirty"
        key = (span.tensor, span.start, span.count)
        if key not in self._slots:
            self._slots[key] = self._find_slot(span)
        return self._slots[key]

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Copy the elements to where they belong; those that this worker has no part of are dropped."""
        if (slot := self.slot(span)) is not None:
            self._copy(slot, values)
            return
        for region in self._regions[span.tensor]:
            for piece in pieces(region, span.start, span.start + span.count):
                shape = (piece.rows, piece.columns)
                target = self._flat[piece.parameter].as_strided(
                    shape, (piece.target_stride, 1), self._flat[piece.parameter].storage_offset() + piece.target
                )
                source = values.as_strided(
                    shape, (piece.source_stride, 1), values.storage_offset() + piece.source - span.start
                )
                target.copy_(source, non_blocking=True)

    def flush(self) -> None:
        """Launch the small copies."""
        targets, sources = self._small
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
            self._small = ([], [])

    def finish(self) -> None:
        """Wait until all is written."""
        self.flush()
        synchronize(self._model.device)
        self._state = "clean"

    def abort(self) -> ModelState:
        """Tell what the model holds."""
        self._small = ([], [])
        return self._state

    def _copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        if values.numel() * values.element_size() < _SMALL_BYTES and values.device == target.device:
            self._small[0].append(target)
            self._small[1].append(values)
        else:
            target.copy_(values, non_blocking=True)

    def _find_slot(self, span: Span) -> torch.Tensor | None:
        for region in self._regions[span.tensor]:
            first = span.start - region.source
            if region.rows == 1 and first >= 0 and first + span.count <= region.columns:
                only = sum(_overlaps(other, span) for other in self._regions[span.tensor]) == 1
                place = region.target + first
                return self._flat[region.parameter][place : place + span.count] if only else None
        return None


def pieces(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield what a region takes of elements [start, stop) of its tensor, as regions: at most three.

    The first and the last row may be taken in part.
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
    """Yield columns [begin, end) of rows [first, stop) of a region, unless that is nothing."""
    if first < stop and begin < end:
        yield Region(
            tensor=region.tensor,
            parameter=region.parameter,
            rows=stop - first,
            columns=end - begin,
            source=region.source + first * region.source_stride + begin,
            source_stride=region.source_stride,
            target=region.target + first * region.target_stride + begin,
            target_stride=region.target_stride,
        )


def _overlaps(region: Region, span: Span) -> bool:
    return any(True for _ in pieces(region, span.start, span.start + span.count))


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter as one run, from its first element to its last."""
    parameter = parameter.detach()
    extent = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.as_strided((extent,), (1,), parameter.storage_offset())
