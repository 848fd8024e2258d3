"""Selections: the units of a scored group, worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fourfold.algorithm.advantages import Constant, Distillation
from fourfold.algorithm.packed import PackedRewards
from fourfold.algorithm.selection import SelectionConfig, pairs_of
from fourfold.config import Config
from fourfold.config.algorithm import SAMPLE_PRESETS
from tests.support.recipes import make_recipe

SCORES = [0.5, 2.0, -1.0, 2.0, 0.75]


@pytest.mark.parametrize(
    ("rule", "scores", "chosen"),
    [
        ({"kind": "none"}, SCORES, [0, 1, 2, 3, 4]),
        ({"kind": "best"}, SCORES, [1]),  # the earlier one of two
        ({"kind": "best", "threshold": 2.0}, SCORES, [1]),
        ({"kind": "best", "threshold": 2.5}, SCORES, []),
        ({"kind": "above", "threshold": 0.75}, SCORES, [1, 3, 4]),
        ({"kind": "above", "threshold": 3.0}, SCORES, []),
        ({"kind": "top", "count": 3}, SCORES, [1, 3, 4]),
        ({"kind": "top", "count": 4}, SCORES, [0, 1, 3, 4]),
        ({"kind": "top", "count": 4, "threshold": 1.0}, SCORES, [1, 3]),
        ({"kind": "top", "count": 9}, SCORES, [0, 1, 2, 3, 4]),
        ({"kind": "best-worst"}, SCORES, [1, 2]),
        ({"kind": "best-worst", "min_margin": 3.0}, SCORES, [1, 2]),
        ({"kind": "best-worst", "min_margin": 3.5}, SCORES, []),
        ({"kind": "best-worst"}, [1.0, 1.0, 1.0], []),
        ({"kind": "best-worst"}, [1.0], []),
        ({"kind": "all-pairs"}, SCORES, [0, 1, 2, 3, 4]),
        ({"kind": "all-pairs", "min_margin": 2.0}, SCORES, [1, 2, 3]),
        ({"kind": "all-pairs"}, [0.0, 0.0], []),
    ],
)
def test_the_selected_samples(rule: dict[str, Any], scores: list[float], chosen: list[int]) -> None:
    assert SelectionConfig.model_validate(rule).select(scores) == chosen


def test_the_pairs_of_a_group_are_those_of_its_selected_samples() -> None:
    assert pairs_of(SCORES, 1.5) == [(1, 0), (0, 2), (3, 0), (1, 2), (3, 2), (4, 2)]
    assert pairs_of(SCORES, 1.75) == [(1, 2), (3, 2), (4, 2)]
    chosen = SelectionConfig(kind="all-pairs", min_margin=1.75).select(SCORES)
    assert chosen == [1, 2, 3, 4]
    again = [(chosen[a], chosen[b]) for a, b in pairs_of([SCORES[i] for i in chosen], 1.75)]
    assert again == pairs_of(SCORES, 1.75)


def test_coordinator_and_trainer_find_the_same_pairs() -> None:
    """The trainer has scores as float32, and the coordinator as doubles; a margin is at least `min_margin` in both."""
    for first, second, margin in itertools.product(range(11), range(11), range(11)):
        scores = [first / 10, second / 10]
        found = pairs_of(scores, margin / 10)
        assert found == pairs_of([float(np.float32(score)) for score in scores], margin / 10)
        assert bool(found) == (first != second and abs(first - second) >= margin), (first, second, margin)


def test_advantages_without_scores() -> None:
    rewards = PackedRewards(
        rewards=np.array([0.5, -1.0, 0.0]), values=None, lengths=np.array([2, 0, 1]), gaps=np.ones(3, np.int64)
    )
    assert Constant(value=0.5).spread(rewards)[0].tolist() == [0.5, 0.5, 0.5]
    assert Constant().spread(rewards)[0].tolist() == [-0.5, -0.5, 0.0]
    assert Distillation(coef=2.0).spread(rewards)[0].tolist() == [1.0, -2.0, 0.0], "a token has its own reward alone"


def test_the_estimate_of_the_reverse_kl_divergence_has_its_gradient() -> None:
    """For the softmax of logits z: sum over tokens of pi A grad(log pi) is -grad KL(pi || f), by finite differences."""
    z, f = np.array([0.3, -1.2, 0.9, 0.1]), np.log([0.1, 0.2, 0.3, 0.4])

    def logs(logits: Any) -> Any:
        return logits - np.log(np.exp(logits).sum())

    def divergence(logits: Any) -> float:
        return float((np.exp(logs(logits)) * (logs(logits) - f)).sum())

    p, pi = logs(z), np.exp(logs(z))
    advantages = Distillation().spread(
        PackedRewards(rewards=f - p, values=None, lengths=np.array([4]), gaps=np.ones(4, np.int64))
    )[0]
    estimate = [float((pi * advantages * (np.eye(4)[:, k] - pi[k])).sum()) for k in range(4)]
    h = 1e-6
    slopes = [(divergence(z + h * np.eye(4)[k]) - divergence(z - h * np.eye(4)[k])) / (2 * h) for k in range(4)]
    assert estimate == pytest.approx([-slope for slope in slopes], abs=1e-8)


def recipe(algorithm: dict[str, Any], **tables: Any) -> Config:
    batch = {"group_size": 4, "tokens_per_micro_batch": 4096} | tables.pop("batch", {})
    return make_recipe(algorithm=algorithm, batch=batch, **tables)


def test_the_presets_are_complete() -> None:
    assert set(SAMPLE_PRESETS) == {"rejection-sampling", "online-dpo", "on-policy-distill"}
    sampling, dpo = recipe({"preset": "rejection-sampling"}), recipe({"preset": "online-dpo"})
    assert (sampling.needs_scorer, sampling.needs_reference) == (True, False)
    assert (dpo.needs_scorer, dpo.needs_reference, dpo.algorithm.selection.kind) == (True, True, "best-worst")
    distill: dict[str, Any] = {"algorithm": {"preset": "on-policy-distill"}, "reference": {"source": "teacher"}}
    found = recipe(**distill)
    assert (found.needs_scorer, found.needs_reference) == (False, True)
    held_out = {"data": {"holdout": {"field": "", "groups": 1}}}
    assert recipe(**distill, **held_out, reward={"function": "math_verify"}).needs_scorer, "for the held-out answers"


TEACHER = {"reference": {"source": "teacher"}}


@pytest.mark.parametrize(
    ("algorithm", "tables", "message"),
    [
        ({"selection": {"kind": "above"}, "preset": "rejection-sampling"}, {}, "set threshold, such as"),
        ({"selection": {"min_margin": 0.5}, "preset": "rejection-sampling"}, {}, "min_margin = 0.5 has no effect on"),
        ({"selection": {"count": 2}, "preset": "rejection-sampling"}, {}, "count = 2 has no effect on kind = `best`"),
        (
            {"selection": {"threshold": 1.0}, "preset": "online-dpo"},
            {},
            "threshold = 1 has no effect on kind = `best-w",
        ),
        ({"selection": {"kind": "best"}}, {}, "algorithm.advantage.kind = `grpo` compares them; set advantage ="),
        ({"selection": {"kind": "best-worst"}}, {}, "makes pairs, but algorithm.loss.kind = `ppo` reads trajectories"),
        ({"selection": {"kind": "top"}, "preset": "online-dpo"}, {}, "reads pairs of different scores, but"),
        ({"loss": {"kind": "dpo"}, "filter": {"keep": "varied"}}, {}, "batch.group_size = 4; set selection.kind ="),
        ({"preset": "online-dpo"}, {"batch": {"group_size": 1}}, "raise it to at least 2"),
        (
            {"preset": "rejection-sampling", "selection": {"kind": "top", "count": 4}},
            {},
            "selects of more than the batch.group_size = 4 samples of a prompt; raise it to at least 5",
        ),
        (
            {"preset": "online-dpo", "selection": {"kind": "all-pairs"}},
            {"batch": {"tokens_per_micro_batch": 40}},
            "tokens_per_micro_batch = 40 cannot hold 4 samples of",
        ),
        (
            {"preset": "online-dpo", "selection": {"kind": "all-pairs"}, "loss": {"ld_alpha": 0.5}},
            {},
            "remove ld_alpha, or use kind = `best-worst`",
        ),
        ({"preset": "on-policy-distill"}, {}, "learns from a teacher; set reference.source to its model"),
        ({"preset": "on-policy-distill", "kl": {"coef": 0.1}}, TEACHER, "kl.coef has no effect on advantage.kind = `d"),
        ({"preset": "on-policy-distill", "filter": {"keep": "varied"}}, TEACHER, "filter.keep has no effect on"),
        ({"preset": "on-policy-distill"}, TEACHER | {"reward": {"weight": 2.0}}, "[reward] has no effect"),
        ({}, TEACHER, "reference.source = 'teacher' has no effect"),
    ],
)
def test_recipes_that_cannot_select_are_refused(algorithm: dict[str, Any], tables: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        recipe(algorithm, **tables)
    assert message in str(caught.value)
