"""Limits of an engine that follow from the recipe, and the options of vLLM that a recipe may not set."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from fourfold.config import Config
from fourfold.plan.batch import EngineLimits, engine_limits


def recipe(**tables: Any) -> Config:
    base: dict[str, Any] = {
        "name": "t",
        "steps": 10,
        "model": {"source": "m", "max_context_tokens": 100},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 50, "group_size": 8},
        "sampling": {"max_new_tokens": 10},
    }
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table}
    return Config.model_validate(base)


def limits(config: Config) -> EngineLimits:
    (pool,) = config.rollout_pools
    return engine_limits(config, pool)


def samples(**tables: Any) -> int:
    return limits(recipe(**tables)).concurrent_samples


def test_a_replica_takes_its_share_of_a_step_rounded_up() -> None:
    gpus = {"gpus_per_replica": 2}
    assert samples(rollout=gpus) == 400
    assert samples(rollout={**gpus, "replicas": 3}) == 136, "whole groups"
    assert samples(rollout=gpus, algorithm={"advantage": {"kind": "remax"}}) == 450, "a greedy completion per prompt"
    assert samples(rollout={**gpus, "replicas": 0}) == 400, "those started by hand are not counted"


def test_a_replica_takes_its_share_of_all_steps_that_are_in_flight() -> None:
    gpus, lag_2 = {"gpus_per_replica": 1, "replicas": 3}, {"max_policy_lag": 2}
    assert samples(rollout=gpus, batch={"prompts_per_step": 10}) == 64, "4 groups"
    assert samples(rollout=gpus, batch={"prompts_per_step": 10}, asynchrony=lag_2) == 80, "10 groups, not 3 times 4"
    assert samples(rollout=gpus, asynchrony=lag_2) == 400
    assert samples(rollout={"gpus_per_replica": 1}, asynchrony=lag_2) == 1024, "3 times 400 are too many"
    assert samples(asynchrony=lag_2) == 256
    assert samples(rollout={**gpus, "public_listen": "127.0.0.1:1"}, asynchrony=lag_2) == 534
    assert samples(rollout={"max_concurrent_samples": 9}, asynchrony=lag_2) == 9, "the recipe's own limit"


def test_the_share_is_bounded_below_for_agents_and_groups_and_above_by_the_device() -> None:
    gpus = {"gpus_per_replica": 1, "replicas": 8}
    assert samples(rollout=gpus) == 64
    assert samples(rollout=gpus, batch={"prompts_per_step": 2, "group_size": 200}) == 200
    big = {"prompts_per_step": 1000}
    assert samples(rollout={"gpus_per_replica": 1}, batch=big) == 1024
    assert samples(batch=big) == 256


def test_an_evaluation_counts_if_the_recipe_gives_its_size() -> None:
    data = {"eval": {"path": "e.jsonl"}}
    gpus = {"gpus_per_replica": 1}
    small = {"prompts_per_step": 1}
    assert samples(rollout=gpus, batch=small, data=data) == 256
    asked = {"max_prompts": 90, "samples_per_prompt": 4}
    assert samples(rollout=gpus, batch=small, data=data, evaluation=asked) == 360
    sized = {"eval": {"path": "e.jsonl", "size": 70}}
    assert samples(rollout=gpus, batch=small, data=sized, evaluation={"samples_per_prompt": 2}) == 140
    assert samples(rollout=gpus, batch=small, data=sized, evaluation={"samples_per_prompt": 250}) == 1024
    few = {"samples_per_prompt": 200, "max_prompts": 3}
    assert samples(rollout={**gpus, "replicas": 8}, batch=small, data=sized, evaluation=few) == 200, "a whole prompt's"
    assert samples(rollout=gpus, batch=small, evaluation=asked) == 64, "there is no held-out data"


def agent_samples(**tables: Any) -> int:
    return limits(recipe(**tables)).agent_samples


def test_agents_get_what_the_coordinators_share_and_its_largest_call_leave() -> None:
    assert agent_samples(rollout={"max_concurrent_samples": 40}) == 10
    assert agent_samples(rollout={"max_concurrent_samples": 10}) == 2, "the 8 samples of a prompt travel in one call"
    assert agent_samples(rollout={"max_concurrent_samples": 8}) == 0
    evaluation = {"samples_per_prompt": 35}
    data = {"eval": {"path": "e.jsonl"}}
    assert agent_samples(rollout={"max_concurrent_samples": 40}, data=data, evaluation=evaluation) == 5


def test_a_public_port_makes_room_for_agents_beside_the_step() -> None:
    public = {"gpus_per_replica": 2, "public_listen": "127.0.0.1:1"}
    assert samples(rollout=public) == 534, "400 of the step are three quarters"
    assert agent_samples(rollout=public) == 133
    with pytest.raises(pydantic.ValidationError, match="public_listen needs room for the samples of agents; raise"):
        recipe(rollout={"max_concurrent_samples": 8, "public_listen": "127.0.0.1:1"})


@pytest.mark.parametrize("name", ["max_num_scheduled_tokens", "kv_sharing_fast_prefill", "stream_interval"])
def test_an_option_that_would_stop_the_engine_is_refused(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=name):
        recipe(rollout={"vllm": {name: 64}})


def test_numbers_of_the_recipe_stay_and_a_step_has_room_for_every_sample() -> None:
    assert limits(recipe()) == EngineLimits(concurrent_samples=256, batched_tokens=8192, agent_samples=64)
    assert limits(recipe(rollout={"gpus_per_replica": 1})).batched_tokens == 16384
    given = {"max_concurrent_samples": 3000, "max_batched_tokens": 64}
    assert limits(recipe(rollout=given)) == EngineLimits(
        concurrent_samples=3000, batched_tokens=3001, agent_samples=750
    )
    assert limits(recipe(rollout={"max_concurrent_samples": 8})).concurrent_samples == 8
    for gpus, tokens in ((0, 100), (1, 65)):
        table = {"gpus_per_replica": gpus, "max_concurrent_samples": 64, "max_batched_tokens": 64}
        assert limits(recipe(rollout=table)).batched_tokens == tokens, "a whole prompt on CPU"


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("prompts", [1, 1000])
@pytest.mark.parametrize("data", [{}, {"eval": {"path": "e.jsonl"}}, {"eval": {"path": "e.jsonl", "size": 1}}])
def test_a_limit_that_is_derived_has_room_for_the_largest_group(gpus: int, prompts: int, data: dict[str, Any]) -> None:
    config = recipe(
        rollout={"gpus_per_replica": gpus, "replicas": 9},
        batch={"prompts_per_step": prompts, "group_size": 256 if prompts == 1 else 2},
        evaluation={"samples_per_prompt": 256},
        data=data,
    )
    assert limits(config).concurrent_samples >= (256 if data else config.batch.group_size)


@pytest.mark.parametrize(
    ("limit", "answers", "message"),
    [
        (7, 1, "rollout.max_concurrent_samples = 7 is below batch.group_size = 8, and the samples of a prompt go to "
         "an engine in one call; raise it to at least 8, remove it (it is then derived from the batch), or lower"),
        (8, 9, "rollout.max_concurrent_samples = 8 is below evaluation.samples_per_prompt = 9, and"),
    ],
)  # fmt: skip
def test_a_limit_below_a_group_is_refused_with_the_recipe(limit: int, answers: int, message: str) -> None:
    tables = {"rollout": {"max_concurrent_samples": limit}, "evaluation": {"samples_per_prompt": answers}}
    for held_out in ({"eval": {"path": "e.jsonl"}}, {"holdout": {"groups": 2}}):
        with pytest.raises(pydantic.ValidationError) as caught:
            recipe(**tables, data=held_out)
        assert message in str(caught.value)


@pytest.mark.parametrize("limit", [{}, {"max_concurrent_samples": 8}])
def test_without_held_out_data_no_evaluation_is_too_large(limit: dict[str, int]) -> None:
    config = recipe(rollout=limit, evaluation={"samples_per_prompt": 100}, batch={"prompts_per_step": 12})
    assert limits(config).concurrent_samples == limit.get("max_concurrent_samples", 96)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "max_num_seqs",
            5,
            "`max_num_seqs` is set by the key `rollout.max_concurrent_samples` of the recipe; set that instead",
        ),
        ("seed", 5, "set by the key `seed`"),
        ("data_parallel_size", 2, "set by the key `rollout.replicas`"),
        ("data_parallel_rank", 2, "`data_parallel_rank` is set by Fourfold: an engine is one process group"),
        ("speculative_config", "x", "every sampled token is the policy's own; remove it"),
        ("logprobs_mode", "raw_logits", "log-probabilities are those of the distribution"),
        ("hf_overrides", {"a": 1}, "`hf_overrides` = {'a': 1} must be a number, a text, true, false, or a list of"),
        ("cudagraph_capture_sizes", [1, [2]], "or a list of these"),
    ],
)
def test_options_that_fourfold_sets_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        recipe(rollout={"vllm": {name: value}})
    assert message in str(caught.value)


def test_other_options_of_vllm_are_taken_as_they_are() -> None:
    options = {"block_size": 32, "kv_cache_dtype": "fp8", "watermark": 0.1, "cudagraph_capture_sizes": [1, 8]}
    assert recipe(rollout={"vllm": options}).rollout.vllm == options
