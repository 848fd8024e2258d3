"""Limits the calls in flight on a server: `CallSlots` per kind of call, `Quotas` per caller.

    interceptor:  with slots.enter(service, method, principal), quotas.call(principal): ...
    servicer:     with quotas.tokens(principal, count): ...

A refused call gets `Overloaded` with a reason and the seconds after which a retry may succeed. A call that no retry
can make succeed gets `InvalidInput`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from fourfold.errors import InvalidInput, Overloaded
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.security.access import MEMBER_ROLES
from fourfold.security.principal import UNLIMITED, CallerLimits, Principal

PROBE_SERVICES: Final = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
MAX_PROBES: Final = 64
MAX_WATCHES: Final = 256
MAX_WATCHES_PER_PRINCIPAL: Final = 64
MAX_WATCHES_PER_AGENT: Final = 16
# A member makes one call at a time. Without this limit a single faulty member could take all slots of a service.
MEMBER_LIMITS: Final = CallerLimits(concurrent_calls=32)
# Of one agent, unless its token has limits of its own. Each call may hold 1 MiB of an unfinished request.
AGENT_LIMITS: Final = CallerLimits(concurrent_calls=128, calls_per_second=100)
# An environment service has one call in flight for each of its episodes.
ENVIRONMENT_LIMITS: Final = CallerLimits(concurrent_calls=1024)
# A gateway has one call in flight for each turn of its agents, and at the coordinator for agents that wait for tasks.
GATEWAY_LIMITS: Final = CallerLimits(concurrent_calls=1024)

_REFLECTION: Final = "ServerReflectionInfo"
_WATCHES: Final = "watches"
_PROBES: Final = "probes"
# Calls that gRPC accepts beyond the sum of our limits; the interceptor answers each with an error at once.
_REFUSABLE_CALLS: Final = 256
_SLOT_RETRY_SECONDS: Final = 1.0
_QUOTA_RETRY_SECONDS: Final = 0.5
_MAX_PRINCIPALS: Final = 4096


def is_probe(service: str) -> bool:
    """Return whether a service (health, reflection) describes the server itself."""
    return service in PROBE_SERVICES


def is_watch(name: str) -> bool:
    """Return whether a method is a stream that lasts until its client leaves; such a method needs no deadline."""
    return name.startswith(("Watch", "Attach")) or name == _REFLECTION


class CallSlots:
    """Counts the calls in flight on one port: per service, all watches together, and all probes together.

    gRPC has a single limit for all calls of a server. With that limit alone, a thousand watches would fill the server
    and the next KeepAlive would be refused. gRPC's limit is therefore set above the sum of these limits. Use a
    `CallSlots` from one event loop.
    """

    def __init__(self, *, calls_per_service: int, public: bool) -> None:
        """Allow so many calls of one service in flight, watches not counted.

        A `public` port serves only agents. On any other port, agents together get half of each limit.
        """
        self._calls_per_service = calls_per_service
        self._public = public
        self._all: Counter[str] = Counter()
        self._agents: Counter[str] = Counter()
        self._watches: Counter[Principal] = Counter()

    def maximum_concurrent_rpcs(self, service_count: int) -> int:
        """Return the limit to pass to gRPC for a server with `service_count` services besides the probes."""
        return service_count * self._calls_per_service + MAX_WATCHES + MAX_PROBES + _REFUSABLE_CALLS

    @contextmanager
    def enter(self, service: str, name: str, principal: Principal) -> Iterator[None]:
        """Hold a slot for a call of method `name` while the block runs, or raise Overloaded."""
        kind, limit = self._kind(service, name)
        is_agent = principal.is_agent
        _check_slot(kind, limit, self._all[kind], "in flight")
        if is_agent and not self._public:
            _check_slot(kind, max(1, limit // 2), self._agents[kind], "in flight for agents")
        if kind == _WATCHES:
            own = MAX_WATCHES_PER_AGENT if is_agent else MAX_WATCHES_PER_PRINCIPAL
            _check_slot(kind, own, self._watches[principal], f"in flight for {principal}")
            self._watches[principal] += 1
        self._all[kind] += 1
        self._agents[kind] += is_agent
        try:
            yield
        finally:
            self._all[kind] -= 1
            self._agents[kind] -= is_agent
            if kind == _WATCHES:
                self._watches[principal] -= 1
                if not self._watches[principal]:  # callers without watches must take no memory
                    del self._watches[principal]

    # Watches come first: health and reflection have methods of that kind too.
    def _kind(self, service: str, name: str) -> tuple[str, int]:
        if is_watch(name):
            return _WATCHES, MAX_WATCHES
        if is_probe(service):
            return _PROBES, MAX_PROBES
        return f"calls of {service}", self._calls_per_service


def _check_slot(kind: str, limit: int, count: int, whose: str) -> None:
    if count >= limit:
        raise Overloaded(
            f"{count} {kind} are {whose}, and {limit} may be; try again when one has ended",
            reason="TOO_MANY_WATCHES" if kind == _WATCHES else "TOO_MANY_CALLS",
            retry_after=_SLOT_RETRY_SECONDS,
        )


def limits_by_role(
    agents: CallerLimits, overrides: Callable[[str], Mapping[str, float]] = lambda _name: {}
) -> Callable[[Principal], CallerLimits]:
    """Return a function that gives the limits of a principal; the coordinator and local callers have none.

    An agent has the limits `agents`, except for the fields that `overrides` returns for its name.
    """

    def limits(principal: Principal) -> CallerLimits:
        if principal.is_agent:
            own = overrides(principal.name)
            return replace(agents, **own) if own else agents
        if principal.role == "environment":
            return ENVIRONMENT_LIMITS
        if principal.role == "gateway":
            return GATEWAY_LIMITS
        return MEMBER_LIMITS if principal.role in MEMBER_ROLES else UNLIMITED

    return limits


@dataclass(slots=True)
class _Usage:
    """Current usage of one principal; `allowance` is a token bucket of calls."""

    allowance: float  # calls that may start at once; grows by `calls_per_second` up to one second's worth
    updated: float  # monotonic time of `allowance`
    calls: int = 0
    tokens: int = 0


class Quotas:
    """Counts calls and tokens in flight per principal, for all ports of a process. Use it from one event loop.

    Memory is bounded: an entry exists only while a principal has calls in flight or its rate has not recovered, and at
    most `_MAX_PRINCIPALS` exist.
    """

    def __init__(self, limits: Callable[[Principal], CallerLimits], *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Start with nothing in use. `limits` runs at every call, so a changed token file applies at once."""
        self._limits = limits
        self._clock = clock
        self._usage: dict[Principal, _Usage] = {}

    @contextmanager
    def call(self, principal: Principal, *, is_watch: bool = False) -> Iterator[None]:
        """Count a call while the block runs; a watch counts only for the rate, as `CallSlots` limits their number.

        Raises:
            Overloaded: the principal has too many calls in flight, or made too many in the last second.
        """
        limits = self._limits(principal)
        if limits == UNLIMITED:  # no entry in memory for the coordinator and local callers
            yield
            return
        usage = self._find(principal, limits)
        if not is_watch and usage.calls + 1 > limits.concurrent_calls:
            raise Overloaded(
                f"{principal} has {usage.calls} calls in flight and may have {limits.concurrent_calls:g} "
                f"(concurrent_calls); wait for one to end",
                reason="TOO_MANY_CALLS",
                retry_after=_QUOTA_RETRY_SECONDS,
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
        """Count `count` tokens of a call while the block runs.

        Raises:
            InvalidInput: the call alone has more tokens than the principal may have in flight.
            Overloaded: the principal has too many tokens in flight now.
        """
        limits = self._limits(principal)
        if limits.tokens_in_flight == math.inf:
            yield
            return
        if count > limits.tokens_in_flight:
            raise InvalidInput(
                f"the call has {count} tokens, and {principal} may have {limits.tokens_in_flight:g} in flight "
                f"(tokens_in_flight); shorten the prompt, or lower max_tokens"
            )
        usage = self._find(principal, limits)
        if usage.tokens + count > limits.tokens_in_flight:
            raise Overloaded(
                f"{principal} has {usage.tokens} tokens in flight and {count} more would pass its limit of "
                f"{limits.tokens_in_flight:g} (tokens_in_flight); wait for a call to end, or lower max_tokens",
                reason="TOO_MANY_TOKENS_IN_FLIGHT",
                retry_after=_QUOTA_RETRY_SECONDS,
            )
        usage.tokens += count
        try:
            yield
        finally:
            usage.tokens -= count
            self._forget(principal, limits)

    def usage(self, principal: Principal) -> tuple[CallerLimits, int]:
        """Return the limits of a principal, and its tokens in flight."""
        usage = self._usage.get(principal)
        return self._limits(principal), usage.tokens if usage else 0

    def _find(self, principal: Principal, limits: CallerLimits) -> _Usage:
        """Return the usage of a principal with its current allowance; make an entry if it has none."""
        now = self._clock.monotonic()
        usage = self._usage.get(principal)
        if usage is None:
            self._make_room()
            usage = self._usage[principal] = _Usage(_burst(limits), now)
        _refill(usage, limits, now)
        return usage

    def _forget(self, principal: Principal, limits: CallerLimits) -> None:
        """Drop the entry of a principal that uses nothing and whose rate has recovered."""
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
                retry_after=_QUOTA_RETRY_SECONDS,
            )


def _burst(limits: CallerLimits) -> float:
    return max(1.0, limits.calls_per_second)


def _refill(usage: _Usage, limits: CallerLimits, now: float) -> None:
    burst = _burst(limits)
    if burst == math.inf:  # inf times 0 seconds would be NaN
        usage.allowance = burst
    else:
        usage.allowance = min(burst, usage.allowance + (now - usage.updated) * limits.calls_per_second)
    usage.updated = now
