"""Policy losses: values and gradients against the papers' equations, written out in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from fourfold.algorithm.losses import LOSSES as REGISTERED
from fourfold.algorithm.losses import (
    CispoLoss,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    LossInputs,
    PolicyLoss,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
    TokenLoss,
    VespoLoss,
)
from fourfold.config.rows import ROW_LOSSES
from fourfold.metrics import CLIP_FRACTION_HIGH, CLIP_FRACTION_LOW, DUAL_CLIP_FRACTION, METRICS
from tests.support.tensors import F64, f64, leaf, near, slopes

FORMS: tuple[Literal["token", "sequence"], ...] = ("token", "sequence")


def compute(
    loss: PolicyLoss, p: Tensor, o: Tensor, advantages: Tensor, segments: Tensor | None = None, count: int = 1
) -> TokenLoss:
    """Compute the loss of every token; without segments all tokens are of one sample."""
    inputs = LossInputs(
        logprobs=p,
        old_logprobs=o,
        behavior_logprobs=o if isinstance(loss, DppoLoss | VespoLoss) else o - 1,  # others do not read it
        advantages=advantages,
        segments=torch.zeros(len(p), dtype=torch.int64) if segments is None else segments,
        segment_count=count,
    )
    return loss.compute(inputs)


def of(loss: PolicyLoss) -> Callable[[Tensor, Tensor, Tensor], TokenLoss]:
    return lambda p, o, advantages: compute(loss, p, o, advantages)


# Every loss as a function of p, o and A.
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], TokenLoss]] = {
    "ppo": of(PpoLoss(clip_low=0.2, clip_high=0.3)),
    "ppo_dual": of(PpoLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0)),
    "gspo_token": of(GspoLoss(clip_low=0.2, clip_high=0.3, form="token")),
    "gspo_sequence": of(GspoLoss(clip_low=0.2, clip_high=0.3, form="sequence")),
    "cispo": of(CispoLoss(ratio_min=0.0, ratio_max=5.0)),
    "sapo": of(SapoLoss(tau_positive=1.0, tau_negative=1.05)),
    "reinforce": of(ReinforceLoss()),
    "gmpo": of(GmpoLoss()),
    "dppo": of(DppoLoss()),
    "dppo_weight": of(DppoLoss(ratio_max=5.0)),
    "vespo": of(VespoLoss()),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


# What holds for all


@every_loss
def test_the_first_update_of_a_batch_has_the_gradient_of_reinforce(
    loss: Callable[[Tensor, Tensor, Tensor], TokenLoss],
) -> None:
    p = leaf([-1.0, -2.0, -3.0])
    advantages = f64([2.0, 2.0, 2.0])  # constant: all tokens of a sample share the mean in one form of GSPO
    assert slopes(loss(p, p.detach(), advantages).loss, p) == near([-2.0, -2.0, -2.0])
    assert slopes(loss(p, p.detach(), -advantages).loss, p) == near([2.0, 2.0, 2.0])


@every_loss
def test_without_advantage_there_is_no_loss_and_no_gradient(
    loss: Callable[[Tensor, Tensor, Tensor], TokenLoss],
) -> None:
    p = leaf([-1.0, -0.1, -60.0, -math.inf])
    result = loss(p, f64([-1.5, -50.0, -0.1, -1.0]), f64([0.0] * 4))
    assert result.loss.tolist() == [0.0] * 4
    assert slopes(result.loss, p) == [0.0] * 4
    assert all(mean.tolist() == [0.0] * 4 for mean in result.means.values())


@every_loss
def test_only_the_current_policy_gets_a_gradient(loss: Callable[[Tensor, Tensor, Tensor], TokenLoss]) -> None:
    p, o, advantages = leaf([-1.0, -2.0]), f64([-1.1, -1.9]), f64([1.0, -4.0])
    result = loss(p, o, advantages)
    result.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None and p.grad.all()
    for wrong in ((leaf([-1.1, -1.9]), advantages), (o, leaf([1.0, -4.0]))):
        with pytest.raises(AssertionError, match="must be detached"):
            loss(p, *wrong)
    assert not any(mean.requires_grad for mean in result.means.values())


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_is_that_of_the_log_probabilities(
    loss: Callable[[Tensor, Tensor, Tensor], TokenLoss], dtype: torch.dtype
) -> None:
    p = leaf([-1.0, -2.0], dtype)
    result = loss(p, p.detach(), torch.ones(2, dtype=dtype))
    assert result.loss.dtype == dtype
    assert result.loss.shape == (2,)
    for name, mean in result.means.items():
        assert name in METRICS
        assert (mean.dtype, mean.shape) == (dtype, (2,))


@every_loss
def test_an_empty_micro_batch_keeps_its_graph(loss: Callable[[Tensor, Tensor, Tensor], TokenLoss]) -> None:
    p = leaf([])
    total = loss(p, f64([]), f64([])).loss.sum()
    assert total.item() == 0
    assert slopes(total, p) == []


@every_loss
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_log_ratio_is_finite(
    loss: Callable[[Tensor, Tensor, Tensor], TokenLoss], difference: float, advantage: float
) -> None:
    # float32, where exp(100) is infinite; an infinite log-ratio comes from either side
    for current, old in ((difference, 0.0), (0.0, -difference)):
        if current == math.inf:
            continue  # no log-probability is +inf, only -inf of the old one makes the ratio infinite
        p = leaf([current], torch.float32)
        result = loss(p, torch.tensor([old]), torch.tensor([advantage]))
        assert result.loss.isfinite().all()
        assert all(math.isfinite(slope) for slope in slopes(result.loss, p))


# PPO

PPO_CASES = [  # clip to [0.8, 1.3]; slope is d loss / d p = -ratio * A where nothing is clipped
    (1.0, 2.0, -2.0, -2.0),
    (1.0, -2.0, 2.0, 2.0),
    (1.2, 2.0, -2.4, -2.4),
    (1.5, 2.0, -2.6, 0.0),  # too good already
    (1.5, -2.0, 3.0, 3.0),  # must come back: not clipped
    (0.5, 2.0, -1.0, -1.0),
    (0.5, -2.0, 1.6, 0.0),  # too bad already
    (0.9, -2.0, 1.8, 1.8),
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), PPO_CASES)
def test_ppo_and_its_gradient(ratio: float, advantage: float, loss: float, slope: float) -> None:
    p = leaf([-1.0 + math.log(ratio)])
    result = compute(PpoLoss(clip_low=0.2, clip_high=0.3), p, f64([-1.0]), f64([advantage]))
    assert result.loss.tolist() == near([loss])
    assert slopes(result.loss, p) == near([slope])


def test_clipped_tokens_are_counted_on_the_side_that_stops_learning() -> None:
    p = f64([0.5, 1.5, 0.5, 1.5, 0.5, 1.5, 1.25]).log()
    advantages = f64([1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 1.0])
    means = compute(PpoLoss(clip_low=0.2, clip_high=0.3), p, torch.zeros(7, dtype=F64), advantages).means
    assert means[CLIP_FRACTION_LOW].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert means[CLIP_FRACTION_HIGH].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert DUAL_CLIP_FRACTION not in means


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bounded"),
    [  # c = 3: at most 3 |A| where A < 0
        (2.9, -2.0, 5.8, 5.8, 0.0),
        (3.1, -2.0, 6.0, 0.0, 1.0),
        (1000.0, -2.0, 6.0, 0.0, 1.0),
        (0.5, -2.0, 1.6, 0.0, 0.0),  # clipped as before
        (1000.0, 2.0, -2.6, 0.0, 0.0),  # says nothing for A > 0
        (1000.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_and_its_gradient(
    ratio: float, advantage: float, loss: float, slope: float, bounded: float
) -> None:
    p = leaf([-1.0 + math.log(ratio)])
    result = compute(PpoLoss(clip_low=0.2, clip_high=0.3, dual_clip=3.0), p, f64([-1.0]), f64([advantage]))
    assert result.loss.tolist() == near([loss])
    assert slopes(result.loss, p) == near([slope])
    assert result.means[DUAL_CLIP_FRACTION].tolist() == [bounded]
    plain = compute(PpoLoss(clip_low=0.2, clip_high=0.3), p, f64([-1.0]), f64([advantage]))
    for name, mean in plain.means.items():
        assert result.means[name].tolist() == mean.tolist()


@pytest.mark.parametrize("name", ["ppo", "ppo_dual", "sapo"])
def test_beyond_twenty_the_ratio_stays_and_has_no_gradient(name: str) -> None:
    # A = -1 is not clipped above; both losses below stand still at log-ratio 20
    at = leaf([20.0])
    beyond = leaf([20.5, 25.0, 100.0])
    value_at = LOSSES[name](at, f64([0.0]), f64([-1.0])).loss
    result = LOSSES[name](beyond, f64([0.0] * 3), f64([-1.0] * 3)).loss
    assert result.tolist() == value_at.tolist() * 3
    assert slopes(result, beyond) == [0.0] * 3


# GSPO: three samples of 3, 2 and 1 tokens, mixed, and one without tokens

SEGMENTS = [0, 1, 0, 3, 1, 0]
CURRENT = [-1.0, -2.0, -0.5, -1.5, -0.7, -2.5]
OLD = [-1.3, -1.9, -0.4, -1.2, -0.9, -2.2]
# mean of p - o: sample 0 (0.3 - 0.1 - 0.3) / 3, sample 1 (-0.1 + 0.2) / 2, sample 3 -0.3
RATIOS = {0: math.exp(-0.1 / 3), 1: math.exp(0.05), 3: math.exp(-0.3)}
COUNTS = {0: 3, 1: 2, 3: 1}


def gspo_of(
    p: Tensor, advantages: list[float], form: Literal["token", "sequence"], *, low: float = 0.2, high: float = 0.04
) -> TokenLoss:
    segments = torch.tensor(SEGMENTS)
    return compute(GspoLoss(clip_low=low, clip_high=high, form=form), p, f64(OLD), f64(advantages), segments, 4)


def clipped_term(ratio: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    """Return -min(s A, clip(s) A), and whether s takes part in it."""
    clipped = min(max(ratio, 1 - low), 1 + high) * advantage
    return -min(ratio * advantage, clipped), ratio * advantage <= clipped


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_uses_the_geometric_mean_of_the_sample(form: Literal["token", "sequence"], sign: float) -> None:
    # clip to [0.8, 1.04]: sample 1 (1.051) is clipped where A > 0, sample 3 (0.741) where A < 0
    advantages = [sign * a for a in (1.0, 2.0, -0.5, 3.0, -1.0, 0.0)]
    by_hand = [clipped_term(RATIOS[s], a, 0.2, 0.04) for s, a in zip(SEGMENTS, advantages, strict=True)]
    result = gspo_of(leaf(CURRENT), advantages, form)
    assert result.loss.tolist() == near([loss for loss, _ in by_hand])
    low = [float(a < 0 and RATIOS[s] < 0.8) for s, a in zip(SEGMENTS, advantages, strict=True)]
    high = [float(a > 0 and RATIOS[s] > 1.04) for s, a in zip(SEGMENTS, advantages, strict=True)]
    assert result.means[CLIP_FRACTION_LOW].tolist() == low
    assert result.means[CLIP_FRACTION_HIGH].tolist() == high
    assert (sum(low), sum(high)) == ((0, 1) if sign > 0 else (1, 1))


def test_the_token_form_of_gspo_gives_each_token_its_own_gradient() -> None:
    # d / dp_t of sum of c_t l_t = -c_t s A_t where the sample is not clipped for this sign of A
    advantages, weights = [1.0, 2.0, -0.5, 3.0, -1.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    p = leaf(CURRENT)
    by_hand = []
    for segment, advantage, weight in zip(SEGMENTS, advantages, weights, strict=True):
        _, active = clipped_term(RATIOS[segment], advantage, 0.2, 0.04)
        by_hand.append(-weight * RATIOS[segment] * advantage if active else 0.0)
    assert by_hand[1] == 0 and by_hand[4] > 0  # one token of sample 1 is clipped, the other is not
    assert slopes(f64(weights) * gspo_of(p, advantages, "token").loss, p) == near(by_hand)


def test_the_sequence_form_of_gspo_shares_the_mean_gradient() -> None:
    # d / dp_j of sum of c_t l_t = -s / n * sum over t of c_t A_t [active]
    advantages, weights = [1.0, 2.0, -0.5, 3.0, -1.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    p = leaf(CURRENT)
    shared = dict.fromkeys(COUNTS, 0.0)
    for segment, advantage, weight in zip(SEGMENTS, advantages, weights, strict=True):
        _, active = clipped_term(RATIOS[segment], advantage, 0.2, 0.04)
        shared[segment] += -weight * RATIOS[segment] * advantage / COUNTS[segment] if active else 0.0
    by_hand = [shared[segment] for segment in SEGMENTS]
    assert slopes(f64(weights) * gspo_of(p, advantages, "sequence").loss, p) == near(by_hand)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_clamps_the_mean_and_not_its_tokens(form: Literal["token", "sequence"], sign: float) -> None:
    # sample 0: mean (50 - 20) / 2 = 15, within the clamp; sample 1: mean (100 + 0) / 2 = 50, beyond it
    segments, advantages = torch.tensor([0, 0, 1, 1]), f64([-sign] * 4)
    p = leaf([sign * 50.0, sign * -20.0, sign * 100.0, 0.0])
    result = compute(GspoLoss(clip_low=1.0, clip_high=0.1, form=form), p, f64([0.0] * 4), advantages, segments, 2)
    inside, at_clamp = sign * math.exp(sign * 15), sign * math.exp(sign * 20)
    assert result.loss.tolist() == pytest.approx([inside, inside, at_clamp, at_clamp], rel=1e-12)
    assert slopes(result.loss, p) == pytest.approx([inside, inside, 0, 0], rel=1e-12)


def test_gspo_keeps_small_means_of_long_samples_in_float32() -> None:
    # 20,000 differences of 2e-4: the clip range of the paper is as small as the ratio itself
    o = torch.full((20_000,), -1.0)
    p = torch.full((20_000,), -1.0 + 2e-4)
    segments = torch.zeros(20_000, dtype=torch.int64)
    result = compute(GspoLoss(clip_low=3e-4, clip_high=4e-4, form="token"), p, o, torch.ones(20_000), segments, 1)
    difference = p[0].double().item() - o[0].double().item()
    assert -result.loss[0].item() == pytest.approx(math.exp(difference), abs=1e-7)


# CISPO, SAPO, REINFORCE


@pytest.mark.parametrize(
    ("ratio", "weight"), [(1.0, 1.0), (0.1, 0.5), (0.7, 0.7), (4.0, 4.0), (5.5, 5.0), (1e10, 5.0), (1e-10, 0.5)]
)
def test_cispo_weighs_the_log_likelihood_and_never_stops(ratio: float, weight: float) -> None:
    # loss = -clip(ratio, 0.5, 5) * A * p, slope -clip(ratio, 0.5, 5) * A
    p = leaf([-1.25, -1.25])
    old = f64([-1.25 - math.log(ratio)] * 2)
    result = compute(CispoLoss(ratio_min=0.5, ratio_max=5.0), p, old, f64([2.0, -3.0]))
    assert result.loss.tolist() == near([2.0 * weight * 1.25, -3.0 * weight * 1.25])
    assert slopes(result.loss, p) == near([-2.0 * weight, 3.0 * weight])
    assert result.means == {}


@pytest.mark.parametrize("ratio", [1e-3, 0.5, 0.9, 1.0, 1.1, 2.06, 10.0, 100.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.3), (-2.0, 1.7)])
def test_sapo_and_its_gradient(ratio: float, advantage: float, tau: float) -> None:
    # s = 1 / (1 + e^(-tau (ratio - 1))): loss -4 / tau * s * A, slope -A * ratio * 4 s (1 - s)
    s = 1 / (1 + math.exp(-tau * (ratio - 1)))
    p = leaf([-1.0 + math.log(ratio)])
    result = compute(SapoLoss(tau_positive=1.3, tau_negative=1.7), p, f64([-1.0]), f64([advantage]))
    assert result.loss.tolist() == near([-4 / tau * s * advantage])
    assert slopes(result.loss, p) == near([-advantage * ratio * 4 * s * (1 - s)])
    assert result.means == {}


def test_reinforce_is_the_weighted_log_likelihood() -> None:
    p = leaf([-1.0, -2.0, -3.0])
    result = compute(ReinforceLoss(), p, p.detach(), f64([0.5, -2.0, 0.0]))
    assert result.loss.tolist() == [0.5, -4.0, 0.0]
    assert slopes(result.loss, p) == [-0.5, 2.0, 0.0]
    assert result.means == {}


# Finite differences agree where a loss is smooth and stops no gradient

# Losses with a stopped weight w: -w A p, whose slope is loss / p, or -w exp(p - stop(p)) A, whose slope is the loss.
STOPPED = {"cispo": "log", "dppo_weight": "log", "vespo": "log", "gspo_token": "exp"}


def drawn(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, o and A of 12 tokens; `spread` is the standard deviation of p - o."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(12, generator=generator, dtype=F64)
    advantages = torch.randn(12, generator=generator, dtype=F64)
    p = old + spread * torch.randn(12, generator=generator, dtype=F64)
    return p.requires_grad_(), old, advantages


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - STOPPED.keys()))
@pytest.mark.parametrize("seed", range(5))
def test_gradients_agree_with_finite_differences(name: str, seed: int) -> None:
    p, old, advantages = drawn(seed, 0.8)
    assert torch.autograd.gradcheck(lambda current: LOSSES[name](current, old, advantages).loss, (p,))


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("seed", range(5))
def test_a_stopped_weight_has_no_gradient(name: str, seed: int) -> None:
    p, old, advantages = drawn(seed, 0.1)  # no clip binds
    loss = LOSSES[name](p, old, advantages).loss
    wanted = loss.detach() / (p.detach() if STOPPED[name] == "log" else 1)
    assert slopes(loss, p) == near(wanted.tolist())


def test_every_loss_of_fourfold_is_tested_here() -> None:
    """Those of data and of whole answers are in test_likelihood_losses.py and test_sample_losses.py."""
    own = {kind for kind in REGISTERED.kinds() if REGISTERED.find(kind).__module__.startswith("fourfold.")}
    own -= {kind for kind in own if kind in ROW_LOSSES or REGISTERED.find(kind).reads != "trajectories"}
    assert {name.split("_")[0] for name in LOSSES} == own
    # The test without advantage shows that no pass is needed then.
    assert not any(REGISTERED.find(kind).trains_without_advantage for kind in own)
