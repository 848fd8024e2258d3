"""The optimal token baseline, by hand, and in a step of the toy engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.algorithm.advantages import OptimalTokenBaseline
from fourfold.algorithm.comparison import ScoredTokens
from tests.unit.trainer.test_before_update import recorded
from tests.unit.trainer.test_train_step import batch, recipe


def advantages(returns: list[float], energies: list[float], lengths: list[int], groups: str) -> list[float]:
    tokens = ScoredTokens(
        returns=np.array(returns, np.float64),
        energies=np.array(energies, np.float64),
        lengths=np.array(lengths, np.int64),
        groups=list(groups),
    )
    found: list[float] = OptimalTokenBaseline().compare_tokens(tokens).tolist()
    return found


def test_a_sample_counts_by_its_energy_up_to_the_token() -> None:
    # Energies so far: 1, 2 and 3, 4. Baselines: (1 * 4 + 3 * 0) / 4 = 1 and (2 * 4 + 4 * 1) / 6 = 2.
    assert advantages([4, 4, 0, 1], [1, 1, 3, 1], [2, 2], "aa") == pytest.approx([3, 2, -1, -1])
    # The samples of a group need not be neighbours, and another group changes nothing.
    found = advantages([4, 4, 7, 0, 1, 9], [1, 1, 5, 3, 1, 5], [2, 1, 2, 1], "abab")
    assert found == pytest.approx([3, 2, -1, -1, -1, 1])


def test_what_no_other_sample_has_is_exactly_0() -> None:
    # The third token of the first sample, a group of one, a sample without tokens.
    assert advantages([2, 2, 2, 0, 0, 5], [1, 1, 1, 1, 1, 1], [3, 2, 0, 1], "aaab") == [1, 1, 0, -1, -1, 0]
    assert advantages([], [], [0, 0], "aa") == []


def test_equal_returns_and_gradients_of_0_are_exactly_0() -> None:
    # With these energies the weighted mean of 0.7 is not 0.7.
    assert advantages([0.7] * 3, [0.3, 0.7, 0.1], [1, 1, 1], "aaa") == [0, 0, 0]
    assert advantages([1, 0], [0, 0], [1, 1], "aa") == [0, 0]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_takes_energies_from_the_pass_of_the_old_policy(updates: int) -> None:
    algorithm: dict[str, Any] = {"preset": "otb", "shaping": {"mask_truncated": True}}
    config = recipe(algorithm=algorithm, batch={"mini_batches_per_step": updates})
    samples = [replace(s, truncated=i == 1) for i, s in enumerate(batch())]
    engine, result = recorded(samples, config)
    assert len(engine.logprob_shares) == 1
    policy = type(engine)(config).policy.detach()  # before the step
    returns, energies = [], []
    for s in samples:
        for token in s.token_ids[s.action_mask].tolist():
            logits = (policy / s.temperature).requires_grad_()
            (slope,) = torch.autograd.grad(torch.log_softmax(logits, 0)[token], logits)
            energies.append(float(slope.square().sum()))
            returns.append(float(s.score or 0))
    groups = "".join(s.group_id for s in samples)
    wanted = advantages(returns, energies, [int(s.action_mask.sum()) for s in samples], groups)
    np.testing.assert_allclose(np.concatenate(result.targets.advantages), wanted, atol=1e-5)
    assert any(wanted)


def test_rewards_of_tokens_count_from_their_token_on() -> None:
    samples = [replace(s, score=0.0) for s in batch()]
    rewards = np.zeros(len(samples[0].token_ids), np.float32)
    first = int(np.flatnonzero(samples[0].action_mask)[0])
    rewards[first] = 1.0
    samples[0] = replace(samples[0], token_rewards=rewards)
    _, result = recorded(samples, recipe(algorithm={"preset": "otb"}))
    of_first = result.targets.advantages[0]
    assert of_first[0] > 0 and not of_first[1:].any()
