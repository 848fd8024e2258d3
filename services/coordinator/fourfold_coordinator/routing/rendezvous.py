"""Implements RendezvousService, by which ranks on other machines find rank 0 of their trainer.

    rank 0 --OfferRendezvous: address, secret--> coordinator --FindRendezvous--> ranks on other machines
       ^                                                                                 |
       '---------------------------------- AttachRanks: secret --------------------------'

Rank 0 renews its offer, which otherwise expires. Offers are in memory only; after a restart of the coordinator, the
next renewal restores them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from fourfold.coordinator.v1 import rendezvous_service_pb2 as pb
from fourfold.coordinator.v1 import rendezvous_service_pb2_grpc as pb_grpc
from fourfold.errors import ConfigError, InvalidInput, NotFound, Overloaded, PermissionDenied
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc.channel import check_target, split_target
from fourfold.rpc.codec import check_id, duration
from fourfold.security import principal
from fourfold.security.access import Security
from fourfold.security.principal import LOCAL

Context = grpc.aio.ServicerContext[Any, Any]

TTL_SECONDS: Final = 15.0
_MAX_OFFERS: Final = 64
_MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    target: str
    secret: bytes = field(repr=False)
    ends: float  # on the monotonic clock


class RendezvousServicer(pb_grpc.RendezvousServiceServicer):
    """Keeps the newest offer of each trainer."""

    def __init__(self, security: Security | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._security, self._clock = security, clock
        self._offers: dict[str, _Offer] = {}  # by member id

    async def OfferRendezvous(self, request: pb.OfferRendezvousRequest, context: Context) -> pb.OfferRendezvousResponse:
        """Keep an offer. With certificates, a trainer makes offers under its own name only."""
        check_id(request.member_id, "member_id")
        caller = principal.current()
        if caller not in (LOCAL, principal.Principal("trainer", request.member_id)):
            raise PermissionDenied(
                f"{caller} made an offer for {request.member_id!r}; a trainer makes offers under its own name only",
                reason="NOT_YOUR_MEMBER_ID",
            )
        try:
            check_target(request.target, self._security)
        except ConfigError as error:
            raise InvalidInput(f"target: {error.message}") from None
        if split_target(request.target)[1] == 0:
            raise InvalidInput(f"target is {request.target!r}; give the port that rank 0 listens on")
        if not _MIN_SECRET_BYTES <= len(request.secret) <= _MAX_SECRET_BYTES:
            raise InvalidInput(
                f"the secret has {len(request.secret)} bytes; it must have {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}"
            )
        self._forget_ended()
        if request.member_id not in self._offers and len(self._offers) >= _MAX_OFFERS:
            raise Overloaded(
                f"{_MAX_OFFERS} trainers have offers already; a run has one trainer", retry_after=TTL_SECONDS
            )
        ends = self._clock.monotonic() + TTL_SECONDS
        self._offers[request.member_id] = _Offer(target=request.target, secret=request.secret, ends=ends)
        return pb.OfferRendezvousResponse(ttl=duration(TTL_SECONDS))

    async def FindRendezvous(self, request: pb.FindRendezvousRequest, context: Context) -> pb.FindRendezvousResponse:
        """Return the present offer of a trainer."""
        check_id(request.member_id, "member_id")
        self._forget_ended()
        if (offer := self._offers.get(request.member_id)) is None:
            raise NotFound(
                f"rank 0 of {request.member_id} has made no offer; start it with `fourfold serve trainer --rank 0`, or "
                f"wait until it is started"
            )
        return pb.FindRendezvousResponse(target=offer.target, secret=offer.secret)

    def _forget_ended(self) -> None:
        now = self._clock.monotonic()
        self._offers = {name: offer for name, offer in self._offers.items() if offer.ends > now}
