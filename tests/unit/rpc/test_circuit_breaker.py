"""When a service that fails is called again."""

from __future__ import annotations

from fourfold.errors import Overloaded, Unavailable
from fourfold.rpc.circuit_breaker import THRESHOLD, CircuitBreaker

AWAY = Unavailable("away")


def test_one_failure_is_a_short_rest_and_no_more() -> None:
    breaker = CircuitBreaker()
    assert breaker.admits(100.0)
    breaker.record_failure(AWAY, 100.0)
    assert not breaker.open and not breaker.admits(100.2) and breaker.admits(100.25)
    with breaker.in_flight():
        assert not breaker.probing and breaker.admits(100.25), "others may be called beside it"


def test_failures_in_a_row_open_it_and_one_call_at_a_time_tries_again() -> None:
    breaker, now = CircuitBreaker(), 100.0
    for number in range(1, THRESHOLD + 1):
        assert breaker.admits(now)
        breaker.record_failure(Unavailable(f"failure {number}"), now)
        now += 10.0
    assert breaker.open and breaker.first is not None and breaker.first.message == "failure 1"
    with breaker.in_flight():
        assert breaker.probing and not breaker.admits(now), "half open: one call"
        breaker.record_failure(AWAY, now)
    assert not breaker.admits(now + 1.9) and breaker.admits(now + 2.0)
    with breaker.in_flight():
        assert breaker.probing
        breaker.record_success()
    assert not breaker.open and breaker.first is None and breaker.admits(now)


def test_rests_double_up_to_a_limit() -> None:
    breaker = CircuitBreaker()
    rests = []
    now = 0.0
    for _ in range(12):
        breaker.record_failure(AWAY, now)
        rests.append(breaker.retry_at - now)
        now = breaker.retry_at
    assert rests[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0] and rests[-1] == 30.0


def test_a_hang_opens_it_at_once() -> None:
    breaker = CircuitBreaker()
    breaker.trip(AWAY, 0.0)
    assert breaker.open and not breaker.admits(0.2) and breaker.admits(0.25)


def test_a_service_may_ask_for_a_rest_but_not_for_a_long_one() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure(Overloaded("full", retry_after=4.0), 0.0)
    assert not breaker.admits(3.9) and breaker.admits(4.0)
    breaker.record_failure(Overloaded("full", retry_after=1e9), 4.0)
    assert breaker.admits(34.0)


def test_calls_that_fail_together_count_once() -> None:
    breaker = CircuitBreaker()
    for _ in range(12):
        breaker.record_failure(AWAY, 0.0)
    assert breaker.failures == 1 and not breaker.open and breaker.admits(0.25)


def test_a_call_that_worked_beside_the_probe_does_not_let_a_second_probe_in() -> None:
    breaker = CircuitBreaker()
    breaker.trip(AWAY, 0.0)
    with breaker.in_flight():
        breaker.record_success()  # of a call that began before
        assert not breaker.admits(9.0)
    assert breaker.admits(9.0)
