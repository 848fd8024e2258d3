"""The calls of a weight update: their deadlines, what is said of them, and errors that are nobody's answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.errors import WrongState
from fourfold_coordinator.weights import broker
from fourfold_coordinator.weights.update import WeightUpdater
from tests.fakes.stage import Stage, check_books, watch_for

ENGINE_CALLS = ("OpenWeights", "BeginWeights", "ReceiveWeights", "CommitWeights", "ProbeLogprobs", "ReleaseWeights")
TRAINER_CALLS = ("MakeOffer", "OpenWeights", "SendWeights")


def note_deadlines(member: Any, calls: tuple[str, ...]) -> dict[str, list[float]]:
    """Note the seconds that each of a member's calls has left when it arrives, at every call from now on."""
    seen: dict[str, list[float]] = {}

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            seen.setdefault(name, []).append(context.time_remaining())
            return await method(request, context)

        return call

    for name in calls:
        setattr(member, name, wrap(name, getattr(member, name)))
    return seen


async def test_every_call_of_an_update_has_what_is_left_of_its_deadline(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, weights={"timeout_seconds": 321.0})
    stage.rollouts[0].wrong_digests = 1  # so that there are aborts, too
    engine = note_deadlines(stage.rollouts[0], (*ENGINE_CALLS, "AbortWeights", "GetWeightSums"))
    trainer = note_deadlines(stage.trainer, (*TRAINER_CALLS, "AbortWeights", "GetManifest"))
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    for seen, calls in ((engine, ENGINE_CALLS), (trainer, TRAINER_CALLS)):
        for call in calls:
            # Of an update's one deadline; the probe of an engine that is new has a shorter one of its own.
            assert 300.0 < max(seen[call]) < 323.0, call
    for seen in (engine, trainer):
        assert all(0.0 < left < 17.0 for left in seen["AbortWeights"]), "an abort has its own"
    assert all(0.0 < left < 12.0 for left in (*engine["GetWeightSums"], *trainer["GetManifest"]))


async def test_an_engine_is_busy_with_its_commit_until_it_gives_tokens_out(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "_SLOW_SECONDS", 0.05)
    monkeypatch.setattr(broker, "_SHOW_SECONDS", 0.05)
    stage = make_stage(steps=1, weights={"timeout_seconds": 60.0})
    release, lines = stage.rollouts[0].ReleaseWeights, list[str]()
    line = re.compile(r"weights of version 1: commit for \d+ s \(rollout-0\)")

    async def slow_release(request: Any, context: Any) -> Any:
        status = await watch_for(stage, lambda status: line.fullmatch(status.waiting_for) is not None)
        lines.append(status.waiting_for)
        return await release(request, context)

    monkeypatch.setattr(stage.rollouts[0], "ReleaseWeights", slow_release)
    await stage.start()
    assert await stage.finish() == 0
    assert len(lines) == 1


async def test_a_fault_of_ours_in_an_abort_is_not_lost(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: WeightUpdater, engine: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(WeightUpdater, "_abort_engine", broken)
    stage = make_stage(steps=1)
    stage.rollouts[0].wrong_digests = 1
    await stage.start()
    assert await stage.finish() == 1
    assert "ZeroDivisionError: a fault of ours" in caplog.text


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_trainer_that_could_not_abort_is_told_and_no_other(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: bool
) -> None:
    async def refuse(request: Any, context: Any) -> Any:
        raise WrongState("the trainer does not know that epoch")

    stage = make_stage(steps=1)
    stage.rollouts[0].wrong_digests = 1
    if refuses:
        monkeypatch.setattr(stage.trainer, "AbortWeights", refuse)
    await stage.start()
    assert await stage.finish() == 0
    assert stage.rollouts[0].aborts == 1
    assert ("trainer did not abort the update" in caplog.text) == refuses
