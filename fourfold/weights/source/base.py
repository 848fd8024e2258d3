"""Defines the interface of a source of weights, and helpers that sources share.

A source belongs to one trainer rank. Its manifest is the same on all ranks. A source copies nothing where it can avoid
it: `read` returns views of the parameters, which must not change between `begin_round` and `end_round`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fourfold.errors import InvalidInput
from fourfold.weights.manifest import ITEM_BYTES, Manifest, Span
from fourfold.weights.source.fused_params import ParameterSlice


class WeightSource(Protocol):
    """The weights of one trainer rank."""

    def manifest(self) -> Manifest:
        """Return the layout: the same object at every call, the same bytes on every rank."""

    def begin_round(self) -> None:
        """Make the present weights readable. Raises WrongState: the weights are not where the manifest places them."""

    def read(self, span: Span) -> torch.Tensor:
        """Return the elements of one of this rank's spans: 1-D [span.count], on any device. The sender casts it."""

    def is_view(self, span: Span) -> bool:
        """Return whether `read` gives the parameter's own memory, in the dtype sent, at the same address every round.

        Such a span is sent without a copy.
        """

    def end_round(self) -> None:
        """Release the views that `read` returned."""


class ParameterSource(WeightSource, Protocol):
    """A source whose tensors are slices of a model's parameters."""

    @property
    def slices(self) -> Sequence[tuple[str, ParameterSlice]]:
        """For each tensor of the manifest, the name of its parameter and the slice of it."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that a manifest calls `name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the name of `dtype` in a manifest. Raises InvalidInput: weights of this dtype cannot be sent."""
    text = str(dtype).removeprefix("torch.")
    if text not in ITEM_BYTES:
        raise InvalidInput(f"tensor {tensor} would be sent as {text}; set dtype to one of {sorted(ITEM_BYTES)}")
    return text


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its enqueued work, such as the optimizer's step; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
