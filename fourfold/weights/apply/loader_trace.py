"""Records the copies that an engine's weight loaders would make, without running them on real memory.

The loaders run once on meta tensors while `CopyRecorder` intercepts their writes. The recorded copies show whether a
model takes exactly the tensors of a manifest, and let `DirectApplier` repeat them without the loaders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH, WrongState
from fourfold.weights.digest import join_names
from fourfold.weights.manifest import Manifest
from fourfold.weights.source.base import torch_dtype
from fourfold.weights.source.fused_params import storage_id

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_COPIES: Final = frozenset({torch.ops.aten.copy_.default})
_FILLS: Final = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One copy that a loader makes, from a rectangle of a checkpoint tensor to one of a parameter. All in elements.

    Element (r, c), r < rows, c < columns, is number source + r * source_stride + c of the flattened checkpoint tensor,
    and lies target + r * target_stride + c elements after the start of the parameter.
    """

    tensor: str
    parameter: str
    rows: int
    columns: int
    source: int
    source_stride: int
    target: int
    target_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTrace:
    """The effect that loading a manifest's tensors would have."""

    unused: tuple[str, ...]  # checkpoint tensors that no parameter uses
    elsewhere: tuple[str, ...] = ()  # tensors that this stage of a pipeline does not use; another stage must
    missing: Mapping[str, tuple[int, int]]
    """Parameters that would not be filled: name -> (elements that would be written, elements of the parameter)."""
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Checkpoint tensors of which a part would be left out: name -> (elements taken, elements of the tensor)."""
    regions: tuple[Region, ...] = ()  # all copies, if `irregular` is empty
    irregular: str = ""  # description of a copy that is not between rectangles of the same dtype


def check_fits(trace: LoaderTrace) -> None:
    """Raise WrongState unless the model, or one stage of it, takes exactly the tensors that were traced."""
    if trace.unused:
        raise no_place(trace.unused)
    if trace.missing:
        gaps = [f"{name} ({done} of {count} elements)" for name, (done, count) in trace.missing.items()]
        raise _mismatch(f"the trainer does not send all of {join_names(gaps, _NAMES_SHOWN)}")
    if trace.cut:
        parts = [f"{name} (takes {done} of {count} elements)" for name, (done, count) in trace.cut.items()]
        raise _mismatch(
            f"the engine's model is smaller than the trainer's: it would leave out parts of "
            f"{join_names(parts, _NAMES_SHOWN)}"
        )


def meta_tensors(manifest: Manifest) -> NamedTensors:
    """Yield the manifest's tensors on the meta device. Raises WrongState: they are adapters and no weights."""
    if manifest.adapter is not None:
        raise WrongState(
            "the trainer sends LoRA adapters, and this engine was started for whole weights; start trainer and engine "
            "with the same trainer.lora and weights.adapters",
            reason=MODEL_MISMATCH,
        )
    for spec in manifest.tensors:
        yield spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass hook
    """Records which elements a loader would write, and writes nothing to the recorded tensors.

    Weight loaders end in `parameter[...].copy_(checkpoint[...])`, or in a fill of padding. While this mode is active,
    such writes are recorded instead. Any other change of a destination is an error, because its effect is unknown.
    """

    def __init__(self, sources: NamedTensors, destinations: NamedTensors) -> None:
        """Record copies between meta tensors, given by name; destinations that share memory count as one."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = (list(sources), list(destinations))  # a freed tensor's storage address could be used again
        self._sources = {storage_id(tensor): name for name, tensor in self._alive[0]}
        self._destinations = {storage_id(tensor): name for name, tensor in self._alive[1]}
        self.read: Counter[str] = Counter()  # elements taken from each source
        self.written: Counter[str] = Counter()  # elements written to each destination
        self.copies: list[Region] = []  # all copies, when `irregular` is empty
        self.irregular = ""  # description of a copy that `copies` cannot express
        self._regions: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._destinations.get(storage_id(args[0])) if args and isinstance(args[0], torch.Tensor) else None
        if name is None or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        region = (name, target.storage_offset(), tuple(target.shape), target.stride())
        if func in _COPIES:
            source = self._sources.get(storage_id(args[1]))
            if source is None or args[1].numel() != target.numel():
                raise _unverified(f"the loader of {name} fills it with something else than a checkpoint tensor")
            self.read[source] += target.numel()
            self._record(source, args[1], name, target)
        elif func not in _FILLS:
            raise _unverified(f"the loader of {name} changes it by {func}")
        if region not in self._regions:
            self._regions.add(region)
            self.written[name] += target.numel()
        return target

    def _record(self, source: str, values: torch.Tensor, name: str, target: torch.Tensor) -> None:
        found = as_rectangle(values, target)
        if found is None:
            self.irregular = self.irregular or (
                f"{source} goes into {name} by a copy of {values.dtype} {tuple(values.shape)}, strides "
                f"{values.stride()}, to {target.dtype} {tuple(target.shape)}, strides {target.stride()}"
            )
            return
        rows, columns, source_stride, target_stride = found
        self.copies.append(
            Region(
                tensor=source,
                parameter=name,
                rows=rows,
                columns=columns,
                source=int(values.storage_offset()),
                source_stride=source_stride,
                target=int(target.storage_offset()),
                target_stride=target_stride,
            )
        )


def as_rectangle(source: torch.Tensor, target: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Return (rows, columns, row stride in the source, in the target) of an elementwise copy, or None.

    Neighbours in a row are neighbours in both tensors. A copy of one contiguous run is one row.
    """
    if source.dtype != target.dtype:
        return None
    ours = [(n, a) for n, a in zip(source.shape, source.stride(), strict=True) if n != 1]
    theirs = [(n, b) for n, b in zip(target.shape, target.stride(), strict=True) if n != 1]
    if [n for n, _ in ours] != [n for n, _ in theirs]:
        return None
    merged: list[tuple[int, int, int]] = [(1, 1, 1)]  # (size, stride, stride) of merged dimensions, innermost first
    for (size, a), (_, b) in zip(reversed(ours), reversed(theirs), strict=True):
        inner, inner_a, inner_b = merged[-1]
        if (a, b) == (inner * inner_a, inner * inner_b):
            merged[-1] = (inner * size, inner_a, inner_b)
        else:
            merged.append((size, a, b))
    if len(merged) > 2 or merged[0][1:] != (1, 1):
        return None
    rows, source_stride, target_stride = merged[1] if len(merged) == 2 else (1, merged[0][0], merged[0][0])
    return rows, merged[0][0], source_stride, target_stride


def no_place(tensors: Sequence[str]) -> WrongState:
    """Return the error for checkpoint tensors that no parameter uses."""
    return _mismatch(f"the engine's model has no place for {join_names(tensors, _NAMES_SHOWN)}")


def load_refused(tensor: str, error: Exception) -> WrongState:
    """Return the error for a checkpoint tensor that a loader refuses with `error`."""
    return _mismatch(f"the engine's model refuses {tensor}: {str(error) or 'another shape is needed'}")


def _mismatch(what: str) -> WrongState:
    return WrongState(
        f"{what}; trainer and engine must load the same model: start both with one model.source", reason=MODEL_MISMATCH
    )


def _unverified(what: str) -> WrongState:
    return WrongState(
        f"{what}; its update cannot be verified: train another architecture", reason=ARCHITECTURE_NOT_VERIFIED
    )
