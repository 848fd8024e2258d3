"""Reads weights from whole parameters: ZeRO stages 0 to 2, or no DeepSpeed at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fourfold.errors import InvalidInput, WrongState
from fourfold.weights.manifest import Manifest, Span, TensorSpec, layout_of_rank_0
from fourfold.weights.source.base import dtype_name, synchronize, torch_dtype
from fourfold.weights.source.fused_params import ParameterSlice, Rename, sent_parameters


class DenseSource:
    """Whole parameters. Every rank holds all of them, so rank 0 sends everything."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        rank_count: int = 1,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        """Describe the parameters of `model`, a Hugging Face model.

        Args:
            model: its parameters' names are the checkpoint's.
            rank_count: trainer ranks; all but rank 0 hold empty shards.
            dtype: type to send; None: each parameter's own.
            rename: names of the checkpoint where they differ from the parameters'.

        Raises:
            WrongState: the model keeps state outside of its parameters, which an update would miss.
        """
        if rank_count < 1:
            raise InvalidInput(f"rank_count is {rank_count}; it must be at least 1")
        sent = sent_parameters(model, rename)
        self._parameters = [(name, parameter) for name, parameter, _ in sent]
        self._states = [_state(p) for _, p in self._parameters]
        self._slices: list[tuple[str, torch.Tensor, ParameterSlice]] = []  # of each tensor
        tensors: list[TensorSpec] = []
        for name, parameter, slices in sent:
            for part in slices:
                kind = dtype_name(dtype or parameter.dtype, part.name)
                tensors.append(TensorSpec(name=part.name, dtype=kind, shape=part.shape))
                self._slices.append((name, parameter, part))
        self._manifest = layout_of_rank_0(tensors, rank_count)

    @property
    def slices(self) -> Sequence[tuple[str, ParameterSlice]]:
        return [(name, part) for name, _, part in self._slices]

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        """Raise WrongState unless every parameter still has its shape, dtype and address."""
        for before, (name, parameter) in zip(self._states, self._parameters, strict=True):
            if _state(parameter) != before:
                raise WrongState(
                    f"parameter {name} is now {_state(parameter)}, the manifest was made for {before}; "
                    f"make a new source"
                )
        synchronize(self._parameters[0][1].device)

    def read(self, span: Span) -> torch.Tensor:
        _, parameter, part = self._slices[span.tensor]
        flat = parameter.detach().reshape(-1)
        return flat[part.start + span.start : part.start + span.stop]

    def is_view(self, span: Span) -> bool:
        _, parameter, _ = self._slices[span.tensor]
        return parameter.is_contiguous() and parameter.dtype == torch_dtype(self._manifest.tensors[span.tensor].dtype)

    def end_round(self) -> None:
        """Do nothing: `read` allocates nothing."""


def _state(parameter: torch.Tensor) -> str:
    """Describe what the manifest and exported addresses depend on."""
    return f"{parameter.dtype} {tuple(parameter.shape)} at {parameter.data_ptr():#x} of {parameter.device}"
