"""Calls to many engines at once: what fails, whose fault it is, and who is not waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from fourfold.errors import PEER_SLOW, DeadlinePassed, Unavailable
from fourfold_coordinator.routing.trainer_session import TrainerRestarted
from fourfold_coordinator.weights import fan_out
from fourfold_coordinator.weights.fan_out import UpdateFailed, call_all

A, B, C = ("a", "1"), ("b", "1"), ("c", "1")


async def answer(value: int, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    return value


async def fail(text: str, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    raise Unavailable(text)


@pytest.fixture(autouse=True)
def short_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "_BLAME_SECONDS", 0.2)


async def test_all_answers_come_back_by_engine() -> None:
    assert await call_all({A: answer(1), B: answer(2, 0.01)}, trainer=answer(0)) == {A: 1, B: 2}


async def test_who_fails_soon_after_the_first_is_named_and_nobody_else_is_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: fail("a fell"), B: fail("b fell", 0.05), C: answer(3, 60)}, trainer=answer(0, 60))
    assert time.monotonic() - began < 30
    assert set(failed.value.engines) == {A, B} and failed.value.trainer is None
    assert str(failed.value) == "a fell; b fell"


async def lose(text: str) -> int:
    raise DeadlinePassed(text, reason=PEER_SLOW)


async def test_a_member_that_only_waited_for_another_is_not_blamed_before_that_one_has_failed() -> None:
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: lose("b is slow"), B: fail("b fell", 0.6), C: answer(3, 60)}, trainer=lose("b is slow"))
    assert set(failed.value.engines) == {B} and failed.value.trainer is None


async def test_members_that_only_waited_are_named_when_no_other_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "_CAUSE_SECONDS", 0.1)
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: lose("b is slow"), B: answer(2, 60)})
    assert set(failed.value.engines) == {A}


async def test_a_trainer_that_fails_with_all_engines_may_be_to_blame() -> None:
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: fail("a fell"), B: answer(2, 60)}, trainer=fail("the trainer fell"))
    assert set(failed.value.engines) == {A} and str(failed.value.trainer) == "the trainer fell"


async def test_a_trainer_that_served_somebody_is_not_to_blame() -> None:
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: fail("a fell", 0.02), B: answer(2)}, trainer=fail("the trainer fell", 0.02))
    assert set(failed.value.engines) == {A} and failed.value.trainer is None


async def test_a_trainer_that_fails_alone_is_to_blame() -> None:
    with pytest.raises(UpdateFailed) as failed:
        await call_all({A: answer(1)}, trainer=fail("the trainer fell"))
    assert failed.value.engines == {} and str(failed.value.trainer) == "the trainer fell"


async def test_another_trainer_ends_it_as_such() -> None:
    async def restarted() -> None:
        raise TrainerRestarted("a new process")

    with pytest.raises(TrainerRestarted):
        await call_all({A: fail("a fell")}, trainer=restarted())
