"""A Hugging Face causal LM that returns log-probabilities of given tokens instead of logits.

`install` changes a model in place: its output embedding becomes a `LogprobHead`, which holds
the same parameters under the same names, and `model(token_ids, rows, targets, temperatures)`
runs the body once and the head on the asked rows alone. The head stays a module of the model
because ZeRO-3 gathers the parameters of a module when that module is called.
"""

from __future__ import annotations

import types
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.errors import ConfigError
from fourfold.nn.batching import TokenBatch
from fourfold.nn.logprobs import token_logprobs

_PROBE_TOKENS: Final = 8
# Largest difference to the model's own logits that rounding explains: nats, and units in the last place of a logit.
_PROBE_NATS: Final = 1e-3
_PROBE_ULPS: Final = 4


class LogprobHead(nn.Module):
    """The output embedding. Called with targets it returns log-probabilities, without them logits."""

    def __init__(self, linear: nn.Module, softcap: float) -> None:
        """Take over the parameters of `linear`."""
        super().__init__()
        self.weight: nn.Parameter = linear.weight  # type: ignore[assignment]  # [v, h]
        self.bias: nn.Parameter | None = getattr(linear, "bias", None)  # [v]
        self.softcap = softcap

    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperatures: Tensor | None = None) -> Tensor:
        """Return [k] float32 log-probabilities of `targets` at the rows `hidden` [k, h]; or logits [..., v]."""
        if targets is None or temperatures is None:
            return functional.linear(hidden, self.weight, self.bias)
        return token_logprobs(hidden, self.weight, self.bias, targets, temperatures, softcap=self.softcap)


def install(model: Any) -> None:
    """Make `model` return log-probabilities, and check them against its own logits on a few tokens.

    Args:
        model: a `PreTrainedModel` with an output embedding, whole in memory.

    Raises:
        ConfigError: the architecture makes its logits in a way that is not known here.
    """
    name = type(model).__name__
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"the architecture {name} has no plain output embedding behind a model body; "
            f"use a decoder-only language model such as LlamaForCausalLM or Qwen2ForCausalLM"
        )
    device = linear.weight.device
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] % linear.out_features
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).squeeze(1)
        model.set_output_embeddings(LogprobHead(linear, _softcap(model)))
        model.forward = types.MethodType(_forward, model)
        rows = torch.arange(_PROBE_TOKENS - 1, device=device)
        found = model(ids, rows, ids[0, 1:], torch.ones(_PROBE_TOKENS - 1, device=device))
    difference = float((found - expected).abs().max())
    rounding = _PROBE_ULPS * torch.finfo(linear.weight.dtype).eps * float(logits.abs().max())
    if not difference <= max(rounding, _PROBE_NATS):
        raise ConfigError(
            f"the architecture {name} makes its logits in a way that is not known here: log-probabilities differ by "
            f"{difference:.3g} nats from its own; use another architecture, or teach fourfold/nn/forward.py this one"
        )


def batch_arguments(batch: TokenBatch, device: torch.device) -> dict[str, Tensor]:
    """Return `batch` as the arguments of an installed model, on its device."""
    return {
        "token_ids": torch.from_numpy(batch.token_ids).to(device, torch.int64),
        "rows": torch.from_numpy(batch.rows).to(device),
        "targets": torch.from_numpy(batch.targets).to(device, torch.int64),
        "temperatures": torch.from_numpy(batch.temperatures).to(device),
    }


def disable_dropout(model: nn.Module) -> None:
    """Switch every dropout off: log-probabilities of one policy must not depend on chance."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _forward(self: Any, token_ids: Tensor, rows: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Return log-probabilities [k] float32.

    Args:
        self: the model.
        token_ids: [b, t], padded on the right. No attention mask: in a causal model the
            padding is after everything that is read.
        rows: [k], index into the flattened b * t positions.
        targets: [k] token ids.
        temperatures: [k].
    """
    hidden = self.base_model(input_ids=token_ids, use_cache=False)[0]
    chosen = hidden.flatten(0, 1).index_select(0, rows)
    logprobs: Tensor = self.get_output_embeddings()(chosen, targets, temperatures)
    return logprobs


def _softcap(model: Any) -> float:
    config = model.config.get_text_config()
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)
