"""Runs the trainer's end of updates with LoRA adapters: transformers and PEFT in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from fourfold.weights.base_fingerprint import fingerprint, sampled
from fourfold.weights.manifest import AdapterSpec, Manifest, Span
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from tests.support.weight_engine import Output


class AdapterSource(DenseSource):
    """Implements `WeightSource` with the adapters of a PEFT model."""

    def __init__(self, model: Any, adapter: AdapterSpec) -> None:
        """`model`: of `peft.get_peft_model`."""
        super().__init__(model, rename=_rename)
        self._adapters = replace(super().manifest(), adapter=adapter)
        self.dies_at = -1
        """Index of the tensor at which a read fails; -1: none does."""

    def manifest(self) -> Manifest:
        return self._adapters

    def read(self, span: Span) -> Tensor:
        if span.tensor == self.dies_at:
            raise RuntimeError("the trainer died")
        return super().read(span)


class AdapterTrainer:
    """A model with adapters on some layers. They add nothing before the first `step`."""

    def __init__(self, folder: Path, *, targets: Sequence[str], rank: int = 4, scale: float = 2.0) -> None:
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        own = {name: (tuple(p.shape), p.detach().reshape(-1)) for name, p in base.named_parameters()}
        identity = fingerprint({name: (shape, flat[sampled(len(flat))]) for name, (shape, flat) in own.items()})
        config = peft.LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=list(targets))  # type: ignore[arg-type]
        self.model: Any = peft.get_peft_model(base, config).eval()
        self.source = AdapterSource(self.model, AdapterSpec(rank=rank, scale=scale, base=identity))
        self.sender = WeightSender(self.source, rank=0, rank_count=1)
        self._random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self) -> None:
        """Change all adapters, so much that the log-probabilities change by whole nats."""
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=self._random) / parameter.shape[1] ** 0.5)

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, after those before it."""
        ids = torch.tensor([list(tokens)])
        scores = self.model(ids).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def distance(self, prompts: Sequence[Sequence[int]], outputs: Output) -> float:
        """Return the largest difference of a sampled token's log-probability to that of PEFT, in nats."""
        return max(
            abs(one - two)
            for prompt, (tokens, logprobs) in zip(prompts, outputs, strict=True)
            for one, two in zip(logprobs, self.logprobs([*prompt, *tokens])[len(prompt) - 1 :], strict=True)
        )


def _rename(name: str) -> str:
    return name.replace(".default.", ".") if ".lora_" in name else ""
