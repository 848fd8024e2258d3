"""Room for calls on one server: services, watches and probes do not take it from each other."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from fourfold.errors import Overloaded
from fourfold.rpc import call_slots
from fourfold.rpc.call_slots import MAX_PROBES, MAX_WATCHES, MAX_WATCHES_PER_AGENT, MAX_WATCHES_PER_PRINCIPAL, CallSlots
from fourfold.security.principal import LOCAL, Principal

AGENT = Principal("agent", "anna")


def fill(
    stack: ExitStack, slots: CallSlots, service: str, name: str, caller: Principal = LOCAL, most: int = 2000
) -> int:
    """Take slots until one is refused; return how many there were."""
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
        assert fill(stack, slots, service, name, AGENT) == MAX_WATCHES_PER_AGENT
        assert fill(stack, slots, "x.Other", "WatchLoad", AGENT) == 0
        callers = [Principal("agent", str(number)) for number in range(100)]
        assert sum(fill(stack, slots, service, name, caller) for caller in callers) == (
            MAX_WATCHES - MAX_WATCHES_PER_AGENT
        )
    assert not slots._watches, "callers without watches take no memory"


def test_agents_together_get_half_of_a_port_that_others_use_too() -> None:
    for public, most in ((False, 5), (True, 10)):
        slots = CallSlots(calls_per_service=10, public=public)
        with ExitStack() as stack:
            assert fill(stack, slots, "x.Rollout", "Generate", AGENT) == most
            assert fill(stack, slots, "x.Rollout", "Generate") == 10 - most
    slots = CallSlots(calls_per_service=10, public=False)
    with ExitStack() as stack:
        callers = [Principal("agent", str(number)) for number in range(100)]
        assert sum(fill(stack, slots, "x.Run", "WatchRun", caller) for caller in callers) == MAX_WATCHES // 2


def test_the_limit_of_grpc_is_above_the_sum_of_all() -> None:
    slots = CallSlots(calls_per_service=10, public=False)
    assert slots.maximum_concurrent_rpcs(2) > 2 * 10 + call_slots.MAX_WATCHES + call_slots.MAX_PROBES
