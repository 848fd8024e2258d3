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
        self._texts: dict[str, tuple[Member, str]] = {}  # by member_id, the oldest first

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
        how = "" if change is MemberChange.LEFT else f": {change.value}"
        clock = time.strftime("%H:%M:%S", time.localtime(self._clock.now()))
        self._texts.pop(member.member_id, None)
        self._texts[member.member_id] = member, f"{member.member_id} left at {clock}{how}"
        while len(self._texts) > _MAX_KEPT:
            del self._texts[next(iter(self._texts))]

    def forget(self, member: Member) -> None:
        """Forget a member that is there again."""
        self._texts.pop(member.member_id, None)

    def texts(self, role: int, pool: str = "") -> list[str]:
        """Return when and how the members of a role, or of a pool, left, for users."""
        return [text for each, text in self._texts.values() if each.role == role and pool in ("", each.pool)]
