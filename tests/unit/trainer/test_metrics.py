"""Tests the metrics of a step against values derived by hand, and that no pass waits for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.config import Config
from fourfold.nn.router import Routed
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step.train_step import train_step
from fourfold_trainer.work import Work
from tests.fakes.toy_engine import Toy, ToyEngine
from tests.fakes.trainer_engine import group_of, sample
from tests.unit.trainer.test_train_step import ALGORITHMS, batch, recipe, run


def with_behavior(samples: Sequence[Sample], ratios: Sequence[Sequence[float]]) -> tuple[list[Sample], list[float]]:
    """Return samples whose tokens are `ratios` times likelier to the toy than to the engine, and the toy's logprobs."""
    engine = ToyEngine(recipe())
    found, old = [], []
    for one, row in zip(samples, ratios, strict=True):
        table = torch.log_softmax(engine.policy.detach() / one.temperature, 0).numpy()
        logprobs = table[one.token_ids[one.loss_mask]]
        behavior = one.behavior_logprobs.copy()
        behavior[one.loss_mask] = logprobs - np.log(row)
        found.append(replace(one, behavior_logprobs=behavior))
        old += logprobs.tolist()
    return found, old


def test_what_a_correction_bounds_rejects_and_leaves_is_counted() -> None:
    samples, old = with_behavior(group_of([0, 1, 3], group="a"), [[1.5, 4.0], [1.0, 0.25], [8.0, math.inf]])
    config = recipe(algorithm={"correction": {"kind": "tis", "low": 0.5, "high": 2.0}})
    found = metrics.summarise(run(samples, config)[1], config)
    assert found[m.CORRECTION_WEIGHT_MIN] == pytest.approx(0.5)
    assert found[m.CORRECTION_WEIGHT_MAX] == pytest.approx(2.0)
    assert found[m.CORRECTION_WEIGHT] == pytest.approx((1.5 + 2 + 1 + 0.5 + 2 + 0) / 6)
    assert found[m.TRUNCATED_WEIGHTS] == pytest.approx(3 / 6)
    assert found[m.REJECTED_TOKENS] == pytest.approx(1 / 6) and found[m.REJECTED_SAMPLES] == 0
    assert found[m.MISMATCH_NONFINITE] == 1
    gaps = [abs(1 - 1 / ratio) * math.exp(logprob) for ratio, logprob in zip([1.5, 4, 1, 0.25, 8], old, strict=False)]
    assert found[m.MISMATCH_PROBABILITY] == pytest.approx(sum(gaps) / 5, rel=1e-5)
    config = recipe(algorithm={"correction": {"kind": "icepop", "low": 0.5, "high": 2.0}})
    found = metrics.summarise(run(samples, config)[1], config)
    assert found[m.REJECTED_TOKENS] == pytest.approx(4 / 6) and found[m.TRUNCATED_WEIGHTS] == 0
    assert found[m.REJECTED_SAMPLES] == pytest.approx(1 / 3), "the third has no token left"
    assert found[m.CORRECTION_WEIGHT_MIN] == pytest.approx(1.0), "of those that are not rejected"
    assert found[m.CORRECTION_WEIGHT_MAX] == pytest.approx(1.5)


def test_metrics_cover_all_sampled_tokens_where_a_pass_before_the_updates_does() -> None:
    samples = [*group_of([0, 1], group="useful", reference=True), *group_of([1, 1], group="masked", reference=True)]
    samples, _ = with_behavior(samples, [[2, 2], [0.5, 2], [4, 4], [1, math.inf]])
    samples = [replace(s, truncated=s.group_id == "masked") for s in samples]
    tables: dict[str, Any] = {"batch": {"epochs_per_step": 2}, "trainer": {"device": "cuda"}}
    algorithm: dict[str, Any] = {"advantage": {"kind": "rloo"}, "shaping": {"mask_truncated": True}}
    config = recipe(algorithm=algorithm, **tables)
    wide = recipe(algorithm={**algorithm, "kl": {"coef": 0.1, "placement": "reward"}}, **tables)
    logs = np.log([2, 2, 2, 2, 4, 4, 1])

    def check(samples: Sequence[Sample], config: Config, covered: float, count: int) -> dict[str, float]:
        _, result = run(samples, config)
        found = metrics.summarise(result, config)
        assert len(result.policy.mismatches) == count, "once, not once per epoch"
        assert found[m.MISMATCH_COVERED] == count / 8
        assert (found[m.ENTROPY_COVERED], found[m.COVERED]) == (covered, 0.5)
        assert found[m.MISMATCH_MEAN] == pytest.approx(logs[:count].mean(), rel=1e-5)
        assert found[m.MISMATCH_NONFINITE] == (count == 7)
        ratios = np.array([2, 2, 0.5, 2, 4, 4, 1][:count])
        assert found[m.EFFECTIVE_SAMPLE_SIZE] == pytest.approx(ratios.sum() ** 2 / (count * (ratios**2).sum()))
        return found

    check(samples, config, 0.5, 4)
    found = check(samples, wide, 1.0, 7)
    logprobs = torch.log_softmax(ToyEngine(config).policy.detach(), 0)  # the temperature is 1
    assert found[m.ENTROPY] == pytest.approx(-float((logprobs.exp() * logprobs).sum()), rel=1e-6)


