"""Losses of whole answers: values from the papers' formulas in plain Python, gradients by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from fourfold import metrics as m
from fourfold.algorithm.losses import (
    BradleyTerryLoss,
    CpoLoss,
    DpoLoss,
    KtoLoss,
    OrpoLoss,
    SampleInputs,
    SampleLoss,
    SimpoLoss,
    StepLabelsLoss,
    UnitLoss,
)
from fourfold.algorithm.losses.reference_free import _log1mexp
from fourfold.config import AlgorithmConfig
from tests.support.tensors import F64, f64, leaf, near

# Two pairs; the preferred answer is the first of one and the second of the other. Sums of p and f, tokens, labels.
SUMS: Final = [-3.0, -7.5, -20.0, -2.0]
REFERENCE: Final = [-4.0, -7.0, -18.5, -2.5]
COUNTS: Final = [3, 5, 10, 4]
LABELS: Final = [1.0, 0.0, 2.0, 2.5]
# The same, preferred first, as (s_w, f_w, n_w, s_l, f_l, n_l).
PAIRS: Final = [(-3.0, -4.0, 3, -7.5, -7.0, 5), (-2.0, -2.5, 4, -20.0, -18.5, 10)]


def inputs(sums: Tensor, *, distance: float = 0.0) -> SampleInputs:
    return SampleInputs(
        sums=sums, counts=torch.tensor(COUNTS), labels=f64(LABELS), reference_sums=f64(REFERENCE), distance=distance
    )


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def log_sigmoid(v: float) -> float:
    return math.log(sigmoid(v))


def odds(s: float, n: int) -> float:
    """Return log(P / (1 - P)) of the geometric mean P of an answer's probabilities."""
    mean = math.exp(s / n)
    return math.log(mean / (1 - mean))


Formula = Callable[[float, float, int, float, float, int], float]
CASES: Final[dict[str, tuple[SampleLoss, Formula]]] = {
    "dpo": (DpoLoss(beta=0.3), lambda s, f, n, t, g, k: -log_sigmoid(0.3 * ((s - f) - (t - g)))),
    "cdpo": (
        DpoLoss(beta=0.3, label_smoothing=0.2),
        lambda s, f, n, t, g, k: (
            -0.8 * log_sigmoid(0.3 * ((s - f) - (t - g))) - 0.2 * log_sigmoid(-0.3 * ((s - f) - (t - g)))
        ),
    ),
    "robust": (
        DpoLoss(form="robust", beta=0.3, label_smoothing=0.2),
        lambda s, f, n, t, g, k: (
            (-0.8 * log_sigmoid(0.3 * ((s - f) - (t - g))) + 0.2 * log_sigmoid(-0.3 * ((s - f) - (t - g)))) / 0.6
        ),
    ),
    "dpo, averages": (
        DpoLoss(beta=0.3, average=True),
        lambda s, f, n, t, g, k: -log_sigmoid(0.3 * ((s - f) / n - (t - g) / k)),
    ),
    "ipo": (DpoLoss(form="ipo", beta=0.5), lambda s, f, n, t, g, k: ((s - f) / n - (t - g) / k - 1.0) ** 2),
    "ipo, sums": (
        DpoLoss(form="ipo", beta=0.5, average=False),
        lambda s, f, n, t, g, k: ((s - f) - (t - g) - 1.0) ** 2,
    ),
    "hinge": (DpoLoss(form="hinge", beta=0.6), lambda s, f, n, t, g, k: max(0.0, 1 - 0.6 * ((s - f) - (t - g)))),
    "apo-zero": (
        DpoLoss(form="apo-zero", beta=0.3),
        lambda s, f, n, t, g, k: 1 - sigmoid(0.3 * (s - f)) + sigmoid(0.3 * (t - g)),
    ),
    "apo-down": (
        DpoLoss(form="apo-down", beta=0.3),
        lambda s, f, n, t, g, k: sigmoid(0.3 * (s - f)) + 1 - sigmoid(0.3 * ((s - f) - (t - g))),
    ),
    "simpo": (SimpoLoss(beta=2.0, gamma=0.7), lambda s, f, n, t, g, k: -log_sigmoid(2.0 * (s / n - t / k) - 0.7)),
    "cpo": (CpoLoss(beta=0.2), lambda s, f, n, t, g, k: -log_sigmoid(0.2 * (s - t))),
    "orpo": (OrpoLoss(beta=0.4), lambda s, f, n, t, g, k: -0.4 * log_sigmoid(odds(s, n) - odds(t, k))),
    "bradley-terry": (BradleyTerryLoss(), lambda s, f, n, t, g, k: -log_sigmoid(s - t)),
    "bradley-terry, centred": (
        BradleyTerryLoss(center_coef=0.01),
        lambda s, f, n, t, g, k: -log_sigmoid(s - t) + 0.01 * (s + t) ** 2,
    ),
}
every_pair_loss = pytest.mark.parametrize("name", CASES)
OTHERS: Final[dict[str, SampleLoss]] = {"kto": KtoLoss(), "steps": StepLabelsLoss()}
EVERY: Final = {name: loss for name, (loss, _) in CASES.items()} | OTHERS
every_loss = pytest.mark.parametrize("loss", EVERY.values(), ids=EVERY)


