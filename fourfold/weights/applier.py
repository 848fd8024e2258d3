"""How arrived weights get into an engine's model: the protocol, and the applier that reloads.

    bake(manifest)     once per epoch: would the model take exactly these tensors? changes nothing
    begin()            per version: the model is set up for loading; it cannot run meanwhile
    load(tensors)      checkpoint tensors, in any order
    finish()           the model runs again, with the new weights
    abort()            at any time: the model runs again; "clean" with the old weights, else "dirty"

`ReloadApplier` works on every device, quantised or not, through the engine's own weight
loaders; one that writes into the model's parameters in place (CUDA) has the same methods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH, WrongState
from fourfold.weights.manifest import Manifest
from fourfold.weights.transport import Shards, Sink

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


class Applier(Protocol):
    """Puts weights into one worker's model."""

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check that the model takes all tensors of `manifest` and needs no others; nothing changes."""

    def sink(self) -> Sink | None:
        """Return where a transport may write at once, or None."""

    def begin(self) -> None:
        """Set the model up for loading."""

    def load(self, shards: Shards) -> None:
        """Take what arrived; views into it may be kept until `finish` or `abort`."""

    def finish(self) -> None:
        """Make the model run with what was loaded."""

    def abort(self) -> ModelState:
        """Make the model run again: "clean" when its weights are whole, "dirty" when they may be mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What loading would do, found out without doing it."""

    unused: tuple[str, ...]
    """Checkpoint tensors that no parameter takes anything from."""
    missing: Mapping[str, tuple[int, int]]
    """Parameters that would not be filled: name -> (elements that would be written, elements there are)."""


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

    def bake(self, manifest: Manifest) -> ApplyReport:
        """Check `manifest` against the model.

        Raises:
            WrongState: the architecture is not verified, or names or shapes do not fit the model.
        """
        unverified = [name for name in self._model.architectures if name not in VERIFIED_ARCHITECTURES]
        if unverified:
            raise WrongState(
                f"weight updates of {' / '.join(unverified)} are not verified, so they are refused; verified are "
                f"{', '.join(sorted(VERIFIED_ARCHITECTURES))}: train one of these, or verify yours in "
                f"tests/integration/test_weight_update.py",
                reason=ARCHITECTURE_NOT_VERIFIED,
            )
        trace = self._model.trace(meta_tensors(manifest))
        if trace.unused:
            raise _mismatch(f"the engine's model has no place for {_some(trace.unused)}")
        if trace.missing:
            gaps = [f"{name} ({done} of {count} elements)" for name, (done, count) in trace.missing.items()]
            raise _mismatch(f"the trainer does not send all of {_some(gaps)}")
        self._manifest = manifest
        return ApplyReport(direct_tensor_count=0, reload_tensor_count=len(manifest.tensors))

    def sink(self) -> Sink | None:
        """Return None: the loaders need whole checkpoint tensors."""
        return None

    def begin(self) -> None:
        """Set the model up for loading."""
        if self._manifest is None:
            raise WrongState("weights were announced by no manifest; open the epoch first")
        self._loading = True
        self._model.begin_load()

    def load(self, shards: Shards) -> None:
        """Load all tensors of the manifest."""
        manifest = self._manifest
        if manifest is None or not self._loading:
            raise WrongState("weights cannot be loaded before begin")
        # Some loaders write through at once, others when a layer is complete: whole again only at the end.
        self._whole = False
        self._model.load((spec.name, shards.tensor(index)) for index, spec in enumerate(manifest.tensors))

    def finish(self) -> None:
        """End the loading."""
        if not self._loading:
            raise WrongState("there is no loading to finish")
        self._model.finish_load()
        self._loading = False
        self._whole = True

    def abort(self) -> ModelState:
        """End a loading that is under way and tell what the model holds."""
        if self._loading:
            self._model.cancel_load()
            self._loading = False
        return "clean" if self._whole else "dirty"


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
        elif func not in _FILLS:
            raise _unverified(f"the loader of {name} changes it by {func}")
        if region not in self._regions:
            self._regions.add(region)
            self.written[name] += target.numel()
        return target


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
