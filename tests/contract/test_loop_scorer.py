"""A run whose scorer fails: `reward.on_error`, with the real coordinator and loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import RewardConfig, from_tables
from fourfold.errors import Unavailable
from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc import circuit_breaker
from fourfold_coordinator.launch.fleet import serve_arguments
from fourfold_coordinator.launch.launcher import ServiceSpec
from fourfold_coordinator.launch.run_folder import read_stop_reason
from fourfold_coordinator.rewards import deployment_calls
from fourfold_coordinator.rewards.scorers import Deployment
from fourfold_coordinator.routing import router
from fourfold_coordinator.routing.registry import Member
from fourfold_coordinator.routing.replica import GivenUp, RetryBudget
from fourfold_coordinator.state.ledger import Ledger
from tests.fakes.stage import Stage, until, watch_for

TEXT = "KeyError: 'answer' (scorer.py:7)"
BROKEN = reward.SampleError(code=2, reason="RAISED", message=TEXT)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "_FIRST_REST_SECONDS", 0.01)
    monkeypatch.setattr(circuit_breaker, "_MAX_OPEN_SECONDS", 0.05)
    monkeypatch.setattr(router, "_TICK_SECONDS", 0.02)


def broken(_: reward.ScoreItem) -> reward.SampleScore:
    return reward.SampleScore(error=BROKEN)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the coordinator's last words; the other services of a stage log JSON to the same stderr."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")][-1]


async def test_samples_wait_for_a_scorer_that_fails_and_watchers_see_why(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.reward.outcome = broken
    await stage.start()
    status = await watch_for(stage, lambda s: len(s.conditions) > 0)
    (condition,) = status.conditions
    assert condition.subject == "reward-0 (toy@1)"
    assert "RAISED" in condition.text and TEXT in condition.text
    await watch_for(stage, lambda s: "reward-0 (toy@1)" in s.waiting_for and TEXT in s.waiting_for)
    stage.reward.outcome = lambda item: None
    await watch_for(stage, lambda s: not s.conditions and not s.waiting_for)
    await stage.check_end()
    report = stage.report()
    assert report["dropped"] == {} and report["eval_before"]["missing"] == 0
    (fault,) = report["faults"]
    assert (fault["peer"], fault["kind"]) == ("reward-0", "RAISED") and TEXT in fault["first"]
    assert fault["count"] >= circuit_breaker.THRESHOLD


async def test_a_scorer_that_breaks_after_it_has_worked_loses_no_sample(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    works, mended = True, False

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        nonlocal works
        works = mended or (works and item.experience.sample_id.startswith("eval"))
        return None if works else broken(item)

    stage.reward.outcome = outcome
    await stage.start()
    await watch_for(stage, lambda s: len(s.conditions) > 0)
    mended = True
    await stage.check_end()
    assert stage.report()["dropped"] == {}


async def test_the_first_error_of_a_call_is_its_fault(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)
    mended = False

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if mended:
            return None
        if name.startswith("eval"):  # no sample has had a score
            return reward.SampleScore(abstain_reason="NO_IDEA")
        reason = "FIRST" if name.endswith("-0") else "OTHER"
        return reward.SampleScore(error=reward.SampleError(code=2, reason=reason, message="why"))

    stage.reward.outcome = outcome
    await stage.start()
    status = await watch_for(stage, lambda s: len(s.conditions) > 0)
    (condition,) = status.conditions
    assert "FIRST" in condition.text and "OTHER" not in condition.text
    mended = True
    assert await stage.finish() == 0


async def test_the_wait_for_a_scorer_ends_with_its_name_and_the_first_error(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(reward={"wait_seconds": 0.2})
    stage.reward.outcome = broken
    await stage.start()
    assert await stage.finish() == 1
    last = last_line(capsys)
    assert "no scorer works for 0.2 s (reward.wait_seconds)" in last
    assert "reward-0 (toy@1)" in last and f"first error: RAISED: reward-0 at {stage.reward.target}" in last
    assert TEXT in last and "--resume" in last


async def test_dropped_groups_end_the_run_when_every_round_of_a_step_loses_all(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(reward={"on_error": "drop", "lost_rounds": 2}, retry={"infrastructure": 1})
    stage.reward.outcome = lambda item: broken(item) if not item.experience.sample_id.startswith("eval") else None
    await stage.start()
    assert await stage.finish() == 1
    last = last_line(capsys)
    groups = stage_ledger_groups(stage)
    assert 2 * 3 < groups <= 2 * 3 + 3, "two rounds of three prompts, and those that were under way"
    assert f"step 1: no group is left to train on; dropped samples: {4 * groups} RAISED" in last
    assert "the first RAISED came from reward-0: " in last and TEXT in last
    assert last.endswith("; correct `exact_match`")


def stage_ledger_groups(stage: Stage) -> int:
    ledger = Ledger(stage.folder / "ledger.sqlite")
    count = sum(ledger.dropped().values()) // 4
    ledger.close()
    return count


async def test_dropped_groups_are_replaced_when_the_scorer_works_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, reward={"on_error": "drop"}, retry={"data": 0})
    tries: list[str] = []

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        if item.experience.sample_id.startswith("eval"):
            return None
        tries.append(item.experience.sample_id)
        return broken(item) if len(tries) <= 12 else None

    stage.reward.outcome = outcome
    await stage.complete()
    assert len(stage.trainer.batches[1]) == 12
    assert stage.report()["dropped"]["RAISED"] >= 4
    assert {line["dropped"] for line in stage.lines("samples.jsonl") if line["score"] is None} == {"RAISED"}


async def test_groups_that_wait_for_a_broken_scorer_are_dropped_together(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(
        reward={"on_error": "drop", "lost_rounds": 1},
        retry={"infrastructure": 2},
        batch={"prompts_per_step": 20, "group_size": 2},
        evaluation={"every_steps": 100, "max_prompts": 1},
    )
    stage.reward.outcome = broken
    calls = 0
    answer = stage.reward.Score

    async def score(request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
        nonlocal calls
        calls += not request.items[0].experience.sample_id.startswith("eval")
        return await answer(request, context)

    stage.reward.Score = score  # type: ignore[method-assign]
    await stage.start()
    assert await stage.finish() == 1
    assert "RAISED" in last_line(capsys)
    assert calls < 20 * 3, "not each of them has used up its own tries"


async def test_a_scorer_that_is_gone_is_waited_for_as_one_that_fails(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, retry={"service_wait_seconds": 0.2})
    left = asyncio.Event()

    async def leave() -> None:
        if stage.trainer.step == 1 and not left.is_set():
            left.set()
            await stage.reward.leave()

    stage.rollouts[0].on_generate = leave
    await stage.start()
    await watch_for(stage, lambda s: s.waiting_for.startswith("a reward service (reward-0 left at "))
    await asyncio.sleep(0.5)
    assert not stage.ended, "reward.wait_seconds counts, and not retry.service_wait_seconds"
    await stage.reward.join(stage.address)
    await stage.check_end()
    assert stage.report()["dropped"] == {}


async def test_the_first_error_ends_the_run_when_the_recipe_says_stop(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(reward={"on_error": "stop"})
    stage.reward.outcome = lambda item: broken(item) if item.experience.sample_id == "p0000001-0-2" else None
    await stage.start()
    assert await stage.finish() == 1
    last = last_line(capsys)
    assert "sample p0000001-0-2 has no score" in last and "reward-0 (toy@1)" in last and TEXT in last


async def test_stop_also_ends_a_run_whose_scorer_gives_no_answers(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(reward={"on_error": "stop"}, retry={"infrastructure": 1})
    stage.reward.outcome = broken
    await stage.start()
    assert await stage.finish() == 1
    last = last_line(capsys)
    assert "samples has no scores" in last and TEXT in last


async def test_a_scorer_that_hangs_is_shown_and_costs_one_long_deadline(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_calls, "SLACK_SECONDS", 0.1)
    stage = make_stage(steps=1, evaluation={"every_steps": 100}, reward={"timeout_seconds": 0.1})
    again = asyncio.Event()
    calls: list[int] = []

    async def hang() -> None:
        calls.append(1)
        await again.wait()

    stage.reward.on_score = hang
    await stage.start()
    await watch_for(stage, lambda s: any("no answer to a call of" in c.text for c in s.conditions))
    status = await watch_for(stage, lambda s: any("DEADLINE_PASSED" in c.text for c in s.conditions))
    assert status.conditions[0].subject == "reward-0 (toy@1)"
    assert "Score took longer than" in status.conditions[0].text
    again.set()
    stage.reward.on_score = None
    await watch_for(stage, lambda s: not s.conditions)
    await stage.check_end()
    faults = {row["kind"]: row for row in stage.report()["faults"]}
    assert set(faults) == {"DEADLINE_PASSED"}


async def test_a_failing_scorer_is_asked_for_one_sample_before_it_gets_more(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)
    sizes: list[int] = []
    answer = stage.reward.Score

    async def score(request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
        sizes.append(len(request.items))
        if len(sizes) == 40:
            stage.reward.outcome = lambda item: None
        return await answer(request, context)

    stage.reward.Score = score  # type: ignore[method-assign]
    stage.reward.outcome = broken
    await stage.start()
    await until(lambda: len(sizes) >= 40)
    assert set(sizes[30:40]) == {1}, "once it is known to fail, calls are small"
    await stage.check_end()


async def test_bad_samples_are_told_from_a_bad_scorer_by_one_that_had_a_score(make_stage: Callable[..., Stage]) -> None:
    """All answers to one prompt have errors, again and again; the run waits for nothing."""
    stage = make_stage(steps=1, batch={"prompts_per_step": 1}, reward={"wait_seconds": 5.0})
    stage.reward.outcome = lambda item: broken(item) if item.experience.sample_id.startswith("p0000000-") else None
    await stage.complete()
    assert stage.report()["dropped"] == {"RAISED": 4}


async def test_faults_are_counted_over_the_lives_of_a_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)
    kinds = iter(("FIRST", "SECOND"))

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        if item.experience.sample_id != "p0000000-0-1":
            return None
        return reward.SampleScore(error=reward.SampleError(code=2, reason=next(kinds), message=TEXT))

    stage.reward.outcome = outcome
    await stage.start()
    await until(lambda: len(stage.trainer.batches) == 3)
    await stage.kill()
    assert read_stop_reason(stage.folder)
    stage.reward.outcome = lambda item: None
    await stage.start()
    assert await stage.finish() == 0
    assert [(row["kind"], row["count"]) for row in stage.report()["faults"]] == [("FIRST", 1), ("SECOND", 1)]


def test_a_program_of_the_user_names_the_process_to_end_after_a_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID_VARIABLE, "1")
    ours, permanent = (
        Member(member_id="reward-0", incarnation="", role=3, target="h:1", tokenizer_sha256=b"", permanent=permanent)
        for permanent in (False, True)
    )
    advice = deployment_calls.restart_advice(RewardConfig(function="mine.py:score"), "demo", ours)
    assert "correct `mine.py:score`" in advice
    # The pattern must be part of the command line of the service.
    service = ServiceSpec(role="reward", name="reward-0")
    argv = " ".join(serve_arguments(service, run_dir=Path("runs/demo"), coordinator="127.0.0.1:1"))
    pattern = advice.split("pkill -f ")[1].strip("'")
    for folder, found in (("runs/demo", True), ("/runs/demo", True), ("runs/my-demo", False)):
        assert bool(re.search(pattern, argv.replace("runs/demo", folder))) is found, folder
    for table in (RewardConfig(), RewardConfig(function="mine.py:score", replicas=0)):
        assert deployment_calls.restart_advice(table, "demo", ours) == ""
    assert deployment_calls.restart_advice(RewardConfig(function="mine.py:score"), "demo", permanent) == ""
    monkeypatch.delenv(PARENT_PID_VARIABLE)  # services that were started by hand have other command lines
    assert deployment_calls.restart_advice(RewardConfig(function="mine.py:score"), "demo", ours) == ""


def act_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what the advice reads alone: with the variable itself, this process would end with its parent."""
    monkeypatch.setenv("FOURFOLD_TEST_LAUNCHER", "1")
    monkeypatch.setattr(deployment_calls, "PARENT_PID_VARIABLE", "FOURFOLD_TEST_LAUNCHER")


