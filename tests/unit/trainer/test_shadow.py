"""The gradients of live and shadow scores, compared on a toy policy; DeepSpeed's are in test_trainer_shadow.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState, RunningMoments
from fourfold.config import Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample, ScoreTerm
from fourfold_trainer.optim.master_weights import MasterSlice, MasterWeights
from fourfold_trainer.service.metrics import summarise
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.shadow import compare_gradients
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from fourfold_trainer.zero.gradients import KeptGradient, intercepted
from tests.fakes.toy_engine import ToyEngine
from tests.unit.trainer.test_train_step import ALGORITHMS, batch, recipe

STATE = AlgorithmState(scores=RunningMoments(count=9, mean=0.5, m2=4.0))
SHADOW_SCORES = (3.0, 0.0, 1.0, 2.0, 5.0, -1.0, 0.5)
RECIPES: dict[str, dict[str, Any]] = {
    # Without those whose advantages follow from no score.
    **{name: algorithm for name, algorithm in ALGORITHMS.items() if name not in ("distillation", "selected")},
    "shaped": {"shaping": {"normalize": True, "overlong_buffer": 0.5, "truncated": 0.5}, "whiten": "full"},
    "gdpo": {"advantage": {"kind": "gdpo"}},
    "turns": {"advantage": {"kind": "turn-grpo", "turn_discount": 0.5}},
}
UPDATES: dict[str, dict[str, int]] = {"one": {}, "four": {"mini_batches_per_step": 2, "epochs_per_step": 2}}


def shadowed(samples: Sequence[Sample], scores: Sequence[float]) -> list[Sample]:
    return [replace(sample, shadow_score=score) for sample, score in zip(samples, scores, strict=True)]


def rewarded() -> list[Sample]:
    """Return the batch with rewards of single tokens, and with terms of the scores."""
    random = np.random.default_rng(1)
    return [
        replace(
            s,
            token_rewards=np.where(s.action_mask, random.normal(size=len(s.token_ids)), 0).astype(np.float32),
            terms=terms(("one", random.normal(), 1), ("two", random.normal(), 1)),
        )
        for s in batch()
    ]


def terms(*parts: tuple[str, float, float]) -> tuple[ScoreTerm, ...]:
    """Return terms of these names, scores and weights."""
    return tuple(ScoreTerm(name=n, scorer=f"{n}@1", score=r, weight=w) for n, r, w in parts)


def run(samples: Sequence[Sample], config: Config) -> tuple[ToyEngine, StepResult]:
    engine = ToyEngine(config)
    measure = partial(compare_gradients, engine, STATE)  # type: ignore[arg-type]
    return engine, train_step(engine, samples, config, step=1, state=STATE, measure=measure)  # type: ignore[arg-type]


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_shadow_has_the_gradient_of_a_step_with_its_scores_and_changes_nothing(name: str, updates: str) -> None:
    tables: dict[str, Any] = {"algorithm": RECIPES[name], "batch": UPDATES[updates]}
    config = recipe(ranks=2, budget=30, **tables)
    samples = rewarded()
    plain, wanted = run(samples, config)
    engine, found = run(shadowed(samples, SHADOW_SCORES), config)

    assert len(engine.gradients) == len(plain.gradients) > 0
    for one, other in zip(engine.gradients, plain.gradients, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert torch.equal(engine.policy, plain.policy) and torch.equal(engine.critic, plain.critic)
    assert found.algorithm_state == wanted.algorithm_state
    before, after = summarise(wanted, config), summarise(found, config)
    extra = {key: after.pop(key) for key in list(after) if key.startswith("shadow/")}
    np.testing.assert_equal(after, before)

    whole = recipe(**{**tables, "batch": {}})
    live = run(samples, whole)[0].gradients
    swapped = [replace(s, score=r, terms=()) for s, r in zip(samples, SHADOW_SCORES, strict=True)]
    shadow = run(swapped, whole)[0].gradients
    assert live and shadow
    if name == "remax" or not (live[0].isfinite().all() and shadow[0].isfinite().all()):
        assert m.SHADOW_COSINE not in extra
        return
    cosine = float(live[0] @ shadow[0] / live[0].norm() / shadow[0].norm())
    rejects = "icepop", "sequence mask", "reinforce++-baseline"  # all but a few tokens, or all but the KL term
    assert abs(cosine) < 0.9999 or name in rejects
    assert extra[m.SHADOW_COSINE] == pytest.approx(cosine, abs=1e-6)
    assert extra[m.SHADOW_NORM] == pytest.approx(float(shadow[0].norm()), rel=1e-6)
    assert extra[m.SHADOW_LIVE_NORM] == pytest.approx(float(live[0].norm()), rel=1e-6)
    assert extra[m.SHADOW_SECONDS] > 0


def centred(samples: Sequence[Sample]) -> list[float]:
    means = {s.group_id: np.mean([o.score for o in samples if o.group_id == s.group_id]) for s in samples}
    return [float(s.score or 0.0) - float(means[s.group_id]) for s in samples]


@pytest.mark.parametrize(
    ("scores", "cosine"),
    [
        (lambda samples: [s.score for s in samples], 1.0),
        (lambda samples: [3 * s.score + 7 for s in samples], 1.0),
        (lambda samples: [-r for r in centred(samples)], -1.0),
    ],
    ids=["equal", "scaled", "negated"],
)
@pytest.mark.parametrize("updates", UPDATES)
def test_equal_scores_have_cosine_one_and_negated_ones_minus_one(
    scores: Callable[[Sequence[Sample]], list[float]], cosine: float, updates: str
) -> None:
    config = recipe(batch=UPDATES[updates], algorithm={"advantage": {"kind": "grpo", "epsilon": 0.0}})
    found = summarise(run(shadowed(batch(), scores(batch())), config)[1], config)
    assert found[m.SHADOW_COSINE] == pytest.approx(cosine, abs=1e-12)
    assert abs(found[m.SHADOW_COSINE]) <= 1
    assert found[m.SHADOW_NORM] == pytest.approx(found[m.SHADOW_LIVE_NORM], rel=1e-12)


def uses(samples: Sequence[Sample], **tables: Any) -> tuple[list[str], set[str]]:
    """Return the gradients that a step computes, and the metrics of a comparison."""
    config = recipe(**tables)
    engine, result = run(samples, config)
    return engine.uses, {key for key in summarise(result, config) if key.startswith("shadow/")}


ALL = {m.SHADOW_COSINE, m.SHADOW_NORM, m.SHADOW_LIVE_NORM, m.SHADOW_SECONDS}


def test_a_comparison_computes_two_gradients_before_the_updates() -> None:
    samples = shadowed(batch(), SHADOW_SCORES)
    assert uses(batch()) == (["apply"], set())
    assert uses(samples) == (["keep", "compare", "apply"], ALL)
    assert uses(samples, batch={"mini_batches_per_step": 2}) == (["keep", "compare", "apply", "apply"], ALL)


def test_nothing_is_computed_without_two_gradients() -> None:
    samples = shadowed(batch(), SHADOW_SCORES)
    assert uses([*samples[:-1], replace(samples[-1], shadow_score=None)]) == (["apply"], set())
    assert uses(shadowed(batch(), [1, 1, 1, 4, 4, 2, 2])) == (["apply"], set())  # constant groups
    assert uses([replace(s, score=1.0) for s in samples]) == ([], set())
    critic = {"policy_starts_at_step": 2}
    assert uses(samples, algorithm={"preset": "ppo"}, critic=critic) == ([], set())
    # With a KL term in the loss, these gradients are that term's.
    assert uses(shadowed(batch(), [1] * 7), algorithm={"kl": {"coef": 0.1}}) == (["keep", "compare", "apply"], ALL)


def test_a_gradient_that_is_not_finite_is_not_compared() -> None:
    rejects_all = {"correction": {"kind": "icepop", "low": 1e-9, "high": 1e-8}}
    assert uses(shadowed(batch(), SHADOW_SCORES), algorithm=rejects_all) == (["keep", "apply"], set())


# ---- segments and terms ------------------------------------------------------------------------------------------


def test_segments_of_a_trajectory_have_one_shadow_score() -> None:
    first = replace(batch()[0], shadow_score=1.0, segment_count=2, trajectory_id="t")
    segments = [first, replace(first, sample_id="s2", segment_index=1)]
    check_samples(segments, recipe(), policy_version=0)
    for other in (None, 2.0):
        broken = [segments[0], replace(segments[1], shadow_score=other)]
        with pytest.raises(InvalidInput, match=r"sample s2 has shadow_score = .*trajectory t has 1.0; all segments"):
            check_samples(broken, recipe(), policy_version=0)


def test_gdpo_compares_the_terms_of_each_sample() -> None:
    a, b, c = batch()[:3]
    d, e = batch()[5:]
    samples = [
        replace(a, terms=terms(("math", 0, 2), ("short", 5, 0))),  # the gate `math` has switched `short` off
        replace(b, terms=terms(("math", 4, 2), ("short", 3, 1))),
        replace(c, terms=terms(("short", 1, 1), ("math", 2, 2))),
        d,  # a group without terms: its scores, 2 and 0
        e,
    ]
    algorithm: dict[str, Any] = {"advantage": {"kind": "gdpo", "epsilon": 0.0, "normalize_batch": False}}
    root = 1 / math.sqrt(2)
    result = run(samples, recipe(algorithm=algorithm))[1]
    found = [float(part[0]) for part in result.targets.advantages]
    assert found == pytest.approx([-2, 2 + root, -root, root, -root])  # math: 0 4 2, mean 2, s = 2
    # Rewards of tokens are a term of their own, with weight 1. They are 1 for b, and -1 for d.
    stream = np.zeros(len(b.token_ids), np.float32)
    stream[-1] = 1.0
    samples[1] = replace(samples[1], token_rewards=stream)
    result = run(samples, recipe(algorithm=algorithm))[1]
    found = [float(part[0]) for part in result.targets.advantages]
    third = 1 / math.sqrt(3)  # 0 1 0, mean 1/3, s = sqrt(1/3)
    assert found == pytest.approx([-2 - third, 2 + root + 2 * third, -root - third, root, -root])


def test_segments_have_the_same_terms_where_they_are_compared() -> None:
    one = replace(batch()[0], segment_count=2, trajectory_id="t", terms=terms(("math", 1, 1)))
    two = replace(one, sample_id="s2", segment_index=1, terms=())
    check_samples([one, two], recipe(), policy_version=0)
    with pytest.raises(InvalidInput, match=r"sample s2 has terms = \(\), and"):
        check_samples([one, two], recipe(algorithm={"advantage": {"kind": "gdpo"}}), policy_version=0)


# ---- one rank ----------------------------------------------------------------------------------------------------


def masters() -> MasterWeights:
    """Return two masters of 7 and 4 elements; elements 3 to 4 of the first and 2 to 3 of the second are padding."""
    pieces = [("a", 0, 3, 0, 0), ("b", 4, 2, 0, 5), ("c", 0, 2, 1, 0)]
    return MasterWeights(
        tensors=[torch.zeros(7), torch.zeros(2, 2)],
        slices=[MasterSlice(name=n, first=f, count=c, master=i, offset=o) for n, f, c, i, o in pieces],
        sizes={"a": 3, "b": 6, "c": 2},
        shared=True,
    )


def test_products_are_those_of_all_parameters_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_trainer.zero.gradients._CHUNK", 2)
    table = masters()
    kept = KeptGradient(table, torch.device("cpu"))
    first, second = table.tensors
    one, two = torch.arange(1.0, 8.0), torch.tensor([[5.0, 1.0], [math.nan, math.nan]])
    three, four = torch.ones(7), torch.tensor([[7.0, 3.0], [math.nan, math.nan]])
    kept.keep(first, one)
    kept.keep(second, two)
    assert kept.byte_count == 4 * (7 + 4)
    one.zero_()  # a buffer of DeepSpeed that is used again
    kept.compare(first, three)
    kept.compare(second, four)
    squares = 1 + 4 + 9 + 36 + 49
    assert kept.products() == [1 + 2 + 3 + 6 + 7 + 35 + 3, squares + 25 + 1, 5 + 49 + 9]
    assert kept.products() == [0, 0, 0] and kept.byte_count == 0  # both were forgotten
    kept.keep(first, torch.full((7,), 2.0))
    kept.compare(second, torch.full((2, 2), 3.0))  # either has gradients where the other has none
    assert kept.products() == [0, 20, 18]


def test_an_intercepted_optimizer_shows_its_gradients_in_place_of_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.arange(3.0)
    seen: list[list[float]] = []
    with intercepted(optimizer, lambda master, gradient: seen.append(gradient.tolist())):
        optimizer.step()
    assert not optimizer.state and torch.equal(weight.detach(), torch.ones(3))
    optimizer.step()
    assert optimizer.state and not torch.equal(weight.detach(), torch.ones(3))
    assert seen == [[0, 1, 2]]
