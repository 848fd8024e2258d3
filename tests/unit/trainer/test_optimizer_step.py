"""The order of an optimizer step's work on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold import metrics
from fourfold.config import AlgorithmConfig
from fourfold.nn.batching import TokenBatch
from fourfold_trainer.batches import PolicyBatch, dummy_policy_batch
from fourfold_trainer.engine import UpdateSettings
from fourfold_trainer.step.micro_batches import MicroBatches
from fourfold_trainer.step.optimizer_step import update_policy
from tests.fakes.toy_engine import Toy
from tests.fakes.trainer_engine import VOCABULARY


def test_the_next_batch_is_made_before_the_backward_pass_that_waits_for_the_device() -> None:
    order: list[str] = []

    def make(members: Sequence[int]) -> PolicyBatch:
        order.append(f"make {members[0]}")
        return dummy_policy_batch(with_old=False, with_reference=False)

    class Policy(Toy):
        def backward(self, loss: Tensor, *, last: bool) -> None:
            order.append("last backward" if last else "backward")

    policy: Any = Policy(torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True))
    batches = MicroBatches([[0], [1], [2]], make, dummy_policy_batch(with_old=False, with_reference=False))
    settings = UpdateSettings(learning_rate=0.1, token_count=3)
    update_policy(policy, batches, settings, AlgorithmConfig(), rank_count=1)
    assert order == ["make 0", "make 1", "backward", "make 2", "backward", "last backward"]


@pytest.mark.parametrize(
    ("algorithm", "asked"),
    [
        ({}, True),
        ({"loss": {"kind": "nll"}, "advantage": {"kind": "constant"}}, False),
        ({"loss": {"kind": "dft"}, "advantage": {"kind": "constant"}}, False),
        ({"loss": {"kind": "nll"}, "entropy_coef": 0.1}, True),
    ],
)
def test_entropies_are_computed_only_where_a_term_or_a_metric_reads_them(
    algorithm: dict[str, Any], asked: bool
) -> None:
    found: list[bool] = []

    class Policy(Toy):
        def logprobs(
            self, batch: TokenBatch, *, entropy: bool = False, energy: bool = False
        ) -> tuple[Tensor, Tensor | None]:
            found.append(entropy)
            return super().logprobs(batch, entropy=entropy, energy=energy)

    policy: Any = Policy(torch.zeros(VOCABULARY, dtype=torch.float64, requires_grad=True))
    dummy = dummy_policy_batch(with_old=False, with_reference=False)
    real = replace(dummy, weights=np.ones(1, np.float32), advantages=np.ones(1, np.float32))
    config = AlgorithmConfig.model_validate(algorithm)
    sums = update_policy(policy, [real], UpdateSettings(learning_rate=0.1), config, rank_count=1)
    assert found == [asked]
    assert (metrics.ENTROPY in sums.sums) == asked
