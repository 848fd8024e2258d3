"""Tests that ranks that share a row get the outputs of one rank alone, and that their gradients add up to its own.

The ranks are threads; tests/integration/test_sequence_parallel.py has processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.nn import forward
from fourfold.plan.models import check_sequence_parallel
from fourfold_trainer.batches import dummy_value_batch
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.ranks.distributed_engine import DistributedEngine
from fourfold_trainer.ranks.rank_channel import RankMessage
from fourfold_trainer.ranks.rank_processes import RankProcesses
from fourfold_trainer.ranks.rank_worker import _sums_answer as sums_answer
from tests.fakes.threads import ThreadGroup
from tests.support.architectures import build
from tests.support.recipes import make_recipe
from tests.support.sequence_cases import CASES, Case, check, float64_alone, make_model, run
from tests.support.sequence_ranks import config_of


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_shared_row_gives_what_one_rank_gives(case: Case, size: int) -> None:
    with float64_alone():
        wanted = run(case, make_model(case))
        models = [make_model(case) for _ in range(size)]  # not in the threads: the default dtype is one for all
        check(ThreadGroup(size).run(lambda exchange: run(case, models[exchange.rank], exchange)), wanted)
    assert all(wanted[name].abs().sum() > 0 for name in wanted if name.startswith("output"))


def test_a_rank_holds_its_slice_alone() -> None:
    seen: list[list[int]] = []
    models = [make_model(Case(architecture="llama")) for _ in range(4)]

    def work(exchange: Any) -> None:
        model = models[exchange.rank]
        forward.share_rows(model, exchange)
        model.base_model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append([*args[0].shape]))
        ids = torch.arange(3, 40)
        arguments = {"token_ids": ids, "lengths": torch.tensor([30, 7]), "rows": torch.arange(36)}
        model(**arguments, targets=ids[1:], temperatures=torch.ones(36))

    ThreadGroup(4).run(work)
    assert seen == [[1, 10, 32]] * 4  # 37 tokens and 3 of padding


def test_a_shared_row_gives_several_log_probabilities_of_each_token() -> None:
    ids = torch.arange(3, 40)
    targets = torch.stack([ids[1:], ids[1:] % 7, ids[1:] % 5 + 8], 1)

    def work(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = {"token_ids": ids, "lengths": torch.tensor([30, 7]), "rows": torch.arange(36)}
        logprobs, _ = model(**arguments, targets=targets, temperatures=torch.ones(36))
        (logprobs * torch.arange(108.0).view(36, 3)).sum().square().backward()  # no sum over tokens
        return logprobs.detach(), model.get_output_embeddings().weight.grad

    case = Case(architecture="llama")
    with float64_alone():
        wanted, slope = work(make_model(case))
        models = [make_model(case) for _ in range(2)]

        def share(exchange: Any) -> tuple[torch.Tensor, torch.Tensor]:
            forward.share_rows(models[exchange.rank], exchange)
            return work(models[exchange.rank])

        (one, first), (two, second) = ThreadGroup(2).run(share)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first + second, slope, rtol=1e-10, atol=1e-9)


def test_a_group_has_one_share_and_one_of_its_ranks_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(RankProcesses)
    ranks._config = config_of(4, 2)
    group = object.__new__(DistributedEngine)
    group._critic = ranks
    sent: list[Any] = []

    def call(_self: RankProcesses, _name: str, *, fields: Any, shares: Any) -> list[RankMessage]:
        sent.extend(shares)
        sums = [UpdateSums(token_count=10**rank, mismatches=np.ones(rank, np.float32)) for rank in range(4)]
        return [sums_answer(one) for one in sums]

    monkeypatch.setattr(RankProcesses, "call", call)
    shares = [[dummy_value_batch()], [dummy_value_batch(), dummy_value_batch()]]
    sums = group.update_critic(shares, UpdateSettings(learning_rate=1.0))
    assert [len(share) for share in sent] == [1, 1, 2, 2]
    assert sums.token_count == 101 and len(sums.mismatches) == 2


# ---- what is refused -----------------------------------------------------------------


class Ranks:
    """As many as are asked for; none of them ever meets another."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


def test_heads_that_cannot_be_dealt_are_refused() -> None:
    model = build("llama", torch.float32)
    with pytest.raises(ConfigError, match="sequence_parallel_size = 3 does not divide the 4 attention heads of Llama"):
        forward.share_rows(model, Ranks(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sample_are_refused(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    model = build("llama", torch.float32, rope_parameters=rope)
    with pytest.raises(ConfigError, match=f"rope_type = '{kind}', depends on the longest sample of a row"):
        forward.share_rows(model, Ranks(2))  # type: ignore[arg-type]


def recipe(source: str, **trainer: int) -> Config:
    batch = {"prompts_per_step": 2, "group_size": 2}
    return make_recipe(model={"source": source, "max_context_tokens": 2048}, batch=batch, trainer=trainer)


def test_ranks_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence_parallel_size = 3 must divide ranks = 4; set it to a divisor"):
        recipe("m", ranks=4, sequence_parallel_size=3)


def test_a_group_of_ranks_needs_samples_as_one_rank_did() -> None:
    assert recipe("m", ranks=16, sequence_parallel_size=4).trainer.data_parallel_size == 4
    with pytest.raises(ValueError, match="= 4 samples cannot feed 8 groups of trainer ranks"):
        recipe("m", ranks=16, sequence_parallel_size=2)


def test_the_heads_of_policy_and_critic_are_compared_before_anything_starts(tmp_path: Path) -> None:
    quickstart = "builtin:smollm2-135m-instruct"  # 9 heads
    check_sequence_parallel(recipe(quickstart, ranks=6, sequence_parallel_size=3))
    check_sequence_parallel(recipe("no/such/folder"))
    config = recipe(quickstart, ranks=6, sequence_parallel_size=2)
    rule = "sequence_parallel_size = 2 does not divide the 9 attention heads of model.source = 'builtin:.*one of: 1, 3$"
    with pytest.raises(ConfigError, match=rule):
        check_sequence_parallel(config)
