"""`MembershipService` on a real server: one test per answer."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from fourfold.coordinator.client import Lease, MembershipClient
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2_grpc import add_MembershipServiceServicer_to_server
from fourfold.errors import InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from fourfold.rpc.server import Server
from fourfold.service.membership import Membership
from fourfold_coordinator.routing import membership
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import MAX_MEMBERS, Registry
from tests.conftest import Serve
from tests.fakes.clock import FakeClock

TOKENIZER = b"t" * 32


class Desk:
    """A client of a fresh registry."""

    def __init__(self, registry: Registry, client: MembershipClient) -> None:
        self.registry, self.client = registry, client

    async def register(self, **changes: Any) -> Lease:
        arguments: dict[str, Any] = {
            "member_id": "rollout-0",
            "incarnation": "a" * 32,
            "role": pb.ROLE_ROLLOUT,
            "target": "127.0.0.1:5000",
            "tokenizer_sha256": TOKENIZER,
            "timeout": 5.0,
        }
        return await self.client.register(**{**arguments, **changes})


@pytest.fixture
async def desk(serve: Serve, clock: FakeClock) -> Desk:
    registry = Registry(clock=clock, tokenizer_sha256=TOKENIZER)
    service = pb.DESCRIPTOR.services_by_name["MembershipService"]
    channel = await serve((service, add_MembershipServiceServicer_to_server, MembershipServicer(registry)))
    return Desk(registry, MembershipClient(channel, peer="coordinator"))


async def test_a_lease_is_granted_renewed_and_given_back(desk: Desk, clock: FakeClock) -> None:
    lease = await desk.register()
    assert lease.ttl_seconds == 15.0
    assert 1 <= len(lease.token) <= 64
    assert [m.member_id for m in desk.registry.members()] == ["rollout-0"]
    await clock.advance(14)
    assert await desk.register() == lease
    for _ in range(2):
        await clock.advance(14)
        assert await desk.client.keep_alive(lease.token, timeout=5) == (15.0, False)
    for _ in range(2):
        await desk.client.deregister(lease.token, timeout=5)
    assert desk.registry.members() == []


async def test_an_empty_token_is_an_unknown_lease(desk: Desk) -> None:
    await desk.register()
    with pytest.raises(NotFound):
        await desk.client.keep_alive(b"", timeout=5)
    await desk.client.deregister(b"", timeout=5)
    assert len(desk.registry.members()) == 1


async def test_a_lease_that_ran_out_is_not_found(desk: Desk, clock: FakeClock) -> None:
    lease = await desk.register()
    await clock.advance(15)
    with pytest.raises(NotFound, match="register again"):
        await desk.client.keep_alive(lease.token, timeout=5)


async def test_a_replaced_process_is_not_found_and_stays_out(desk: Desk) -> None:
    old = await desk.register()
    await desk.register(incarnation="b" * 32)
    with pytest.raises(NotFound):
        await desk.client.keep_alive(old.token, timeout=5)
    with pytest.raises(WrongState, match="give it another --member-id"):
        await desk.register()


async def test_a_process_that_still_answers_is_not_replaced(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    target = await server.start()
    lease = await desk.register(target=target)
    for other in ("127.0.0.1:5001", "127.0.0.1:9"):
        with pytest.raises(
            Unavailable, match=r"rollout-0 at 127.* is another process of this name, and still"
        ) as refused:
            await desk.register(incarnation="b" * 32, target=other)
        assert refused.value.reason == "MEMBER_ID_IN_USE"
    assert await desk.register(target=target) == lease, "it is as it was"
    await server.stop(0)
    began = time.monotonic()
    lease = await desk.register(incarnation="b" * 32, target="127.0.0.1:5001")
    assert time.monotonic() - began < 2, "nothing listens there any more"
    with socket.create_server(("127.0.0.1", 0)) as hung:
        target = f"127.0.0.1:{hung.getsockname()[1]}"
        await desk.register(incarnation="c" * 32, target=target)
        monkeypatch.setattr(membership, "_PROBE_SECONDS", 0.3)
        await desk.register(incarnation="d" * 32)
    assert [m.incarnation[0] for m in desk.registry.members()] == ["d"]


async def test_a_process_that_listens_at_the_address_of_the_old_one_replaces_it(desk: Desk) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    target = await server.start()
    await desk.register(target=target)
    await desk.register(incarnation="b" * 32, target=target)
    assert [m.incarnation[0] for m in desk.registry.members()] == ["b"]
    await server.stop(0)


async def test_1200_members_that_register_at_once_do_no_harm(desk: Desk) -> None:
    first = await desk.register()

    async def keep_alive() -> None:
        for _ in range(20):
            await desk.client.keep_alive(first.token, timeout=5)
            await asyncio.sleep(0.02)

    kept = asyncio.create_task(keep_alive())
    names = [f"rollout-{number}" for number in range(1, 1201)]
    calls = (desk.register(member_id=name, timeout=60.0) for name in names)
    leases = await asyncio.gather(*calls, return_exceptions=True)
    await kept
    refused = [lease for lease in leases if not isinstance(lease, Lease)]
    assert all(isinstance(error, Overloaded | Unavailable) for error in refused), "all may try again"
    assert len(refused) == 1201 - MAX_MEMBERS
    assert len(desk.registry.members()) == MAX_MEMBERS
    assert await desk.register() == first, "who is a member stays one"
    await desk.register(incarnation="b" * 32)  # also as a new process
    (left, *_) = [lease for lease in leases if isinstance(lease, Lease)]
    await desk.client.deregister(left.token, timeout=5)
    await desk.register(member_id="rollout-1201")


async def test_another_tokenizer_is_a_failed_precondition(desk: Desk) -> None:
    with pytest.raises(WrongState, match=r"start it with the run's model.source") as error:
        await desk.register(tokenizer_sha256=b"u" * 32)
    assert error.value.reason == "WRONG_TOKENIZER"


@pytest.mark.parametrize(
    "changes",
    [
        *({"member_id": ""}, {"incarnation": ""}, {"role": pb.ROLE_UNSPECIFIED}, {"target": ""}),
        *({"incarnation": "short"}, {"target": "nowhere"}),
    ],
    ids=str,
)
async def test_malformed_members_are_invalid_arguments(desk: Desk, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await desk.register(**changes)


async def test_a_service_that_lost_its_lease_registers_again(desk: Desk, clock: FakeClock) -> None:
    """The real client of every service against the real registry."""
    membership = Membership(
        desk.client,
        member_id="rollout-0",
        role=pb.ROLE_ROLLOUT,
        target="127.0.0.1:5000",
        tokenizer_sha256=TOKENIZER,
        on_drain=lambda: None,
        clock=clock,
    )
    task = asyncio.create_task(membership.run())
    try:
        await settle(lambda: len(clock.slept) == 1)
        assert clock.slept == [5.0], "it renews at a third of the time to live"
        clock._time += 20  # the machine was suspended: the lease is gone before the next renewal
        desk.registry.expire()
        assert desk.registry.members() == []
        await clock.advance(0)
        await settle(lambda: len(clock.slept) == 2)  # told that the lease is gone
        await clock.advance(0)
        await settle(lambda: bool(desk.registry.members()))
        assert [m.incarnation for m in desk.registry.members()] == [membership.incarnation]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settle(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_lease_is_given_back_with_one_try(serve: Serve) -> None:
    class Leaving(MembershipServicer):
        tries = 0

        async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
            self.tries += 1
            raise Unavailable("the coordinator is ending, too")

    servicer = Leaving(Registry(clock=FakeClock(), tokenizer_sha256=TOKENIZER))
    service = pb.DESCRIPTOR.services_by_name["MembershipService"]
    channel = await serve((service, add_MembershipServiceServicer_to_server, servicer))
    with pytest.raises(Unavailable):
        await MembershipClient(channel, peer="coordinator").deregister(b"token", timeout=5.0)
    assert servicer.tries == 1, "a service that ends does not wait for the coordinator"
