"""Keeps the members of a run: their leases and their incarnations.

A member lives as long as its lease, whatever happens to its connection. A process that registers with a new incarnation
replaces the old process if that no longer answers (`membership.py` asks it). The old lease then ends at once, and the
old incarnation is refused, so that a slow process cannot return next to its successor. The id of a live member is
refused to services of another role.

    Register --> live --KeepAlive every ttl/3--> live --no KeepAlive for ttl--> EXPIRED
                  |--Deregister--> LEFT (its calls in flight may finish)
                  '--Register of a new incarnation--> REPLACED

While this process is stalled (a loaded machine, a disk that hangs), it handles no renewals. `beat` shows that the event
loop runs. After a gap longer than the interval of renewals, every lease that was live before it gets another whole
period.

A refused call changes nothing: every field is checked before anything is stored. With certificates, a member id
belongs to the principal of that name, and a lease to the principal that registered.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
PERMANENT: Final = "0" * 32
"""Incarnation of members without a registration; their processes cannot be told apart."""
MAX_MEMBERS: Final = 1024  # most live members; each costs the coordinator a channel
MAX_FENCED: Final = 16 * MAX_MEMBERS  # most remembered incarnations that were replaced; the oldest is forgotten first
_RENEWAL_SHARE: Final = 1 / 3  # share of the ttl after which a member renews its lease
_OVERDUE_SHARE: Final = _RENEWAL_SHARE + 1 / 10  # a tenth of the ttl is for the call
_MAX_DEPARTED: Final = 16
ROLE_NAMES: Final[dict[int, str]] = {
    Role.ROLE_ROLLOUT: "rollout",
    Role.ROLE_TRAINER: "trainer",
    Role.ROLE_REWARD: "reward",
    Role.ROLE_REFERENCE: "reference",
    Role.ROLE_GATEWAY: "gateway",
    Role.ROLE_ENVIRONMENT: "environment",
}


_WITHOUT_TOKENIZER: Final = (Role.ROLE_REWARD, Role.ROLE_ENVIRONMENT)  # they work on texts


class MemberChange(Enum):
    """Event in the life of a member; the value is the text for messages."""

    JOINED = "joined"
    LEFT = "left"
    EXPIRED = "lease expired"
    REPLACED = "replaced by a new process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a service."""

    member_id: str
    incarnation: str
    role: int  # a value of `Role`
    target: str  # address
    tokenizer_sha256: bytes
    pool: str = ""  # reward services of one pool score alike and may replace each other
    permanent: bool = False  # the recipe names its address; it does not register

    @property
    def role_name(self) -> str:
        """Return the role as users write it, for example "rollout"."""
        return ROLE_NAMES[self.role]

    @property
    def peer(self) -> str:
        return f"{self.member_id} at {self.target}"


@dataclass(slots=True, kw_only=True)
class _Lease:
    member: Member
    owner: Principal
    token: bytes
    renewed: float  # last renewal, on the monotonic clock
    renewed_at: float  # the same time in seconds since the epoch
    live_since: float  # first of the unbroken series of timely renewals, in seconds since the epoch


Listener = Callable[[Member, MemberChange], None]


