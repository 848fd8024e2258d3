"""Tests each rule of ForwardBackward, OptimStep and DiscardGradient, with a fake engine on a loopback server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fourfold.errors import AlreadyExists, InvalidInput, NotFound, WrongState
from fourfold.trainer.client import ForwardBackwardOutput
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold_trainer.batches import WeightedBatch
from tests.fakes.trainer_engine import VOCABULARY, FakeEngine, group_of
from tests.fakes.trainer_service import SECONDS, Start, Trainer

Rows = Sequence[Sequence[float]]

TOKENS = [[5, 7, 9], [1, 2, 3, 4]]
WEIGHTS: Rows = [[0, -1, 0], [0, 0.5, 0, 2]]
OTHERS: Rows = [[0, 1, 1], [0, 0.5, 0, 2]]


async def add(
    trainer: Trainer, step: int = 1, part: int = 1, weights: Rows = WEIGHTS, **more: Any
) -> ForwardBackwardOutput:
    return await trainer.client.forward_backward(TOKENS, weights, step=step, part=part, timeout=SECONDS, **more)


async def end(trainer: Trainer, step: int = 1, /, **more: float) -> pb.OptimStepResponse:
    return await trainer.client.optim_step(step, timeout=SECONDS, **more)


def passes(trainer: Trainer) -> list[WeightedBatch]:
    return [batch for shares in trainer.engine.weighted for share in shares for batch in share]


def calls(trainer: Trainer, name: str) -> int:
    return trainer.engine.order.count(name)


# ---- forward ----


async def test_forward_returns_what_is_asked_for(start_trainer: Start) -> None:
    trainer = await start_trainer(algorithm={"preset": "ppo"})
    plain = await trainer.client.forward(TOKENS, timeout=SECONDS)
    assert (plain.entropies, plain.values) == ([], [])
    full = await trainer.client.forward(TOKENS, entropies=True, values=True, timeout=SECONDS)
    for tokens, row, logprobs, entropies, values in zip(
        TOKENS, plain.logprobs, full.logprobs, full.entropies, full.values, strict=True
    ):
        wanted = np.array([np.nan, *tokens[1:]], np.float32)
        for found, factor in ((row, -1), (logprobs, -1), (entropies, 0.5), (values, 0.25)):
            np.testing.assert_array_equal(found, factor * wanted)


async def test_forward_goes_in_several_calls_when_it_is_large(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.trainer.client._FORWARD_BYTES", 40)
    found = await trainer.client.forward(TOKENS * 5, entropies=True, timeout=SECONDS)
    assert [row[1] for row in found.logprobs] == [-7, -2] * 5 and len(found.entropies) == 10
    assert calls(trainer, "compute_logprobs") > 1


async def test_values_without_a_critic_are_refused(trainer: Trainer) -> None:
    with pytest.raises(InvalidInput, match="values are asked for, but the recipe has no critic"):
        await trainer.client.forward(TOKENS, values=True, timeout=SECONDS)


@pytest.mark.parametrize(("more", "limit"), [(False, 8 << 20), (True, 4 << 20)])
async def test_a_lookup_is_as_small_as_its_answer_needs(trainer: Trainer, more: bool, limit: int) -> None:
    one = pb.ComputeLogprobsRequest(include_entropies=more)
    one.experiences.add(sample_id="a", token_ids=bytes(limit))
    with pytest.raises(Exception, match=f"send at most {limit} at once"):
        await trainer.stub.ComputeLogprobs(one, timeout=SECONDS)


# ---- ForwardBackward ----


async def test_a_part_answers_the_loss_and_the_logprobs_of_its_tokens(trainer: Trainer) -> None:
    answer = await add(trainer)
    assert answer.loss == 7 - 0.5 * 2 - 2 * 4
    np.testing.assert_array_equal(answer.logprobs[0], np.array([np.nan, -7, np.nan], np.float32))
    np.testing.assert_array_equal(answer.logprobs[1], np.array([np.nan, -2, np.nan, -4], np.float32))
    (batch,) = passes(trainer)
    assert sorted(zip(batch.tokens.targets.tolist(), batch.weights.tolist(), strict=True)) == [
        (2, 0.5),
        (4, 2),
        (7, -1),
    ]
    status = await trainer.status()
    assert (status.step, status.policy_version, status.gradient_part_count) == (0, 0, 1)


async def test_a_part_is_split_over_ranks_and_passes_and_its_temperature_kept(start_trainer: Start) -> None:
    trainer = await start_trainer(FakeEngine(rank_count=2), trainer={"ranks": 2}, batch={"tokens_per_micro_batch": 16})
    tokens = [np.arange(n) for n in (16, 3, 15, 2, 16)]
    weights = [np.r_[0, np.full(len(t) - 1, i + 1)] for i, t in enumerate(tokens)]
    answer = await trainer.client.forward_backward(tokens, weights, step=1, part=1, temperature=0.5, timeout=SECONDS)
    for ids, row in zip(tokens, answer.logprobs, strict=True):
        np.testing.assert_array_equal(row[1:], -ids[1:].astype(np.float32))
    (shares,) = trainer.engine.weighted
    assert len(shares) == 2 and len(shares[0]) == len(shares[1])
    real = [batch for share in shares for batch in share if batch.weights.any()]
    assert sum(len(batch.weights) for batch in real) == sum(len(t) - 1 for t in tokens)
    assert all((batch.tokens.temperatures == 0.5).all() for batch in real)
    assert answer.loss == -sum(float(w @ t) for w, t in zip(weights, tokens, strict=True))


async def test_a_part_without_a_weight_needs_no_pass(trainer: Trainer) -> None:
    answer = await add(trainer, weights=[[0, 0, 0], [0, 0, 0, 0]])
    assert answer.loss == 0 and all(np.isnan(row).all() for row in answer.logprobs)
    assert calls(trainer, "forward_backward") == 0
    assert (await end(trainer)).policy_version == 1


async def test_the_last_part_again_returns_the_stored_answer(trainer: Trainer) -> None:
    await add(trainer)
    first = await add(trainer, part=2)
    again = await add(trainer, part=2)
    assert again.loss == first.loss
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(again.logprobs, first.logprobs, strict=True))
    assert calls(trainer, "forward_backward") == 2
    assert (await trainer.status()).gradient_part_count == 2


async def test_the_last_part_with_other_bytes_is_refused(trainer: Trainer) -> None:
    await add(trainer)
    with pytest.raises(AlreadyExists, match="part 1 of step 1 was another call; send part 2, or begin anew"):
        await add(trainer, weights=OTHERS)
    with pytest.raises(AlreadyExists):
        await add(trainer, temperature=0.5)
    assert calls(trainer, "forward_backward") == 1


@pytest.mark.parametrize("part", [1, 4])
async def test_any_other_part_is_a_wrong_state(trainer: Trainer, part: int) -> None:
    await add(trainer)
    await add(trainer, part=2)
    with pytest.raises(WrongState, match=f"part {part} of step 1 cannot be added; the last one was 2: send 3"):
        await add(trainer, part=part)


@pytest.mark.parametrize("step", [1, 3])
async def test_a_part_of_another_step_is_a_wrong_state(trainer: Trainer, step: int) -> None:
    await add(trainer)
    await end(trainer)
    with pytest.raises(WrongState, match=f"step {step} accepts no part; the trainer is at step 1: send step 2"):
        await add(trainer, step=step)
    assert calls(trainer, "forward_backward") == 1


@pytest.mark.parametrize(
    ("tokens", "weights", "more", "says"),
    [
        ([[1, 2]], [[0, math.nan]], {}, r"sample 0: loss_weights\[1\] is nan; it must be finite"),
        ([[1, 2], [3, 4, 5]], [[0, 1], [0, 1, -math.inf]], {}, r"sample 1: loss_weights\[2\] is -inf"),
        ([[1, 2]], [[1, 1]], {}, r"sample 0: loss_weights\[0\] is 1.0; it must be 0: nothing comes before"),
        ([[1, 2]], [[0]], {}, "sample 0: loss_weights has 4 bytes; 2 float32 need 8"),
        ([[1, VOCABULARY]], [[0, 1]], {}, "sample 0: token id 100 is outside the vocabulary"),
        ([[1]], [[0]], {}, "sample 0: 1 tokens; it must have 2 to 16"),
        ([[1, 2]], [[0, 1]], {"temperature": 0.0}, "sample 0: temperature is 0"),
        ([], [], {}, "the request has no samples; send at least one"),
        ([[1, 2]], [[0, 1]], {"step": 0}, "step is 0; it must be at least 1"),
        ([[1, 2]], [[0, 1]], {"part": 0}, "part is 0; it must be at least 1"),
    ],
)
async def test_a_bad_part_is_refused_and_nothing_changes(
    trainer: Trainer, tokens: list[list[int]], weights: list[list[float]], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        await trainer.client.forward_backward(tokens, weights, timeout=SECONDS, **{"step": 1, "part": 1, **more})
    assert trainer.engine.order == [] and (await trainer.status()).gradient_part_count == 0


async def test_a_sample_id_that_occurs_twice_is_refused(trainer: Trainer) -> None:
    one = pb.WeightedSample(loss_weights=bytes(8))
    one.experience.MergeFrom(_experience())
    request = pb.ForwardBackwardRequest(step=1, part=1, samples=[one, one])
    with pytest.raises(Exception, match="sample a occurs twice"):
        await trainer.stub.ForwardBackward(request, timeout=SECONDS)


async def test_a_part_that_is_too_large_is_refused(trainer: Trainer) -> None:
    one = pb.WeightedSample(experience=_experience(), loss_weights=bytes(8 << 20))
    with pytest.raises(Exception, match="send at most 8388608 at once, and the rest after"):
        await trainer.stub.ForwardBackward(pb.ForwardBackwardRequest(step=1, part=1, samples=[one]), timeout=SECONDS)


def _experience() -> Any:
    request = pb.ComputeLogprobsRequest()
    return request.experiences.add(sample_id="a", token_ids=b"\1\0\0\0\2\0\0\0", temperature=1)


async def test_the_answer_of_a_part_outlives_a_caller_that_gave_up(trainer: Trainer) -> None:
    trainer.engine.gate.clear()
    first = asyncio.create_task(add(trainer))
    await asyncio.to_thread(trainer.engine.entered.wait, SECONDS)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    trainer.engine.gate.set()
    assert (await add(trainer)).loss == -2
    assert calls(trainer, "forward_backward") == 1


# ---- OptimStep ----


async def test_a_step_uses_the_gradient_up(trainer: Trainer) -> None:
    await add(trainer)
    await add(trainer, part=2)
    answer = await end(trainer, learning_rate=0.5, max_grad_norm=0.25)
    assert answer == pb.OptimStepResponse(step=1, policy_version=1, grad_norm=1.5)
    assert trainer.engine.optim_steps == [(0.5, 0.25)]
    status = await trainer.status()
    assert (status.step, status.policy_version, status.gradient_part_count) == (1, 1, 0)
    assert status.phase == pb.TRAINER_PHASE_WAITING


async def test_what_is_unset_is_the_recipes_and_zero_is_zero(start_trainer: Start) -> None:
    trainer = await start_trainer(trainer={"learning_rate": 0.1, "warmup_steps": 2, "max_grad_norm": 3.0})
    await add(trainer)
    await end(trainer)
    await add(trainer, step=2)
    await end(trainer, 2, learning_rate=0, max_grad_norm=0)
    assert trainer.engine.optim_steps == [(pytest.approx(0.1 / 3), 3.0), (0, 0)]


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["learning_rate", "max_grad_norm"])
async def test_a_number_out_of_its_range_is_refused(trainer: Trainer, name: str, wrong: float) -> None:
    await add(trainer)
    with pytest.raises(InvalidInput, match=f"{name} is {wrong}; it must be finite and at least 0, or unset"):
        await end(trainer, 1, **{name: wrong})
    assert calls(trainer, "optim_step") == 0 and (await trainer.status()).gradient_part_count == 1


async def test_a_gradient_that_is_not_finite_is_dropped(trainer: Trainer) -> None:
    trainer.engine.grad_norm = math.inf
    await add(trainer)
    answer = await end(trainer)
    assert (answer.step, answer.policy_version, answer.skipped_reason) == (1, 0, "NOT_FINITE")
    assert answer.grad_norm == math.inf
    status = await trainer.status()
    assert (status.step, status.skipped_step_count, status.gradient_part_count) == (1, 1, 0)


async def test_the_last_step_again_returns_the_stored_answer(trainer: Trainer) -> None:
    await add(trainer)
    first = await end(trainer, learning_rate=0.5)
    assert await end(trainer, learning_rate=0.5) == first
    await add(trainer, step=2)
    assert await end(trainer, learning_rate=0.5) == first  # however late, it does not touch the next one
    assert calls(trainer, "optim_step") == 1 and (await trainer.status()).gradient_part_count == 1


async def test_the_last_step_with_other_bytes_is_refused(trainer: Trainer) -> None:
    await add(trainer)
    await end(trainer)
    with pytest.raises(AlreadyExists, match="step 1 was ended by another call; the next is 2"):
        await end(trainer, learning_rate=0.5)


async def test_another_step_or_none_that_waits_is_a_wrong_state(trainer: Trainer) -> None:
    with pytest.raises(WrongState, match="no gradient waits for step 1; call ForwardBackward first"):
        await end(trainer)
    await add(trainer)
    with pytest.raises(WrongState, match="step 2 cannot be ended; the trainer is at step 0: send 1"):
        await end(trainer, 2)
    with pytest.raises(InvalidInput, match="step is 0"):
        await end(trainer, 0)
    assert calls(trainer, "optim_step") == 0


# ---- while a gradient waits ----


async def test_a_discarded_gradient_is_gone_and_its_step_begins_anew(trainer: Trainer) -> None:
    assert await trainer.client.discard_gradient(timeout=SECONDS) == 0
    await add(trainer)
    await add(trainer, part=2)
    assert await trainer.client.discard_gradient(timeout=SECONDS) == 2
    assert await trainer.client.discard_gradient(timeout=SECONDS) == 0
    assert calls(trainer, "discard_gradient") == 1
    with pytest.raises(WrongState, match="no gradient waits"):
        await end(trainer)
    await add(trainer, weights=OTHERS)
    assert (await end(trainer)).policy_version == 1


async def test_a_whole_step_and_a_checkpoint_are_refused(trainer: Trainer) -> None:
    await add(trainer)
    fix = "while a gradient of 1 parts waits for OptimStep; call that, or DiscardGradient"
    with pytest.raises(WrongState, match=f"step 1 cannot be trained {fix}"):
        await trainer.train(1, group_of([0, 1]))
    with pytest.raises(WrongState, match=f"no checkpoint can be written {fix}"):
        await trainer.client.save_checkpoint(timeout=SECONDS)
    assert trainer.engine.order == ["forward_backward"]


async def test_the_other_calls_go_on(trainer: Trainer) -> None:
    await add(trainer)
    await trainer.client.forward(TOKENS, timeout=SECONDS)
    await trainer.client.export_model("model", timeout=SECONDS)
    assert (await trainer.status()).gradient_part_count == 1


async def test_both_kinds_of_step_alternate(trainer: Trainer) -> None:
    whole = await trainer.train(1, group_of([0, 1]))
    await add(trainer, step=2)
    assert await trainer.train(1, group_of([0, 1])) == whole  # a repeated call is answered even now
    assert (await end(trainer, 2)).policy_version == 2
    with pytest.raises(AlreadyExists, match="step 2 was trained with another batch"):
        await trainer.train(2, group_of([0, 1]))
    assert (await trainer.train(3, group_of([0, 1], version=2))).policy_version == 3
    with pytest.raises(AlreadyExists, match="step 3 was ended by another call"):
        await end(trainer, 3)


async def test_a_checkpoint_of_such_a_step_restores_it_and_its_answer(start_trainer: Start) -> None:
    trainer = await start_trainer()
    await add(trainer)
    first = await end(trainer)
    assert await trainer.client.save_checkpoint(timeout=SECONDS) == 1
    other = await start_trainer()  # as after a restart
    status = await other.client.load_checkpoint(1, timeout=SECONDS)
    assert (status.step, status.policy_version, other.engine.updates) == (1, 1, 1)
    assert await end(other) == first


async def test_other_parts_make_another_lineage(trainer: Trainer) -> None:
    await trainer.client.save_checkpoint(timeout=SECONDS)
    for weights in (WEIGHTS, OTHERS):
        await add(trainer, weights=weights)
        await end(trainer)
        await trainer.client.save_checkpoint(timeout=SECONDS)
        await trainer.client.load_checkpoint(0, timeout=SECONDS)
    assert calls(trainer, "save") == 3


async def test_a_restored_checkpoint_drops_the_gradient_but_a_missing_one_does_not(trainer: Trainer) -> None:
    await trainer.client.save_checkpoint(timeout=SECONDS)
    await add(trainer)
    with pytest.raises(NotFound):
        await trainer.client.load_checkpoint(7, timeout=SECONDS)
    assert (await trainer.status()).gradient_part_count == 1
    status = await trainer.client.load_checkpoint(0, timeout=SECONDS)
    assert status.gradient_part_count == 0
    assert trainer.engine.order[-2:] == ["discard_gradient", "load"]
