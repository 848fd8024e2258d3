"""The gradients of one optimizer step in plain transformers, in float64: one padded batch and no code of the trainer.

Legend: B samples, n tokens of the longest, T the predicted positions n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fourfold.arrays import Float32Array
from fourfold.sample import Sample
from tests.fakes.trainer_engine import group_of
from tests.support.trajectories import cut

Gradients = dict[str, Tensor]


def holed(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with holes in their masks: tokens of the environment, and actions outside of the loss."""
    found = []
    for number, one in enumerate(samples):
        place = np.arange(len(one.token_ids)) + number
        action = one.action_mask & (place % 5 != 3)
        behavior = np.where(action, one.behavior_logprobs, np.nan).astype(np.float32)
        found.append(replace(one, action_mask=action, loss_mask=action & (place % 7 != 2), behavior_logprobs=behavior))
    return found


def ragged(kind: str, *, vocabulary: int) -> list[Sample]:
    """Return a batch of uneven samples.

    `many`; `few`, which leave one of three ranks empty; `segments`, those of `few` cut into the segments of each
    trajectory; `one`, a group of one.
    """
    common: dict[str, Any] = {"vocabulary": vocabulary, "seed": 7, "reference": True}
    few = group_of([0, 3], group="a", prompt=3, completion=12, temperature=0.7, **common)
    if kind == "few":
        return holed(few)
    if kind == "segments":
        return [part for number, one in enumerate(holed(few)) for part in cut(one, (1, 3) if number else (1, 2, 3))]
    one = group_of([1], group="b", prompt=2, completion=7, **common)
    if kind == "one":
        return holed(one)
    many = [
        *group_of([2, -1, 0, 4], group="c", prompt=11, completion=13, **common),
        *group_of([1, 1], group="d", prompt=4, completion=2, **common),  # constant
        *group_of([0, 1, 0], group="e", prompt=1, completion=21, temperature=1.3, **common),
        *group_of([1, 5], group="f", prompt=9, completion=1, **common),
        *group_of([1, 2], group="g", prompt=6, completion=0, **common),  # nothing was sampled
    ]
    return holed([*many, *one, *few])


def group_advantages(samples: Sequence[Sample]) -> Float32Array:
    """Return [B]: (score - mean) / (standard deviation + 1e-6) of the group; 0 in a constant one (arXiv 2402.03300)."""
    found = []
    for one in samples:
        scores = np.array([s.score for s in samples if s.group_id == one.group_id], np.float64)
        spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
        found.append((one.score - scores.mean()) / (spread + 1e-6) if spread else 0.0)
    return np.array(found, np.float32)


def policy_gradients(
    model: Any, samples: Sequence[Sample], advantages: Tensor, *, kl_coef: float, entropy_coef: float
) -> Gradients:
    """Return the gradient of each parameter at the policy that sampled: every ratio is 1.

    Args:
        model: a causal language model in float64.
        samples: of the step.
        advantages: of each token [B, T] or sample [B, 1].
        kl_coef: coefficient of k3 to the reference in the loss.
        entropy_coef: coefficient of the entropy bonus.
    """
    ids, attended, mask = _padded(samples)
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    rows = torch.log_softmax(logits / torch.tensor([s.temperature for s in samples])[:, None, None].double(), -1)
    logprobs = rows.gather(2, ids[:, 1:, None]).squeeze(2)
    entropy = -(rows.exp() * rows).sum(2)
    reference = _stacked([s.reference_logprobs[1:] for s in samples], ids.shape[1] - 1)
    difference = reference - logprobs
    kl = (torch.exp(difference) - 1 - difference).clamp(max=10)
    gain = torch.exp(logprobs - logprobs.detach()) * advantages
    return _gradients(model, (-gain + kl_coef * kl - entropy_coef * entropy)[mask].sum() / mask.sum())


def pair_gradients(model: Any, samples: Sequence[Sample], *, beta: float, sft_coef: float) -> Gradients:
    """Return the gradients of DPO (arXiv 2305.18290, eq. 7) plus the likelihood of the preferred answers.

    Args:
        model: a causal language model in float64.
        samples: the preferred and the other answer of each pair, one after the other.
        beta: of DPO.
        sft_coef: weight of the mean negative log-likelihood of the preferred tokens.
    """
    ids, attended, mask = _padded(samples)
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    rows = torch.log_softmax(logits / torch.tensor([s.temperature for s in samples])[:, None, None].double(), -1)
    logprobs = rows.gather(2, ids[:, 1:, None]).squeeze(2)
    reference = _stacked([s.reference_logprobs[1:] for s in samples], ids.shape[1] - 1)
    gains = torch.where(mask, logprobs - reference, 0.0).sum(1)
    loss = torch.log(1 + torch.exp(-beta * (gains[0::2] - gains[1::2]))).mean()
    return _gradients(model, loss - sft_coef * logprobs[0::2][mask[0::2]].mean())


def value_gradients(model: Any, samples: Sequence[Sample]) -> tuple[Gradients, Tensor]:
    """Return the gradient of each of a critic's parameters, and the policy's advantages [B, T].

    gamma and lambda are 1, so the return of each token is the score, and the advantage is score - value, whitened over
    the tokens of the loss.

    Args:
        model: of the sequence classifiers, one label, in float64.
        samples: of the step.
    """
    ids, attended, mask = _padded(samples)
    hidden = model.model(input_ids=ids, attention_mask=attended, use_cache=False)[0][:, :-1]
    values = model.score(hidden).squeeze(2)
    scores = torch.tensor([s.score for s in samples], dtype=torch.float64)[:, None]
    advantages = (scores - values).detach()
    chosen = advantages[mask]
    advantages = (advantages - chosen.mean()) / chosen.var(correction=0).clamp(min=1e-8).sqrt()
    return _gradients(model, 0.5 * (values - scores).square()[mask].sum() / mask.sum()), advantages


def check_gradients(found: Gradients, wanted: Gradients, tolerance: float) -> float:
    """Compare parameter by parameter; return the largest distance, relative to the length of the gradient."""
    assert found.keys() == wanted.keys()
    distances = {}
    for name, theirs in wanted.items():
        assert theirs.any(), f"{name} has no gradient, so that nothing is compared"
        mine = found[name].double().reshape(theirs.shape)
        distances[name] = float((mine - theirs).norm() / theirs.norm())
        assert distances[name] <= tolerance, f"{name}: {distances[name]:.3g}"
    return max(distances.values())


def _padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids and what is attended to, [B, n], and the tokens of the loss, [B, T]."""
    width = max(len(s.token_ids) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    attended = torch.zeros_like(ids)
    mask = torch.zeros(len(samples), width - 1, dtype=torch.bool)
    for row, one in enumerate(samples):
        count = len(one.token_ids)
        ids[row, :count] = torch.from_numpy(one.token_ids)
        attended[row, :count] = 1
        mask[row, : count - 1] = torch.from_numpy(one.loss_mask[1:])
    return ids, attended, mask


def _stacked(rows: Sequence[Float32Array], width: int) -> Tensor:
    found = torch.zeros(len(rows), width, dtype=torch.float64)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = torch.from_numpy(values)
    return found


def _gradients(model: Any, loss: Tensor) -> Gradients:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
