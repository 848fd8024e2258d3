"""The authenticated caller of an RPC, and the limits that a caller may have.

The interceptor authenticates the caller and sets its principal before it calls the servicer. Servicers read the
principal with `current()`. They never read certificates, tokens or metadata themselves.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity of a caller. Two calls have the same caller if and only if their principals are equal."""

    role: str
    """Role of the certificate ("rollout", "coordinator" ...), "agent" on a public port, or "local" on an internal port
    without TLS, which every process of this machine can call."""
    name: str = ""
    """Member id of the certificate, or name of the bearer token; empty without either."""

    @property
    def is_agent(self) -> bool:
        """True for an external agent. Agents have stricter limits than the services of a run."""
        return self.role == "agent"

    def __str__(self) -> str:
        return f"{self.role}/{self.name}" if self.name else self.role


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """Limits of one principal; `math.inf` means no limit. `fourfold.rpc.limits` enforces these limits."""

    concurrent_calls: float = math.inf
    """Calls in flight. Streams count until they end; watches have a limit of their own."""
    tokens_in_flight: float = math.inf
    """Prompt plus max_tokens of every sample of the calls in flight."""
    calls_per_second: float = math.inf
    """Average rate; as many calls may also start at once."""


UNLIMITED: Final = CallerLimits()
LOCAL: Final = Principal("local")  # every caller of an internal port without TLS
LOCAL_AGENT: Final = Principal("agent")  # every caller of a public port without TLS

_current: ContextVar[Principal] = ContextVar("fourfold_principal", default=LOCAL)


def current() -> Principal:
    """Return the caller of the RPC that the current task serves; `LOCAL` outside of an RPC."""
    return _current.get()


def set_current(principal: Principal) -> None:
    """Set the caller of the RPC that the current task serves. For the interceptor and for tests of servicers."""
    _current.set(principal)
