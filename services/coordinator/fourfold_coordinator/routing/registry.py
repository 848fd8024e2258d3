"""Who is alive: members, their leases and incarnations.

A member lives as long as its lease; liveness is the lease, never the connection. A process
that registers with a new incarnation takes its slot over: the old lease is gone at once, and
the old incarnation is fenced for good, so that a process that was only slow cannot come back
beside its successor.

    Register --> live --KeepAlive every ttl/3--> live --silence for ttl--> EXPIRED
                  |--Deregister--> LEFT (calls in flight may end)
                  '--Register of a new incarnation--> REPLACED

Everything that a peer sends is checked before anything is stored: a refused call changes nothing.
With certificates, a member id belongs to the principal that bears it, and a lease to the principal
that it was granted to.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, InvalidInput, NotFound, Overloaded, PermissionDenied, WrongState
from fourfold.host.clock import Clock
from fourfold.rpc.channel import check_target, split_target
from fourfold.rpc.codec import check_id
from fourfold.security.access import Security
from fourfold.security.principal import LOCAL, Principal

log = logging.getLogger("fourfold.coordinator")

TTL_SECONDS: Final = 15.0
MAX_MEMBERS: Final = 1024
"""Live members of one run; each costs the coordinator a channel."""
MAX_FENCED: Final = 16 * MAX_MEMBERS
"""Replaced incarnations that are remembered; the oldest is forgotten first."""
# Members renew their leases every third of the ttl, and a call takes its time.
_OVERDUE_SHARE: Final = 1 / 3 + 1 / 10
ROLE_NAMES: Final[dict[int, str]] = {
    Role.ROLE_ROLLOUT: "rollout",
    Role.ROLE_TRAINER: "trainer",
    Role.ROLE_REWARD: "reward",
    Role.ROLE_REFERENCE: "reference",
}


class MemberChange(Enum):
    """What happened to a member."""

    JOINED = "joined"
    LEFT = "left"
    EXPIRED = "lease expired"
    REPLACED = "replaced by a new process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a service."""

    member_id: str
    incarnation: str
    role: int
    """A value of `Role`."""
    target: str
    tokenizer_sha256: bytes

    @property
    def role_name(self) -> str:
        """E.g. "rollout"."""
        return ROLE_NAMES[self.role]

    @property
    def peer(self) -> str:
        """Name for messages."""
        return f"{self.member_id} at {self.target}"


@dataclass(slots=True, kw_only=True)
class _Lease:
    member: Member
    owner: Principal
    token: bytes
    ends: float
    heard: float
    """When it was renewed last."""
    heard_at: float
    """The same as seconds since the epoch."""
    live_since: float
    """Since when it is renewed in time, in seconds since the epoch."""
    drain_requested: bool = False


Listener = Callable[[Member, MemberChange], None]


