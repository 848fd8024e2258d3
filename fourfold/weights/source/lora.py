"""Sends LoRA adapters: alone, or merged into the weights, so that engines get W + scale * B A under the base's names.

    W [out, in] base weight, frozen    A [r, in], B [out, r] adapter (Hu et al. 2021, arXiv 2106.09685)   scale a number

The sum is computed span by span when it is read, never in place: the base weights stay as they are for the next round.
It is computed in float32 from the values that the forward pass uses, and rounded once, to the dtype sent. A span of a
ZeRO-3 partition may begin and end inside a row; whole rows are computed and cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fourfold.errors import WrongState
from fourfold.weights.manifest import AdapterSpec, Manifest, Span, TensorSpec, layout_of_rank_0
from fourfold.weights.source.base import ParameterSource, dtype_name, synchronize, torch_dtype
from fourfold.weights.source.fused_params import whole_shape

# Elements whose float32 copies exist at the same time: 64 MiB each.
_CHUNK_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    a: Any  # A [r, in], a parameter; whole on this rank when it is read
    b: Any  # B [out, r], likewise
    scale: float


@torch.no_grad()
def merged(weight: Tensor, adapter: Adapter, *, start: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Return elements of W + scale * B A, a new tensor.

    Args:
        weight: [n] elements of the flattened W, from element `start` on.
        adapter: the adapter of W.
        start: index of the first element in the whole W.
        dtype: dtype of the result; None: that of `weight`.
    """
    a = adapter.a.detach().float()
    width = a.shape[1]
    result = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=weight.device)
    rows = max(1, _CHUNK_ELEMENTS // width)
    end = start + len(weight)
    for row in range(start // width, -(-end // width), rows):
        # Flat elements [begin, stop) of W: the part of the span in these rows.
        begin, stop = max(start, row * width), min(end, (row + rows) * width)
        delta = (adapter.b.detach()[row : -(-stop // width)].float() @ a).mul_(adapter.scale).view(-1)
        delta = delta[begin - row * width : stop - row * width]
        result[begin - start : stop - start] = weight[begin - start : stop - start] + delta  # float32 by promotion
    return result


class AdapterSource:
    """Adapters alone, for engines that add them to base weights of their own. Rank 0 sends everything."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        spec: AdapterSpec,
        *,
        rank_count: int,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """Describe adapters.

        Args:
            parameters: A [r, in] and B [out, r] of each layer, under the names that PEFT writes.
            spec: rank, scale and base of all of them.
            rank_count: trainer ranks; all but rank 0 hold empty shards.
            gather: collective that makes all adapters whole on this rank, called here first. None: they are so already.
        """
        self._parameters, self._gather = list(parameters.values()), gather
        tensors = [
            TensorSpec(name=name, dtype=dtype_name(one.dtype, name), shape=whole_shape(one))
            for name, one in parameters.items()
        ]
        self._manifest = layout_of_rank_0(tensors, rank_count, adapter=spec)
        if gather:
            gather()

    def manifest(self) -> Manifest:
        return self._manifest

    def begin_round(self) -> None:
        """Gather. Raises WrongState: an adapter is not whole here, or has another shape or dtype than at first."""
        if self._gather:
            self._gather()
        for spec, one in zip(self._manifest.tensors, self._parameters, strict=True):
            if tuple(one.shape) != spec.shape or one.dtype != torch_dtype(spec.dtype):
                raise WrongState(
                    f"{spec.name} is {one.dtype} {tuple(one.shape)} on this rank, the manifest was made for "
                    f"{spec.dtype} {spec.shape}; gather it, or make a new source"
                )
        synchronize(self._parameters[0].device)

    def read(self, span: Span) -> Tensor:
        flat: Tensor = self._parameters[span.tensor].detach().reshape(-1)
        return flat[span.start : span.stop]

    def is_view(self, span: Span) -> bool:
        """Return False: ZeRO-3 may gather an adapter to another address, and a copy of one costs little."""
        return False

    def end_round(self) -> None:
        """Do nothing: `read` allocates nothing."""


class MergedSource:
    """Adds adapters to the weights of another source."""

    def __init__(
        self, base: ParameterSource, adapters: Mapping[str, Adapter], *, gather: Callable[[], None] | None = None
    ) -> None:
        """Wrap a source.

        Args:
            base: source of the base weights, under the names that are sent.
            adapters: by the name that their parameter has in the model without adapters.
            gather: collective that makes all adapters whole on this rank, called here first. None: they are so already.

        Raises:
            WrongState: an adapter belongs to no matrix that is sent.
        """
        self._base, self._gather = base, gather
        _check(adapters, base)
        self._adapters = [adapters.get(name) for name, _ in base.slices]
        self._starts = [part.start for _, part in base.slices]
        self._dtypes = [torch_dtype(spec.dtype) for spec in base.manifest().tensors]
        self._last: tuple[Span, Tensor] | None = None
        if gather:
            gather()

    def manifest(self) -> Manifest:
        return self._base.manifest()

    def begin_round(self) -> None:
        if self._gather:
            self._gather()
        self._base.begin_round()

    def read(self, span: Span) -> Tensor:
        """Return the elements of a span, computed once even if a transport reads the span in parts."""
        adapter = self._adapters[span.tensor]
        if adapter is None:
            return self._base.read(span)
        if self._last is None or self._last[0] != span:
            self._last = None  # releases its memory before the next one is allocated
            weight, start = self._base.read(span), self._starts[span.tensor] + span.start
            self._last = span, merged(weight, adapter, start=start, dtype=self._dtypes[span.tensor])
        return self._last[1]

    def is_view(self, span: Span) -> bool:
        return self._adapters[span.tensor] is None and self._base.is_view(span)

    def end_round(self) -> None:
        self._last = None
        self._base.end_round()


def _check(adapters: Mapping[str, Adapter], base: ParameterSource) -> None:
    """Check that every adapter belongs to a whole matrix, whose rows a checkpoint may store as several tensors."""
    sent: dict[str, list[tuple[int, ...]]] = {}
    for name, part in base.slices:
        sent.setdefault(name, []).append(part.shape)
    for name, adapter in adapters.items():
        height, width = whole_shape(adapter.b)[0], whole_shape(adapter.a)[1]
        shapes = sent.get(name, [])
        if any(len(shape) != 2 or shape[1] != width for shape in shapes) or sum(s[0] for s in shapes) != height:
            raise WrongState(
                f"the adapter of {name} changes a matrix {(height, width)}; of it {shapes or 'nothing'} is sent: "
                f"let trainer.lora.target_modules name linear layers alone"
            )
