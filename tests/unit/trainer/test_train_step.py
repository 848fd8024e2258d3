"""A whole step on a toy policy and critic: every algorithm, split in every way, and what is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import EMPTY_FLOATS
from fourfold.config import PRESETS, Config, CriticConfig, TrainerConfig
from fourfold.errors import InvalidInput
from fourfold.nn.batching import TokenBatch
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step import before_update
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import mini_batches
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.step_result import StepResult
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import Toy, ToyEngine
from tests.fakes.trainer_engine import group_of, sample
from tests.support.recipes import make_recipe

T = TypeVar("T")


def recipe(*, ranks: int = 1, budget: int = 1000, batch: dict[str, Any] | None = None, **tables: Any) -> Config:
    rates = {"trainer": {"ranks": ranks, "learning_rate": 0.5}, "critic": {"learning_rate": 0.1}}
    return make_recipe(batch={"tokens_per_micro_batch": budget, **(batch or {})}, **(rates | tables))


def batch() -> list[Sample]:
    useful = group_of([0, 1, 3], group="a", reference=True)
    longer = group_of([2, 0], group="b", completion=7, reference=True, temperature=0.5)
    samples = [*useful, *group_of([1, 1], group="c", completion=5, reference=True), *longer]
    return [replace(s, baseline_score=0.5) for s in samples]


def run(samples: Sequence[Sample], config: Config, *, number: int = 1) -> tuple[ToyEngine, StepResult]:
    engine = ToyEngine(config)
    return engine, train_step(engine, samples, config, step=number, state=AlgorithmState())  # type: ignore[arg-type]


# ---- independence of the split -----------------------------------------------------------------------------------

ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "remax": {"advantage": {"kind": "remax"}, "aggregation": "sequence-sum"},
    "opo": {"advantage": {"kind": "opo"}, "loss": {"kind": "reinforce"}, "entropy_coef": 0.01},
    "dual": {"loss": {"kind": "ppo", "dual_clip": 3.0}, "kl": {"coef": 0.3, "estimator": "k3"}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.01, "high": 0.2}},
    "sequence mask": {"correction": {"kind": "sequence-mask-tis", "low": 0.001, "high": 0.02}},
    "distillation": {"preset": "on-policy-distill"},
    "selected": {"preset": "rejection-sampling"},
}


@pytest.mark.parametrize("updates", [{}, {"mini_batches_per_step": 2, "epochs_per_step": 2}], ids=["one", "four"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_and_metrics_do_not_depend_on_ranks_and_micro_batches(name: str, updates: dict[str, int]) -> None:
    teacher = {"reference": {"source": "teacher"}} if name == "distillation" else {}
    tables: dict[str, Any] = {"algorithm": ALGORITHMS[name], "batch": updates, **teacher}
    whole, result = run(batch(), recipe(**tables))
    wanted = metrics.summarise(result, recipe(**tables))
    for ranks, budget in ((1, 16), (2, 100), (3, 20)):
        config = recipe(ranks=ranks, budget=budget, **tables)
        engine, split = run(batch(), config)
        assert len(engine.gradients) == len(whole.gradients) == config.batch.updates_per_step
        found_gradients = engine.gradients + engine.critic_gradients
        for one, other in zip(found_gradients, whole.gradients + whole.critic_gradients, strict=True):
            assert float((one - other).norm()) <= 1e-12 * float(other.norm()) or (
                one.isnan().all() and other.isnan().all()
            )
        found = metrics.summarise(split, config)
        assert found.keys() == wanted.keys()
        for key in found.keys() - {m.PADDING_FRACTION, m.DUMMY_FRACTION}:
            assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6, nan_ok=True), key
        assert found.keys() <= m.METRICS.keys()


def test_distillation_compares_each_token_with_the_teacher_and_reads_no_score() -> None:
    config = recipe(algorithm={"advantage": {"kind": "distillation", "coef": 0.5}}, reference={"source": "teacher"})
    found = group_of([0, 1, 3], group="a", reference=True)
    forced = np.zeros_like(found[1].loss_mask)
    forced[found[1].action_mask.argmax()] = True  # a grammar forced the others
    found[1] = replace(found[1], loss_mask=forced)
    engine, result = run(found, config)
    p = torch.log_softmax(ToyEngine(config).policy.detach(), 0)
    for one, advantages in zip(found, result.targets.advantages, strict=True):
        own = p[torch.from_numpy(one.token_ids[one.action_mask]).long()].float().numpy()
        gain = np.where(one.loss_mask, one.reference_logprobs, np.nan)[one.action_mask] - own
        assert advantages == pytest.approx(np.where(np.isnan(gain), 0.0, 0.5 * gain), abs=1e-6)
        assert len({*advantages.tolist()}) > 1
    free = np.concatenate([s.loss_mask[s.action_mask] for s in found])
    mean = -2 * sum(float(part.sum()) for part in result.targets.advantages) / free.sum()
    assert metrics.summarise(result, config)[m.TEACHER_KL] == pytest.approx(mean)
    rewarded = [replace(s, score=7.0, token_rewards=np.ones(len(s.token_ids), np.float32)) for s in found]
    assert torch.equal(run(rewarded, config)[0].gradients[0], engine.gradients[0])
    with pytest.raises(InvalidInput, match=r"advantage\.kind = `distillation` needs them"):
        check_samples([replace(s, reference_logprobs=EMPTY_FLOATS) for s in found], config, policy_version=9)


# ---- one update --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["none", "tis", "icepop"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_the_only_update_of_a_step_forwards_every_token_once(
    loss: str, correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"kl": {"coef": 0.1}, "loss": {"kind": loss}, "correction": {"kind": correction}}
    config = recipe(budget=20, algorithm=algorithm)
    forwarded: list[int] = []
    logprobs = Toy.logprobs

    def counted(self: Toy, tokens: TokenBatch, *, entropy: bool = False) -> Any:
        forwarded.append(tokens.token_count)
        return logprobs(self, tokens, entropy=entropy)

    monkeypatch.setattr(Toy, "logprobs", counted)
    _, result = run(batch(), config)
    assert len(forwarded) == result.micro_batch_count and sum(forwarded) == result.forwarded_tokens
    once = metrics.summarise(result, config)
    assert once[m.REFERENCE_KL] > 0 and once[m.MISMATCH_MEAN] > 0 and once[m.RATIO_MAX] == once[m.RATIO_MIN] == 1

    # The same numbers as with a pass before it: what the update finds is what the old weights gave.
    monkeypatch.setattr(before_update, "needs_old_logprobs", lambda _config: True)
    forwarded.clear()
    _, result = run(batch(), config)
    assert sum(forwarded) > result.forwarded_tokens
    twice = metrics.summarise(result, config)
    assert {k: v for k, v in twice.items() if k in once} == pytest.approx(once, rel=1e-5, abs=1e-6, nan_ok=True)


# ---- several updates ---------------------------------------------------------------------------------------------


def test_old_logprobs_stay_those_of_the_start_so_that_later_updates_clip() -> None:
    tables: dict[str, Any] = {"trainer": {"learning_rate": 40.0}}
    once = metrics.summarise(run(batch(), recipe(**tables))[1], recipe(**tables))
    assert (once[m.CLIP_FRACTION_LOW], once[m.CLIP_FRACTION_HIGH], once[m.RATIO_MAX]) == (0, 0, 1)
    config = recipe(batch={"epochs_per_step": 3}, **tables)
    engine, result = run(batch(), config)
    often = metrics.summarise(result, config)
    assert often[m.CLIP_FRACTION_LOW] > 0 and often[m.CLIP_FRACTION_HIGH] > 0
    assert often[m.RATIO_MIN] < 0.8 and often[m.RATIO_MAX] > 1.2 and often[m.UPDATES] == 3
    first = engine.policy_shares[0][0][0].old_logprobs
    assert all(sorted(s[0][0].old_logprobs) == sorted(first) for s in engine.policy_shares)


def test_every_epoch_deals_all_samples_to_its_mini_batches_and_repeats_itself() -> None:
    config = recipe(batch={"mini_batches_per_step": 3, "epochs_per_step": 2})
    bounds = np.arange(9)
    parts = mini_batches(bounds, config, step=4)
    for epoch in (parts[:3], parts[3:]):
        assert sorted(i for part in epoch for i in part) == list(range(8))
    assert [len(p) for p in parts] == [3, 3, 2, 3, 3, 2]
    assert parts[:3] != parts[3:] and parts == mini_batches(bounds, config, step=4)
    assert parts != mini_batches(bounds, config, step=5)
    assert mini_batches(bounds, recipe(), step=4) == [list(range(8))]


def test_a_mini_batch_with_nothing_to_learn_is_left_out() -> None:
    samples = [*group_of([1, 1, 1, 1], group="a"), *group_of([0, 1], group="b")]
    config = recipe(batch={"mini_batches_per_step": 6})
    engine, result = run(samples, config)
    assert len(engine.gradients) == result.policy_updates == 2
    assert result.skipped_reason == ""


# ---- what is skipped ---------------------------------------------------------------------------------------------


def test_constant_groups_and_samples_without_action_tokens_skip_the_step() -> None:
    assert run(group_of([1, 1]), recipe())[1].skipped_reason == "NO_ADVANTAGE"
    assert run(group_of([0, 1], completion=0), recipe())[1].skipped_reason == "NO_ACTION_TOKENS"
    config = recipe(algorithm={"shaping": {"mask_truncated": True}})
    samples = [replace(s, truncated=True) for s in group_of([0, 1])]
    assert run(samples, config)[1].skipped_reason == "NO_ACTION_TOKENS"


def test_a_step_whose_tokens_are_all_rejected_changes_nothing() -> None:
    config = recipe(algorithm={"correction": {"kind": "icepop", "low": 1e6, "high": 1e7}})
    engine, result = run(batch(), config)
    assert result.skipped_reason == "ALL_REJECTED" and not engine.gradients[0].isfinite().any()
    assert result.policy_updates == 0
    found = metrics.summarise(result, config)
    assert found[m.REJECTED_TOKENS] == 1 and math.isnan(found[m.GRAD_NORM])


def test_a_behavior_logprob_that_is_not_finite_is_left_out_of_the_mismatch() -> None:
    samples = group_of([0, 1])
    behavior = samples[0].behavior_logprobs.copy()
    behavior[-1] = -math.inf
    samples[0] = replace(samples[0], behavior_logprobs=behavior)
    _, result = run(samples, recipe())
    assert (result.policy.token_count, len(result.policy.mismatches)) == (4, 3)
    found = metrics.summarise(result, recipe())
    assert math.isfinite(found[m.MISMATCH_KL]) and 0 < found[m.EFFECTIVE_SAMPLE_SIZE] <= 1
    assert found[m.MISMATCH_NONFINITE] == 1


# ---- rewards -----------------------------------------------------------------------------------------------------


def test_a_reward_of_a_turn_is_credited_to_the_tokens_before_it() -> None:
    token_rewards = np.array([0, 0, 0, 5, 0], np.float32)
    samples = [replace(sample("s", prompt=2, completion=3, score=1.0), token_rewards=token_rewards)]
    config = recipe(batch={"group_size": 1}, algorithm={"advantage": {"kind": "reinforce"}})
    _, result = run(samples, config)
    assert np.concatenate(result.targets.advantages).tolist() == [6, 6, 1]
    grouped = [replace(s, group_id="g") for s in [*samples, sample("t", prompt=2, completion=1, score=2.0)]]
    _, result = run(grouped, recipe(algorithm={"advantage": {"kind": "dr-grpo"}}))
    assert np.concatenate(result.targets.advantages).tolist() == [2, 2, 2, -2]  # 1 + 5 against 2


def test_remax_compares_with_the_greedy_answer() -> None:
    samples = [replace(sample("s", score=1.0), baseline_score=0.25)]
    _, result = run(samples, recipe(algorithm={"advantage": {"kind": "remax"}}))
    assert np.concatenate(result.targets.advantages).tolist() == [0.75, 0.75]
    with pytest.raises(InvalidInput, match="sample s has no baseline_score"):
        check_samples([sample("s")], recipe(algorithm={"advantage": {"kind": "remax"}}), policy_version=0)


def test_penalties_come_before_the_comparison_and_the_clip_after_it() -> None:
    shaping = {"overlong_buffer": 0.5, "truncated": 0.5, "clip": 1.0}
    config = recipe(algorithm={"advantage": {"kind": "dr-grpo"}, "shaping": shaping})
    samples = [sample("a", score=8.0, completion=2), sample("b", score=4.0, completion=6)]  # 6 - 4 of 4 tokens too long
    samples[1] = replace(samples[1], truncated=True)
    _, result = run(samples, config)
    assert result.outcomes.tolist() == [8, (4 - 0.5) * 0.5]
    assert set(np.concatenate(result.targets.advantages).tolist()) == {1, -1}
    assert metrics.summarise(result, config)[m.REWARD_PENALTY] == pytest.approx((1.75 - 4) / 2)


def test_running_normalisation_and_the_kl_coefficient_are_remembered() -> None:
    kl = {"coef": 0.1, "placement": "reward", "estimator": "k2", "target": 1e-3, "horizon": 100}
    config = recipe(algorithm={"shaping": {"normalize": True}, "kl": kl})
    _, first = run(batch(), config)
    assert first.algorithm_state.scores.count == 7 and first.algorithm_state.scores.mean == pytest.approx(8 / 7)
    assert first.algorithm_state.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 7 / 100))  # far above its target
    engine = ToyEngine(config)
    again = train_step(engine, batch(), config, step=2, state=first.algorithm_state)  # type: ignore[arg-type]
    assert again.algorithm_state.scores.count == 14 and again.kl_coef == first.algorithm_state.kl_coef
    assert metrics.summarise(again, config)[m.KL_COEF] == first.algorithm_state.kl_coef


def test_a_log_probability_that_is_no_number_leaves_the_kl_coefficient_alone() -> None:
    kl = {"coef": 0.1, "placement": "reward", "estimator": "k1", "target": 1e-3}
    config = recipe(algorithm={"kl": kl})
    engine = ToyEngine(config)
    with torch.no_grad():
        engine.policy[0] = math.nan
    result = train_step(engine, batch(), config, step=1, state=AlgorithmState())  # type: ignore[arg-type]
    assert (result.skipped_reason, result.algorithm_state.kl_coef) == ("NOT_FINITE", 0.1)


def test_the_distance_in_the_reward_is_reported_only_where_it_is_subtracted() -> None:
    in_loss = recipe(algorithm={"preset": "grpo-paper"}, batch={"mini_batches_per_step": 2})
    assert m.REWARD_KL not in metrics.summarise(run(batch(), in_loss)[1], in_loss)
    in_reward = recipe(algorithm={"preset": "reinforce++"})
    assert m.REWARD_KL in metrics.summarise(run(batch(), in_reward)[1], in_reward)


# ---- critic ------------------------------------------------------------------------------------------------------


def test_the_critic_learns_the_returns_and_lowers_the_variance_of_the_advantages() -> None:
    config = recipe(algorithm={"preset": "ppo", "kl": {"coef": 0.0}, "whiten": "off"}, critic={"learning_rate": 0.5})
    engine, state, variances = ToyEngine(config), AlgorithmState(), []
    samples = batch()
    for number in range(1, 40):
        result = train_step(engine, samples, config, step=number, state=state)  # type: ignore[arg-type]
        variances.append(metrics.summarise(result, config)[m.EXPLAINED_VARIANCE])
    assert variances[0] == pytest.approx(0, abs=1e-3) and variances[-1] > 0.5


def test_the_policy_waits_for_the_critic() -> None:
    config = recipe(algorithm={"preset": "ppo"}, critic={"policy_starts_at_step": 3})
    engine, result = run(batch(), config, number=2)
    assert (len(engine.gradients), len(engine.critic_gradients)) == (0, 1)
    assert (result.policy_updates, result.skipped_reason) == (0, "")
    engine, result = run(batch(), config, number=3)
    assert (len(engine.gradients), len(engine.critic_gradients), result.policy_updates) == (1, 1, 1)


def test_a_critic_whose_gradient_overflows_while_it_is_trained_alone_skips_the_step() -> None:
    config = recipe(algorithm={"preset": "ppo"}, critic={"policy_starts_at_step": 3})
    engine = ToyEngine(config)
    with torch.no_grad():
        engine.critic[:] = math.nan
    result = train_step(engine, batch(), config, step=1, state=AlgorithmState())  # type: ignore[arg-type]
    assert result.skipped_reason == "NOT_FINITE"


class PolicyFirst(ToyEngine):
    """A critic that is apart may end last."""

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        self.beside_count += 1
        found = policy()
        critic()
        return found

    beside_count = 0


def test_policy_and_critic_may_work_at_the_same_time() -> None:
    config = recipe(algorithm={"preset": "ppo"}, batch={"mini_batches_per_step": 2}, critic={"ranks": 3})
    other, wanted = run(batch(), config)
    engine = PolicyFirst(config)
    found = train_step(engine, batch(), config, step=1, state=AlgorithmState())  # type: ignore[arg-type]
    assert engine.beside_count == 3  # the look-up and two mini-batches
    for mine, theirs in zip(
        engine.gradients + engine.critic_gradients, other.gradients + other.critic_gradients, strict=True
    ):
        assert torch.equal(mine, theirs)
    assert metrics.summarise(found, config) == metrics.summarise(wanted, config)
    assert [len(shares) for shares in engine.policy_shares] == [1, 1]
    assert [len(shares) for shares in engine.critic_shares] == [3, 3]


# ---- schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 1, [1 / 2, 1, 1, 1]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(schedule: str, warmup: int, rates: list[float]) -> None:
    config = TrainerConfig.model_validate({"learning_rate": 2.0, "schedule": schedule, "warmup_steps": warmup})
    found = [learning_rate(config, n, 4) / 2 for n in range(1, 5)]
    assert found == pytest.approx(rates, abs=1e-6)
    assert all(0 < rate < 1 for rate in found[:warmup]) and found[warmup] == 1, "as many reduced steps as asked for"
    if schedule != "constant":
        assert learning_rate(config, 5, 4) == pytest.approx(0, abs=1e-12)
        assert learning_rate(config, 50, 4) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2]),  # 0.2 + 0.8 (1 - x), x = 0, 1/4, 2/4, 3/4 and 1 at the end
        ("cosine", [1 / 3, 2 / 3, 1, 0.882843, 0.6, 0.317157, 0.2]),  # 0.2 + 0.8 (1 + cos(pi x)) / 2
    ],
)
def test_the_learning_rate_falls_to_its_last_share(schedule: str, rates: list[float]) -> None:
    table = {"learning_rate": 2.0, "schedule": schedule, "warmup_steps": 2, "final_learning_rate_share": 0.2}
    for config in (TrainerConfig.model_validate(table), CriticConfig.model_validate(table)):
        found = [learning_rate(config, n, 6) / 2 for n in range(1, 8)]
        assert found == pytest.approx(rates, abs=1e-6)
        assert learning_rate(config, 50, 6) == pytest.approx(2 * rates[-1])


def test_a_share_of_the_steps_is_the_warm_up() -> None:
    config = TrainerConfig(learning_rate=2.0, warmup_share=0.3)
    assert [learning_rate(config, n, 10) for n in (1, 3, 4)] == [0.5, 1.5, 2.0]
    with pytest.raises(ValueError, match=r"warmup_steps = 2 and warmup_share = 0.3 exclude each other"):
        TrainerConfig(warmup_steps=2, warmup_share=0.3)
