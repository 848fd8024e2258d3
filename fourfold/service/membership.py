"""Registers a service at the coordinator and renews its lease while the service runs.

               register                    lease lost, or coordinator unreachable
   outside ---------------> member ------------------------------------------------> outside
      |  ^ back off, retry     | keep alive after every third of the lease
      +--+                     +--> on_drain, when the coordinator requests a drain

Only the lease decides whether a member is alive, not the connection. Registering again with the same incarnation is
idempotent, so every failure leads back to it. Errors that can never change (wrong tokenizer, no permission) end the
service.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable
from contextlib import suppress
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
_PERMANENT: Final = (AlreadyExists, InvalidInput, PermissionDenied, Unauthenticated, WrongState)


class Membership:
    """One member of a run. Call `run` in a task, and `leave` when the service drains."""

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
        scorer: str = "",
        incarnation: str = "",
    ) -> None:
        """Prepare a member; `incarnation` has 32 hexadecimal digits, by default new ones.

        `member_id` is the stable name of the slot, e.g. "rollout-0", and `target` the "host:port" of the service.
        `tokenizer_sha256` has 32 bytes, or none. `on_drain` is called each time the coordinator requests a drain.
        `scorer` is the name of the table [[reward]] that a reward service serves; empty: the first.
        """
        self._client = client
        self._member_id, self._role, self._target = member_id, role, target
        self._tokenizer_sha256 = tokenizer_sha256
        self._scorer = scorer
        self._on_drain = on_drain
        self._clock = clock
        self._random = random_source or random.Random()
        self._lease: Lease | None = None
        self._registration: asyncio.Task[Lease] | None = None  # the call in flight
        self._failures = 0
        self._registered = asyncio.Event()
        self.problem = "no answer yet"
        """Why the last registration or renewal failed."""
        self.incarnation = incarnation or uuid.uuid4().hex

    async def run(self) -> None:
        """Register and keep alive until cancelled; raise the error if the coordinator can never accept it."""
        while True:
            try:
                wait = await self._register_or_renew()
                self._failures = 0
            except _PERMANENT:
                raise
            except FourfoldError as error:
                wait = self._on_failure(error)
            await self._clock.sleep(wait)

    async def is_registered(self, *, within: float) -> bool:
        """Wait up to `within` seconds; return whether the coordinator has accepted this member."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._registered.wait()
        return self._registered.is_set()

    async def leave(self, *, timeout: float) -> None:
        """Return the lease, also that of a registration still in flight. Cancel `run` first.

        Errors are only logged, because the lease expires anyway. `timeout` is in seconds, for both calls together.
        """
        lease, self._lease = self._lease, None
        registration, self._registration = self._registration, None
        try:
            async with asyncio.timeout(timeout):
                if registration is not None:
                    with suppress(FourfoldError):  # then there is no lease
                        lease = await registration
                if lease is not None:
                    await self._client.deregister(lease.token, timeout=timeout)
        except FourfoldError as error:
            log.info("deregistration failed: %s", error)
        except TimeoutError:
            log.info("deregistration failed: no answer within %s s", timeout)

    async def _register_or_renew(self) -> float:
        """Register or keep alive once; return the seconds until the next call."""
        if self._lease is None:
            self._lease = await self._register()
            self._registered.set()
            log.info("registered", extra={"target": self._target, "ttl_seconds": self._lease.ttl_seconds})
            return self._lease.ttl_seconds / 3
        # The call may take as long as the lease lasts: a coordinator with a thousand members can be slow to accept it.
        ttl, drain = await self._client.keep_alive(self._lease.token, timeout=2 * self._lease.ttl_seconds / 3)
        if drain:
            self._on_drain()
        return ttl / 3

    async def _register(self) -> Lease:
        """Register. A cancellation leaves the call in flight: the coordinator may have accepted it already."""
        call = self._client.register(
            member_id=self._member_id,
            incarnation=self.incarnation,
            role=self._role,
            target=self._target,
            tokenizer_sha256=self._tokenizer_sha256,
            timeout=_CALL_TIMEOUT_SECONDS,
            scorer=self._scorer,
        )
        self._registration = asyncio.create_task(call)
        # Read the error of a call that outlives `run`: `leave` may never await it, and asyncio would log that.
        self._registration.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            lease = await asyncio.shield(self._registration)
        except FourfoldError:
            self._registration = None
            raise
        self._registration = None
        return lease

    def _on_failure(self, error: FourfoldError) -> float:
        """Drop the lease after a failure; return the seconds until the next registration."""
        was_member, self._lease, self.problem = self._lease is not None, None, error.message
        self._failures += 1
        if was_member or self._failures == 1:  # log only the first failure of a series, which may last for hours
            state = "lost the lease" if was_member else "registration failed"
            log.warning("%s; retrying until the coordinator accepts: %s", state, error)
        if was_member and isinstance(error, NotFound):  # the coordinator has restarted: register at once
            return 0.0
        limit = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 10), _MAX_BACKOFF_SECONDS)
        return limit * self._random.uniform(0.5, 1.0)
