"""Sizes of a step that follow from the batch keys, and the memory formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import Config, load
from fourfold.model.folder import ModelShape
from fourfold.plan import placement
from fourfold.plan.batch import batch_plan
from fourfold.plan.memory import GIB, activation_bytes, checkpoint_bytes, kv_bytes_per_token, memory_plan
from fourfold.plan.models import ModelSizes, model_sizes

SHAPE = ModelShape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=512, tied=False,
    parameter_count=1_000_000, largest_block=40_000,
)  # fmt: skip
SIZES = ModelSizes(policy=SHAPE, critic=SHAPE, adapters=None)


def recipe(**tables: Any) -> Config:
    base: dict[str, Any] = {
        "name": "t",
        "steps": 10,
        "model": {"source": "m", "max_context_tokens": 100},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 5, "group_size": 4, "tokens_per_micro_batch": 350},
        "sampling": {"max_new_tokens": 10},
    }
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table} if isinstance(table, dict) else table
    return Config.model_validate(base)


def test_batches_are_split_over_ranks_and_micro_batches() -> None:
    plan = batch_plan(recipe(trainer={"ranks": 3}))
    assert (plan.samples_per_step, plan.tokens_per_step, plan.sampled_tokens_per_step) == (20, 2000, 200)
    assert plan.samples_per_rank == 7  # 7 + 7 + 6
    assert plan.samples_per_micro_batch == 3  # 350 // 100
    assert plan.micro_batches_per_step == 3  # 3 + 3 + 1
    assert plan.samples_in_run == 200


def test_a_group_of_ranks_counts_as_one_rank() -> None:
    trainer = {"ranks": 6, "sequence_parallel_size": 2}
    assert batch_plan(recipe(trainer=trainer)) == batch_plan(recipe(trainer={"ranks": 3}))
    assert activation_bytes(recipe(trainer=trainer), SHAPE) == activation_bytes(recipe(), SHAPE) / 2


def test_mini_batches_and_epochs_multiply_the_passes() -> None:
    plan = batch_plan(recipe(trainer={"ranks": 3}, batch={"mini_batches_per_step": 2, "epochs_per_step": 3}))
    assert plan.samples_per_mini_batch == 10
    assert plan.micro_batches_per_step == 2 * 3 * 2  # 4 on a rank: 3 + 1


@pytest.mark.parametrize(
    ("every", "steps", "expected"), [(5, 10, (5, 10)), (4, 10, (4, 8, 10)), (20, 10, (10,)), (1, 3, (1, 2, 3))]
)
def test_checkpoints_come_every_few_steps_and_after_the_last(every: int, steps: int, expected: tuple[int, ...]) -> None:
    assert batch_plan(recipe(steps=steps, checkpoint={"every_steps": every})).checkpoints == expected


def test_evaluations_begin_before_the_first_step_and_need_data() -> None:
    assert batch_plan(recipe()).evaluations == ()
    held_out = recipe(data={"holdout": {"groups": 1}}, evaluation={"every_steps": 5})
    assert batch_plan(held_out).evaluations == (0, 5, 10)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 4, 4, 12), (1, 2, 4, 16 / 4), (2, 2, 4 / 4, 16 / 4), (3, 2 / 4 + 2, 4 / 4, 16 / 4)],
)
def test_each_zero_stage_divides_its_state(stage: int, weights: float, gradients: float, optimizer: float) -> None:
    dtype = "bfloat16" if stage else "float32"  # stage 0 would sum gradients in bfloat16
    config = recipe(trainer={"ranks": 4, "zero_stage": stage}, model={"dtype": dtype})
    trainer = memory_plan(config, SIZES)[0]
    million = SHAPE.parameter_count
    assert trainer.role == "trainer" and trainer.count == 4
    assert (trainer.weights, trainer.gradients, trainer.optimizer) == (
        weights * million, gradients * million, optimizer * million,
    )  # fmt: skip


def test_a_critic_takes_as_much_again_in_the_same_ranks() -> None:
    config = recipe(trainer={"ranks": 4}, algorithm={"preset": "ppo"})
    trainer, critic = memory_plan(config, SIZES)[:2]
    assert (critic.role, critic.count) == ("critic", 4)
    assert critic.total == trainer.weights + trainer.gradients + trainer.optimizer
    half = replace(SHAPE, parameter_count=SHAPE.parameter_count // 2)
    assert memory_plan(config, replace(SIZES, critic=half))[1].total == critic.total / 2
    assert checkpoint_bytes(config, replace(SIZES, critic=half)) == 1.5 * checkpoint_bytes(recipe(), SIZES)


def test_a_critic_has_room_for_its_update_in_ranks_whose_policy_needs_less() -> None:
    config = recipe(trainer={"device": "cuda"}, algorithm={"preset": "ppo"}, model={"dtype": "bfloat16"})
    large = replace(SHAPE, parameter_count=10**10)
    trainer, critic = memory_plan(config, replace(SIZES, critic=large))[:2]
    assert trainer.activations + critic.activations == 4 * large.parameter_count, "its flat copy of the gradients"


def test_an_average_is_a_fourth_float32_copy_of_the_policy_alone() -> None:
    million = SHAPE.parameter_count
    for stage, share in ((1, 4), (2, 4), (3, 4)):
        tables: dict[str, Any] = {"ranks": 4, "zero_stage": stage}
        with_it = recipe(trainer={**tables, "ema_decay": 0.9}, algorithm={"preset": "ppo"})
        without = recipe(trainer=tables, algorithm={"preset": "ppo"})
        found, plain = memory_plan(with_it, SIZES), memory_plan(without, SIZES)
        assert found[0].optimizer == plain[0].optimizer + 4 * million // share
        assert found[1:] == plain[1:]
        assert checkpoint_bytes(with_it, SIZES) == checkpoint_bytes(without, SIZES) + 4 * million


@pytest.mark.parametrize(
    ("stage", "offload", "on_gpu", "in_main_memory"),
    [  # bytes of a parameter: weights, gradients, optimizer
        (1, "optimizer", (2, 4, 0), (2 / 4, 0, 16 / 4)),
        (2, "optimizer", (2, 4 / 4, 0), (2 / 4, 0, 16 / 4)),
        (3, "optimizer", (2 / 4 + 2, 0, 0), (0, 4 / 4, 16 / 4)),
        (3, "optimizer+parameters", (2, 0, 0), (2 / 4, 4 / 4, 16 / 4)),
    ],
)
def test_offloading_moves_its_state_to_main_memory(
    stage: int, offload: str, on_gpu: tuple[float, ...], in_main_memory: tuple[float, ...]
) -> None:
    tables: dict[str, Any] = {"ranks": 4, "zero_stage": stage, "device": "cuda", "offload": offload}
    rows = memory_plan(recipe(trainer=tables, algorithm={"preset": "ppo"}), SIZES)
    roles = ["trainer", "trainer, offloaded", "critic", "critic, offloaded"]
    assert [(row.role, row.count, row.on_gpu) for row in rows[:4]] == [(r, 4, "," not in r) for r in roles]
    for row, wanted in zip(rows, [on_gpu, in_main_memory] * 2, strict=False):
        found = (row.weights, row.gradients, row.optimizer)
        assert found == tuple(share * SHAPE.parameter_count for share in wanted)
    assert rows[0].activations and rows[0].programs and not rows[1].activations and not rows[1].programs


def test_muon_has_one_moment_of_the_matrices() -> None:
    adamw, with_muon = recipe(), recipe(trainer={"optimizer": "muon"})
    for one in (SHAPE, replace(SHAPE, tied=not SHAPE.tied)):
        sizes = replace(SIZES, policy=one)
        matrices = one.parameter_count - one.vocabulary * one.hidden * (1 if one.tied else 2)
        saved = memory_plan(adamw, sizes)[0].optimizer - memory_plan(with_muon, sizes)[0].optimizer
        assert saved == 4 * matrices > 0
        assert checkpoint_bytes(adamw, sizes) - checkpoint_bytes(with_muon, sizes) == 4 * matrices


def test_float32_doubles_weights_and_cache() -> None:
    narrow, wide = recipe(), recipe(model={"dtype": "float32"})
    assert kv_bytes_per_token(narrow.rollout_pools[0], SHAPE) == 2 * 2 * 2 * 16 * 2
    assert kv_bytes_per_token(wide.rollout_pools[0], SHAPE) == 2 * kv_bytes_per_token(narrow.rollout_pools[0], SHAPE)
    assert memory_plan(wide, SIZES)[0].weights == 2 * memory_plan(narrow, SIZES)[0].weights


def test_gradient_checkpointing_keeps_one_layer() -> None:
    plain = activation_bytes(recipe(), SHAPE)
    saved = activation_bytes(recipe(trainer={"gradient_checkpointing": True}), SHAPE)
    assert plain / 2 < saved < plain  # of two layers, and the inputs of both


def test_rollout_on_a_gpu_takes_its_share_and_on_a_cpu_its_cache() -> None:
    cpu, gpu = recipe(rollout={"kv_cache_gib": 3}), recipe(rollout={"gpus_per_replica": 2, "replicas": 2})
    assert memory_plan(cpu, SIZES)[1].kv_cache == 3 * GIB
    row = memory_plan(gpu, SIZES)[1]
    assert (row.on_gpu, row.count, row.share_of_gpu, row.weights) == (True, 4, 0.85, SHAPE.parameter_count)


def test_weights_in_transfer_are_counted_once_and_for_gloo_in_every_engine_worker() -> None:
    for backend, workers in (("auto", 1), ("shm", 1), ("gloo", 6)):
        config = recipe(rollout={"replicas": 3, "gpus_per_replica": 2}, weights={"backend": backend})
        (row,) = [row for row in memory_plan(config, SIZES) if row.role == "transfer"]
        assert (row.count, row.on_gpu, row.total) == (workers, False, 2 * SHAPE.parameter_count)


def test_the_plan_of_the_quickstart_is_near_what_was_measured() -> None:
    config = load(Path(__file__).parents[3] / "recipes" / "quickstart.toml")
    planned = sum(row.total * row.count for row in memory_plan(config, model_sizes(config)))
    assert planned == pytest.approx(12.0e9, rel=0.08), "the peak that the README shows, on two cores"


def test_reference_is_counted_only_when_it_is_needed() -> None:
    assert "reference" not in [row.role for row in memory_plan(recipe(), SIZES)]
    assert "reference" in [row.role for row in memory_plan(recipe(algorithm={"kl": {"coef": 0.1}}), SIZES)]


OF_0_43B = ModelShape(
    hidden=1024, layers=24, heads=16, kv_heads=8, head_dim=64, intermediate=4096, vocabulary=49_152, tied=True,
    parameter_count=427_870_208, largest_block=50_331_648,
)  # fmt: skip
OF_7B = ModelShape(
    hidden=3584, layers=28, heads=28, kv_heads=4, head_dim=128, intermediate=18_944, vocabulary=152_064, tied=False,
    parameter_count=7_615_616_512, largest_block=544_997_376,
)  # fmt: skip


def hybrid(tokens: int, ranks: int, **trainer: Any) -> Config:
    return recipe(
        model={"max_context_tokens": 576, "dtype": "bfloat16"},
        batch={"prompts_per_step": 64, "group_size": 8, "tokens_per_micro_batch": tokens},
        sampling={"max_new_tokens": 512},
        trainer={"device": "cuda", "ranks": ranks, "liger_kernels": True, **trainer},
        rollout={"replicas": ranks, "gpus_per_replica": 1, "kv_cache_gib": 9, "max_batched_tokens": 16_384},
        reference={"replicas": ranks, "device": "cuda", "tokens_per_batch": tokens},
        algorithm={"kl": {"coef": 0.001}},
        placement={"colocated": True},
    )


@pytest.mark.parametrize(
    ("shape", "config", "measured"),
    [  # GiB of a rank at the peak of its allocator, on H100 and H200
        (OF_0_43B, hybrid(36_864, 2), 39.22),
        (OF_0_43B, hybrid(73_728, 2), 71.55),
        (OF_7B, hybrid(9_216, 2), 108.53),
        (OF_7B, hybrid(9_216, 4, gradient_checkpointing=True), 42.0),
        (OF_7B, hybrid(18_432, 2, gradient_checkpointing=True, offload="optimizer"), 17.0),
    ],
)
def test_the_plan_is_within_a_tenth_of_what_ranks_took(shape: ModelShape, config: Config, measured: float) -> None:
    trainer = memory_plan(config, ModelSizes(policy=shape, critic=shape, adapters=None))[0]
    assert (trainer.total - trainer.programs) / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "measured", "whole"),
    [  # GiB that nvidia-smi shows for the processes of a GPU, and for all of it
        (36_864, {"trainer": 43.1, "rollout": 11.6, "reference": 4.9}, 59.2),
        (73_728, {"trainer": 75.6, "rollout": 11.6, "reference": 5.9}, 92.8),
    ],
)
def test_what_shares_a_gpu_takes_what_the_plan_says(
    tokens: int, measured: dict[str, float], whole: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sizes = hybrid(tokens, 2), ModelSizes(policy=OF_0_43B, critic=OF_0_43B, adapters=None)
    monkeypatch.setattr(placement, "model_sizes", lambda config: sizes)
    planned = {row.role: row.total / GIB for row in memory_plan(config, sizes) if row.on_gpu}
    assert planned == {role: pytest.approx(value, rel=0.1) for role, value in measured.items()}
    assert placement._fullest(config, memory_plan(config, sizes)) / GIB == pytest.approx(whole, rel=0.1)
    small = placement.check_gpu_memory(config, round(79.2 * GIB))  # an H100
    assert placement.check_gpu_memory(config, 139 * GIB) == "", "an H200"
    if tokens == 36_864:
        assert small == ""
    else:
        assert small.startswith("A GPU must hold about 91.") and "and has 79.2: it may run out of memory." in small
        assert "lower batch.tokens_per_micro_batch = 73728 or rollout.kv_cache_gib = 9 or reference.tokens_per" in small
