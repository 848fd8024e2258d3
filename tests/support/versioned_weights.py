"""Weights of many versions of one model, and the log-probabilities that tokens of these versions must have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.sample import Sample

# Standard deviation of the factors: texts stay texts, and log-probabilities of two versions differ by far more than
# those of two engines. A factor for each element would take seconds.
_SPREAD: Final = 0.1


class VersionedWeights:
    """Float32 weights of a model folder, which are version 0, and further versions: each parameter times a factor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base: dict[str, Any] = dict(self._load().named_parameters())
        self._models: dict[int, Any] = {}

    def write(self, model: Any, version: int) -> None:
        """Write the weights of a version into a model of the folder; its parameters stay where they are."""
        import torch

        factors = 1 + _SPREAD * torch.randn(len(self._base), generator=torch.Generator().manual_seed(version))
        with torch.no_grad():
            for factor, (name, parameter) in zip(factors, model.named_parameters(), strict=True):
                parameter.copy_(self._base[name] * (factor if version else 1))

    def models(self, versions: Sequence[int]) -> list[Any]:
        """Return models of some versions; only those stay in memory."""
        self._models = {version: model for version, model in self._models.items() if version in versions}
        for version in versions:
            if version not in self._models:
                self._models[version] = self._load()
                self.write(self._models[version], version)
        return [self._models[version] for version in versions]

    def _load(self) -> Any:
        import torch
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """The tokens `begin` to `end` of a segment, which were sampled in one turn."""

    segment: Sample
    begin: int
    end: int
    spans: tuple[tuple[int, int], ...]
    """Versions, and the number of tokens of each."""

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.spans]


def turns_of(segment: Sample) -> Iterator[SampledTurn]:
    """Yield the turns of a segment."""
    versions = np.repeat(
        [span.policy_version for span in segment.version_spans], [span.token_count for span in segment.version_spans]
    )
    edges = np.flatnonzero(np.diff(np.concatenate(([0], segment.action_mask, [0]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        spans = tuple(sorted(Counter(versions[begin:end].tolist()).items()))
        yield SampledTurn(segment=segment, begin=begin, end=end, spans=spans)


def logprob_error(turn: SampledTurn, models: Sequence[Any]) -> float:
    """Return the largest difference of a turn's log-probabilities from those of a plain forward pass.

    Args:
        turn: of samples that kept their keys and values over an update.
        models: one for each span.
    """
    ends = np.cumsum([count for _, count in turn.spans]) + turn.begin - 1
    # The keys and values of a token are computed when the next one is sampled.
    expected = forward(list(zip(ends.tolist(), models, strict=True)), turn.segment.token_ids[: turn.end].tolist())
    given = turn.segment.behavior_logprobs[turn.begin : turn.end]
    return float(np.abs(given - expected[turn.begin - 1 :]).max())


def forward(pieces: Sequence[tuple[int, Any]], ids: list[int]) -> Any:
    """Return the log-probability of each id after the first; each model computes the inputs up to its index."""
    import torch
    from transformers import DynamicCache

    cache, at, logits = DynamicCache(), 0, []
    with torch.no_grad():
        for end, model in pieces:
            logits.append(model(torch.tensor([ids[at:end]]), past_key_values=cache, use_cache=True).logits[0])
            at = end
    assert at == len(ids) - 1
    rows = torch.log_softmax(torch.cat(logits).double(), -1)
    return rows[torch.arange(at), torch.tensor(ids[1:])].numpy()
