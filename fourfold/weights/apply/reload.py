"""How arrived weights get into an engine's model: the protocol, and the applier that reloads.

    bake(manifest)   once per epoch: would the model take exactly these tensors? changes nothing
    begin()          per version; the applier is a sink from here on, and nothing is touched before it gets something
    finish()         the model runs again, with the new weights
    abort()          at any time: the model runs again; "clean" with the old weights, else "dirty"

`ReloadApplier` works on every device, quantised or not, through the engine's own weight loaders; `direct.DirectApplier`
writes into the model's parameters in place, where that is known to be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH, WrongState
from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.transport.base import Sink

# Architectures whose update is tested end to end (tests/integration/test_weight_update.py):
# tokens and log-probabilities equal those of an engine started with the new weights. Others
# are refused: a weight that a loader drops or transforms would go stale without a sign.
VERIFIED_ARCHITECTURES: Final = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)

ModelState = Literal["clean", "dirty"]
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """How an applier will treat the tensors of a manifest."""

    direct_tensor_count: int
    reload_tensor_count: int
    reload_reason: str = ""
    """Why they are reloaded where the device could be written in place."""


class CannotApply(Exception):
    """This applier cannot take the manifest, for a reason that another one may not have. The message is for people."""


class Applier(Sink, Protocol):
    """Puts weights into one worker's model."""

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check that the model takes all tensors of `manifest` and needs no others; nothing changes.

        Raises:
            WrongState: it does not.
            CannotApply: this applier is not the right one.
        """

    def begin(self, *, stable: bool) -> None:
        """Expect a version; `stable`: what `take` gets stays until `finish` or `abort`."""

    def finish(self) -> None:
        """Make the model run with what was taken; all of it must have been."""

    def abort(self) -> ModelState:
        """Make the model run again: "clean" when its weights are whole, "dirty" when they may be mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One copy that a loader makes: a rectangle of a checkpoint tensor to one of a parameter. All in elements.

    Element (r, c), r < rows, c < columns, is number source + r * source_stride + c of the flattened checkpoint tensor,
    and lies target + r * target_stride + c elements after the beginning of the parameter.
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
class Trace:
    """What loading would do, found out without doing it."""

    unused: tuple[str, ...]
    """Checkpoint tensors that no parameter takes anything from."""
    missing: Mapping[str, tuple[int, int]]
    """Parameters that would not be filled: name -> (elements that would be written, elements there are)."""
    cut: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Checkpoint tensors of which too little would be taken: name -> (elements that would be, that should be)."""
    regions: tuple[Region, ...] = ()
    """All copies, when `irregular` is empty."""
    irregular: str = ""
    """A copy that is none between rectangles of one type, for people."""


class ReloadableModel(Protocol):
    """What `ReloadApplier` needs of an engine's model."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names that must all be verified: the checkpoint's architecture and the class that implements it."""

    def trace(self, tensors: NamedTensors) -> Trace:
        """Find out what loading these (meta) tensors would do; the model stays as it is."""

    def begin_load(self) -> None:
        """Prepare for loading."""

    def load(self, tensors: NamedTensors) -> None:
        """Load checkpoint tensors."""

    def finish_load(self) -> None:
        """End the loading; the model can run again."""

    def cancel_load(self) -> None:
        """Give the loading up; the model can run again, with whatever its parameters hold."""


class ReloadApplier:
    """Applies weights by the engine's own loaders, layer by layer."""

    def __init__(self, model: ReloadableModel) -> None:
        """Wrap a model that holds whole weights now."""
        self._model = model
        self._manifest: Manifest | None = None
        self._loading = False
        self._whole = True
        self._stable = False
        self._whole_tensors: list[tuple[str, torch.Tensor]] = []
        self._parts: dict[int, tuple[torch.Tensor, int]] = {}  # tensors that came in part, and elements that lack

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check `manifest` against the model.

        Raises:
            WrongState: the architecture is not verified, or names or shapes do not fit the model.
        """
        check_verified(self._model.architectures)
        check_fits(self._model.trace(meta_tensors(manifest)))
        self._manifest = manifest
        return ApplyReport(direct_tensor_count=0, reload_tensor_count=len(manifest.tensors))

    def begin(self, *, stable: bool) -> None:
        """Expect a version."""
        if self._manifest is None:
            raise WrongState("weights were announced by no manifest; open the epoch first")
        self._stable = stable
        self._whole_tensors = []
        self._parts = {}

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return None: the loaders need whole checkpoint tensors."""
        return None

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Put parts together; a whole tensor is loaded with the others of its window."""
        manifest = self._manifest
        assert manifest is not None, "begun"
        spec = manifest.tensors[span.tensor]
        if span.count == spec.count:
            whole = values if self._stable else values.clone()
            self._whole_tensors.append((spec.name, whole.view(spec.shape)))
            return
        if span.tensor not in self._parts:
            self._parts[span.tensor] = (torch.empty(spec.count, dtype=values.dtype, device=values.device), spec.count)
        whole, left = self._parts.pop(span.tensor)
        whole[span.start : span.start + span.count].copy_(values)
        if left > span.count:
            self._parts[span.tensor] = (whole, left - span.count)
        else:
            self._whole_tensors.append((spec.name, whole.view(spec.shape)))

    def flush(self) -> None:
        """Load the tensors that are complete."""
        if not self._whole_tensors:
            return
        if not self._loading:
            self._loading = True
            self._model.begin_load()
        # Some loaders write through at once, others when a layer is complete: whole again only at the end.
        self._whole = False
        tensors, self._whole_tensors = self._whole_tensors, []
        self._model.load(tensors)

    def finish(self) -> None:
        """End the loading."""
        self.flush()
        if not self._loading or self._parts:
            raise WrongState(f"{len(self._parts)} tensors did not arrive whole; abort the update")
        self._model.finish_load()
        self._loading = False
        self._whole = True

    def abort(self) -> ModelState:
        """End a loading that is under way and tell what the model holds."""
        self._whole_tensors, self._parts = [], {}
        if self._loading:
            self._model.cancel_load()
            self._loading = False
        return "clean" if self._whole else "dirty"


def check_verified(architectures: Iterable[str]) -> None:
    """Raise WrongState when updates of a model are not verified.

    Args:
        architectures: see `ReloadableModel`.
    """
    unverified = [name for name in architectures if name not in VERIFIED_ARCHITECTURES]
    if unverified:
        raise WrongState(
            f"weight updates of {' / '.join(unverified)} are not verified, so they are refused; verified are "
            f"{', '.join(sorted(VERIFIED_ARCHITECTURES))}: train one of these, or verify yours in "
            f"tests/integration/test_weight_update.py",
            reason=ARCHITECTURE_NOT_VERIFIED,
        )


def check_fits(trace: Trace) -> None:
    """Raise WrongState when the model would not take exactly the tensors that were traced."""
    if trace.unused:
        raise _mismatch(f"the engine's model has no place for {_some(trace.unused)}")
    if trace.missing:
        gaps = [f"{name} ({done} of {count} elements)" for name, (done, count) in trace.missing.items()]
        raise _mismatch(f"the trainer does not send all of {_some(gaps)}")
    if trace.cut:
        parts = [f"{name} (takes {done} of {count} elements)" for name, (done, count) in trace.cut.items()]
        raise _mismatch(f"the engine's model is smaller than the trainer's: it would leave out parts of {_some(parts)}")


def meta_tensors(manifest: Manifest) -> NamedTensors:
    """Yield the manifest's tensors without memory."""
    for spec in manifest.tensors:
        yield spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")


class CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass hook
    """Records which elements a loader would write, and writes nothing to the recorded tensors.

    Weight loaders end in `parameter[...].copy_(checkpoint[...])`, or in a fill of padding.
    While this mode is active such writes are noted instead. Anything else that would change a
    destination is an error, since its effect is not known.
    """

    def __init__(self, sources: NamedTensors, destinations: NamedTensors) -> None:
        """Watch tensors.

        Args:
            sources: checkpoint tensors by name, on meta.
            destinations: parameters by name. Those that share memory are one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = (list(sources), list(destinations))
        self._sources = {_storage(tensor): name for name, tensor in self._kept[0]}
        self._destinations = {_storage(tensor): name for name, tensor in self._kept[1]}
        self.read: Counter[str] = Counter()
        """Elements taken from each source."""
        self.written: Counter[str] = Counter()
        """Elements written to each destination."""
        self.copies: list[Region] = []
        """All copies, when `irregular` is empty."""
        self.irregular = ""
        """A copy that `copies` cannot express, for people."""
        self._regions: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self._destinations.get(_storage(args[0])) if args and isinstance(args[0], torch.Tensor) else None
        if name is None or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        region = (name, target.storage_offset(), tuple(target.shape), target.stride())
        if func in _COPIES:
            source = self._sources.get(_storage(args[1]))
            if source is None or args[1].numel() != target.numel():
                raise _unverified(f"the loader of {name} fills it with something else than a checkpoint tensor")
            self.read[source] += target.numel()
            self._note(source, args[1], name, target)
        elif func not in _FILLS:
            raise _unverified(f"the loader of {name} changes it by {func}")
        if region not in self._regions:
            self._regions.add(region)
            self.written[name] += target.numel()
        return target

    def _note(self, source: str, values: torch.Tensor, name: str, target: torch.Tensor) -> None:
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

    Neighbours in a row are neighbours in both; a copy of one run has one row.
    """
    if source.dtype != target.dtype:
        return None
    ours = [(n, a) for n, a in zip(source.shape, source.stride(), strict=True) if n != 1]
    theirs = [(n, b) for n, b in zip(target.shape, target.stride(), strict=True) if n != 1]
    if [n for n, _ in ours] != [n for n, _ in theirs]:
        return None
    merged: list[tuple[int, int, int]] = [(1, 1, 1)]  # size and both strides, the innermost first
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


_COPIES: Final = frozenset({torch.ops.aten.copy_.default})
_FILLS: Final = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def not_fitting(tensor: str, error: Exception) -> WrongState:
    """Return the error for a checkpoint tensor that a loader refuses."""
    why = str(error) or "another shape is needed"
    return _mismatch(f"the engine's model refuses {tensor}: {why}")


def _mismatch(what: str) -> WrongState:
    return WrongState(
        f"{what}; trainer and engine must load the same model: start both with one model.source", reason=MODEL_MISMATCH
    )


def _unverified(what: str) -> WrongState:
    return WrongState(
        f"{what}; its update cannot be verified: train another architecture", reason=ARCHITECTURE_NOT_VERIFIED
    )