class Registry:
    """Leases of all members. Not thread-safe; call `expire` about once a second."""

    def __init__(
        self,
        *,
        clock: Clock,
        tokenizer_sha256: bytes,
        security: Security | None = None,
        ttl: float = TTL_SECONDS,
        scorers: Sequence[str] = ("reward",),
    ) -> None:
        """Create a registry; without `security` it accepts members on this machine only. `ttl` is in seconds.

        `scorers` are the names of the tables [[reward]], the pools of reward services that register.
        """
        self.ttl, self.clock, self.security = ttl, clock, security
        self.tokenizer_sha256, self._scorers = tokenizer_sha256, tuple(scorers)
        self._leases: dict[str, _Lease] = {}  # by member_id
        self._by_token: dict[bytes, _Lease] = {}
        self._fenced: dict[tuple[str, str], None] = {}  # (member_id, incarnation), the oldest first
        self._listeners: list[Listener] = []
        self._beat: float | None = None  # time of the last `beat`, on the monotonic clock; None: none yet

    def beat(self) -> None:
        """Note that the event loop runs; call it several times a second, or never."""
        self._forgive_stall()
        self._beat = self.clock.monotonic()

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` on every change from now on; its errors are logged and change nothing here."""
        self._listeners.append(listener)

    def members(self, role: int | None = None) -> list[Member]:
        """Return the live members of one role, or of all, ordered by name."""
        members = [lease.member for lease in self._leases.values()]
        return sorted((m for m in members if role is None or m.role == role), key=lambda m: m.member_id)

    def rival(self, member: Member, owner: Principal = LOCAL) -> Member | None:
        """Return the live process that `member` would replace, if it may still answer.

        A process at the same address has ended, because the new one listens there. Raises the errors of `register`.
        """
        self._forgive_stall()
        self._check(member, owner)
        held = self._leases.get(member.member_id)
        if held is None or held.member.permanent or self._age(held) >= self.ttl:
            return None
        same = held.member.incarnation == member.incarnation or held.member.target == member.target
        return None if same or (member.member_id, member.incarnation) in self._fenced else held.member

    def register(self, member: Member, owner: Principal = LOCAL) -> bytes:
        """Grant a lease and return its token; renew the lease when the same incarnation registers again.

        Raises:
            InvalidInput: A field is malformed, or no channel may be opened to the target.
            PermissionDenied: The caller's certificate is that of another member.
            WrongState: Another tokenizer, an unknown scorer, an incarnation that was replaced, a second trainer, or
                the id of a live member of another role.
            Overloaded: There are too many members.
        """
        self._forgive_stall()
        member = self._with_pool(member)
        self._check(member, owner)
        held = self._leases.get(member.member_id)
        late = held is not None and self._age(held) >= self.ttl
        if late or member.role == Role.ROLE_TRAINER or len(self._leases) >= MAX_MEMBERS:
            self.expire()  # an expired lease must neither be renewed nor block the registration
            held = self._leases.get(member.member_id)
        self._check_only_trainer(member)
        if held is not None and held.member.permanent:
            raise WrongState(
                f"{member.member_id} is the name of the service at {held.member.target}, which the recipe names; start "
                f"this one with another --member-id"
            )
        if (member.member_id, member.incarnation) in self._fenced:
            raise WrongState(
                f"{member.member_id} was replaced by a newer process of the same name; stop this one, or give it "
                f"another --member-id",
                reason="INCARNATION_FENCED",
            )
        if held is None and len(self._leases) >= MAX_MEMBERS:
            raise Overloaded(
                f"{member.member_id}: this run has {len(self._leases)} members, and no more than {MAX_MEMBERS} "
                f"are accepted; stop one of them"
            )
        if held is not None and held.member == member and held.owner == owner:
            self._renew(held)
            return held.token
        if held is not None:
            if held.member.incarnation != member.incarnation:
                self._fence(held.member)
            self._remove(held, MemberChange.REPLACED)
        token, now, now_at = secrets.token_bytes(16), self.clock.monotonic(), self.clock.now()
        lease = _Lease(member=member, owner=owner, token=token, renewed=now, renewed_at=now_at, live_since=now_at)
        self._leases[member.member_id] = self._by_token[token] = lease
        self._notify(member, MemberChange.JOINED)
        return token

    def _with_pool(self, member: Member) -> Member:
        """Return a reward service with the pool of its scorer; raise WrongState for an unknown scorer."""
        if member.role != Role.ROLE_REWARD:
            return replace(member, pool="")
        if member.pool and member.pool not in self._scorers:
            raise WrongState(
                f"{member.member_id} serves the scorer {member.pool[:64]!r}, and the run has {list(self._scorers)}; "
                f"start it with the run's recipe and one of these names (--scorer)",
                reason="UNKNOWN_SCORER",
            )
        return replace(member, pool=member.pool or self._scorers[0])

    def add_permanent(self, member_id: str, role: int, target: str, *, pool: str = "") -> None:
        """Add a member with an address in the recipe: it never registers, and its lease never ends.

        Raises ConfigError: no channel may be opened to the target.
        """
        check_target(target, self.security)
        if split_target(target)[1] == 0:
            raise ConfigError(f"{target!r} has port 0, where nothing listens; give the port of the service")
        if (held := self._leases.get(member_id)) is not None:
            raise ConfigError(
                f"{target!r} would have the member id {member_id} of {held.member.target!r}; write one of the hosts in "
                f"another way, such as by its IP address"
            )
        member = Member(
            member_id=member_id,
            incarnation=PERMANENT,
            role=role,
            target=target,
            tokenizer_sha256=b"",
            pool=pool,
            permanent=True,
        )
        now = self.clock.now()
        self._leases[member_id] = _Lease(
            member=member,
            owner=LOCAL,
            token=secrets.token_bytes(16),
            renewed=self.clock.monotonic(),
            renewed_at=now,
            live_since=now,
        )
        self._notify(member, MemberChange.JOINED)

    def remove_permanent(self, member_id: str) -> None:
        """Remove a member that `add_permanent` added; its calls in flight may finish."""
        if (lease := self._leases.get(member_id)) is not None and lease.member.permanent:
            self._remove(lease, MemberChange.LEFT)

    def keep_alive(self, token: bytes, owner: Principal = LOCAL) -> None:
        """Renew a lease; raise NotFound when it ended, or belongs to another principal."""
        lease = self._find(token, owner)
        if lease is None:
            raise NotFound("this lease is gone: it expired or was replaced; stop work and register again")
        self._renew(lease)

    def overdue(self, member_id: str) -> tuple[bool, float]:
        """Return whether a member should have renewed its lease by now, and since when, in seconds since the epoch.

        That is the time of the last renewal when it is overdue, else the first of the unbroken series of renewals.
        """
        self._forgive_stall()
        lease = self._leases.get(member_id)
        if lease is None:  # the lease ended after the caller had listed the members
            return True, self.clock.now()
        overdue = self._overdue(lease)
        return overdue, lease.renewed_at if overdue else lease.live_since

    def deregister(self, token: bytes, owner: Principal = LOCAL) -> None:
        """End a lease of `owner`; do nothing when it has ended already."""
        lease = self._find(token, owner)
        if lease is not None:
            self._remove(lease, MemberChange.LEFT)

    def expire(self) -> list[Member]:
        """Remove and return the members whose leases have run out."""
        self._forgive_stall()
        expired = [lease for lease in self._leases.values() if self._age(lease) >= self.ttl]
        for lease in expired:
            self._remove(lease, MemberChange.EXPIRED)
        return [lease.member for lease in expired]

    def _forgive_stall(self) -> None:
        """Give every lease that was live before a stall of this process a whole period from now."""
        beat, now = self._beat, self.clock.monotonic()
        if beat is None or now - beat <= self.ttl * _RENEWAL_SHARE:
            return
        log.warning("coordinator was stalled: seconds=%.1f; each lease gets %g s more", now - beat, self.ttl)
        self._beat = now
        for lease in self._leases.values():
            if beat - lease.renewed < self.ttl:
                lease.renewed = now

    def _age(self, lease: _Lease) -> float:
        return 0.0 if lease.member.permanent else self.clock.monotonic() - lease.renewed

    def _overdue(self, lease: _Lease) -> bool:
        return self._age(lease) > self.ttl * _OVERDUE_SHARE

    def _renew(self, lease: _Lease) -> None:
        overdue = self._overdue(lease)
        lease.renewed, lease.renewed_at = self.clock.monotonic(), self.clock.now()
        if overdue:
            lease.live_since = lease.renewed_at

    def _find(self, token: bytes, owner: Principal) -> _Lease | None:
        """Return the live lease with this token; None when it ran out, even before the next `expire`."""
        self._forgive_stall()
        lease = self._by_token.get(token)  # a random token of 16 bytes; the hash of a dict leaks nothing of use
        return lease if lease is not None and lease.owner == owner and self._age(lease) < self.ttl else None

    def _fence(self, member: Member) -> None:
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
        self._check_role(member)

    def _check_target(self, member: Member) -> None:
        """Raise InvalidInput for a target to which no channel may be opened."""
        try:
            check_target(member.target, self.security)
            if split_target(member.target)[1] == 0:
                raise ConfigError(f"{member.target!r} has port 0, where nothing listens; give the bound port")
        except ConfigError as error:
            raise InvalidInput(f"{member.member_id}: target {error}") from None

    def _check_tokenizer(self, member: Member) -> None:
        own = member.tokenizer_sha256
        if own == self.tokenizer_sha256 or (not own and member.role in _WITHOUT_TOKENIZER):
            return
        raise WrongState(
            f"{member.member_id} has tokenizer {own.hex()[:12] or 'none'}, this run has "
            f"{self.tokenizer_sha256.hex()[:12]}; start it with the run's model.source",
            reason="WRONG_TOKENIZER",
        )

    def _check_role(self, member: Member) -> None:
        held = self._leases.get(member.member_id)
        if held is not None and held.member.role != member.role and self._age(held) < self.ttl:
            raise WrongState(
                f"{member.member_id}: a live {held.member.role_name} service has this id, {held.member.peer}; start "
                f"this {member.role_name} service with another --member-id",
                reason="MEMBER_ID_TAKEN",
            )

    def _check_only_trainer(self, member: Member) -> None:
        if member.role != Role.ROLE_TRAINER:
            return
        for other in self.members(Role.ROLE_TRAINER):
            if other.member_id != member.member_id:
                raise WrongState(
                    f"{member.member_id}: this run has a trainer already, {other.peer}, and a run has one; stop this "
                    f"process, or stop that one and start this one with --member-id {other.member_id}",
                    reason="SECOND_TRAINER",
                )

    def _remove(self, lease: _Lease, change: MemberChange) -> None:
        del self._leases[lease.member.member_id]
        self._by_token.pop(lease.token, None)  # the token of a permanent member is not in the table
        self._notify(lease.member, change)

    def _notify(self, member: Member, change: MemberChange) -> None:
        for listener in self._listeners:
            try:
                listener(member, change)
            except Exception:  # a bug in a listener must neither end the run nor affect the lease
                log.exception("registry listener failed: member=%s change=%s", member.member_id, change.value)


class Departures:
    """The last members that left and did not return, so that a wait for a service can name them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: dict[str, tuple[Member, MemberChange, float]] = {}  # change and time by member_id, the oldest first

    def add(self, member: Member, change: MemberChange) -> None:
        """Remember and log that a member left."""
        if change is MemberChange.EXPIRED:
            log.warning(
                "connection to %s lost: %s; its process was killed, hangs, or cannot reach the coordinator",
                member.member_id,
                change.value,
                extra={"target": member.target},
            )
        else:
            log.info("%s left: %s", member.member_id, change.value)
        self._left.pop(member.member_id, None)
        self._left[member.member_id] = member, change, self._clock.now()
        while len(self._left) > _MAX_DEPARTED:
            del self._left[next(iter(self._left))]

    def forget(self, member: Member) -> None:
        """Forget a member that has returned."""
        self._left.pop(member.member_id, None)

    def texts(self, role: int, pool: str = "") -> list[str]:
        """Describe for users when and how the members of a role, or of a pool, left."""
        found = [each for each in self._left.values() if each[0].role == role and pool in ("", each[0].pool)]
        return [self._text(*each) for each in found]

    def _text(self, member: Member, change: MemberChange, left: float) -> str:
        then, now = time.localtime(left), time.localtime(self._clock.now())
        clock = time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)
        return f"{member.member_id} left at {clock}{'' if change is MemberChange.LEFT else f': {change.value}'}"
