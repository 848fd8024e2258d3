"""The order of an optimizer step's work on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fourfold.config import AlgorithmConfig
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
