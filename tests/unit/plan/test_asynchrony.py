"""What `fourfold plan` says of the policy lag, and the memory of engines that sample while the trainer trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu
from fourfold.plan import report
from fourfold.plan.placement import check_gpu_memory

GIB = 1 << 30
CPU = configuration.load(Path(__file__).parents[3] / "recipes" / "async_cpu.toml").model_dump()
COLOCATED: dict[str, Any] = {
    "placement": {"colocated": True},
    "rollout": {"gpus_per_replica": 1, "kv_cache_gib": 8},
    "trainer": {"device": "cuda"},
}


def recipe(**tables: dict[str, Any]) -> Config:
    """Return the asynchronous recipe with some keys changed."""
    changed = {name: {**({} if "preset" in table else CPU[name]), **table} for name, table in tables.items()}
    return Config.model_validate({**CPU, **changed})


def plan(**tables: dict[str, Any]) -> str:
    return " ".join(report.describe(recipe(**tables)).split())


def test_the_lag_is_described() -> None:
    text = plan(asynchrony={"max_policy_lag": 2}, batch={"prompts_per_step": 20})
    assert (
        "policy lag at most 2: engines sample while the trainer trains. At most 3 x 20 = 60 groups are between "
        "admission and the update that trains on them, and up to 40 of them run while a step trains. Groups are "
        "trained in the order of admission. Those with tokens of weights more than 2 versions old, as after a failure, "
        "are dropped (STALE). Each engine has up to 256 samples in flight (160 at lag 0; of 480, the others wait in "
        "the coordinator)."
    ) in text
    assert "Running samples are paused, and continue under the new weights" in text
    assert "more than 1 version old, as after a failure, are trained on." in plan(asynchrony={"stale": "train"})
    controlled = plan(asynchrony={"target_mismatch": 0.05})
    assert "The lag is lowered while |o - u| of trained tokens" in controlled and "is above 0.05 nats" in controlled


def test_the_room_in_the_kv_cache_is_described() -> None:
    lag = {"max_policy_lag": 1}
    few = plan(asynchrony=lag)
    assert (
        "Each engine has up to 192 samples in flight (96 at lag 0). At full length their KV cache takes 1.1 GiB" in few
    )
    assert "1.1 GiB; the engine has room for 182 of them, and the others wait in its queue." in few
    assert "takes 1.1 GiB, which the engine has." in plan(asynchrony=lag, rollout={"kv_cache_gib": 2})
    assert "takes 1.1 GiB of the engine's share of its GPUs." in plan(asynchrony=lag, rollout={"gpus_per_replica": 1})
    assert "up to 96 samples in flight (48 at lag 0)" in plan(asynchrony=lag, rollout={"replicas": 2})


def test_an_algorithm_without_a_correction_is_warned_of() -> None:
    warning = 'Warning: algorithm.correction.kind = "none" trains tokens of older weights as if those of the step had'
    assert warning in plan(algorithm={"preset": "grpo"})
    assert warning not in plan(algorithm={"preset": "grpo"}, asynchrony={"max_policy_lag": 0})
    assert "Warning" not in plan(algorithm={"preset": "cispo"})
    assert "Warning" not in plan(algorithm={"preset": "grpo", "correction": {"kind": "tis"}})


def test_a_loss_that_corrects_the_lag_itself_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(algorithm={"preset": "grpo"})
    monkeypatch.setattr(type(config.algorithm.loss), "corrects_lag", True)
    assert "Warning" not in report.describe(config)


def test_an_update_that_waits_for_samples_is_warned_of() -> None:
    warning = 'Warning: weights.pause = "wait" lets every update wait for the longest running sample'
    assert warning in plan(weights={"pause": "wait"})
    assert warning not in plan(weights={"pause": "keep"})
    assert "Warning" not in plan(weights={"pause": "wait"}, asynchrony={"max_policy_lag": 0})


def test_engine_and_trainer_that_overlap_on_a_gpu_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(gib: float | None) -> str:
        gpus = [] if gib is None else [Gpu(id="0", name="g", memory_bytes=round(gib * GIB))]
        monkeypatch.setattr(report, "visible_gpus", lambda: gpus)
        return plan(**COLOCATED)

    needs = (
        "Engine and trainer work at the same time: the fullest GPU holds about 19.9 GiB, 10.2 of them the engine (8.0"
    )
    assert needs in on(None) and "Every GPU must have at least that much." in on(None)
    assert "It fits: this machine's have 24.0." in on(24)
    assert "It does not fit: this machine's have 15.0. To make it fit, lower batch.tokens_per_micro_batch = " in on(15)
    assert "set rollout.sleep_mode = true and asynchrony.max_policy_lag = 0." in on(15)


def test_engines_that_sleep_cannot_sample_while_the_trainer_trains() -> None:
    asleep = {**COLOCATED, "rollout": {**COLOCATED["rollout"], "sleep_mode": True}}
    recipe(**asleep, asynchrony={"max_policy_lag": 0})
    with pytest.raises(
        ValueError, match=r"asynchrony\.max_policy_lag = 1 has engines sample .* set rollout\.sleep_mode = f"
    ):
        recipe(**asleep)


def test_too_small_a_gpu_is_refused_with_what_helps_at_this_lag() -> None:
    with pytest.raises(
        ConfigError, match=r"set rollout\.sleep_mode = true and asynchrony\.max_policy_lag = 0, or set pl"
    ):
        check_gpu_memory(recipe(**COLOCATED), 9 * GIB)
    with pytest.raises(ConfigError, match=r"set rollout\.sleep_mode = true, or set placement"):
        check_gpu_memory(recipe(**COLOCATED, asynchrony={"max_policy_lag": 0}), 9 * GIB)
