"""The authenticated caller of an RPC.

The interceptor sets the principal before it calls the servicer. Servicers and quotas read it with
`current()`; they never look at certificates, tokens or metadata themselves.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. Two calls come from the same principal if and only if these are equal."""

    role: str
    """Role of the certificate ("rollout", "coordinator" ...), "agent" on a public port, or "local": a caller on an
    internal port without TLS, which may be any process of this machine."""
    name: str = ""
    """Member id of the certificate, or name of the bearer token; empty where neither is needed."""

    @property
    def is_agent(self) -> bool:
        """Whether it is an external agent, which has limits that the services of a run have not."""
        return self.role == "agent"

    def __str__(self) -> str:
        return f"{self.role}/{self.name}" if self.name else self.role


LOCAL: Final = Principal("local")
"""Every caller of an internal port without TLS."""
LOCAL_AGENT: Final = Principal("agent")
"""Every caller of a public port without TLS."""

_current: ContextVar[Principal] = ContextVar("fourfold_principal", default=LOCAL)


def current() -> Principal:
    """Return the caller of the RPC that this task serves; `LOCAL` outside of an RPC."""
    return _current.get()


def set_current(principal: Principal) -> None:
    """Set the caller of the RPC that this task serves. For the interceptor, and for unit tests of servicers."""
    _current.set(principal)
