"""Where the trainer's weights are: the protocol of a source, and the source for whole parameters.

A source belongs to one trainer rank. Its manifest is the same on all ranks. It copies
nothing: `read` hands out views of the parameters, which stay as they are from `begin_round`
to `end_round`. A parameter may be several tensors of the checkpoint (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from fourfold.errors import InvalidInput, WrongState
from fourfold.weights.manifest import ITEM_BYTES, Manifest, Span, TensorSpec, aligned
from fourfold.weights.source.fused_params import Piece, Rename, checkpoint_pieces

_DTYPE_PREFIX: Final = "torch."


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

    def is_view(self, span: Span) -> bool:
        """Return whether `read` gives the parameter's own memory, as it is sent and at one address in every round.

        Then it can be sent from where it is, without a copy.
        """

    def end_round(self) -> None:
        """The views handed out by `read` are no longer used."""


class ParameterSource(WeightSource, Protocol):
    """Weights as they lie in parameters."""

    @property
    def owners(self) -> Sequence[tuple[str, Piece]]:
        """The parameter that each tensor of the manifest is part of, and which part."""


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
        self._parameters = sent_parameters(model, rename)
        self._states = [_state(p) for _, p, _ in self._parameters]
        self._places: list[tuple[torch.Tensor, Piece]] = []
        """Of each tensor."""
        tensors: list[TensorSpec] = []
        spans: list[Span] = []
        offset = 0
        for _, parameter, pieces in self._parameters:
            for piece in pieces:
                spec = TensorSpec(
                    name=piece.name, dtype=dtype_name(dtype or parameter.dtype, piece.name), shape=piece.shape
                )
                spans.append(Span(tensor=len(tensors), start=0, count=spec.count, rank=0, offset=offset))
                tensors.append(spec)
                self._places.append((parameter, piece))
                offset = aligned(offset + spec.byte_count)
        self._manifest = Manifest(
            tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(offset, *([0] * (rank_count - 1)))
        )

    @property
    def owners(self) -> Sequence[tuple[str, Piece]]:
        """The parameter that each tensor is part of, and which part."""
        return [(name, piece) for name, _, pieces in self._parameters for piece in pieces]

    def manifest(self) -> Manifest:
        """Return the layout."""
        return self._manifest

    def begin_round(self) -> None:
        """Check that every parameter still has its shape, type and place.

        Raises:
            WrongState: names the parameter that changed.
        """
        for before, (name, parameter, _) in zip(self._states, self._parameters, strict=True):
            if _state(parameter) != before:
                raise WrongState(
                    f"parameter {name} is now {_state(parameter)}, the manifest was made for {before}; "
                    f"make a new source"
                )
        synchronize(self._parameters[0][1].device)

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of a span."""
        parameter, piece = self._places[span.tensor]
        flat = parameter.detach().reshape(-1)
        return flat[piece.start + span.start : piece.start + span.start + span.count]

    def is_view(self, span: Span) -> bool:
        """Return whether the parameter is contiguous and of the type that is sent."""
        parameter, _ = self._places[span.tensor]
        return parameter.is_contiguous() and parameter.dtype == sent_dtype(self._manifest, span)

    def end_round(self) -> None:
        """Nothing was taken."""


def _state(parameter: torch.Tensor) -> str:
    """Return in words what a manifest and the addresses that were given away depend on."""
    return f"{parameter.dtype} {tuple(parameter.shape)} at {parameter.data_ptr():#x} of {parameter.device}"


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


def sent_parameters(model: torch.nn.Module, rename: Rename | None = None) -> list[tuple[str, Any, tuple[Piece, ...]]]:
    """Return name and parameter of all that is sent, and the tensors of the checkpoint that each is.

    Raises:
        WrongState: as `named_weights` and `checkpoint_pieces` do.
    """
    named = list(named_weights(model, rename))
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named}
    pieces = checkpoint_pieces(model, shapes)
    return [(name, parameter, pieces[name]) for name, parameter in named]


def sent_dtype(manifest: Manifest, span: Span) -> torch.dtype:
    """Return the type that a span is sent in."""
    dtype: torch.dtype = getattr(torch, manifest.tensors[span.tensor].dtype)
    return dtype


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
