"""Who waits for whom on the way of the weights, and since when: what `GetWeightPlane` reports.

The updater and the broker say what happens where it happens; nothing here decides anything.

    join        trainer and engines meet
    look-up     the trainer computes the probe; nothing is paused
    pause       engines stop sampling; who has stopped, and the trainer, wait for the others
    transfer    engines wait for the trainer, the trainer for the engines
    commit      each engine on its own: sample again, probe, give tokens out
    abort       all are told that the update is given up
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role

from ..routing.replica import Replica

SERVING: Final = "serving"
UPDATING: Final = "updating"
WAITING: Final = "waiting"
ASLEEP: Final = "asleep"
FENCED: Final = "fenced"
REFUSED: Final = "refused"

JOIN: Final = "join"
LOOK_UP: Final = "look-up"
PAUSE: Final = "pause"
TRANSFER: Final = "transfer"
COMMIT: Final = "commit"
ABORT: Final = "abort"


@dataclass(slots=True, kw_only=True)
class _Party:
    state: str
    since: float
    backend: str = ""
    last_error: str = ""


class WeightPlaneStatus:
    """The present state. Used on one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.policy_version = -1
        """Version published last, or being published."""
        self.epoch = 0
        """Of the membership."""
        self.last_seconds = self.last_pause_seconds = 0.0
        """Of the last whole update."""
        self.current = ""
        """What the update is doing; empty between updates."""
        self._since = now()
        self._trainer = ""
        self._engines: set[str] = set()  # of the update
        self._busy: set[str] = set()  # have not answered in this phase
        self._parties: dict[str, _Party] = {}

    def begin(self, phase: str, *, trainer: str, engines: Collection[str], busy: Collection[str]) -> None:
        """Say that a phase of an update of `engines` begins, and which members have something to do in it."""
        self.current, self._since, self._trainer = phase, self._now(), trainer
        self._engines, self._busy = set(engines), set(busy)
        for name in engines:
            self.state(name, UPDATING)

    def answered(self, name: str) -> None:
        """Say that one has done its part of the phase."""
        self._busy.discard(name)

    def end(self) -> None:
        """Say that no update is under way."""
        self.current, self._since = "", self._now()
        self._engines, self._busy = set(), set()

    def state(self, name: str, state: str, error: str = "") -> None:
        """Note what an engine does now, and what it failed of; one that serves again is well."""
        party = self._parties.setdefault(name, _Party(state=state, since=self._now()))
        if party.state != state:
            party.state, party.since = state, self._now()
        if error or state == SERVING:
            party.last_error = error

    def backend(self, name: str, backend: str) -> None:
        """Note how an engine gets its weights in the present epoch."""
        self._parties.setdefault(name, _Party(state=WAITING, since=self._now())).backend = backend

    @property
    def seconds(self) -> float:
        """Since the present phase began, or since the last update ended."""
        return self._now() - self._since

    def waits_for(self, name: str) -> list[str]:
        """Return the members whose answers a member waits for."""
        if not self.current or name not in {*self._engines, self._trainer}:
            return []
        trainer = {self._trainer} & self._busy - {name}
        engines = self._busy - {self._trainer, name}
        if self.current == LOOK_UP or (self.current in (JOIN, TRANSFER) and name in self._busy - {self._trainer}):
            return sorted(trainer)
        if self.current == PAUSE and name != self._trainer:
            return [] if name in self._busy else sorted(engines)
        return [] if self.current in (COMMIT, ABORT) else sorted(trainer | engines)

    def line(self) -> str:
        """Return one line on the update for people; empty between updates."""
        if not self.current:
            return ""
        slow = f" ({', '.join(sorted(self._busy))})" if self._busy else ""
        return f"weights of version {self.policy_version}: {self.current} for {self.seconds:.0f} s{slow}"

    def report(self, replicas: Iterable[Replica]) -> pb.GetWeightPlaneResponse:
        """Return the present state of the trainer and the engines among `replicas`."""
        response = pb.GetWeightPlaneResponse(
            policy_version=self.policy_version,
            epoch=self.epoch,
            phase=self.current,
            phase_seconds=self.seconds if self.current else 0.0,
            last_update_seconds=self.last_seconds,
            last_pause_seconds=self.last_pause_seconds,
        )
        members = sorted(replicas, key=lambda replica: (replica.member.role, replica.member.member_id))
        response.parties.extend(self._party(r) for r in members if r.member.role == Role.ROLE_TRAINER)
        response.parties.extend(self._party(r) for r in members if r.member.role == Role.ROLE_ROLLOUT)
        return response

    def _party(self, replica: Replica) -> pb.WeightParty:
        name = replica.member.member_id
        if replica.member.role == Role.ROLE_TRAINER:
            busy = bool(self.current) and name == self._trainer
            state, since, party = UPDATING if busy else SERVING, self._since, None
        else:
            party = self._parties.setdefault(name, _Party(state=WAITING, since=self._now()))
            state, since = party.state, party.since
        if state == SERVING and replica.unusable_reason:  # such as a new process of this name
            state = WAITING
        waits_for = self.waits_for(name)
        if state == UPDATING and name not in self._busy and waits_for:
            state = WAITING
        return pb.WeightParty(
            member_id=name,
            backend=party.backend if party else "",
            policy_version=replica.version if party else self.policy_version,
            state=state,
            state_seconds=self._now() - since,
            waits_for=waits_for,
            last_error=party.last_error if party else "",
        )
