"""Limits of calls: slots per kind of call on a port, and quotas per caller."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from fourfold.errors import InvalidInput, Overloaded
from fourfold.rpc import limits as limits_module
from fourfold.rpc.limits import (
    ENVIRONMENT_LIMITS,
    GATEWAY_LIMITS,
    MAX_PROBES,
    MAX_WATCHES,
    MAX_WATCHES_PER_AGENT,
    MAX_WATCHES_PER_PRINCIPAL,
    MEMBER_LIMITS,
    CallSlots,
    Quotas,
    limits_by_role,
)
from fourfold.security.principal import LOCAL, UNLIMITED, CallerLimits, Principal
from tests.fakes.clock import FakeClock

ANNA, BERT = Principal("agent", "anna"), Principal("agent", "bert")


def quotas(clock: FakeClock, **limits: float) -> Quotas:
    return Quotas(limits_by_role(CallerLimits(**limits)), clock=clock)


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


def test_a_call_that_no_retry_can_make_pass_is_an_error_of_its_caller(clock: FakeClock) -> None:
    with (
        pytest.raises(InvalidInput, match="has 101 tokens, and agent/anna may have 100 in flight"),
        quotas(clock, tokens_in_flight=100).tokens(ANNA, 101),
    ):
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
    await clock.advance(3600)  # an idle hour allows no more calls than one second's
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
    limits = limits_by_role(CallerLimits(concurrent_calls=1))
    assert limits(Principal("coordinator")) == limits(LOCAL) == UNLIMITED
    assert limits(Principal("environment", "x-0")) == ENVIRONMENT_LIMITS  # a call for each of its episodes
    assert limits(Principal("gateway", "x-0")) == GATEWAY_LIMITS  # a call for each turn of its agents
    assert {limits(Principal(role, "x-0")) for role in ("rollout", "trainer", "reward", "reference")} == {MEMBER_LIMITS}
    limited = Quotas(limits, clock=clock)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(limited.call(LOCAL))
            stack.enter_context(limited.tokens(LOCAL, 10**9))
        assert len(limited._usage) == 0


def test_limits_of_a_token_replace_the_default_and_are_read_at_every_call(clock: FakeClock) -> None:
    grants: dict[str, dict[str, float]] = {"anna": {"concurrent_calls": 2}}
    limited = Quotas(limits_by_role(CallerLimits(concurrent_calls=1), lambda name: grants.get(name, {})), clock=clock)
    with limited.call(ANNA), limited.call(ANNA), limited.call(BERT):
        refused(limited)
        refused(limited, BERT)
        grants["anna"] = {"concurrent_calls": 3}
        with limited.call(ANNA):
            pass


async def test_memory_is_bounded_by_active_principals(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_MAX_PRINCIPALS", 3)
    limited = quotas(clock, calls_per_second=1)
    for number in range(3):
        with limited.call(Principal("agent", str(number))):
            pass
    assert len(limited._usage) == 3, "their rates have not recovered"
    error = refused(limited)
    assert error.reason == "TOO_MANY_CALLERS"
    await clock.advance(1)
    with limited.call(ANNA):
        assert len(limited._usage) == 1, "those who are idle are forgotten"
    unlimited_rate = quotas(clock, concurrent_calls=1)
    for number in range(100):
        with unlimited_rate.call(Principal("agent", str(number))):
            pass
    assert len(unlimited_rate._usage) == 0


def fill(
    stack: ExitStack, slots: CallSlots, service: str, name: str, caller: Principal = LOCAL, most: int = 2000
) -> int:
    """Take slots until one is refused; return their number."""
    for count in range(most):
        try:
            stack.enter_context(slots.enter(service, name, caller))
        except Overloaded as error:
            assert error.retry_after
            return count
    return most


def test_a_service_that_is_full_leaves_the_others_their_room() -> None:
    slots = CallSlots(calls_per_service=10, public=False)
    with ExitStack() as stack:
        assert fill(stack, slots, "x.Run", "GetRun") == 10
        assert fill(stack, slots, "x.Run", "WatchRun") == MAX_WATCHES_PER_PRINCIPAL
        assert fill(stack, slots, "grpc.health.v1.Health", "Check") == MAX_PROBES
        assert fill(stack, slots, "x.Membership", "KeepAlive") == 10
    with ExitStack() as stack:
        assert fill(stack, slots, "x.Run", "GetRun") == 10, "all were given back"


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("x.Run", "WatchRun"),
        ("grpc.health.v1.Health", "Watch"),
        ("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
    ],
)
def test_watches_of_any_service_are_counted_together_and_for_each_caller(service: str, name: str) -> None:
    slots = CallSlots(calls_per_service=10, public=True)
    with ExitStack() as stack:
        assert fill(stack, slots, service, name, ANNA) == MAX_WATCHES_PER_AGENT
        assert fill(stack, slots, "x.Other", "WatchLoad", ANNA) == 0
        callers = [Principal("agent", str(number)) for number in range(100)]
        assert sum(fill(stack, slots, service, name, caller) for caller in callers) == (
            MAX_WATCHES - MAX_WATCHES_PER_AGENT
        )
    assert not slots._watches, "callers without watches take no memory"


def test_agents_together_get_half_of_a_port_that_others_use_too() -> None:
    for public, most in ((False, 5), (True, 10)):
        slots = CallSlots(calls_per_service=10, public=public)
        with ExitStack() as stack:
            assert fill(stack, slots, "x.Rollout", "Generate", ANNA) == most
            assert fill(stack, slots, "x.Rollout", "Generate") == 10 - most
    slots = CallSlots(calls_per_service=10, public=False)
    with ExitStack() as stack:
        callers = [Principal("agent", str(number)) for number in range(100)]
        assert sum(fill(stack, slots, "x.Run", "WatchRun", caller) for caller in callers) == MAX_WATCHES // 2


def test_the_limit_of_grpc_is_above_the_sum_of_all() -> None:
    slots = CallSlots(calls_per_service=10, public=False)
    assert slots.maximum_concurrent_rpcs(2) > 2 * 10 + MAX_WATCHES + MAX_PROBES
