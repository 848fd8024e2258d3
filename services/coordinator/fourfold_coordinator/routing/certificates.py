"""When the certificates of the coordinator and of its members expire: a condition of the run, and a metric."""

from __future__ import annotations

from typing import Final

from fourfold import metrics as m
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.security.access import Security, expiry_warning
from fourfold.security.principal import Principal

from ..state.run_board import RunBoard
from .registry import Registry

_PERIOD_SECONDS: Final = 60.0


class CertificateMonitor:
    """Of the processes that take part now. Without TLS there are none. Used on one event loop."""

    def __init__(
        self, security: Security | None, registry: Registry, board: RunBoard, *, own: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Know the coordinator's own.

        Args:
            security: of the coordinator.
            registry: tells which members live.
            board: is told what expires soon.
            own: the coordinator's member id.
            clock: time of day.
        """
        self._security, self._registry, self._board = security, registry, board
        self._own, self._clock = own, clock
        self._seen: dict[str, tuple[bytes, float]] = {}  # certificate and its end, by member id
        self._reported: set[str] = set()

    def record(self, owner: Principal, pem: bytes) -> None:
        """Note what a member has shown."""
        known = self._seen.get(owner.name)
        if known is None or known[0] != pem:
            from cryptography import x509  # only a run with TLS needs it

            end = x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
            self._seen[owner.name] = (pem, end)

    def seconds_left(self) -> dict[str, float]:
        """Return the seconds until each certificate expires, by member id."""
        if self._security is None:
            return {}
        live = {member.member_id for member in self._registry.members()}
        self._seen = {name: seen for name, seen in self._seen.items() if name in live}
        ends = {self._own: self._security.material.expires, **{name: end for name, (_, end) in self._seen.items()}}
        return {name: end - self._clock.now() for name, end in ends.items()}

    def metrics(self) -> dict[str, float]:
        """Return the time that the certificate with the least has left, as a metric of the step."""
        left = self.seconds_left().values()
        return {m.CERTIFICATE_SECONDS: min(left)} if left else {}

    def check(self) -> None:
        """Tell the board what expires soon, and what does not any more."""
        warnings = {name: expiry_warning(name, seconds / 86_400) for name, seconds in self.seconds_left().items()}
        found = {f"certificate of {name}": text for name, text in warnings.items() if text}
        for subject, text in found.items():
            self._board.report_condition(subject, text)
        for subject in self._reported - found.keys():
            self._board.resolve_condition(subject)
        self._reported = set(found)

    async def run(self) -> None:
        """Check once a minute, until cancelled."""
        while True:
            self.check()
            await self._clock.sleep(_PERIOD_SECONDS)
