"""What a step computes, in FLOP of the model: nothing that is computed again counts.

    update      6 N T + 6 L H sum(t^2)     forward and backward
    reference   2 N T + 2 L H sum(t^2)     forward
    sampling    2 N T + 2 L H sum(t^2)     forward, token by token

N are the parameters, a tied matrix once; T all tokens of the step, prompts included; t those of one sample; L layers
and H the width of the attention, under a causal mask (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold_bench.shapes import SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOP of one step, by phase."""

    update: float
    reference: float
    sampling: float

    @property
    def whole(self) -> float:
        """All of it."""
        return self.update + self.reference + self.sampling


def step_flops(shape: str, *, samples: int, tokens: float, reference: bool) -> StepFlops:
    """Return what a step of samples of one length computes.

    Args:
        shape: of the model.
        samples: of the step.
        tokens: of each, prompt included.
        reference: whether there is one.
    """
    config = SHAPES[shape]
    width = config["num_hidden_layers"] * config["hidden_size"]  # heads times head size is the hidden size here
    forward = samples * (2.0 * parameters(config) * tokens + 2.0 * width * tokens * tokens)
    return StepFlops(update=3 * forward, reference=forward if reference else 0.0, sampling=forward)


def parameters(config: dict[str, Any]) -> int:
    """Return the parameters of a Llama or Qwen2 by its configuration; a tied matrix counts once."""
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    biases = hidden + 2 * keys if config["model_type"] == "qwen2" else 0
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden + biases
    matrices = 1 if config["tie_word_embeddings"] else 2
    return int(layers * layer + matrices * config["vocab_size"] * hidden + hidden)