@every_pair_loss
def test_the_value_is_that_of_the_papers_formula(name: str) -> None:
    loss, formula = CASES[name]
    assert loss.compute(inputs(f64(SUMS))).loss.tolist() == near([formula(*pair) for pair in PAIRS])


@every_loss
def test_the_gradient_is_that_of_finite_differences(loss: SampleLoss) -> None:
    def total(sums: Tensor) -> Tensor:
        return loss.compute(inputs(sums, distance=0.3)).loss

    assert torch.autograd.gradcheck(total, leaf(SUMS), eps=1e-6, atol=1e-7, rtol=1e-6)


@every_loss
@pytest.mark.parametrize(
    "sums",
    [
        [-5000.0, -1.0, -5000.0, -1.0],
        [-1.0, -5000.0, -1.0, -5000.0],
        [-5000.0, -5000.0, -5000.0, -5000.0],
        [0.0, 0.0, 0.0, 0.0],  # every token has probability 1
        [-1e-9, -1e-9, -1e-7, -1e-30],
        [-3.0, -3.0, -3.0, -3.0],
    ],
)
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [400, 1, 3, 4000]])
def test_extreme_sums_have_finite_losses_and_gradients(loss: SampleLoss, sums: list[float], counts: list[int]) -> None:
    for dtype in (torch.float64, torch.float32):
        column = leaf(sums, dtype)
        result = loss.compute(
            SampleInputs(
                sums=column,
                counts=torch.tensor(counts),
                labels=f64([1.0, 0.0, 0.0, 1.0]).to(dtype),
                reference_sums=torch.full((4,), -2.0, dtype=dtype),
                distance=2500.0,
            )
        )
        (gradient,) = torch.autograd.grad(result.loss.sum(), column)
        assert result.loss.isfinite().all() and gradient.isfinite().all()
        assert all(mean.isfinite().all() and not mean.requires_grad for mean in result.means.values())
        assert result.loss.dtype == dtype and set(result.means) <= m.METRICS.keys()


def test_before_the_first_update_the_losses_with_a_reference_have_the_values_of_no_preference() -> None:
    column = f64(REFERENCE)
    values = {name: CASES[name][0].compute(inputs(column)).loss.tolist() for name in CASES}
    assert values["dpo"] == values["dpo, averages"] == near([math.log(2)] * 2)
    assert values["ipo"] == values["hinge"] == values["apo-zero"] == values["apo-down"] == near([1.0] * 2)
    assert KtoLoss().compute(inputs(column)).loss.tolist() == near([0.5] * 4)


def test_the_loss_of_steps_is_binary_cross_entropy_with_soft_labels() -> None:
    scores, labels = [-3.0, 0.5, 4.0, 0.0, -40.0], [1.0, 0.25, 0.0, 0.5, 1.0]
    found = StepLabelsLoss().compute(SampleInputs(sums=f64(scores), counts=torch.ones(5).long(), labels=f64(labels)))
    pairs = list(zip(scores, labels, strict=True))
    wanted = [-(t * log_sigmoid(h) + (1 - t) * log_sigmoid(-h)) for h, t in pairs]
    assert found.loss.tolist() == near(wanted)
    assert found.means[m.SCORE_ACCURACY].tolist() == [0, 0, 0, 1, 0]


# KTO


