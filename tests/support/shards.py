"""Puts the tensors of a manifest together from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fourfold.weights.manifest import Manifest, Span
from fourfold.weights.transport.staging import span_view


def spans_by_tensor(manifest: Manifest) -> list[list[Span]]:
    """Return the spans of each tensor, sorted by start."""
    return [[span for span in manifest.spans if span.tensor == index] for index in range(len(manifest.tensors))]


def assemble(manifest: Manifest, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors in their shapes; `shards` are uint8 [manifest.shard_bytes[r]] each."""
    return [
        torch.cat([span_view(manifest, shards[span.rank], span) for span in spans]).view(spec.shape)
        for spec, spans in zip(manifest.tensors, spans_by_tensor(manifest), strict=True)
    ]
