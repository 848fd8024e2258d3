"""Where the trainer's weights are: the protocol of a source, and the source for whole parameters.

A source belongs to one trainer rank. Its manifest is the same on all ranks. It copies
nothing: `read` hands out views of the parameters, which stay as they are from `begin_round`
to `end_round`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import torch

from fourfold.errors import InvalidInput, WrongState
from fourfold.weights.manifest import ITEM_BYTES, Manifest, Span, TensorSpec, aligned

_DTYPE_PREFIX: Final = "torch."

Rename = Callable[[str], str]
"""Gives the name that a parameter is sent under; empty: it is not sent."""


class WeightSource(Protocol):
    """One trainer rank's weights."""

    def manifest(self) -> Manifest:
        """Return the layout; the same object every time, the same bytes on every rank."""

    def begin_round(self) -> None:
        """Make the present weights readable; raise WrongState when they are not where the manifest says."""

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of one of this rank's spans: 1-D [span.count], any device.

        Their dtype may differ from the manifest's; whoever sends them casts (see `as_sent`).
        """

    def end_round(self) -> None:
        """The views handed out by `read` are no longer used."""


class DenseSource:
    """Whole parameters, as with ZeRO stages 0 to 2 or no DeepSpeed at all: rank 0 sends everything."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        rank_count: int = 1,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        """Describe the parameters of `model`.

        Args:
            model: a Hugging Face model; its parameters' names are the checkpoint's.
            rank_count: trainer ranks; all but rank 0 hold empty shards.
            dtype: type to send; None: each parameter's own.
            rename: names of the checkpoint, where the parameters' are others; None: they are the same.

        Raises:
            WrongState: the model keeps state besides parameters, which an update would miss.
            InvalidInput: a dtype that cannot be sent.
        """
        if rank_count < 1:
            raise InvalidInput(f"rank_count is {rank_count}; it must be at least 1")
        self._parameters = list(named_weights(model, rename))
        tensors, spans, offset = [], [], 0
        for index, (name, parameter) in enumerate(self._parameters):
            spec = TensorSpec(name=name, dtype=dtype_name(dtype or parameter.dtype, name), shape=tuple(parameter.shape))
            tensors.append(spec)
            spans.append(Span(tensor=index, start=0, count=spec.count, rank=0, offset=offset))
            offset = aligned(offset + spec.byte_count)
        self._dtypes = [parameter.dtype for _, parameter in self._parameters]
        self._manifest = Manifest(
            tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(offset, *([0] * (rank_count - 1)))
        )

    def manifest(self) -> Manifest:
        """Return the layout."""
        return self._manifest

    def begin_round(self) -> None:
        """Check that every parameter still has its shape and type.

        Raises:
            WrongState: names the parameter that changed.
        """
        for spec, dtype, (name, parameter) in zip(self._manifest.tensors, self._dtypes, self._parameters, strict=True):
            if tuple(parameter.shape) != spec.shape or parameter.dtype != dtype:
                raise WrongState(
                    f"parameter {name} is now {parameter.dtype} {tuple(parameter.shape)}, the manifest was made for "
                    f"{dtype} {spec.shape}; make a new source"
                )
        synchronize(self._parameters[0][1].device)

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of a span."""
        flat = self._parameters[span.tensor][1].detach().reshape(-1)
        return flat[span.start : span.start + span.count]

    def end_round(self) -> None:
        """Nothing was taken."""


def named_weights(model: torch.nn.Module, rename: Rename | None = None) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield name and parameter of all that is sent, tied ones once.

    Raises:
        WrongState: the model has persistent buffers, which are part of a checkpoint but are not sent.
    """
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                raise WrongState(
                    f"{type(model).__name__} keeps a persistent buffer {module_name}.{name}; only models whose whole "
                    f"state is in parameters can be sent"
                )
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if sent := rename(name) if rename else name:
            yield sent, parameter


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return a dtype as the manifest writes it; `name` is the tensor, for the message."""
    text = str(dtype).removeprefix(_DTYPE_PREFIX)
    if text not in ITEM_BYTES:
        raise InvalidInput(f"tensor {name} would be sent as {text}; known types are {sorted(ITEM_BYTES)}: give one")
    return text


def as_sent(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return elements in the type they are sent in; a view when they already have it."""
    return values if values.dtype == dtype else values.to(dtype)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all that was asked of it, such as the optimizer's step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