def test_the_kl_term_is_reported_as_the_recipe_adds_it_up_before_its_coefficient() -> None:
    config = recipe(algorithm={"advantage": {"kind": "dr-grpo"}, "kl": {"coef": 0.25, "estimator": "k2"}})
    samples = [replace(s, reference_logprobs=s.reference_logprobs - 6) for s in group_of([0, 1], reference=True)]
    _, result = run(samples, config)
    _, old = with_behavior(samples, [[1, 1], [1, 1]])
    reference = np.concatenate([s.reference_logprobs[s.loss_mask] for s in samples])
    wanted = (np.clip(np.array(old) - reference, -20, 20) ** 2 / 2).mean()
    assert wanted > 10, "k2 has no bound but that of the log-ratio"
    assert metrics.summarise(result, config)[m.KL_LOSS] == pytest.approx(wanted, rel=1e-5)
    assert m.KL_LOSS not in metrics.summarise(run(samples, recipe())[1], recipe())


def test_a_loss_that_is_no_number_is_counted() -> None:
    engine = ToyEngine(recipe())
    with torch.no_grad():
        engine.policy[0] = math.nan
    result = train_step(engine, batch(), recipe(), step=1, state=AlgorithmState())  # type: ignore[arg-type]
    found = metrics.summarise(result, recipe())
    assert (found[m.NONFINITE_LOSS], found[m.UPDATES]) == (1, 0)
    assert metrics.summarise(run(batch(), recipe())[1], recipe())[m.NONFINITE_LOSS] == 0


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what waits for a device: reading a number, and choosing by a mask. None between the passes of an update."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "item")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        if name in self.WAITS or masked:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["grpo-paper", "gspo", "dual", "icepop"])
def test_nothing_is_read_from_the_device_before_the_last_micro_batch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = recipe(budget=16, algorithm=ALGORITHMS[name])
    mode, passes = NoWaiting(), [0]

    def backward(toy: Toy, loss: torch.Tensor, *, last: bool) -> None:
        passes[0] += 1
        if not last:
            assert mode.seen == [], f"after {passes[0]} passes"
        original(toy, loss, last=last)
        mode.seen.clear()

    original = Toy.backward
    monkeypatch.setattr(Toy, "backward", backward)
    with mode:
        run(batch(), config)
    assert passes[0] >= 3


class FakeRouters:
    """Two layers of three experts; the first one takes half of all tokens in the second layer."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.weight, self.token_count = toy, 0.0, 0
        self.weights: list[float] = []

    def routed(self) -> Routed:
        self.weights.append(self.weight)
        counts = torch.tensor([[4.0, 4, 4], [6, 3, 3]])
        return Routed(loss=torch.tensor(2.5), counts=counts)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 1000), (1, 16), (7, 16)])
def test_the_routers_loss_is_weighted_by_the_share_of_tokens_and_dummies_are_left_out(
    monkeypatch: pytest.MonkeyPatch, ranks: int, budget: int
) -> None:
    made: list[FakeRouters] = []

    def begin(toy: Toy, table: torch.Tensor, *, any_rank: bool = True) -> None:
        original(toy, table, any_rank=any_rank)
        made.append(FakeRouters(toy))
        toy.routers = made[-1]  # type: ignore[assignment]

    original = Toy.__init__
    monkeypatch.setattr(Toy, "__init__", begin)
    trainer = {"ranks": ranks, "learning_rate": 0.5, "router_aux_loss_coef": 0.01}
    config = recipe(budget=budget, trainer=trainer)
    engine, result = run([*batch(), sample("one", group="a", completion=7)], config)
    found = metrics.summarise(result, config)
    assert found[m.ROUTER_LOSS] == pytest.approx(2.5) and found[m.ROUTER_VIOLATION] == pytest.approx(0.5)
    shares = [share for rank in engine.policy_shares[0] for share in rank]
    weights = [weight for routers in made for weight in routers.weights]
    real = sum(one.tokens.token_count for one in shares if not one.is_dummy)
    assert weights == pytest.approx(
        [0.0 if one.is_dummy else 0.01 * one.tokens.token_count / real * ranks for one in shares]
    )
    assert sum(weights) == pytest.approx(0.01 * ranks), "the gradient is averaged over the ranks"
    assert all(routers.weight == 0 for routers in made), "and nothing is left for a loss of parts"
    passes = len(shares) - sum(one.is_dummy for one in shares)
    assert ranks == 1 or passes < len(shares), "there are dummies"
    assert result.policy.expert_counts == [[4.0 * passes] * 3, [6.0 * passes, 3.0 * passes, 3.0 * passes]]


def test_the_work_of_a_step_is_its_look_ups_and_its_updates() -> None:
    samples = [*group_of([0, 1], group="a"), *group_of([1, 1], group="b")]  # 5 tokens each; b has no pass
    assert run(samples, recipe())[1].policy_work == Work(
        forward_tokens=10, forward_squares=50, forward_rows=4, backward_tokens=10, backward_squares=50, backward_rows=4
    )
    twice = run(samples, recipe(batch={"epochs_per_step": 2}))[1].policy_work
    assert twice == Work(
        forward_tokens=30,
        forward_squares=150,
        forward_rows=12,
        backward_tokens=20,
        backward_squares=100,
        backward_rows=8,
    )
    critic = run(samples, recipe(algorithm={"preset": "ppo", "kl": {"coef": 0.0}}))[1].critic_work
    assert critic == Work(forward_tokens=40, forward_squares=200, backward_tokens=20, backward_squares=100)
