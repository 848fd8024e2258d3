"""Remembers the members that left and did not come back: a wait for a service must say that it was there."""

from __future__ import annotations

import logging
import time
from typing import Final

from fourfold.host.clock import Clock

from .registry import Member, MemberChange

log = logging.getLogger("fourfold.coordinator")

_MAX_KEPT: Final = 16


class Departures:
    """The last members that left. Not thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: dict[str, tuple[Member, MemberChange, float]] = {}  # with the time; by member_id, the oldest first

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
        while len(self._left) > _MAX_KEPT:
            del self._left[next(iter(self._left))]

    def forget(self, member: Member) -> None:
        """Forget a member that is there again."""
        self._left.pop(member.member_id, None)

    def texts(self, role: int, pool: str = "") -> list[str]:
        """Return when and how the members of a role, or of a pool, left, for users."""
        found = [each for each in self._left.values() if each[0].role == role and pool in ("", each[0].pool)]
        return [self._text(*each) for each in found]

    def _text(self, member: Member, change: MemberChange, left: float) -> str:
        then, now = time.localtime(left), time.localtime(self._clock.now())
        clock = time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)
        return f"{member.member_id} left at {clock}{'' if change is MemberChange.LEFT else f': {change.value}'}"
