"""The steps of `trainer_driver` in plain PyTorch: no micro-batches, no DeepSpeed, no formula of the trainer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fourfold.config import Config
from fourfold_trainer.step.micro_batches import mini_batches
from tests.support.trainer_driver import LEARNING_RATE, OPTIM, batch, loss_weights

Arrays = Mapping[str, Any]


def plain(
    folder: Path,
    *,
    kl_coef: float = 0.0,
    ema: float = 0.0,
    router_coef: float = 0.0,
    model: Any = None,
    optimizer_of: Any = None,
) -> Arrays:
    """Train the three steps in plain PyTorch; return losses, norms, and log-probabilities of a fixed batch.

    The log-probabilities are those before and after the steps, and under the average of the weights.

    Args:
        folder: of the model.
        kl_coef: coefficient of the KL term in the loss.
        ema: decay of the average.
        router_coef: coefficient of the routers' load-balancing loss.
        model: model to train; None: the one in the folder.
        optimizer_of: makes the optimizer of a model; None: AdamW.
    """
    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    average = copy.deepcopy(model)
    optimizer = (optimizer_of or _plain_adam)(model)
    seen: dict[str, Any] = {"before": lookup(model), "losses": [], "norms": []}
    for number in (1, 2, 3):
        loss, kl = _loss(model, number)
        optimizer.zero_grad()
        balance = router_coef * _router_loss(model, number) if router_coef else 0.0
        torch.autograd.backward(loss + kl_coef * kl + balance)
        seen["losses"] += [float(loss.detach()), 0.0]
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(ema * mean + (1 - ema) * weight)
    return {**seen, "after": lookup(model), "average": lookup(average)}


def plain_parts(folder: Path) -> Arrays:
    """Train the three steps of ForwardBackward and OptimStep: the gradient of all samples at once."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = _plain_adam(model)
    seen: dict[str, Any] = {"before": lookup(model), "entropies": _entropies(model), "losses": [], "norms": []}
    for number, (rate, longest) in enumerate(OPTIM, 1):
        samples = batch(number)
        terms = [
            (torch.from_numpy(w[1:]) * _rows(model, s.token_ids, s.temperature)).sum()
            for s, w in zip(samples, loss_weights(samples), strict=True)
        ]
        loss = torch.stack(terms).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        seen["losses"].append(float(loss.detach()))
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), longest or torch.inf)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {**seen, "after": lookup(model)}


def _rows(model: Any, ids: Any, temperature: float) -> torch.Tensor:
    picked: torch.Tensor = _every(model, ids, temperature).gather(1, torch.from_numpy(ids).long()[1:, None]).squeeze(1)
    return picked


def _every(model: Any, ids: Any, temperature: float) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1)


@torch.no_grad()
def _entropies(model: Any) -> Any:
    rows = [_every(model, s.token_ids, s.temperature) for s in batch(99)]
    return np.concatenate([-(row.exp() * row).sum(1).numpy() for row in rows])


def _loss(model: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = batch(number)
    total = sum(int(s.loss_mask.sum()) for s in samples)
    loss, kl = torch.zeros(()), torch.zeros(())
    for one in samples:
        scores = np.array([s.score for s in samples if s.group_id == one.group_id])
        spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
        advantage = float((one.score - scores.mean()) / (spread + 1e-6)) if spread else 0.0
        mask = torch.from_numpy(one.loss_mask[1:])
        logprobs = _rows(model, one.token_ids, one.temperature)[mask]
        difference = torch.from_numpy(one.reference_logprobs[1:])[mask] - logprobs
        loss = loss - (torch.exp(logprobs - logprobs.detach()) * advantage).sum() / total
        kl = kl + (torch.exp(difference) - 1 - difference).clamp(max=10).sum() / total
    return loss, kl


def _router_loss(model: Any, number: int) -> torch.Tensor:
    """Return transformers' loss of each layer over all samples that have an advantage, the mean of them."""
    groups = defaultdict(set)
    for one in batch(number):
        groups[one.group_id].add(one.score)
    rows = [torch.from_numpy(s.token_ids).long() for s in batch(number) if len(groups[s.group_id]) > 1]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits
    config = model.config
    losses = [
        load_balancing_loss_func((layer,), config.num_local_experts, config.num_experts_per_tok, mask)
        for layer in logits
    ]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean()


@torch.no_grad()
def lookup(model: Any) -> Any:
    return np.concatenate([_rows(model, s.token_ids, s.temperature).numpy() for s in batch(99)])


class PlainCritic(torch.nn.Module):
    """The body of the policy and a value head that is 0 at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        self.score = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.score.weight)

    def forward(self, ids: Any) -> torch.Tensor:
        values: torch.Tensor = self.score(self.body(input_ids=torch.from_numpy(ids).long()[None])[0])[0, :-1, 0]
        return values


def plain_ppo(folder: Path, config: Config) -> Arrays:
    """Train three steps of two updates: k1 in the reward, GAE with gamma = lambda = 1, whitening, clipped values."""
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    critic = PlainCritic(folder)
    optimizers = [_plain_adam(policy), _plain_adam(critic)]
    seen: dict[str, Any] = {"before": lookup(policy), "losses": [], "norms": []}
    for number in (1, 2, 3):
        samples = batch(number)
        masks = [torch.from_numpy(s.action_mask[1:]) for s in samples]
        with torch.no_grad():
            old = [_rows(policy, s.token_ids, s.temperature)[m] for s, m in zip(samples, masks, strict=True)]
            values = [critic(s.token_ids)[m] for s, m in zip(samples, masks, strict=True)]
        returns, advantages = [], []
        for s, m, o, v in zip(samples, masks, old, values, strict=True):
            rewards = -0.01 * (o - torch.from_numpy(s.reference_logprobs[1:])[m]).clamp(-10, 10)
            rewards[-1] += float(s.score or 0)
            returns.append(rewards.flip(0).cumsum(0).flip(0))  # gamma = lambda = 1: what is still to come
            advantages.append(returns[-1] - v)
        every = torch.cat(advantages)
        centre, spread = every.mean(), every.var(correction=0).clamp(min=1e-8).sqrt()
        parts = mini_batches(np.arange(len(samples) + 1), config, step=number)
        losses, norms = torch.zeros(2), (list[float](), list[float]())
        for part in parts:
            count = sum(int(masks[i].sum()) for i in part)
            terms = torch.zeros(2)
            for i in part:
                new = _rows(policy, samples[i].token_ids, samples[i].temperature)[masks[i]]
                ratio, gain = torch.exp(new - old[i]), (advantages[i] - centre) / spread
                value = critic(samples[i].token_ids)[masks[i]]
                clipped = values[i] + (value - values[i]).clamp(-0.5, 0.5)
                error = torch.maximum((value - returns[i]) ** 2, (clipped - returns[i]) ** 2) / 2
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                terms = terms + torch.stack([-surrogate.sum(), error.sum()]) / count
            torch.autograd.backward(terms.sum())
            losses += terms.detach()
            for model, optimizer, found in zip((policy, critic), optimizers, norms, strict=True):
                found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
        seen["losses"] += losses.tolist()
        seen["norms"] += [*norms[0], *norms[1]]
    with torch.no_grad():
        seen["values"] = np.concatenate([critic(s.token_ids).numpy() for s in batch(99)])
    return {**seen, "after": lookup(policy)}


def _plain_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)
