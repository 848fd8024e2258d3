"""Limits per principal: concurrent calls, tokens in flight, calls per second."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest

from fourfold.config import Config
from fourfold.errors import ConfigError, Overloaded
from fourfold.rpc import quota
from fourfold.rpc.quota import MEMBER_LIMITS, UNLIMITED, Limits, Quotas, limits_by_role
from fourfold.security.principal import LOCAL, Principal
from fourfold.service.lifecycle import agent_limits
from tests.fakes.clock import FakeClock

ANNA, BERT = Principal("agent", "anna"), Principal("agent", "bert")


def quotas(clock: FakeClock, **limits: float) -> Quotas:
    return Quotas(limits_by_role(Limits(**limits)), clock=clock)


def refused(quotas: Quotas, principal: Principal = ANNA, *, tokens: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as caught, quotas.tokens(principal, tokens) if tokens else quotas.call(principal):
        pass
    assert caught.value.retry_after is not None and caught.value.retry_after > 0
    return caught.value


def test_concurrent_calls_are_counted_for_each_principal_alone(clock: FakeClock) -> None:
    limited = quotas(clock, concurrent_calls=2)
    with limited.call(ANNA), limited.call(ANNA):
        error = refused(limited)
        assert error.reason == "TOO_MANY_CALLS"
        assert "agent/anna has 2 calls in flight and may have 2 (concurrent_calls)" in error.message
        with limited.call(BERT):
            pass
    with limited.call(ANNA):
        pass


def test_a_call_that_fails_is_no_longer_in_flight(clock: FakeClock) -> None:
    limited = quotas(clock, concurrent_calls=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="boom"), limited.call(ANNA):
            raise ValueError("boom")


def test_tokens_in_flight_are_counted_for_each_principal_alone(clock: FakeClock) -> None:
    limited = quotas(clock, tokens_in_flight=100)
    with limited.tokens(ANNA, 60):
        error = refused(limited, tokens=41)
        assert error.reason == "TOO_MANY_TOKENS_IN_FLIGHT"
        assert "60 tokens in flight and 41 more would pass its limit of 100" in error.message
        with limited.tokens(ANNA, 40), limited.tokens(BERT, 100):
            pass
    with limited.tokens(ANNA, 100):
        pass


async def test_calls_per_second_may_come_at_once_and_then_at_their_rate(clock: FakeClock) -> None:
    limited = quotas(clock, calls_per_second=4)
    for _ in range(4):
        with limited.call(ANNA):
            pass
    error = refused(limited)
    assert (error.reason, error.retry_after) == ("TOO_MANY_CALLS_PER_SECOND", 0.25)
    with limited.call(BERT):
        pass
    await clock.advance(0.25)
    with limited.call(ANNA):
        pass
    refused(limited)
    await clock.advance(3600)  # an hour of silence saves no more than one second's calls
    for _ in range(4):
        with limited.call(ANNA):
            pass
    refused(limited)


async def test_a_rate_below_one_call_per_second_lets_calls_through(clock: FakeClock) -> None:
    limited = quotas(clock, calls_per_second=0.1)
    with limited.call(ANNA):
        pass
    assert refused(limited).retry_after == pytest.approx(10)
    await clock.advance(10)
    with limited.call(ANNA):
        pass


def test_the_coordinator_and_local_callers_have_no_limits_and_members_have_theirs(clock: FakeClock) -> None:
    limits = limits_by_role(Limits(concurrent_calls=1))
    assert limits(Principal("coordinator")) == limits(LOCAL) == UNLIMITED
    assert {limits(Principal(role, "x-0")) for role in ("rollout", "trainer", "reward", "reference")} == {MEMBER_LIMITS}
    limited = Quotas(limits, clock=clock)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(limited.call(LOCAL))
            stack.enter_context(limited.tokens(LOCAL, 10**9))
        assert limited.principal_count == 0


def test_limits_of_a_token_replace_the_default_and_are_read_at_every_call(clock: FakeClock) -> None:
    grants: dict[str, dict[str, float]] = {"anna": {"concurrent_calls": 2}}
    limited = Quotas(limits_by_role(Limits(concurrent_calls=1), lambda name: grants.get(name, {})), clock=clock)
    with limited.call(ANNA), limited.call(ANNA), limited.call(BERT):
        refused(limited)
        refused(limited, BERT)
        grants["anna"] = {"concurrent_calls": 3}
        with limited.call(ANNA):
            pass


def test_the_recipe_gives_the_limits_of_agents() -> None:
    tables: dict[str, Any] = {
        "name": "t",
        "steps": 1,
        "model": {"source": "m"},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 1, "group_size": 2},
        "sampling": {"max_new_tokens": 8},
    }
    assert agent_limits(Config.model_validate(tables)) == Limits(concurrent_calls=128, calls_per_second=100)
    given = {"concurrent_calls": 3, "tokens_in_flight": 500, "calls_per_second": 0.5}
    assert agent_limits(Config.model_validate({**tables, "rollout": {"agents": given}})) == Limits(**given)


def test_a_mapping_gives_limits_and_unknown_or_wrong_ones_are_refused() -> None:
    default = Limits(concurrent_calls=5, calls_per_second=7)
    assert Limits.from_mapping({}, default) == default
    assert Limits.from_mapping({"tokens_in_flight": 9, "calls_per_second": 0.5}, default) == Limits(
        concurrent_calls=5, tokens_in_flight=9, calls_per_second=0.5
    )
    with pytest.raises(ConfigError, match="'calls' is not a limit; the limits are concurrent_calls, tokens_in_flight"):
        Limits.from_mapping({"calls": 1}, default)
    for value in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="a limit is a number above 0"):
            Limits.from_mapping({"concurrent_calls": value}, default)


async def test_memory_is_bounded_by_active_principals(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "_MAX_PRINCIPALS", 3)
    limited = quotas(clock, calls_per_second=1)
    for number in range(3):
        with limited.call(Principal("agent", str(number))):
            pass
    assert limited.principal_count == 3, "their rates have not recovered"
    error = refused(limited)
    assert error.reason == "TOO_MANY_CALLERS"
    await clock.advance(1)
    with limited.call(ANNA):
        assert limited.principal_count == 1, "those who are idle are forgotten"
    unlimited_rate = quotas(clock, concurrent_calls=1)
    for number in range(100):
        with unlimited_rate.call(Principal("agent", str(number))):
            pass
    assert unlimited_rate.principal_count == 0
