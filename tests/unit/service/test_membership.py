"""Registration and keep-alive of a member with a fake clock: calls, back-off and permanent errors."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any, cast

import pytest

from fourfold import errors
from fourfold.coordinator.client import Lease, MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import ROLE_ROLLOUT
from fourfold.service.membership import Membership
from tests.fakes.clock import FakeClock


class Client:
    """A scripted client that records its calls and their times."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.calls: list[tuple[float, str]] = []
        self.errors: dict[str, Exception | None] = {}
        self.accepts = asyncio.Event()
        """Set while the coordinator answers registrations."""
        self.accepts.set()
        self.drain = False
        self.ttl = 15.0

    def _note(self, name: str, timeout: float, limit: float = 5) -> None:
        assert 0 < timeout <= limit
        self.calls.append((self._clock.monotonic() - 1000, name))
        error = self.errors.get(name)
        if error is not None:
            raise error

    async def register(self, **request: Any) -> Lease:
        self._note("register", request["timeout"])
        await self.accepts.wait()
        return Lease(token=b"t", ttl_seconds=self.ttl)

    async def keep_alive(self, token: bytes, *, timeout: float) -> tuple[float, bool]:
        assert token == b"t"
        self._note("keep_alive", timeout, limit=2 * self.ttl / 3)
        return self.ttl, self.drain

    async def deregister(self, token: bytes, *, timeout: float) -> None:
        self._note("deregister", timeout)


def member(client: Client, clock: FakeClock, drains: list[int]) -> Membership:
    return Membership(
        cast(MembershipClient, client),
        member_id="rollout-0",
        role=ROLE_ROLLOUT,
        target="127.0.0.1:1",
        on_drain=lambda: drains.append(1),
        clock=clock,
        random_source=random.Random(1),
    )


async def advance(clock: FakeClock, seconds: float, steps: int) -> None:
    for _ in range(steps):
        await clock.advance(seconds / steps)


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_lease_is_renewed_after_every_third_of_its_length(clock: FakeClock) -> None:
    client = Client(clock)
    task = asyncio.create_task(member(client, clock, []).run())
    await advance(clock, 16, 16)
    assert client.calls == [(0, "register"), (5, "keep_alive"), (10, "keep_alive"), (15, "keep_alive")] or (
        client.calls == [(1, "register"), (6, "keep_alive"), (11, "keep_alive"), (16, "keep_alive")]
    )
    await stopped(task)


async def test_a_lost_lease_is_replaced_at_once(clock: FakeClock) -> None:
    client = Client(clock)
    task = asyncio.create_task(member(client, clock, []).run())
    await clock.advance(0)
    client.errors["keep_alive"] = errors.NotFound("gone")
    await clock.advance(5)
    await clock.advance(0)
    assert client.calls == [(0, "register"), (5, "keep_alive"), (5, "register")]
    await stopped(task)


async def test_registration_is_retried_for_ever_with_growing_random_pauses(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(clock)
    client.errors["register"] = errors.Unavailable("refused")
    membership = member(client, clock, [])
    task = asyncio.create_task(membership.run())
    await advance(clock, 600, 6000)
    pauses = clock.slept
    assert len(pauses) > 100
    assert 0.1 <= pauses[0] <= 0.2
    assert all(2.5 <= p <= 5 for p in pauses[6:])
    assert len({round(p, 6) for p in pauses}) > 90, "jitter"
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1, "said once, not every time"
    assert membership._lease is None
    client.errors.clear()
    await advance(clock, 6, 6)
    assert membership._lease is not None
    await stopped(task)


async def test_a_failed_renewal_leads_to_a_new_registration(
    clock: FakeClock,
) -> None:
    client = Client(clock)
    task = asyncio.create_task(member(client, clock, []).run())
    await clock.advance(0)
    client.errors["keep_alive"] = errors.DeadlinePassed("silence")
    await clock.advance(5)
    assert [name for _, name in client.calls] == ["register", "keep_alive"]
    client.errors.clear()
    await clock.advance(0.2)
    assert [name for _, name in client.calls] == ["register", "keep_alive", "register"]
    await stopped(task)


@pytest.mark.parametrize(
    "cls", [errors.WrongState, errors.InvalidInput, errors.PermissionDenied, errors.Unauthenticated]
)
async def test_a_permanent_error_ends_the_membership(clock: FakeClock, cls: type[errors.FourfoldError]) -> None:
    client = Client(clock)
    client.errors["register"] = cls("never")
    with pytest.raises(cls, match="never"):
        await asyncio.wait_for(member(client, clock, []).run(), 1)


async def test_a_request_to_drain_is_passed_on_while_the_lease_is_kept(clock: FakeClock) -> None:
    client, drains = Client(clock), list[int]()
    task = asyncio.create_task(member(client, clock, drains).run())
    await clock.advance(0)
    client.drain = True
    await clock.advance(5)
    await clock.advance(5)
    assert drains == [1, 1]
    assert [name for _, name in client.calls] == ["register", "keep_alive", "keep_alive"]
    await stopped(task)


async def test_leaving_gives_the_lease_back_once_and_never_fails(clock: FakeClock) -> None:
    client = Client(clock)
    membership = member(client, clock, [])
    await membership.leave(timeout=1)
    assert client.calls == []
    task = asyncio.create_task(membership.run())
    await clock.advance(0)
    await stopped(task)
    client.errors["deregister"] = errors.Unavailable("away")
    await membership.leave(timeout=1)
    await membership.leave(timeout=1)
    assert [name for _, name in client.calls] == ["register", "deregister"]


async def stopped_while_it_registers(client: Client, clock: FakeClock) -> Membership:
    """Return a member whose registration waits for `client.accepts`."""
    client.accepts.clear()
    membership = member(client, clock, [])
    task = asyncio.create_task(membership.run())
    await clock.advance(0)
    await stopped(task)
    return membership


async def test_leaving_gives_back_a_lease_that_is_on_its_way(clock: FakeClock) -> None:
    client = Client(clock)
    membership = await stopped_while_it_registers(client, clock)
    leaving = asyncio.create_task(membership.leave(timeout=5))
    await clock.advance(0)
    assert not leaving.done()
    client.accepts.set()
    await leaving
    await membership.leave(timeout=1)
    assert [name for _, name in client.calls] == ["register", "deregister"]


async def test_leaving_waits_no_longer_than_its_timeout_for_a_lease(clock: FakeClock) -> None:
    client = Client(clock)
    membership = await stopped_while_it_registers(client, clock)
    await asyncio.wait_for(membership.leave(timeout=0.01), 5)
    client.accepts.set()
    await clock.advance(0)
    assert [name for _, name in client.calls] == ["register"]
