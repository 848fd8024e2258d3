"""Trains forty steps with a reward service that breaks its contract in twenty ways, two steps each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fourfold.rpc import circuit_breaker
from fourfold_coordinator.rewards import deployment_calls
from fourfold_coordinator.routing import router
from tests.contract import conftest
from tests.fakes.hostile_reward import FAULTS, STEPS, HostileReward, check_names, check_scores
from tests.fakes.stage import Stage, check_books

make_stage = conftest.make_stage


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_no_answer_of_a_reward_service_ends_a_run_or_becomes_a_zero(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(circuit_breaker, "_FIRST_REST_SECONDS", 0.01)
    monkeypatch.setattr(circuit_breaker, "_MAX_OPEN_SECONDS", 0.05)
    monkeypatch.setattr(router, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(deployment_calls, "SLACK_SECONDS", 0.2)
    stage = make_stage(
        steps=STEPS,
        batch={"prompts_per_step": 2, "group_size": 2, "tokens_per_micro_batch": 256},
        reward={"timeout_seconds": 0.1},
        evaluation={"every_steps": 100},
        checkpoint={"every_steps": 20},
        retry={"service_wait_seconds": 10.0},
    )

    async def step() -> int:
        return stage.trainer.step

    hostile = HostileReward("reward-0", stage.config, step=step)
    stage.reward = hostile
    await stage.start()
    assert await stage.finish(100) == 0
    check_books(stage)
    assert {(step, list(FAULTS)[(step - 1) % 20]) for step in range(1, STEPS + 1)} == set(hostile.bad)

    lines = stage.lines("samples.jsonl")
    check_scores(lines)
    ledger = stage.ledger()
    assert all(ledger.state(line["sample_id"]) == ("DROPPED" if line["dropped"] else "TRAINED") for line in lines)
    ledger.close()

    report = stage.report()
    check_names(report)
    texts = (stage.folder / "report.json").read_text() + (stage.folder / "samples.jsonl").read_text()
    texts += "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter == "\n" for letter in texts)
    assert max(len(line["scorer"]) for line in lines) == 200
