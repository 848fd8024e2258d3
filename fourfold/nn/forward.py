"""Makes a Hugging Face causal LM return log-probabilities or values of packed samples instead of logits.

`install` and `install_values` change a model in place. They replace its attention by attention.py and its output
embedding by a head that works on the target rows only:

    install         model(token_ids, lengths, rows, targets, temperatures, entropy) -> (logprobs, entropies or None)
    install_values  model(token_ids, lengths, rows) -> values

Both then compare the results with those of the unchanged architecture for two short segments, one per row. A token that
sees the other segment, or has another position, is detected there. The heads are modules of the model because ZeRO-3
gathers the parameters of a module when that module is called. After `share_rows`, several ranks call the model with the
same row and compute a slice each (sequence.py).

Legend: t tokens of all samples, s samples, k target rows, h hidden size, v vocabulary size.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.errors import ConfigError
from fourfold.nn import attention, sequence
from fourfold.nn.batching import TokenBatch
from fourfold.nn.logprobs import token_energies, token_logprobs, top_logprobs
from fourfold.nn.sequence import Exchange, RowSlice, to_device

# Tokens of the two segments of the comparison.
_PROBE_LENGTHS: Final = (5, 8)
# Largest difference to the model's own log-probabilities that rounding explains: nats, and ulps of the largest logit.
_PROBE_NATS: Final = 1e-3
_PROBE_ULPS: Final = 4
# The same for hidden states: longest difference over the mean norm of a state, absolute and in ulps.
_PROBE_SHARE: Final = 1e-3
_PROBE_SHARE_ULPS: Final = 16


class LogprobHead(nn.Module):
    """The output embedding `linear`, which computes log-probabilities instead of logits."""

    def __init__(self, linear: nn.Module, softcap: float, *, float32_logits: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = linear.weight  # type: ignore[assignment]  # [v, h]
        self.bias: nn.Parameter | None = getattr(linear, "bias", None)  # [v]
        self.softcap, self.float32_logits = softcap, float32_logits

    def forward(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool, energy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities of `targets`, and entropies, energies or None, from hidden states [k, h]."""
        arguments = hidden, self.weight, self.bias, targets, temperatures
        if energy:
            return token_energies(*arguments, softcap=self.softcap, float32_logits=self.float32_logits)
        return token_logprobs(*arguments, softcap=self.softcap, entropy=entropy, float32_logits=self.float32_logits)


