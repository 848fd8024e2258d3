"""Room for calls on one server: every service has its own, so that no client of one keeps another from answering.

gRPC has a single limit for all calls of a server. A thousand watches would fill it, and the next KeepAlive would be
refused. Here each service, all watches together, and all probes (health, reflection) have a limit each. gRPC's limit is
above their sum and is never reached but by calls that are being refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fourfold.errors import Overloaded
from fourfold.security.principal import Principal

PROBE_SERVICES: Final = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})
MAX_PROBES: Final = 64
MAX_WATCHES: Final = 256
MAX_WATCHES_PER_PRINCIPAL: Final = 64
MAX_WATCHES_PER_AGENT: Final = 16
_REFLECTION: Final = "ServerReflectionInfo"
# Calls that gRPC accepts beyond those that are served: each is answered with an error at once.
_BEING_REFUSED: Final = 256
_RETRY_SECONDS: Final = 1.0
_WATCHES: Final = "watches"
_PROBES: Final = "probes"


def is_probe(service: str) -> bool:
    """Return whether a service tells about the server itself."""
    return service in PROBE_SERVICES


def is_watch(name: str) -> bool:
    """Return whether a method is a stream that lasts until its client leaves, and needs no deadline."""
    return name.startswith("Watch") or name == _REFLECTION


class CallSlots:
    """Counts the calls that a server serves. Belongs to one event loop."""

    def __init__(self, *, calls_per_service: int, public: bool) -> None:
        """Start with no calls.

        Args:
            calls_per_service: calls of one service in flight, without watches.
            public: the port serves agents alone. On any other port agents together get half of each limit.
        """
        self._calls_per_service = calls_per_service
        self._public = public
        self._all: Counter[str] = Counter()
        self._agents: Counter[str] = Counter()
        self._watches: Counter[Principal] = Counter()

    def maximum_concurrent_rpcs(self, service_count: int) -> int:
        """Return the limit to give to gRPC for a server with so many services besides the probes."""
        return service_count * self._calls_per_service + MAX_WATCHES + MAX_PROBES + _BEING_REFUSED

    @contextmanager
    def enter(self, service: str, name: str, principal: Principal) -> Iterator[None]:
        """Hold the slot of a call of method `name` while the block runs.

        Raises:
            Overloaded: all slots of its kind are taken.
        """
        kind, limit = self._kind(service, name)
        is_agent = principal.is_agent
        self._check(kind, limit, self._all[kind], "in flight")
        if is_agent and not self._public:
            self._check(kind, max(1, limit // 2), self._agents[kind], "in flight for agents")
        if kind == _WATCHES:
            own = MAX_WATCHES_PER_AGENT if is_agent else MAX_WATCHES_PER_PRINCIPAL
            self._check(kind, own, self._watches[principal], f"in flight for {principal}")
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
                if not self._watches[principal]:
                    del self._watches[principal]

    def _kind(self, service: str, name: str) -> tuple[str, int]:
        if is_watch(name):
            return _WATCHES, MAX_WATCHES
        if is_probe(service):
            return _PROBES, MAX_PROBES
        return f"calls of {service}", self._calls_per_service

    def _check(self, kind: str, limit: int, count: int, whose: str) -> None:
        if count >= limit:
            raise Overloaded(
                f"{count} {kind} are {whose}, and {limit} may be; try again when one has ended",
                reason="TOO_MANY_WATCHES" if kind == _WATCHES else "TOO_MANY_CALLS",
                retry_after=_RETRY_SECONDS,
            )
