"""The loss of distillation from data: values worked out by hand, and derivatives by finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold import metrics
from fourfold.algorithm.losses import DistillLoss, LossInputs, TokenLoss
from tests.support.tensors import f64, near

LN2, LN3 = math.log(2), math.log(3)
# Outcomes of p: 1/8, 1/2 and the rest 3/8; of q: 1/2, 1/4 and the rest 1/4.
P, Q = [0.125, 0.5], [0.5, 0.25]


def compute(loss: DistillLoss, p: Tensor, q: Tensor, weight: float = 1.0) -> TokenLoss:
    """Compute the loss of log-probabilities [k, top_k]; the token itself has log-probability -2."""
    tokens = torch.full((len(p),), -2.0, dtype=p.dtype)
    columns = {"old_logprobs": tokens, "behavior_logprobs": tokens, "advantages": torch.full_like(tokens, weight)}
    return loss.compute(
        LossInputs(
            **columns,
            logprobs=tokens,
            segments=torch.zeros(len(p), dtype=torch.int64),
            segment_count=1,
            top_logprobs=p,
            teacher_logprobs=q,
        )
    )


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        # 1/2 ln 4 + 1/4 ln 1/2 + 1/4 ln 2/3
        ({}, LN2 - LN2 / 4 + (LN2 - LN3) / 4),
        # 1/8 ln 1/4 + 1/2 ln 2 + 3/8 ln 3/2
        ({"beta": 1}, -LN2 / 4 + LN2 / 2 + 3 * (LN3 - LN2) / 8),
        # m = 5/16, 3/8, 5/16: half of 1/2 ln 8/5 + 1/4 ln 2/3 + 1/4 ln 4/5, and of 1/8 ln 2/5 + 1/2 ln 4/3 + 3/8 ln 6/5
        ({"beta": 0.5}, 0.08776246415331415),
        # m = 7/32, 7/16, 11/32: a quarter of 1/2 ln 16/7 + 1/4 ln 4/7 + 1/4 ln 8/11, and three of
        # 1/8 ln 4/7 + 1/2 ln 8/7 + 3/8 ln 12/11
        ({"beta": 0.25}, 0.0705377186007696),
        # q = 2/3, 1/3; p = 1/5, 4/5: 2/3 ln 10/3 + 1/3 ln 5/12
        ({"tail": "none"}, 2 * math.log(10 / 3) / 3 + math.log(5 / 12) / 3),
        # 1/5 ln 3/10 + 4/5 ln 12/5
        ({"tail": "none", "beta": 1}, math.log(0.3) / 5 + 4 * math.log(2.4) / 5),
    ],
)
def test_values_are_those_of_the_definition(keys: dict[str, Any], wanted: float) -> None:
    found = compute(DistillLoss(top_k=2, **keys), f64(P).log()[None], f64(Q).log()[None], weight=3.0)
    assert found.loss.tolist() == near([3 * wanted])
    assert found.means[metrics.TEACHER_KL].tolist() == near([wanted]), "without the weight of the row"
    assert found.means[metrics.TEACHER_MASS].tolist() == near([0.75])
    assert found.means[metrics.NLL].tolist() == [2.0]


def logits(seed: int, vocabulary: int = 7, rows: int = 3) -> Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("tail", ["bucket", "none"])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_gradient_is_that_of_finite_differences(beta: float, tail: Any) -> None:
    q, ids = logits(1).log_softmax(1).topk(4)

    def value(z: Tensor) -> Tensor:
        return compute(DistillLoss(beta=beta, top_k=4, tail=tail), z.log_softmax(1).gather(1, ids), q).loss

    assert torch.autograd.gradcheck(value, logits(2).requires_grad_(), atol=1e-8, rtol=1e-6)
    assert (value(logits(2)) > 0).all() and value(logits(1)).abs().max() < 1e-12, "a divergence"


@pytest.mark.parametrize("tail", ["bucket", "none"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_tokens_of_the_vocabulary_give_the_whole_divergence(beta: float, tail: Any) -> None:
    z = logits(3).requires_grad_()
    q, ids = logits(4).log_softmax(1).sort(1, descending=True)
    found = compute(DistillLoss(beta=beta, top_k=7, tail=tail), z.log_softmax(1).gather(1, ids), q).loss
    # As in TRL's generalized_jsd_loss: functional.kl_div(a, b) has the terms of KL(b || a).
    p, full = z.log_softmax(1), logits(4).log_softmax(1)
    pairs = {0.0: [(1.0, p, full)], 1.0: [(1.0, full, p)]}.get(beta)
    if pairs is None:
        m = torch.stack([p + math.log(1 - beta), full + math.log(beta)]).logsumexp(0)
        pairs = [(beta, m, full), (1 - beta, m, p)]
    wanted = sum(w * functional.kl_div(a, b, reduction="none", log_target=True).sum(1) for w, a, b in pairs)
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    one, two = (torch.autograd.grad(loss.sum(), z, retain_graph=True)[0] for loss in (found, wanted))
    torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)


def test_the_divergence_between_the_two_has_them_as_its_limits() -> None:
    p, q = f64(P).log()[None], f64(Q).log()[None]
    forward, reverse = (compute(DistillLoss(beta=b, top_k=2), p, q).loss for b in (0.0, 1.0))
    near_0, near_1 = (compute(DistillLoss(beta=b, top_k=2), p, q).loss for b in (1e-6, 1 - 1e-6))
    torch.testing.assert_close(near_0 / 1e-6, forward, rtol=1e-5, atol=0)
    torch.testing.assert_close(near_1 / 1e-6, reverse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_rest_below_the_rounding_of_float32_gives_finite_gradients(beta: float) -> None:
    z = torch.tensor([[40.0, 0.0, -40.0], [0.0, 50.0, 0.0]], requires_grad=True)
    q = torch.tensor([[0.0, -30.0], [-1e-7, -16.0]])
    p = z.log_softmax(1)[:, :2]
    loss = compute(DistillLoss(beta=beta, top_k=2), p, q).loss
    (slope,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isfinite().all() and slope.isfinite().all() and float(loss[0].detach()) == pytest.approx(0, abs=1e-5)


def test_one_token_without_the_rest_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="top_k = 1 with tail = `none` leaves one outcome"):
        DistillLoss(top_k=1, tail="none")
    assert compute(DistillLoss(top_k=1), f64([0.5]).log()[None], f64([0.75]).log()[None]).loss.tolist() == near(
        [0.75 * math.log(1.5) + 0.25 * math.log(0.5)]
    )