class ValueHead(nn.Linear):
    """Maps a hidden state to one number."""

    def __init__(self, embedding: nn.Linear, weight: Tensor | None) -> None:
        """Begin with `weight` [1, h] or zeros, on the device and in the dtype of an output embedding, h wide."""
        like = embedding.weight
        super().__init__(embedding.in_features, 1, bias=False, device=like.device, dtype=like.dtype)
        with torch.no_grad():
            self.weight.zero_() if weight is None else self.weight.copy_(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [k] values from hidden states [k, h]; float32, or float64 from float64."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return functional.linear(hidden.to(wide), self.weight.to(wide)).squeeze(1)


def install(model: Any, *, float32_logits: bool = False) -> None:
    """Make `model` return log-probabilities, and compare them with its own logits on a few tokens.

    `model` is a `PreTrainedModel` with an output embedding; its passes must work, so it is whole or gathered for them.
    `float32_logits`: as for `token_logprobs`.

    Raises ConfigError: samples of this architecture cannot be packed, or it computes its logits in an unknown way.
    """
    linear = _output_embedding(model)
    ids = _probe_ids(linear)
    with torch.no_grad():
        model.set_attn_implementation("eager")  # the reference: other implementations omit parts, such as softcaps
        logits = [rows.float() for rows in _unpad(model(input_ids=ids, use_cache=False).logits)]
        own = torch.cat([torch.log_softmax(z[:-1], -1) for z in logits])
        _replace_attention(model)
        model.set_output_embeddings(LogprobHead(linear, _softcap(model), float32_logits=float32_logits))
        model.forward = types.MethodType(_forward_logprobs, model)
        probe = _probe_arguments(ids)
        targets = probe["token_ids"][probe["rows"] + 1]
        found, _ = model(**probe, targets=targets, temperatures=torch.ones(len(targets), device=ids.device))
    difference = float((found - own.gather(1, targets[:, None]).squeeze(1)).abs().max())
    largest = max(float(z.abs().max()) for z in logits)
    rounding = _PROBE_ULPS * torch.finfo(linear.weight.dtype).eps * largest
    if not difference <= max(rounding, _PROBE_NATS):
        raise ConfigError(
            f"the architecture {type(model).__name__} computes its logits in an unknown way: with packed samples, "
            f"log-probabilities differ by {difference:.3g} nats; use another architecture, or add this one to "
            f"fourfold/nn/forward.py"
        )


def install_values(model: Any, weight: Tensor | None = None) -> None:
    """Make `model` return one value per row, and compare its hidden states with its own on a few tokens.

    `score` replaces the output embedding, as in a ...ForSequenceClassification. Its `weight` is [1, h]; None: zeros, so
    that every value begins at 0.

    Raises ConfigError: samples of this architecture cannot be packed, or `weight` has another size.
    """
    linear = _output_embedding(model)
    if weight is not None and weight.shape != (1, linear.in_features):
        raise ConfigError(
            f"the value head has shape {tuple(weight.shape)}, but {type(model).__name__} needs (1, "
            f"{linear.in_features}); use a reward model of the same base model, with one label"
        )
    ids = _probe_ids(linear)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        own = torch.cat([rows[:-1] for rows in _unpad(model.base_model(input_ids=ids, use_cache=False)[0])]).float()
        _replace_attention(model)
        name = next(name for name, module in model.named_children() if module is linear)
        delattr(model, name)
        model.score = ValueHead(linear, weight)
        model.forward = types.MethodType(_forward_values, model)
        probe = _probe_arguments(ids)
        found = _asked_states(
            model, probe["token_ids"], RowSlice(None, probe["lengths"], probe["rows"], ids.device)
        ).float()
        model(**probe)
    share = float((found - own).norm(dim=1).max() / own.norm(dim=1).mean())
    if not share <= max(_PROBE_SHARE_ULPS * torch.finfo(linear.weight.dtype).eps, _PROBE_SHARE):
        raise ConfigError(
            f"the architecture {type(model).__name__} computes its hidden states in an unknown way: with packed "
            f"samples they differ by {share:.3g} of their norm; use another architecture, or add this one to "
            f"fourfold/nn/forward.py"
        )


def share_rows(model: Any, exchange: Exchange) -> None:
    """Share every row among the ranks of `exchange` from now on, after `install`.

    Raises ConfigError: so many ranks cannot share a row of this architecture.
    """
    sequence.check(model, exchange.size)
    model.exchange = exchange


def read_value_head(folder: Path) -> Tensor | None:
    """Return `score.weight` [1, h] from the safetensors files of a reward model, or None if it has none."""
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            if "score.weight" in file.keys():  # noqa: SIM118
                weight: Tensor = file.get_tensor("score.weight")
                return weight
    return None


def batch_arguments(batch: TokenBatch, device: torch.device) -> dict[str, Tensor]:
    """Return `batch` as the arguments of a model after `install`, on its device."""
    return {
        **value_arguments(batch, device),
        "targets": to_device(batch.targets, device, torch.int64),
        "temperatures": to_device(batch.temperatures, device),
    }


def value_arguments(batch: TokenBatch, device: torch.device) -> dict[str, Tensor]:
    """Return `batch` as the arguments of a model after `install_values`. Lengths and rows stay on the CPU."""
    return {
        "token_ids": to_device(batch.token_ids, device, torch.int64),
        "lengths": torch.from_numpy(batch.lengths),
        "rows": torch.from_numpy(batch.rows),
    }


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: log-probabilities of one policy must not be random."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _forward_logprobs(
    self: Any,
    token_ids: Tensor,
    lengths: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    entropy: bool = False,
    energy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of `targets`, and entropies or energies [k] or None, float32, as a method of the model.

    `token_ids` is [t], `lengths` [s], the others are [k]: see `TokenBatch`; `targets` may be [k, m]. Lengths and rows
    are on the CPU, because reading them from a GPU would wait for it.
    """
    own = RowSlice(getattr(self, "exchange", None), lengths, rows, token_ids.device)
    states = _asked_states(self, token_ids, own)
    head = self.get_output_embeddings()
    logprobs, more = head(states, own.asked(targets), own.asked(temperatures), entropy, energy)
    return own.gather(logprobs), None if more is None else own.gather(more)


def top(
    model: Any, batch: TokenBatch, device: torch.device, *, count: int, ids_below: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `top_logprobs` of a whole model after `install`, whose rows are not shared; without a gradient."""
    arguments = batch_arguments(batch, device)
    own = RowSlice(None, arguments["lengths"], arguments["rows"], device)
    with torch.no_grad():
        states = _asked_states(model, arguments["token_ids"], own)
    head: LogprobHead = model.get_output_embeddings()
    return top_logprobs(
        *(states, head.weight, head.bias, arguments["targets"], arguments["temperatures"]),
        count=count,
        ids_below=ids_below,
        softcap=head.softcap,
        float32_logits=head.float32_logits,
    )


def _forward_values(self: Any, token_ids: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Return values [k], float32; arguments as in `_forward_logprobs`."""
    own = RowSlice(getattr(self, "exchange", None), lengths, rows, token_ids.device)
    return own.gather(self.score(_asked_states(self, token_ids, own)))


def _asked_states(model: Any, token_ids: Tensor, own: RowSlice) -> Tensor:
    """Return the last hidden states [k, h] at the target rows of this rank's slice."""
    segments = attention.Segments(own.lengths, token_ids.device, own.exchange)
    ids, positions = own.tokens(token_ids), own.tokens(segments.positions)
    hidden: Tensor = model.base_model(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, segments=segments
    )[0]
    return hidden[0].index_select(0, own.rows)


def _output_embedding(model: Any) -> nn.Linear:
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"the architecture {type(model).__name__} has no plain output embedding behind a model body; "
            f"use a decoder-only language model such as LlamaForCausalLM or Qwen2ForCausalLM"
        )
    return linear


def _replace_attention(model: Any) -> None:
    attention.register()
    model.set_attn_implementation(attention.NAME)
    if model.base_model.config._attn_implementation != attention.NAME:
        raise ConfigError(
            f"the architecture {type(model).__name__} has an attention that cannot be replaced, so samples cannot be "
            f"packed in one row; use another architecture, such as LlamaForCausalLM or Qwen2ForCausalLM"
        )


def _probe_ids(linear: nn.Linear) -> Tensor:
    """Return the two segments as [2, longest], padded on the right, where no token of a causal model sees the padding.

    The ids are spread over the vocabulary: the first ones are often special and untrained, and so alike.
    """
    shape = len(_PROBE_LENGTHS), max(_PROBE_LENGTHS)
    ids = torch.arange(1, shape[0] * shape[1] + 1, device=linear.weight.device)
    return (ids * max(1, linear.out_features // (len(ids) + 1)) % linear.out_features).view(shape)


def _unpad(padded: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(padded, _PROBE_LENGTHS, strict=True)]


def _probe_arguments(ids: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a pass over the two segments, with all rows but the last of each segment."""
    ends = [sum(_PROBE_LENGTHS[: i + 1]) - 1 for i in range(len(_PROBE_LENGTHS))]
    rows = [row for row in range(ends[-1]) if row not in ends]
    return {
        "token_ids": torch.cat(_unpad(ids)),
        "lengths": torch.tensor(_PROBE_LENGTHS),
        "rows": torch.tensor(rows, device=ids.device),
    }


def _softcap(model: Any) -> float:
    config = model.config.get_text_config()
    return float(getattr(config, "final_logit_softcapping", None) or 0.0)
