"""Tracks the phase of the current weight update and the state of each engine, for `GetWeightPlane`.

The updater and the broker report changes here; this module makes no decisions. Phases of an update:

    join        trainer and engines open an epoch
    pause       engines stop sampling; those that have stopped, and the trainer, wait for the others
    transfer    engines wait for the trainer, the trainer for the engines
    commit      each engine on its own: switch to the new weights, probe, wait for the trainer's probe, release held
                tokens
    abort       trainer and engines give up the update
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role

from ..routing.replica import Replica
from ..state.timeline import Timeline

# States of an engine.
SERVING: Final = "serving"
UPDATING: Final = "updating"
WAITING: Final = "waiting"
ASLEEP: Final = "asleep"
FENCED: Final = "fenced"
REFUSED: Final = "refused"

JOIN: Final = "join"
PAUSE: Final = "pause"
TRANSFER: Final = "transfer"
COMMIT: Final = "commit"
ABORT: Final = "abort"

_MAX_WAITS: Final = 16  # most reported members for which one waits: all pairs of a thousand engines would be a million


@dataclass(slots=True, kw_only=True)
class _EngineStatus:
    state: str
    since: float
    backend: str = ""
    last_error: str = ""


class WeightPlaneStatus:
    """The present state of weight updates. Used on one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, timeline: Timeline | None = None) -> None:
        """Start between updates; `timeline` records for how long each engine is UPDATING."""
        self._now, self._timeline = now, timeline or Timeline()
        self.policy_version = -1  # version that was published last or is being published
        self.epoch = 0
        self.last_seconds = self.last_pause_seconds = 0.0  # the last complete update, and its longest engine pause
        self.phase = ""  # of the current update; empty between updates
        self._since = now()
        self._trainer = ""
        self._engines: set[str] = set()  # members of the current update
        self._busy: set[str] = set()  # members with unfinished work in this phase
        self._first_busy: list[str] | None = None  # the first busy engines in order; None: not computed yet
        self._statuses: dict[str, _EngineStatus] = {}

    def begin_phase(
        self, phase: str, *, trainer: str, engines: Collection[str], busy: Collection[str] | None = None
    ) -> None:
        """Start a phase of an update of `engines`, in which `busy` have work to do; default: all members."""
        self.phase, self._since, self._trainer = phase, self._now(), trainer
        self._engines, self._busy = set(engines), {trainer, *engines} if busy is None else set(busy)
        self._first_busy = None
        for name in engines:
            self.set_state(name, UPDATING)

    def mark_done(self, name: str) -> None:
        """Note that a member has finished its work in this phase."""
        self._busy.discard(name)
        self._first_busy = None

    def end_update(self) -> None:
        """Note that no update is in progress."""
        self.phase, self._since = "", self._now()
        self._engines, self._busy, self._first_busy = set(), set(), None

    def set_state(self, name: str, state: str, error: str = "") -> None:
        """Set an engine's state and last error. The state `SERVING` clears the error."""
        engine = self._engine(name)
        if engine.state != state:
            if UPDATING in (engine.state, state):
                change = self._timeline.begin if state == UPDATING else self._timeline.end
                change(name, "update")
            engine.state, engine.since = state, self._now()
        if error or state == SERVING:
            engine.last_error = error

    def set_backend(self, name: str, backend: str) -> None:
        """Set the backend that an engine uses in the present epoch."""
        self._engine(name).backend = backend

    @property
    def seconds(self) -> float:
        """Return the seconds since the phase began, or since the last update ended."""
        return self._now() - self._since

    def waits_for(self, name: str) -> list[str]:
        """Return the members for which a member waits, in order; at most the first 16."""
        if not self.phase or (name != self._trainer and name not in self._engines):
            return []
        trainer = [self._trainer] if self._trainer in self._busy and self._trainer != name else []
        if self.phase in (JOIN, TRANSFER, COMMIT) and name != self._trainer and name in self._busy:
            return trainer
        if self.phase == PAUSE and name != self._trainer:
            return [] if name in self._busy else self._busy_engines(name)
        return [] if self.phase in (COMMIT, ABORT) else sorted(trainer + self._busy_engines(name))[:_MAX_WAITS]

    def _busy_engines(self, without: str = "") -> list[str]:
        """Return the first engines with unfinished work."""
        if self._first_busy is None:
            self._first_busy = heapq.nsmallest(_MAX_WAITS + 1, self._busy - {self._trainer})
        return [name for name in self._first_busy if name != without][:_MAX_WAITS]

    def describe(self) -> str:
        """Return one line about the current update; empty between updates."""
        if not self.phase:
            return ""
        names = sorted([*self._busy_engines(), *({self._trainer} & self._busy)])[:_MAX_WAITS]
        if more := len(self._busy) - len(names):
            names.append(f"{more} more")
        unfinished = f" ({', '.join(names)})" if names else ""
        return f"weights of version {self.policy_version}: {self.phase} for {self.seconds:.0f} s{unfinished}"

    def to_proto(self, replicas: Iterable[Replica]) -> pb.GetWeightPlaneResponse:
        """Return the state of the trainer and the engines among `replicas`, the trainer first."""
        members = sorted(replicas, key=lambda r: (r.member.role != Role.ROLE_TRAINER, r.member.member_id))
        return pb.GetWeightPlaneResponse(
            policy_version=self.policy_version,
            epoch=self.epoch,
            phase=self.phase,
            phase_seconds=self.seconds if self.phase else 0.0,
            last_update_seconds=self.last_seconds,
            last_pause_seconds=self.last_pause_seconds,
            parties=[self._party(r) for r in members if r.member.role in (Role.ROLE_TRAINER, Role.ROLE_ROLLOUT)],
        )

    def _engine(self, name: str) -> _EngineStatus:
        return self._statuses.setdefault(name, _EngineStatus(state=WAITING, since=self._now()))

    def _party(self, replica: Replica) -> pb.WeightParty:
        name = replica.member.member_id
        if replica.member.role == Role.ROLE_TRAINER:
            busy = bool(self.phase) and name == self._trainer
            status = _EngineStatus(state=UPDATING if busy else SERVING, since=self._since)
            version = self.policy_version
        else:
            status, version = self._engine(name), replica.version
        state, waits_for = status.state, self.waits_for(name)
        # A new process of this name is not usable yet; do not show the state of its predecessor.
        replaced = state == SERVING and replica.unusable_reason
        if replaced or (state == UPDATING and name not in self._busy and waits_for):
            state = WAITING
        return pb.WeightParty(
            member_id=name,
            backend=status.backend,
            policy_version=version,
            state=state,
            state_seconds=self._now() - status.since,
            waits_for=waits_for,
            last_error=status.last_error,
        )