async def test_watchers_read_how_a_corrected_program_gets_into_its_service(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as_launched(monkeypatch)
    stage = make_stage(steps=1, reward={"function": "mine.py:score"})
    stage.reward.outcome = broken
    await stage.start()
    status = await watch_for(stage, lambda s: len(s.conditions) > 0)
    (condition,) = status.conditions
    assert TEXT in condition.text
    assert "; samples without a score: correct `mine.py:score`, then end its service" in condition.text
    assert f"pkill -f '/{stage.folder.name}/config.toml --member-id reward-0 '" in condition.text
    stage.reward.outcome = lambda item: None
    await watch_for(stage, lambda s: not s.conditions)
    assert await stage.finish() == 0
    assert "pkill" not in json.dumps(stage.report()["faults"])


async def test_the_error_that_ends_a_run_gives_no_advice_about_its_services(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    act_as_launched(monkeypatch)
    table = {"function": "mine.py:score", "on_error": "drop", "lost_rounds": 1}
    stage = make_stage(reward=table, retry={"infrastructure": 1}, evaluation={"every_steps": 100, "max_prompts": 1})
    stage.reward.outcome = broken
    await stage.start()
    assert await stage.finish() == 1
    last = last_line(capsys)
    assert TEXT in last and "pkill" not in last and last.count("correct `mine.py:score`") == 1


async def test_calls_that_fail_while_no_scorer_is_registered_use_up_their_own_tries() -> None:
    class NoReplicas:
        def replicas(self, _role: int, _pool: str) -> list[Any]:
            return []

    config = from_tables(
        {
            "name": "x", "steps": 1, "model": {"source": "m"}, "data": {"train": {"path": "x.jsonl"}},
            "batch": {"prompts_per_step": 1, "group_size": 2}, "sampling": {"max_new_tokens": 4},
            "reward": {"on_error": "drop"},
        },
        source="this test",
    )  # fmt: skip
    budget = RetryBudget(infrastructure=1, data=0)
    table = config.reward[0]
    router: Any = NoReplicas()
    calls = deployment_calls.DeploymentCalls(config, table, Deployment(pool="reward"), router, {}, run="x")
    calls.record_failure(Unavailable("the lease of the only scorer expired"), budget)
    assert budget.infrastructure == 0
    with pytest.raises(GivenUp):
        calls.record_failure(Unavailable("again"), budget)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_scorer_gets_the_messages_of_prompts_if_it_reads_them(
    make_stage: Callable[..., Stage], reads: bool
) -> None:
    stage = make_stage(steps=1)
    stage.reward.reads_messages = reads
    seen = set[str]()
    stage.reward.outcome = lambda item: seen.add(item.prompt_messages_json)
    await stage.complete()
    assert ("" in seen) is not reads
    if reads:
        messages = [json.loads(text) for text in seen]
        assert messages and all(m["role"] == "user" and m["content"] for (m,) in messages)
