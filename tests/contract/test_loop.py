"""The real coordinator, loop and ledger, against services with toy engines: what it survives and what it leaves."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from fourfold import metrics as m
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample
from fourfold_coordinator.data.prompts import PromptSet
from fourfold_coordinator.rewards.scoring import Scoring
from fourfold_coordinator.training.standstill import StandstillMonitor
from tests.contract.test_loop_filter import constant_at
from tests.fakes.stage import Stage, check_books, until, watch_for
from tests.fakes.toy_rollout import FakeRollout

# Digests of everything that the trainer received in a run of the release before `[asynchrony]` (commit 8b8ff61).
BEFORE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "plain": (
        {},
        "48c8c393d973915045d569d070be02c37010e1701f4542997731b3e1b82a772e",
    ),
    "filter": (
        {"algorithm": {"filter": {"keep": "varied", "max_rounds": 4}}},
        "4726f1da6a6b7d493db632ab320fd00d518e9b9fc90aa1f57faceb4290c566b6",
    ),
    "remax": (
        {"algorithm": {"advantage": {"kind": "remax"}}},
        "6858e55b7cb9bfcfca2e9ced94f3b2abf41c630ba61a1e1b306791baa6a6aed7",
    ),
}


def digest(batches: list[list[Sample]]) -> str:
    """Return a SHA-256 (hex) of the batches, in order, with every field that training depends on."""
    result = hashlib.sha256()
    for step, samples in enumerate(batches):
        for s in samples:
            facts = (step, s.sample_id, s.group_id, s.score, s.baseline_score, s.temperature, s.truncated)
            spans = [(span.policy_version, span.token_count) for span in s.version_spans]
            result.update(repr((facts, spans)).encode())
            for array in (s.token_ids, s.behavior_logprobs, s.action_mask, s.loss_mask):
                result.update(array.tobytes())
    return result.hexdigest()


async def test_a_run_goes_to_its_end_and_leaves_everything_behind(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    await stage.start()
    async with asyncio.timeout(10):
        states = [
            s async for s in AsyncCoordinatorClient(open_channel(stage.address, None), peer="coordinator").watch_run()
        ]
    assert await stage.finish() == 0
    assert states[-1].phase == run_pb.RUN_PHASE_DONE
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "held-out" in line] == ["step 0", "step 2", "step 4"]
    assert any(line.startswith("trainer-0 is ready") for line in lines) and "step 4/4" in "\n".join(lines)
    assert [row.step for row in states[-1].steps] == [1, 2, 3, 4]
    assert [row.step for row in states[-1].evals] == [0, 2, 4]
    assert {m.member_id for m in states[-1].members} == {"rollout-0", "trainer-0", "reward-0"}
    check_books(stage)
    report = stage.report()
    assert report["steps"] == 4
    assert report["eval_before"]["n"] == report["eval_after"]["n"] == 4 * 2 * 2
    assert report["eval_after"]["score"] > report["eval_before"]["score"]
    assert (report["model"], report["model_ema"]) == ("/somewhere/model", None)
    assert report["peak_memory_bytes"] > 10_000_000 and report["peak_memory_without"] == []
    assert len(report["answers_before"]) == len(report["answers_after"]) == 8
    assert (stage.folder / "curve.png").exists()
    assert stage.rollouts[0].version == stage.trainer.version == report["policy_version"]
    assert stage.rollouts[0].backend == "shm"
    line = stage.lines("samples.jsonl")[0]
    assert line["version_spans"] == [[-1, line["prompt_tokens"]], [0, line["completion_tokens"]]]
    assert line["logprob_mean"] < 0 < line["completion_tokens"] and not list((stage.folder / "experiences").iterdir())
    names = [[row["sample_id"] for row in stage.lines(name)] for name in ("samples.jsonl", "tokens.jsonl")]
    assert names[0] == names[1]
    times = stage.lines("timeline.jsonl")
    assert [row["step"] for row in times] == [1, 2, 3, 4]
    assert {*times[1]["members"]} == {"rollout-0", "trainer-0", "reward-0"}
    assert {*times[1]["members"]["rollout-0"]} == {"generate", "update"} and "train" in times[1]["members"]["trainer-0"]
    metrics = stage.lines("metrics.jsonl")[0]
    assert metrics["weights/probe_diff_mean"] == pytest.approx(0.01, abs=1e-4)
    assert metrics["train/policy_lag_max"] == 0
    assert stage.rollouts[0].sleeps == [] and m.TIME_SLEEP not in metrics, "the recipe asks for no sleep"


async def test_a_fault_of_a_display_is_logged_and_the_run_goes_on(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_monitor: StandstillMonitor) -> None:
        raise KeyError("rollout-9")

    monkeypatch.setattr(StandstillMonitor, "tick", fail)
    stage = make_stage()
    await stage.complete()
    (fault,) = [record for record in caplog.records if "display failed" in record.getMessage()]
    assert fault.exc_info is not None and "rollout-9" in str(fault.exc_info[1])


async def test_what_looks_at_all_prompts_leaves_the_event_loop_free(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[int]()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return work(*args)

        return call

    monkeypatch.setattr(PromptSet, "digest", noted(PromptSet.digest))
    monkeypatch.setattr(Scoring, "check_prompts", noted(Scoring.check_prompts))
    stage = make_stage(steps=1)
    await stage.complete()
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_checkpoints_have_scores_and_every_model_is_exported(make_stage: Callable[..., Stage]) -> None:
    """The critic and the average are exported beside the policy, and the policy also during the run."""
    stage = make_stage(
        steps=5,
        checkpoint={"every_steps": 1, "export_every_steps": 2},
        trainer={"ema_decay": 0.9},
        algorithm={"preset": "ppo", "kl": {"coef": 0.0}},
        data={"holdout": {"field": "expression", "unordered_numbers": True, "groups": 1}},
    )
    began = datetime.now(UTC)
    await stage.start()
    watching = asyncio.create_task(watch_for(stage, lambda s: s.phase == run_pb.RUN_PHASE_DONE))
    assert await stage.finish() == 0
    report, rows = stage.report(), stage.lines("metrics.jsonl")
    scores = {row["step"]: row["score"] for row in report["evals"]}
    assert stage.trainer.scores == {1: None, 2: scores[2], 3: None, 4: scores[4], 5: scores[5]}
    during, models = stage.trainer.exports[:2], stage.trainer.exports[2:]
    assert during == [("model-step-2", "policy"), ("model-step-4", "policy")]
    assert models == [("model", "policy"), ("model-ema", "ema"), ("critic", "critic")]
    assert (report["model_ema"], report["critic"]) == ("/somewhere/model-ema", "/somewhere/critic")
    assert rows[1]["eval/half_width"] is None and rows[1]["eval/score"] >= 0, "one task group has no spread"
    ends = [datetime.fromisoformat(row["end_time"]) for row in rows]
    # The text is cut to milliseconds.
    assert began - timedelta(milliseconds=1) <= ends[0] < ends[1] < ends[2] <= datetime.now(UTC)
    assert not any("end_time" in record.metrics for record in (await watching).steps), "it is not a metric"


async def test_a_run_waits_for_a_rollout_service_and_fills_it_before_it_serves(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(evaluation={"every_steps": 4})
    only = stage.rollouts[0]
    late = FakeRollout("rollout-1", stage.config)
    served: list[int] = []

    async def die() -> None:
        if len(stage.trainer.batches) == 2:
            asyncio.get_running_loop().create_task(only.kill())
            await asyncio.sleep(30)

    async def note() -> None:
        served.append(late.version)

    only.on_generate, late.on_generate = die, note
    await stage.start()
    await until(lambda: len(stage.trainer.batches) == 2)
    status = await watch_for(stage, lambda s: "rollout" in s.waiting_for)
    assert "rollout-0" in status.waiting_for
    stage.rollouts.append(late)
    await late.join(stage.address)
    await stage.check_end()
    assert late.commits[0] == 2 and min(served) == 2, "it came with version 0 and was filled before it served"


async def test_a_score_that_is_missing_is_no_zero(make_stage: Callable[..., Stage]) -> None:
    """One answer of each group abstains, one fails for good, and one fails once."""
    stage = make_stage(steps=2)
    failed: set[str] = set()

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if name.startswith("eval"):
            return None
        if name.endswith("-0"):
            return reward.SampleScore(abstain_reason="NO_IDEA")
        if name.endswith("-1"):
            return reward.SampleScore(error=reward.SampleError(code=13, reason="RAISED", message="ValueError"))
        if name.endswith("-2") and name not in failed:
            failed.add(name)
            return reward.SampleScore(error=reward.SampleError(code=4, reason="TIMEOUT", message="10 s"))
        return None

    stage.reward.outcome = outcome
    await stage.complete()
    assert [len(ids) for ids in stage.trainer.batches.values()] == [6, 6]
    assert not any(name.endswith(("-0", "-1")) for ids in stage.trainer.batches.values() for name in ids)
    assert stage.report()["dropped"] == {"NO_IDEA": 6, "RAISED": 6}
    lines = stage.lines("samples.jsonl")
    assert len(lines) == 24
    assert {line["dropped"] for line in lines if line["score"] is None} == {"NO_IDEA", "RAISED"}
    metrics = stage.lines("metrics.jsonl")[0]
    assert (metrics["score/abstain_count"], metrics["samples/dropped"]) == (3, 6)
    assert "3 NO_IDEA" in metrics["diagnosis"]


async def test_a_sample_that_hangs_the_reward_function_is_dropped_after_one_more_try(
    make_stage: Callable[..., Stage],
) -> None:
    """One answer of each group times out for good; another finds the service busy more often than that."""
    stage = make_stage(steps=2, retry={"infrastructure": 3, "data": 1})
    tries = Counter[str]()

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        tries[name] += 1
        if not name.startswith("eval") and name.endswith("-1"):
            return reward.SampleScore(error=reward.SampleError(code=4, reason="TIMEOUT", message="10 s"))
        if not name.startswith("eval") and name.endswith("-2") and tries[name] <= 3:
            return reward.SampleScore(error=reward.SampleError(code=14, reason="WORKER_DIED", message="killed"))
        return None

    stage.reward.outcome = outcome
    await stage.complete()
    assert stage.report()["dropped"] == {"TIMEOUT": 6}
    assert [len(ids) for ids in stage.trainer.batches.values()] == [9, 9]
    assert {n for name, n in tries.items() if name.endswith("-1") and not name.startswith("eval")} == {2}
    # One that has a score may be scored again, to tell a scorer that fails from samples that do.
    assert min(n for name, n in tries.items() if name.endswith("-2") and not name.startswith("eval")) == 4


async def test_a_lost_answer_of_a_step_is_asked_for_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.trainer.lost_answers = 2
    await stage.complete()
    assert stage.trainer.step == 2 and len(stage.trainer.trained) == 24, "trained once"


async def test_a_step_with_nothing_to_learn_is_skipped_and_the_run_goes_on(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.reward.outcome = lambda item: reward.SampleScore(score=0.0)
    await stage.complete()
    assert stage.trainer.version == stage.rollouts[0].version == 0
    assert stage.report()["skipped_steps"] == 2
    metrics = stage.lines("metrics.jsonl")[1]
    assert metrics["train/skipped_steps"] == 2 and metrics["groups/useful"] == 0
    assert "every sample scored 0" in metrics["diagnosis"] and "NO_ADVANTAGE" in metrics["diagnosis"]


@pytest.mark.parametrize("kind", BEFORE)
async def test_a_run_without_a_lag_is_the_run_that_it_was(make_stage: Callable[..., Stage], kind: str) -> None:
    """At policy lag 0 a run trains on the very samples of the loop before asynchronous training."""
    changes, before = BEFORE[kind]
    stage, batches = make_stage(steps=6, **changes), list[list[Sample]]()
    if kind == "filter":
        stage.reward.outcome = constant_at(every=3)
    stage.trainer.on_batch = batches.append
    await stage.complete()
    assert digest(batches) == before
