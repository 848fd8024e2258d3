"""Keeps a service's lease at the coordinator alive for as long as the service runs.

              register                 lease gone, or the coordinator unreachable
   outside ---------------> member ------------------------------------------------> outside
      |  ^ back off, try again  | keep alive every third of the lease
      +--+                      +--> drain requested: told once to the host

Liveness is the lease, never the connection. Registering again with the same incarnation is
harmless, so any failure leads back to it. Only an answer that can never change (the wrong
tokenizer, no permission) ends the service.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable
from typing import Final

from fourfold.coordinator.client import Lease, MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import (
    AlreadyExists,
    FourfoldError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    WrongState,
)
from fourfold.host.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger("fourfold.service.membership")

_FIRST_BACKOFF_SECONDS: Final = 0.2
_MAX_BACKOFF_SECONDS: Final = 5.0
_CALL_TIMEOUT_SECONDS: Final = 5.0
_FINAL: Final = (AlreadyExists, InvalidInput, PermissionDenied, Unauthenticated, WrongState)


class Membership:
    """One member of the run. `run` it in a task; `leave` when the service drains."""

    def __init__(
        self,
        client: MembershipClient,
        *,
        member_id: str,
        role: Role.ValueType,
        target: str,
        tokenizer_sha256: bytes = b"",
        on_drain: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
        random_source: random.Random | None = None,
    ) -> None:
        """Prepare a member with a fresh incarnation.

        Args:
            client: of the coordinator.
            member_id: stable name of the slot.
            role: what the member does.
            target: where it serves.
            tokenizer_sha256: 32 bytes, or empty.
            on_drain: called each time the coordinator asks the member to drain.
            clock: time.
            random_source: of the back-off's jitter.
        """
        self._client = client
        self._member_id, self._role, self._target = member_id, role, target
        self._tokenizer_sha256 = tokenizer_sha256
        self._on_drain = on_drain
        self._clock = clock
        self._random = random_source or random.Random()
        self._lease: Lease | None = None
        self._failures = 0
        self.incarnation = uuid.uuid4().hex

    @property
    def registered(self) -> bool:
        """Whether the last that was heard is that the lease lives."""
        return self._lease is not None

    async def run(self) -> None:
        """Register and keep alive until cancelled.

        Raises:
            FourfoldError: the coordinator will never accept this member.
        """
        while True:
            try:
                wait = await self._once()
                self._failures = 0
            except _FINAL:
                raise
            except FourfoldError as error:
                wait = self._failed(error)
            await self._clock.sleep(wait)

    async def leave(self, *, timeout: float) -> None:
        """Give the lease back, if there is one. A coordinator that does not answer is let be: the lease ends anyway."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self._client.deregister(lease.token, timeout=timeout)
        except FourfoldError as error:
            log.info("could not deregister: %s", error)

    async def _once(self) -> float:
        """Register or keep alive once; return seconds until the next time."""
        if self._lease is None:
            self._lease = await self._client.register(
                member_id=self._member_id,
                incarnation=self.incarnation,
                role=self._role,
                target=self._target,
                tokenizer_sha256=self._tokenizer_sha256,
                timeout=_CALL_TIMEOUT_SECONDS,
            )
            log.info("registered", extra={"target": self._target, "ttl_seconds": self._lease.ttl_seconds})
            return self._lease.ttl_seconds / 3
        timeout = min(self._lease.ttl_seconds / 3, _CALL_TIMEOUT_SECONDS)
        ttl, drain = await self._client.keep_alive(self._lease.token, timeout=timeout)
        if drain:
            self._on_drain()
        return ttl / 3

    def _failed(self, error: FourfoldError) -> float:
        """Note a failure; return seconds to wait before registering again."""
        was_member, self._lease = self._lease is not None, None
        self._failures += 1
        if was_member or self._failures == 1:  # the first of a series; a coordinator may be away for hours
            state = "the lease is lost" if was_member else "not registered yet"
            log.warning("%s, trying until the coordinator answers: %s", state, error)
        if was_member and isinstance(error, NotFound):
            return 0.0
        limit = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 10), _MAX_BACKOFF_SECONDS)
        return limit * self._random.uniform(0.5, 1.0)
