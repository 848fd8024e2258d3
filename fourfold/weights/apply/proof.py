"""Proves, when an engine starts, that an update replaces everything that its model computes with.

A weight that a loader drops, or a matrix that a layer computed from its weights, would stay stale without an error. No
list of architectures can exclude this, so each engine is tested with the weights that it has loaded:

    sums of all tensors  ->  overwrite them  ->  an update with the tensors of the model folder  ->  the same sums?

The update runs through the appliers that later updates use. It takes about as long as loading the model, and needs no
memory but that of the tensors on their way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Protocol

import torch

from fourfold.errors import FourfoldError, WrongState
from fourfold.weights.apply.base import Applier, ApplyReport, CannotApply, ModelState, TraceableModel
from fourfold.weights.apply.loader_trace import NamedTensors
from fourfold.weights.digest import join_names
from fourfold.weights.manifest import ITEM_BYTES, Manifest, Span, TensorSpec, aligned
from fourfold.weights.tensor_sums import span_sums

# The loaders get this many bytes at a time.
_FLUSH_BYTES: Final = 256 << 20
# Number of elements that are overwritten at once; each needs a byte of temporary memory.
_BLOCK: Final = 1 << 24
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Depth of the search for tensors in the objects of a layer, such as layer.quant_method.kernel.scales.
_DEPTH: Final = 4
_NAMES_SHOWN: Final = 5


class ProvableModel(TraceableModel, Protocol):
    """The methods of an engine's model that `prove` calls."""

    def checkpoint(self) -> NamedTensors:
        """Yield the tensors of the model folder, as the engine reads them at its start.

        Raises WrongState: the engine does not load a model folder in this way.
        """

    def sent_dtype(self) -> str:
        """Return the dtype in which a trainer sends the weights."""

    def tied(self) -> Sequence[Sequence[str]]:
        """Return the names of the parameters that share memory, the one that is sent first in each group."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors that the model has held since it was loaded, by name."""

    def weight_state(self) -> Set[str]:
        """Return the names of the tensors in `state` that were loaded or computed from loaded tensors."""

    def addresses_matter(self) -> bool:
        """Return whether kernels were recorded with the addresses of the tensors, as in CUDA graphs."""

    def remove_packed(self) -> Callable[[], Sequence[str]]:
        """Remove weights that the model holds in other forms than tensors.

        Return a function that lists the removed weights that have not been made again.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of a proof. An engine takes updates only if `refusal` is empty."""

    appliers: tuple[Applier, ...] = ()
    """All appliers. Those that are not proven refuse every manifest and give the reason."""
    refusal: str = ""
    intact: bool = True
    """Whether the model holds the weights that it has loaded. It must not run otherwise."""


def prove(model: ProvableModel, appliers: Sequence[Applier]) -> Proof:
    """Try each applier on the loaded model. Returns a refusal with the names of the stale tensors if none passes."""
    try:
        manifest = folder_manifest(model)
    except FourfoldError as error:
        return Proof(refusal=error.message)
    results: list[Applier] = []
    failed: list[str] = []
    restore: Applier | None = None  # a proven applier, if a later one has failed
    before = _sums(model)
    for applier in appliers:
        try:
            applier.bake(manifest)
        except CannotApply as reason:
            results.append(_Refusing(str(reason)))
            continue
        except FourfoldError as error:
            return Proof(refusal=error.message, intact=not failed)
        if stale := _update(model, applier, manifest, before):
            failed.append(f"an update leaves {join_names(stale, _NAMES_SHOWN)} stale")
            results.append(_Refusing(failed[-1]))
        else:
            restore = applier
            results.append(applier)
    if restore is None:
        refusal = "; ".join(failed) or f"no way to apply weights: {'; '.join(r.reason for r in _refusing(results))}"
        return Proof(refusal=refusal, intact=not failed)
    if failed:
        stale = _update(model, restore, manifest, before)
        assert not stale, "it was proven with the same tensors"
    return Proof(appliers=tuple(results))


def folder_manifest(model: ProvableModel) -> Manifest:
    """Return the manifest of the tensors of the model folder that a trainer would send.

    These are the tensors that the loaders take; of tied weights, only the first. Raises WrongState: one cannot be sent.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.checkpoint():
        if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
            raise WrongState(
                f"the model folder stores {name} as {str(tensor.dtype).removeprefix('torch.')}: a trainer sends "
                f"{', '.join(ITEM_BYTES)}, which the engine cannot turn into a quantised checkpoint's tensors"
            )
        shapes[name] = tuple(tensor.shape)
    dtype: torch.dtype = getattr(torch, model.sent_dtype())
    trace = model.trace([(name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items()])
    targets: dict[str, set[str]] = {}
    for region in trace.regions:
        targets.setdefault(region.tensor, set()).add(region.parameter)
    filled = set().union(*targets.values())
    copies = {name for group in model.tied() if filled & {group[0]} for name in group[1:]}
    left_out = {*trace.unused, *trace.elsewhere, *(tensor for tensor, names in targets.items() if names <= copies)}
    specs: list[TensorSpec] = []
    spans: list[Span] = []
    offset = 0
    for name, shape in shapes.items():
        if name in left_out:
            continue
        spec = TensorSpec(name=name, dtype=model.sent_dtype(), shape=shape)
        spans.append(Span(tensor=len(specs), start=0, count=spec.count, rank=0, offset=offset))
        specs.append(spec)
        offset = aligned(offset + spec.byte_count)
    return Manifest(tensors=tuple(specs), spans=tuple(spans), shard_bytes=(offset,))


def kept_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that a model holds beside its parameters: buffers, and all in its layers' objects.

    Objects with a destructor are left out, because their tensors may be addresses.
    """
    # Any access to this object of torch warns, and layers refer to the module that contains it.
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, layer in model.named_modules():
        own = {name: value for name, value in vars(layer).items() if name not in ("_parameters", "_modules")}
        for name, value in ({**own.pop("_buffers", {}), **own}).items():
            found.update(_tensors_in(f"{path}.{name}" if path else name, value, seen, _DEPTH))
    return found