def test_kto_is_that_of_its_paper_with_the_distance_of_the_step() -> None:
    loss = KtoLoss(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    labelled = SampleInputs(
        sums=f64(SUMS),
        counts=torch.tensor(COUNTS),
        labels=f64([1, 0, -1, 2]),
        reference_sums=f64(REFERENCE),
        distance=0.8,
    )
    x = [s - f for s, f in zip(SUMS, REFERENCE, strict=True)]
    wanted = [
        1.5 * (1 - sigmoid(0.3 * (x[0] - 0.8))),
        0.5 * (1 - sigmoid(0.3 * (0.8 - x[1]))),
        0.5 * (1 - sigmoid(0.3 * (0.8 - x[2]))),
        1.5 * (1 - sigmoid(0.3 * (x[3] - 0.8))),
    ]
    result = loss.compute(labelled)
    assert result.loss.tolist() == near(wanted)
    assert result.means[m.KTO_DISTANCE].tolist() == [0.8] * 4
    assert result.means[m.KTO_ACCURACY].tolist() == [1, 1, 1, 0]


def test_a_negative_distance_counts_as_none() -> None:
    one, two = (KtoLoss().compute(inputs(f64(SUMS), distance=z)) for z in (-3.0, 0.0))
    assert one.loss.tolist() == two.loss.tolist() and one.means[m.KTO_DISTANCE].tolist() == [0.0] * 4


# Metrics, margins and keys


def test_the_metrics_of_pairs_compare_what_the_loss_compares() -> None:
    means = DpoLoss(beta=0.5).compute(inputs(f64(SUMS))).means
    assert means[m.PAIR_CHOSEN_REWARD].tolist() == near([0.5, 0.25])
    assert means[m.PAIR_REJECTED_REWARD].tolist() == near([-0.25, -0.75])
    assert means[m.PAIR_MARGIN].tolist() == near([0.75, 1.0])
    assert means[m.PAIR_ACCURACY].tolist() == [1, 1]
    turned = SampleInputs(sums=f64(SUMS), counts=torch.tensor(COUNTS), labels=-f64(LABELS))
    assert SimpoLoss().compute(turned).means[m.PAIR_ACCURACY].tolist() == [0, 0]


def test_a_margin_is_the_difference_of_the_labels() -> None:
    wanted = [-log_sigmoid(-3.0 + 7.5 - 1.0), -log_sigmoid(-2.0 + 20.0 - 0.5)]
    assert BradleyTerryLoss(margin=True).compute(inputs(f64(SUMS))).loss.tolist() == near(wanted)


def test_log1mexp_keeps_its_digits_on_both_sides() -> None:
    assert _log1mexp(f64([-1e-12, -1e-3, -0.7, -30.0, -700.0])).tolist() == pytest.approx(
        [
            math.log(-math.expm1(v)) if v > -1 else math.log1p(-math.exp(v))
            for v in (-1e-12, -1e-3, -0.7, -30.0, -700.0)
        ],
        rel=1e-14,
    )


@pytest.mark.parametrize("name", ["counts", "labels", "reference_sums"])
def test_only_the_sums_may_have_a_gradient(name: str) -> None:
    columns: dict[str, Any] = {"counts": torch.ones(2, dtype=F64), "labels": f64([1, 0]), "reference_sums": f64([0, 0])}
    with pytest.raises(AssertionError, match=f"{name} must be detached"):
        SampleInputs(sums=leaf([-1.0, -2.0]), **{**columns, name: leaf([1.0, 2.0])})


def test_a_metric_of_a_loss_has_a_name_that_can_be_sent() -> None:
    with pytest.raises(ValueError, match=r"a metric named 'a<b>'; write a name such as my-loss/penalty"):
        UnitLoss(loss=torch.zeros(1), means={"a<b>": torch.zeros(1)})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"loss": {"kind": "dpo", "form": "hinge", "label_smoothing": 0.1}},
            "label_smoothing = 0.1 has no effect on form",
        ),
        ({"loss": {"kind": "dpo", "form": "ipo", "ld_alpha": 0.5}}, "ld_alpha = 0.5 weighs tokens of sums"),
        ({"loss": {"kind": "dpo"}, "kl": {"coef": 0.1}}, "kl.coef has no effect on loss.kind = `dpo`"),
        ({"loss": {"kind": "simpo"}, "entropy_coef": 0.1}, "entropy_coef has no effect on loss.kind = `simpo`"),
        (
            {"loss": {"kind": "kto"}, "correction": {"kind": "tis"}},
            "correction.kind has no effect on loss.kind = `kto`",
        ),
        ({"loss": {"kind": "kto"}, "sft_coef": 1.0}, "sft_coef = 1 weighs the preferred answers of pairs"),
        ({"loss": {"kind": "bradley-terry"}, "sft_coef": 1.0}, "sft_coef has no effect on loss.kind = `bradley-terry`"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(table)
