"""Micro-batches: every loss token exactly once, under the budget, the same number of passes on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.arrays import Float32Array, Int64Array
from fourfold.errors import InvalidInput
from fourfold.nn.batching import TokenBatch, pack, split_by_tokens
from fourfold.sample import Sample
from fourfold.sample.columns import Samples
from fourfold_trainer.batches import (
    PolicyBatch,
    ReceivedBatches,
    ValueBatch,
    dummy_policy_batch,
    from_arrays,
    to_arrays,
)
from fourfold_trainer.ranks.rank_processes import SharedBatches
from fourfold_trainer.step.advantages import ModelOutputs, TokenTargets
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.micro_batches import LossTokens, MicroBatches, compute_per_token, deal
from tests.fakes.trainer_engine import sample
from tests.support.recipes import make_recipe

LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=30)


def samples(lengths: list[tuple[int, int]], *, reference: bool = False) -> list[Sample]:
    return [
        sample(f"s{i}", prompt=p, completion=c, temperature=0.5 + 0.1 * (i % 5), reference=reference)
        for i, (p, c) in enumerate(lengths)
    ]


def test_batches_are_as_few_as_first_fit_makes_them_and_about_equal() -> None:
    # First fit fills 18 with 9 + 8 and leaves 4 + 3 + 2; dealt anew: 9 + 3 + 2 and 8 + 4.
    assert split_by_tokens([3, 9, 4, 8, 2], max_tokens=18) == [[1, 0, 4], [3, 2]]
    assert split_by_tokens([5, 5, 5, 5], max_tokens=10) == [[0, 2], [1, 3]]
    assert split_by_tokens([], max_tokens=4) == []
    with pytest.raises(InvalidInput, match="9 tokens does not fit a batch of 8"):
        split_by_tokens([3, 9], max_tokens=8)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 200))
def test_every_sample_is_in_one_batch_under_the_budget(lengths: list[int], budget: int) -> None:
    batches = split_by_tokens(lengths, max_tokens=budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(0 < total <= budget for total in sums)
    assert len(batches) < 1 + 2 * sum(lengths) / budget or not lengths  # all but one are more than half full


def test_samples_follow_each_other_and_rows_point_at_the_position_before_the_token() -> None:
    ids = [np.array([5, 6, 7], np.int32), np.array([4], np.int32), np.array([8, 9], np.int32)]
    batch = pack(ids, [np.array([1, 2]), np.array([], np.int64), np.array([1])], [1.0, 2.0, 0.5])
    assert batch.token_ids.tolist() == [5, 6, 7, 4, 8, 9]
    assert batch.lengths.tolist() == [3, 1, 2]
    assert batch.rows.tolist() == [0, 1, 4]
    assert batch.token_ids[batch.rows + 1].tolist() == batch.targets.tolist() == [6, 7, 9]
    assert batch.temperatures.tolist() == [1.0, 1.0, 0.5]
    assert batch.token_count == 6
    assert [a.dtype for a in (batch.token_ids, batch.lengths, batch.targets)] == [np.int32] * 3
    assert batch.rows.dtype == np.int64 and batch.temperatures.dtype == np.float32


def test_each_sample_is_dealt_to_the_rank_with_the_fewest_tokens() -> None:
    assert deal([10, 20, 30, 40, 50, 60], 3) == [[5, 0], [4, 1], [3, 2]]
    assert deal([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert deal([7], 3) == [[0], [], []]


def loss_tokens(batch: list[Sample], advantages: list[float], *, ranks: int, budget: int) -> LossTokens:
    table = {"prompts_per_step": 8, "group_size": 2, "tokens_per_micro_batch": budget}
    config = make_recipe(model={"max_context_tokens": 32}, batch=table, trainer={"ranks": ranks})
    step = TrainBatch.of(batch, config.algorithm)
    every = [np.full(n, advantage) for n, advantage in zip(step.lengths, advantages, strict=True)]
    values = [part.astype(np.float32) for part in every]
    targets = TokenTargets(advantages=every, returns=every, outputs=ModelOutputs(values=values), kl=None)
    with_reference = all(len(s.reference_logprobs) for s in batch)
    return LossTokens(config=config, batch=step, targets=targets, kl_in_loss=with_reference)


@given(LENGTHS, st.integers(1, 4), st.integers(32, 100))
def test_every_loss_token_is_in_exactly_one_micro_batch(
    lengths: list[tuple[int, int]], rank_count: int, budget: int
) -> None:
    batch = samples(lengths, reference=True)
    advantages = [float(i + 1) for i in range(len(batch))]  # names the sample
    tokens = loss_tokens(batch, advantages, ranks=rank_count, budget=budget)
    members = list(range(len(batch)))
    shares = tokens.policy_micro_batches(members, tokens.weights(members))
    assert len({len(share) for share in shares}) == 1 and len(shares) == rank_count
    seen: list[tuple[float, int, float, float, float]] = []
    for micro in (m for share in shares for m in share):
        assert micro.tokens.token_count <= budget
        assert len(micro.tokens.targets) == len(micro.advantages) == len(micro.trajectories)
        if micro.weights.any():
            assert (
                micro.trajectories.tolist() == sorted(micro.trajectories)
                and len(set(micro.trajectories)) == micro.trajectories[-1] + 1
            )
            parts = (micro.advantages, micro.tokens.targets, micro.behavior_logprobs, micro.reference_logprobs)
            seen += list(zip(*(p.tolist() for p in parts), micro.tokens.temperatures.tolist(), strict=True))
    wanted = []
    for advantage, one in zip(advantages, batch, strict=True):
        for token in np.flatnonzero(one.loss_mask):
            row = (one.token_ids[token], one.behavior_logprobs[token], one.reference_logprobs[token])
            wanted.append((advantage, *(v.item() for v in row), np.float32(one.temperature).item()))
    assert sorted(seen) == sorted(wanted)


def test_samples_without_a_gradient_need_no_pass() -> None:
    batch = samples([(3, 2), (2, 2), (2, 3)])
    batch[2] = replace(batch[2], loss_mask=np.zeros_like(batch[2].loss_mask))
    plain = loss_tokens(batch, [0.0, 1.0, 1.0], ranks=1, budget=32)
    assert plain.to_train([0, 1, 2]) == [1]
    algorithm = plain.config.algorithm.model_copy(update={"entropy_coef": 0.01})
    with_entropy = replace(plain, config=plain.config.model_copy(update={"algorithm": algorithm}))
    assert with_entropy.to_train([0, 1, 2]) == [0, 1], "entropy moves tokens without advantage, too"
    with_kl = loss_tokens(samples([(3, 2), (2, 2)], reference=True), [0.0, 1.0], ranks=1, budget=32)
    assert with_kl.to_train([0, 1]) == [0, 1], "so does the distance to the reference"


def test_ranks_without_samples_run_dummies_that_weigh_nothing() -> None:
    tokens = loss_tokens(samples([(3, 2)]), [1.0], ranks=3, budget=32)
    shares = tokens.policy_micro_batches([0], tokens.weights([0]))
    assert [[m.weights.tolist() for m in share] for share in shares] == [[[0.5, 0.5]], [[0.0]], [[0.0]]]
    assert shares[1][0].tokens.token_count == 2 and len(shares[1][0].reference_logprobs) == 0


def test_a_loss_mask_smaller_than_the_action_mask_is_obeyed() -> None:
    one = sample("a", prompt=2, completion=4)
    mask = one.loss_mask.copy()
    mask[3] = False
    tokens = loss_tokens([replace(one, loss_mask=mask)], [1.0], ranks=1, budget=32)
    ((micro,),) = tokens.policy_micro_batches([0], tokens.weights([0]))
    assert micro.tokens.rows.tolist() == [1, 3, 4]
    ((values,),) = tokens.value_micro_batches([0], tokens.weights([0]))
    assert values.tokens.rows.tolist() == [1, 3, 4] and values.weights.tolist() == pytest.approx([1 / 3] * 3)


@given(LENGTHS, st.integers(1, 4))
def test_a_look_up_gives_every_sample_its_own_numbers(lengths: list[tuple[int, int]], rank_count: int) -> None:
    batch = samples(lengths)
    config = loss_tokens(batch, [1.0] * len(batch), ranks=rank_count, budget=64).config

    def compute(shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        assert len({len(share) for share in shares}) == 1
        return [[b.targets.astype(np.float32) for b in share] for share in shares]

    positions = [np.arange(1 + i % 3, len(s.token_ids)) for i, s in enumerate(batch)]  # some ask for nothing
    rows = compute_per_token(compute, Samples.of(batch), positions.__getitem__, [len(p) for p in positions], config)
    for one, asked, row in zip(batch, positions, rows, strict=True):
        assert row.tolist() == one.token_ids[asked].tolist()


def test_batches_survive_the_way_to_another_rank() -> None:
    tokens = loss_tokens(samples([(3, 2), (2, 2)], reference=True), [1, 2], ranks=1, budget=32)
    weights = tokens.weights([0, 1])
    ((micro,),), ((values,),) = (
        tokens.policy_micro_batches([0, 1], weights),
        tokens.value_micro_batches([0, 1], weights),
    )
    for batch, back in (
        (micro, from_arrays(PolicyBatch, to_arrays(micro))),
        (values, from_arrays(ValueBatch, to_arrays(values))),
        (micro.tokens, from_arrays(TokenBatch, to_arrays(micro.tokens))),
    ):
        assert [a.tolist() for a in to_arrays(back)] == [a.tolist() for a in to_arrays(batch)]
        assert type(back) is type(batch)


def test_a_micro_batch_is_made_when_its_rank_reads_it() -> None:
    tokens = loss_tokens(samples([(3, 29)] * 6), [1.0] * 6, ranks=2, budget=32)
    members, made = list(range(6)), list[list[int]]()
    shares = tokens.policy_micro_batches(members, tokens.weights(members))

    def note(ids: Sequence[int]) -> PolicyBatch:
        made.append(list(ids))
        return next(batch for share in shares for batch, s in zip(share, share.members, strict=True) if s == ids)

    share = MicroBatches(shares[1].members, note, dummy_policy_batch(with_old=False, with_reference=False))
    batches = SharedBatches([], [share, shares[0]], sequence=1)
    received = ReceivedBatches(PolicyBatch, batches)
    assert len(received) == 3 and not made
    assert [batch.advantages.tolist() for batch in received] == [b.advantages.tolist() for b in shares[1]]
    assert made == list(share.members), "each once, in order"


@pytest.mark.parametrize(
    ("tables", "ranks", "passes"),
    [
        ({}, 1, [[128, 128]]),  # four times the budget of 32
        ({}, 2, [[128], [128]]),
        ({"gradient_checkpointing": True}, 1, [[32] * 8]),  # a pass with gradients keeps as little
        ({"gradient_checkpointing": True}, 2, [[32] * 4] * 2),
    ],
)
def test_a_pass_without_gradients_takes_more_tokens_where_it_keeps_less(
    tables: dict[str, bool], ranks: int, passes: list[list[int]]
) -> None:
    batch = samples([(8, 8)] * 16)
    config = loss_tokens(batch, [1.0] * 16, ranks=ranks, budget=32).config
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=tables)})
    seen: list[list[int]] = []

    def compute(shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        seen.extend([b.token_count for b in share] for share in shares)
        return [[b.targets.astype(np.float32) for b in share] for share in shares]

    def every(_index: int) -> Int64Array:
        return np.arange(1, 16)

    rows = compute_per_token(compute, Samples.of(batch), every, [15] * 16, config)
    assert seen == passes
    assert [row.tolist() for row in rows] == [one.token_ids[1:].tolist() for one in batch]
    seen.clear()
    compute_per_token(compute, Samples.of(batch), every, [15] * 16, config, ranks=4)  # those of the critic
    assert len(seen) == 4 and {sum(share) for share in seen} == {64}