class Registry:
    """Leases of all members. Used on one event loop; `expire` must be called about once a second."""

    def __init__(
        self,
        *,
        clock: Clock,
        tokenizer_sha256: bytes,
        security: Security | None = None,
        ttl: float = TTL_SECONDS,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        """Start without members.

        Args:
            clock: tells when a lease ends.
            tokenizer_sha256: of the run; who has another tokenizer is refused.
            security: of the coordinator; None: members are on this machine only.
            ttl: seconds that a lease lasts.
            max_members: live members; one more is refused.
        """
        self.ttl = ttl
        self._clock = clock
        self._tokenizer_sha256 = tokenizer_sha256
        self._security = security
        self._max_members = max_members
        self._leases: dict[str, _Lease] = {}  # by member_id
        self._fenced: dict[tuple[str, str], None] = {}  # (member_id, incarnation), the oldest first
        self._listeners: list[Listener] = []

    def add_listener(self, listener: Listener) -> None:
        """Have `listener` called on every change, at once. What it raises is logged and changes nothing here."""
        self._listeners.append(listener)

    def members(self, role: int | None = None) -> list[Member]:
        """Return the live members, of one role or of all, by name."""
        members = [lease.member for lease in self._leases.values()]
        return sorted((m for m in members if role is None or m.role == role), key=lambda m: m.member_id)

    def register(self, member: Member, owner: Principal = LOCAL) -> bytes:
        """Grant a lease and return its token. A repeat by the same incarnation renews it.

        Args:
            member: what the caller says of itself.
            owner: who calls.

        Raises:
            InvalidInput: a field is malformed, or the target may not be dialled.
            PermissionDenied: the caller's certificate is that of another member.
            WrongState: another tokenizer, an incarnation that was replaced, or a second trainer.
            Overloaded: there are too many members.
        """
        self._check(member, owner)
        self.expire()  # a lease that ran out is not renewed, even when nobody has noticed yet
        self._check_only_trainer(member)
        held = self._leases.get(member.member_id)
        if (member.member_id, member.incarnation) in self._fenced:
            raise WrongState(
                f"{member.member_id} was replaced by a newer process of the same name; stop this one, or give it "
                f"another --member-id",
                reason="INCARNATION_FENCED",
            )
        if held is None and len(self._leases) >= self._max_members:
            raise Overloaded(
                f"{member.member_id}: this run has {len(self._leases)} members, and no more than {self._max_members} "
                f"are accepted; stop one of them"
            )
        if held is not None and held.member == member and held.owner == owner:
            self._renew(held)
            return held.token
        if held is not None:
            if held.member.incarnation != member.incarnation:
                self._fence(held.member)
            self._remove(held, MemberChange.REPLACED)
        now, at = self._clock.monotonic(), self._clock.now()
        token = secrets.token_bytes(16)
        lease = _Lease(
            member=member, owner=owner, token=token, ends=now + self.ttl, heard=now, heard_at=at, live_since=at
        )
        self._leases[member.member_id] = lease
        self._tell(member, MemberChange.JOINED)
        return lease.token

    def keep_alive(self, token: bytes, owner: Principal = LOCAL) -> bool:
        """Extend a lease; return whether its member should drain.

        Raises:
            NotFound: it expired, was given back, was replaced, or was granted to somebody else.
        """
        lease = self._find(token, owner)
        if lease is None:
            raise NotFound("this lease is gone: it expired or was replaced; stop work and register again")
        self._renew(lease)
        return lease.drain_requested

    def overdue(self, member_id: str) -> tuple[bool, float]:
        """Return whether a live member should have renewed its lease by now, and since when that is so.

        The time is in seconds since the epoch: of its last renewal when it is overdue, else of the first one in time.
        """
        lease = self._leases.get(member_id)
        if lease is None:  # its lease ended a moment ago
            return True, self._clock.now()
        late = self._late(lease)
        return late, lease.heard_at if late else lease.live_since

    def deregister(self, token: bytes, owner: Principal = LOCAL) -> None:
        """End a lease of `owner`; nothing happens when it is gone already."""
        lease = self._find(token, owner)
        if lease is not None:
            self._remove(lease, MemberChange.LEFT)

    def request_drain(self) -> None:
        """Ask every member to drain and deregister, with its next KeepAlive."""
        for lease in self._leases.values():
            lease.drain_requested = True

    def expire(self) -> list[Member]:
        """Remove and return the members whose leases have run out."""
        now = self._clock.monotonic()
        late = [lease for lease in self._leases.values() if lease.ends <= now]
        for lease in late:
            self._remove(lease, MemberChange.EXPIRED)
        return [lease.member for lease in late]

    def _late(self, lease: _Lease) -> bool:
        return self._clock.monotonic() - lease.heard > self.ttl * _OVERDUE_SHARE

    def _renew(self, lease: _Lease) -> None:
        late, lease.heard_at = self._late(lease), self._clock.now()
        lease.heard = self._clock.monotonic()
        lease.ends = lease.heard + self.ttl
        if late:
            lease.live_since = lease.heard_at

    def _find(self, token: bytes, owner: Principal) -> _Lease | None:
        """Return the live lease with this token. One that ran out is gone, whether `expire` has seen it or not."""
        for lease in self._leases.values():
            if secrets.compare_digest(lease.token, token):
                return lease if lease.owner == owner and lease.ends > self._clock.monotonic() else None
        return None

    def _fence(self, member: Member) -> None:
        """Keep a replaced incarnation out."""
        self._fenced[member.member_id, member.incarnation] = None
        while len(self._fenced) > MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]

    def _check(self, member: Member, owner: Principal) -> None:
        check_id(member.member_id, "member_id")
        if len(member.incarnation) != 32 or not set(member.incarnation) <= set("0123456789abcdef"):
            raise InvalidInput(
                f"{member.member_id}: incarnation {member.incarnation[:40]!r} is not 32 lower-case hexadecimal digits"
            )
        if member.role not in ROLE_NAMES:
            raise InvalidInput(f"{member.member_id}: role {member.role} is unknown; give one of {Role.keys()[1:]}")
        claimed = Principal(member.role_name, member.member_id)
        if owner not in (LOCAL, claimed):
            raise PermissionDenied(
                f"{owner} may not register as {claimed}; start {claimed.name} with its own certificate, which "
                f"`fourfold certs` makes",
                reason="NOT_YOUR_MEMBER_ID",
            )
        self._check_target(member)
        self._check_tokenizer(member)

    def _check_target(self, member: Member) -> None:
        """Refuse a target to which no channel can be opened."""
        try:
            check_target(member.target, self._security)
            if split_target(member.target)[1] == 0:
                raise ConfigError(f"{member.target!r} has port 0, where nothing listens; give the bound port")
        except ConfigError as error:
            raise InvalidInput(f"{member.member_id}: target {error}") from None

    def _check_tokenizer(self, member: Member) -> None:
        own = member.tokenizer_sha256
        if own == self._tokenizer_sha256 or (not own and member.role == Role.ROLE_REWARD):
            return
        raise WrongState(
            f"{member.member_id} has tokenizer {own.hex()[:12] or 'none'}, this run has "
            f"{self._tokenizer_sha256.hex()[:12]}; start it with the run's model.source",
            reason="WRONG_TOKENIZER",
        )

    def _check_only_trainer(self, member: Member) -> None:
        if member.role != Role.ROLE_TRAINER:
            return
        for other in self.members(Role.ROLE_TRAINER):
            if other.member_id != member.member_id:
                raise WrongState(
                    f"{member.member_id}: this run has a trainer already, {other.peer}, and a run has one; stop this "
                    f"process, or start it with --member-id {other.member_id} to replace that one",
                    reason="SECOND_TRAINER",
                )

    def _remove(self, lease: _Lease, change: MemberChange) -> None:
        del self._leases[lease.member.member_id]
        self._tell(lease.member, change)

    def _tell(self, member: Member, change: MemberChange) -> None:
        for listener in self._listeners:
            try:
                listener(member, change)
            except Exception:  # the lease is right whatever its followers do; a bug of theirs must not end the run
                log.exception("a follower of the registry failed: %s, %s", member.member_id, change.value)
