"""Tests who may offer a meeting place, and how long it is kept."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fourfold.coordinator.v1 import rendezvous_service_pb2 as pb
from fourfold.errors import InvalidInput, NotFound, Overloaded, PermissionDenied
from fourfold.security import principal
from fourfold.security.principal import LOCAL, Principal
from fourfold_coordinator.routing.rendezvous import TTL_SECONDS, RendezvousServicer
from tests.fakes.clock import FakeClock

CONTEXT: Any = None
SECRET = b"s" * 32


@pytest.fixture
def servicer() -> RendezvousServicer:
    return RendezvousServicer(None, FakeClock())


async def offer(servicer: RendezvousServicer, **fields: Any) -> float:
    known = {"member_id": "trainer-0", "target": "127.0.0.1:5000", "secret": SECRET}
    response = await servicer.OfferRendezvous(pb.OfferRendezvousRequest(**{**known, **fields}), CONTEXT)
    return float(response.ttl.seconds)


async def find(servicer: RendezvousServicer, name: str = "trainer-0") -> tuple[str, bytes]:
    response = await servicer.FindRendezvous(pb.FindRendezvousRequest(member_id=name), CONTEXT)
    return response.target, response.secret


async def test_the_newest_offer_is_found_until_it_ends(servicer: RendezvousServicer) -> None:
    with pytest.raises(NotFound, match="rank 0 of trainer-0 has made no offer"):
        await find(servicer)
    assert await offer(servicer) == TTL_SECONDS
    await offer(servicer, target="127.0.0.1:5001", secret=b"t" * 16)
    assert await find(servicer) == ("127.0.0.1:5001", b"t" * 16)
    clock = cast(FakeClock, servicer._clock)
    await clock.advance(TTL_SECONDS - 0.1)
    await find(servicer)
    await clock.advance(0.2)
    with pytest.raises(NotFound):
        await find(servicer)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"member_id": ""}, "member_id"),
        ({"target": "127.0.0.1:0"}, "give the port"),
        ({"target": "nowhere"}, "is not an address"),
        ({"target": "10.0.0.1:5000"}, "without TLS"),
        ({"secret": b"s" * 15}, "the secret has 15 bytes; it must have 16 to 64"),
        ({"secret": b"s" * 65}, "the secret has 65 bytes"),
    ],
)
async def test_malformed_offers_are_refused(servicer: RendezvousServicer, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        await offer(servicer, **fields)


async def test_a_trainer_offers_under_its_own_name(servicer: RendezvousServicer) -> None:
    principal.set_current(Principal("trainer", "trainer-1"))
    try:
        with pytest.raises(PermissionDenied, match="own name only"):
            await offer(servicer)
        await offer(servicer, member_id="trainer-1")
    finally:
        principal.set_current(LOCAL)


async def test_offers_are_bounded(servicer: RendezvousServicer) -> None:
    for number in range(64):
        await offer(servicer, member_id=f"trainer-{number}")
    with pytest.raises(Overloaded):
        await offer(servicer, member_id="trainer-64")
    await offer(servicer)  # a renewal
