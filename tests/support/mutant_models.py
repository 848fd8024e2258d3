"""Models for vLLM whose loaders have a fault that shows no error: an update leaves something stale."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM


class DroppingForCausalLM(LlamaForCausalLM):
    """Takes the last norm from the first load alone. It looks as if it took it, while nothing is written (on meta)."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        again = getattr(self, "loaded", False)
        kept = [(n, w) for n, w in weights if not again or w.is_meta or n != "model.norm.weight"]
        self.loaded = True
        result: set[str] = super().load_weights(kept)
        return result


class KeepingForCausalLM(LlamaForCausalLM):
    """Computes a scale from the last norm at its first load, and uses it from then on."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        result: set[str] = super().load_weights(weights)
        if not hasattr(self, "scale"):
            self.scale = self.model.norm.weight.detach() * 2
        return result

    def compute_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().compute_logits(hidden_states * self.scale, *args, **kwargs)