def tensor_sums(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that is equal for equal tensors in any layout: form, and plain and weighted sums of the bytes.

    Tensors of other layouts are copied first, into memory without gaps.
    """
    form = (tensor.dtype, tuple(tensor.shape))
    if not tensor.numel():
        return form
    flat = tensor.detach().resolve_conj().resolve_neg()
    if small := flat.element_size() == 1:
        flat = flat.view(torch.uint8)  # a copy of bool would turn all bytes but 0 into 1
    flat = flat.contiguous().reshape(-1)
    # torch calls a single element with stride 0 contiguous, and refuses to view it in words of another size.
    flat = flat.as_strided(flat.shape, (1,))
    if small and flat.numel() % 2:  # the sums are over words of 16 bits
        flat = flat.to(torch.int16)
    elif flat.storage_offset() * flat.element_size() % 2:
        flat = flat.clone()
    return *form, *span_sums(flat.view(torch.int16), 0)


def overwrite(tensor: torch.Tensor) -> None:
    """Set all bits of every element that is not zero: NaN for all types of floats.

    Zeros stay: loaders fill the padding of a parameter with them, and an update need not write it again.
    """
    flat = tensor.detach()
    for dim, stride in enumerate(flat.stride()):
        if stride == 0:  # torch does not write to elements that share memory
            flat = flat.narrow(dim, 0, min(flat.shape[dim], 1))
    if flat.is_complex():
        flat = torch.view_as_real(flat.conj() if flat.is_conj() else flat)
    words = flat.view(_WORDS[flat.element_size()])
    if not words.is_contiguous():
        words.masked_fill_(words != 0, -1)
        return
    words = words.view(-1)
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        block.masked_fill_(block != 0, -1)


def _update(model: ProvableModel, applier: Applier, manifest: Manifest, before: Mapping[str, object]) -> list[str]:
    """Overwrite the model, update it from its folder, and return the names of tensors that differ from `before`."""
    state = model.state()
    with torch.inference_mode():
        for name in model.weight_state():
            overwrite(state[name])
    unmade = model.remove_packed()
    spans = {manifest.tensors[span.tensor].name: span for span in manifest.spans}
    applier.begin(stable=True)
    waiting = 0
    for name, tensor in model.checkpoint():
        if (span := spans.pop(name, None)) is None:
            continue
        applier.take(span, tensor.reshape(-1))  # send the folder's dtype, so that it is cast as at the start
        waiting += tensor.nbytes
        if waiting >= _FLUSH_BYTES:
            applier.flush()
            waiting = 0
    applier.finish()
    after = _sums(model)
    names = [name for name, value in before.items() if after.get(name) != value]
    return sorted({*names, *unmade()})


def _sums(model: ProvableModel) -> dict[str, object]:
    fixed = model.addresses_matter()
    cache: dict[int, tuple[object, ...]] = {}  # tensors that several layers share
    result: dict[str, object] = {}
    with torch.inference_mode():
        for name, tensor in model.state().items():
            if id(tensor) not in cache:
                cache[id(tensor)] = (*tensor_sums(tensor), *_layout(tensor), tensor.data_ptr() if fixed else 0)
            result[name] = cache[id(tensor)]
    return result


def _layout(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions longer than 1: compiled code expects these to stay."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _tensors_in(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter) and not value.is_meta:
            yield name, value
        return
    if depth == 0 or id(value) in seen:
        return
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, list | tuple):
        parts = ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, dict):
        parts = ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        parts = ((f".{variable}", cell.cell_contents) for variable, cell in cells if _is_set(cell))
    elif hasattr(value, "__dict__") and not _is_opaque(value):
        parts = ((f".{attribute}", part) for attribute, part in vars(value).items())
    else:
        return
    seen.add(id(value))
    for suffix, part in parts:
        yield from _tensors_in(name + suffix, part, seen, depth - 1)


def _is_opaque(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | type) or hasattr(value, "__del__")


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _refusing(appliers: Iterable[Applier]) -> Iterator[_Refusing]:
    return (applier for applier in appliers if isinstance(applier, _Refusing))


class _Refusing:
    """Stands for an applier that is not proven."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def bake(self, manifest: Manifest) -> ApplyReport:
        raise CannotApply(self.reason)

    def begin(self, *, stable: bool) -> None:
        raise WrongState(self.reason)

    def slot(self, span: Span) -> torch.Tensor | None:
        raise WrongState(self.reason)

    def take(self, span: Span, values: torch.Tensor) -> None:
        raise WrongState(self.reason)

    def flush(self) -> None:
        raise WrongState(self.reason)

    def finish(self) -> None:
        raise WrongState(self.reason)

    def abort(self) -> ModelState:
        return "clean"
