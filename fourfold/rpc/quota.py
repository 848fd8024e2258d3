"""Limits of what one caller may have in flight, the same for every port.

    interceptor:  with quotas.call(principal): ...            concurrent calls, calls per second
    servicer:     with quotas.tokens(principal, count): ...   tokens in flight

A refusal is `Overloaded` with a reason and the seconds after which a retry may succeed. Only principals with calls in
flight, or with a rate that has not recovered yet, take memory, and at most `_MAX_PRINCIPALS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Final

from fourfold.errors import ConfigError, Overloaded
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.security.principal import Principal

_MAX_PRINCIPALS: Final = 4096
_RETRY_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one principal may use. `math.inf`: no limit."""

    concurrent_calls: float = math.inf
    """Calls in flight; streams count until they end, watches have a limit of their own (`fourfold.rpc.call_slots`)."""
    tokens_in_flight: float = math.inf
    """Tokens of the calls in flight at their longest: prompt plus max_tokens, for each sample."""
    calls_per_second: float = math.inf
    """Calls per second on average; as many calls may also come at once."""

    @staticmethod
    def from_mapping(values: Mapping[str, float], default: Limits) -> Limits:
        """Return `default` with the limits that `values` names.

        Raises:
            ConfigError: a key is unknown, or a value is not a positive number.
        """
        known = {f.name: getattr(default, f.name) for f in fields(Limits)}
        for key, value in values.items():
            if key not in known:
                raise ConfigError(f"{key!r} is not a limit; the limits are {', '.join(known)}")
            if not value > 0:  # NaN, too
                raise ConfigError(f"{key} = {value:g}; a limit is a number above 0: leave it out for the default")
            known[key] = float(value)
        return Limits(**known)


UNLIMITED: Final = Limits()
# A member makes one call at a time; without a limit one member could take the calls of all (`Limits` is per principal).
MEMBER_LIMITS: Final = Limits(concurrent_calls=32)
_MEMBER_ROLES: Final = frozenset({"rollout", "trainer", "reward", "reference"})


def limits_by_role(
    agents: Limits, overrides: Callable[[str], Mapping[str, float]] = lambda _name: {}
) -> Callable[[Principal], Limits]:
    """Return the limits of every principal: agents and members have some, the coordinator and local callers none.

    Args:
        agents: limits of an agent.
        overrides: returns limits of the agent of that name that differ, by the names of the fields of `Limits`.
    """

    def limits(principal: Principal) -> Limits:
        if principal.is_agent:
            return Limits.from_mapping(overrides(principal.name), agents)
        return MEMBER_LIMITS if principal.role in _MEMBER_ROLES else UNLIMITED

    return limits


@dataclass(slots=True)
class _Usage:
    """What one principal uses now."""

    allowance: float
    """Calls that may come at once; grows by `calls_per_second`."""
    updated: float
    """Monotonic time for which `allowance` holds."""
    calls: int = 0
    tokens: int = 0


class Quotas:
    """Counts calls and tokens per principal. Belongs to one event loop."""

    def __init__(self, limits: Callable[[Principal], Limits], *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Start with nothing in use.

        Args:
            limits: returns the limits of a principal; asked at every call, so that they may change meanwhile.
            clock: time of the rates.
        """
        self._limits = limits
        self._clock = clock
        self._usage: dict[Principal, _Usage] = {}

    @contextmanager
    def call(self, principal: Principal, *, is_watch: bool = False) -> Iterator[None]:
        """Count a call while the block runs.

        Args:
            principal: the caller.
            is_watch: the call counts for the rate alone; the server limits watches by themselves.

        Raises:
            Overloaded: the principal has too many calls in flight, or made too many in the last second.
        """
        limits = self._limits(principal)
        if limits == UNLIMITED:
            yield
            return
        usage = self._of(principal, limits)
        if not is_watch and usage.calls + 1 > limits.concurrent_calls:
            raise Overloaded(
                f"{principal} has {usage.calls} calls in flight and may have {limits.concurrent_calls:g} "
                f"(concurrent_calls); wait for one to end",
                reason="TOO_MANY_CALLS",
                retry_after=_RETRY_SECONDS,
            )
        if usage.allowance < 1:
            raise Overloaded(
                f"{principal} makes more than {limits.calls_per_second:g} calls per second (calls_per_second); slow "
                f"down, or ask for more samples in one call",
                reason="TOO_MANY_CALLS_PER_SECOND",
                retry_after=(1 - usage.allowance) / limits.calls_per_second,
            )
        usage.allowance -= 1
        usage.calls += not is_watch
        try:
            yield
        finally:
            usage.calls -= not is_watch
            self._forget(principal, limits)

    @contextmanager
    def tokens(self, principal: Principal, count: int) -> Iterator[None]:
        """Count tokens of a call while the block runs.

        Raises:
            Overloaded: the principal has too many tokens in flight.
        """
        limits = self._limits(principal)
        if limits.tokens_in_flight == math.inf:
            yield
            return
        usage = self._of(principal, limits)
        if usage.tokens + count > limits.tokens_in_flight:
            raise Overloaded(
                f"{principal} has {usage.tokens} tokens in flight and {count} more would pass its limit of "
                f"{limits.tokens_in_flight:g} (tokens_in_flight); wait for a call to end, or lower max_tokens",
                reason="TOO_MANY_TOKENS_IN_FLIGHT",
                retry_after=_RETRY_SECONDS,
            )
        usage.tokens += count
        try:
            yield
        finally:
            usage.tokens -= count
            self._forget(principal, limits)

    @property
    def principal_count(self) -> int:
        """Principals that take memory now."""
        return len(self._usage)

    def _of(self, principal: Principal, limits: Limits) -> _Usage:
        """Return the usage of a principal, with its allowance of now."""
        usage = self._usage.get(principal)
        if usage is None:
            self._make_room()
            usage = self._usage[principal] = _Usage(_burst(limits), self._clock.monotonic())
        _refill(usage, limits, self._clock.monotonic())
        return usage

    def _forget(self, principal: Principal, limits: Limits) -> None:
        """Drop the usage of a principal that uses nothing and whose rate has recovered."""
        usage = self._usage.get(principal)
        if usage is None or usage.calls or usage.tokens:
            return
        _refill(usage, limits, self._clock.monotonic())
        if usage.allowance >= _burst(limits):
            del self._usage[principal]

    def _make_room(self) -> None:
        if len(self._usage) < _MAX_PRINCIPALS:
            return
        for principal in list(self._usage):
            self._forget(principal, self._limits(principal))
        if len(self._usage) >= _MAX_PRINCIPALS:
            raise Overloaded(
                f"{_MAX_PRINCIPALS} callers are active, the most that one service counts; try again later",
                reason="TOO_MANY_CALLERS",
                retry_after=_RETRY_SECONDS,
            )


def _burst(limits: Limits) -> float:
    return max(1.0, limits.calls_per_second)


def _refill(usage: _Usage, limits: Limits, now: float) -> None:
    burst = _burst(limits)
    if burst == math.inf:
        usage.allowance = burst
    else:
        usage.allowance = min(burst, usage.allowance + (now - usage.updated) * limits.calls_per_second)
    usage.updated = now
