"""Holds the open groups of tasks for agents.

    collect --> WAITING --lease--> LEASED --> STORING --> TAKEN
                   ^                 |            |
                   |                 |            '-- refused: WAITING, or MISSING(BAD_TRAJECTORY) after its tries
                   +--- expired, ----+
                   |    again        '-- released: MISSING(reason of the agent)
                   '-- the group's deadline: MISSING(EXPIRED)

A group closes when it has no open attempt, or at its deadline, which counts from its first lease. Then `collect`
returns it. The run offers places for groups of the agents' own (`offer`); the first agent that joins with a new key
takes the oldest offer.

Leases are in memory only: after a restart of the coordinator its tasks are unknown, and their prompts are issued again.
A lease belongs to a gateway and to the process of the environment service that asked for it. It ends when that process
leaves the run, or when the next process of the gateway does not name the task (`return_tasks`). Each lease has a random
name. A gateway that was cut off, or that has sessions of another run with equal task ids, therefore cannot extend or
end a lease of another gateway.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from fourfold import metrics as m
from fourfold.config.agents import AgentsConfig
from fourfold.errors import InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.seeds import derive_seed
from fourfold.text import format_duration

from ..data.prompts import Prompt
from ..state.samples import Trajectory

log = logging.getLogger("fourfold.coordinator")

# Reasons of releases that are no fault of the task: its agent was idle for too long, or a user dropped it.
_NO_FAULTS: Final = ("SESSION_EXPIRED", "DROPPED")
EXPIRED: Final = "EXPIRED"  # no trajectory came before the group's deadline
BAD_TRAJECTORY: Final = "BAD_TRAJECTORY"  # the trajectory breaks the contract
_RETRY_SECONDS: Final = 2.0  # delay for agents that bring more groups than the run takes now
_OPENING_SECONDS: Final = 10.0  # longest time from an accepted offer to the issue of its samples
_TICK_SECONDS: Final = 0.25
# First lease of a task for an environment service, which opens its session at once. It is short: if the answer of the
# call is lost because a process stops, no agent has the task, and its group waits for the end of the lease.
_OPENING_LEASE_SECONDS: Final = 15.0
_LEASE_BYTES: Final = 8  # random bytes of the name of a lease
_MAX_LEFT: Final = 1_024  # most remembered processes of agents that left the run
_IDLE_SECONDS: Final = 10.0  # a session is idle after this time without a call of its agent
_SETTLED: Final = 1 << 16  # most remembered tasks of closed groups, for the answer to a repeated Put


class AttemptState(Enum):
    """State of an attempt."""

    WAITING = "waiting"
    LEASED = "leased"
    STORING = "storing"  # its trajectory is being stored
    TAKEN = "taken"
    MISSING = "missing"  # it ended without a trajectory


_OPEN: Final = (AttemptState.WAITING, AttemptState.LEASED, AttemptState.STORING)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The gateway's report on the session that attempts a task. Times are monotonic."""

    session_id: str
    turn_count: int
    idle_since: float | None  # None: a turn is sampled
    expires_at: float


@dataclass(slots=True, eq=False)
class Attempt:
    """One task: a sample of the ledger, or an answer of an evaluation."""

    task_id: str
    index: int
    seed: int
    group: TaskGroup
    state: AttemptState = AttemptState.WAITING
    gateway: str = ""  # gateway of the present or the last lease
    lease: str = ""  # name of the newest lease
    leases: set[str] = field(default_factory=set)  # names of all leases
    agent: str = ""  # incarnation of the environment service that has the lease
    session: AgentSession | None = None  # None: not opened, or its gateway reports none
    leased_at: float = 0.0  # monotonic
    lease_end: float = 0.0  # monotonic
    reason: str = ""  # why it is MISSING
    refused: int = 0  # trajectories that broke the contract
    released: int = 0  # number of releases by agents
    digest: bytes = b""  # digest of the stored trajectory
    trajectory: Trajectory | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a Put stores the trajectory

    @property
    def open(self) -> bool:
        return self.state in _OPEN


@dataclass(slots=True, eq=False)
class TaskGroup:
    """The attempts at one problem."""

    group_id: str
    prompt: Prompt
    task_ids: Sequence[str]
    seed: int
    evaluation: bool = False
    own: OwnProblem | None = None
    on_lease: Callable[[], None] = lambda: None  # called at the first lease
    attempts: list[Attempt] = field(init=False)
    leased: bool = False  # whether there was a lease
    deadline: float | None = None  # monotonic; None until the first lease
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.attempts = [
            Attempt(task_id=name, index=index, seed=derive_seed(self.seed, "attempt", index), group=self)
            for index, name in enumerate(self.task_ids)
        ]


@dataclass(slots=True, eq=False)
class OwnProblem:
    """A problem of an agent's own, and the future of its group."""

    owner: str
    key: str
    prompt: Prompt
    opened: asyncio.Future[TaskGroup]
    joined: dict[str, Attempt] = field(default_factory=dict)  # by attempt_id


class TaskQueue:
    """The open tasks of a run. Not thread-safe; `run` ends leases and groups in time."""

    def __init__(
        self, config: AgentsConfig, *, max_refusals: int = 0, max_releases: int = 1, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Start without groups.

        An attempt is MISSING after more than `max_refusals` malformed trajectories, or when agents gave it back more
        than `max_releases` times.
        """
        self._lease_seconds, self._group_seconds = config.lease_seconds, config.group_seconds
        self._max_refusals, self._max_releases, self._clock = max_refusals, max_releases, clock
        self._groups: dict[str, TaskGroup] = {}  # open groups by id, in order of opening
        self._tasks: dict[str, Attempt] = {}  # tasks of open groups
        self._settled: OrderedDict[str, bytes] = OrderedDict()  # digest (may be empty) by task of closed groups
        self._offers: deque[asyncio.Future[OwnProblem]] = deque()
        self._own: dict[tuple[str, str], OwnProblem] = {}
        self._left: deque[str] = deque(maxlen=_MAX_LEFT)  # incarnations of agents that left
        self.moved_at = -math.inf  # time of the last trajectory or turn, monotonic
        self._ends: Counter[str] = Counter()  # attempts since the last `take_metrics`, by the name of a metric
        self._changed = asyncio.Event()
        self._ended = False

    # -- for the makers of groups -----------------------------------------------------------------------------------

    async def collect(self, group: TaskGroup) -> None:
        """Open a group, and return when it is closed: each attempt is TAKEN or MISSING then.

        Its users are `training/groups.py`, and `training/evaluation/evaluator.py` for held-out prompts.
        """
        self._groups[group.group_id] = group
        self._tasks |= {attempt.task_id: attempt for attempt in group.attempts}
        if group.own is not None:
            self._open_own(group, group.own)
        self._notify()
        try:
            await group.closed.wait()
        finally:  # also when the run goes back to a checkpoint
            del self._groups[group.group_id]
            for attempt in group.attempts:
                del self._tasks[attempt.task_id]
                self._settled[attempt.task_id] = attempt.digest
            while len(self._settled) > _SETTLED:
                self._settled.popitem(last=False)
            if group.own is not None:
                self._forget_own(group.own)

    async def offer(self) -> OwnProblem:
        """Offer a place for a group of the agents' own; return the problem of the agent that takes it."""
        place: asyncio.Future[OwnProblem] = asyncio.get_running_loop().create_future()
        self._offers.append(place)
        try:
            return await place
        finally:
            if place in self._offers:
                self._offers.remove(place)

    def begin(self) -> None:
        """Let agents wait for tasks again; after `end`, because a restarted trainer may set the run back."""
        self._ended = False

    def end(self) -> None:
        """Tell all agents, including waiting ones, that no task follows."""
        self._ended = True
        self._notify()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the tasks: their number by state now, and how attempts ended since the last call."""
        ends, self._ends = self._ends, Counter()
        states = Counter(attempt.state for attempt in self._tasks.values())
        return {
            m.TASKS_WAITING: float(states[AttemptState.WAITING]),
            m.TASKS_LEASED: float(states[AttemptState.LEASED] + states[AttemptState.STORING]),
            **{name: float(ends[name]) for name in (m.TASKS_TAKEN, m.TASKS_RELEASED, m.TASKS_EXPIRED, m.TASKS_REFUSED)},
        }

    # -- for gateways -----------------------------------------------------------------------------------------------

    async def lease(self, gateway: str, count: int, *, wait: float, agent: str = "") -> list[Attempt]:
        """Lease up to `count` waiting attempts of the run's own problems; wait for the first at most `wait` seconds.

        `agent` is the incarnation of the environment service that asks; while it is no member it gets none.
        Raises WrongState when the run has ended.
        """
        end = self._clock.monotonic() + wait
        while True:
            changed = self._changed
            waiting = self._waiting() if agent not in self._left else ()
            chosen = [attempt for attempt, _ in zip(waiting, range(count), strict=False)]
            for attempt in chosen:
                self._grant(attempt, gateway, agent)
            left = end - self._clock.monotonic()
            if not chosen:
                self._check_not_ended()
            if chosen or left <= 0:
                return chosen
            await _wait(changed, left)

    async def join(self, gateway: str, attempt_id: str, problem: OwnProblem) -> Attempt:
        """Lease an attempt in the group of the agent's key; open the group if it is new.

        Raises:
            Overloaded: The run takes no further group now, or the group has all its attempts.
            Unavailable: The group was not opened in time.
            WrongState: The run has ended.
        """
        self._check_not_ended()
        known = self._own.get((problem.owner, problem.key))
        if known is None:
            known = self._take_offer(problem)
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                group = await asyncio.shield(known.opened)
        except TimeoutError:
            self._forget_own(known)
            raise Unavailable("the run did not open the group in time; try again", reason="GROUP_NOT_OPENED") from None
        attempt = known.joined.get(attempt_id)
        if attempt is None or not attempt.open:
            attempt = next((a for a in group.attempts if a.state is AttemptState.WAITING), None)
        if attempt is None:
            raise Overloaded(
                f"group {known.key!r} has its {len(group.attempts)} attempts; give further ones another key",
                reason="GROUP_FULL",
                retry_after=_RETRY_SECONDS,
            )
        # An attempt whose lease ended may have had another agent, whose repeated call must not share it.
        known.joined = {name: other for name, other in known.joined.items() if other is not attempt}
        known.joined[attempt_id] = attempt
        self._grant(attempt, gateway)
        return attempt

    def renew(
        self,
        task_ids: Sequence[str],
        leases: Sequence[str] = (),
        sessions: Sequence[AgentSession | None] = (),
    ) -> list[str]:
        """Extend leases; return the tasks that are unknown or have another lease than in `leases`.

        `sessions` has the session of each task, unless it is empty.
        """
        gone, count = [], len(task_ids)
        for task_id, lease, session in zip(task_ids, leases or ("",) * count, sessions or (None,) * count, strict=True):
            attempt = self._tasks.get(task_id)
            held = attempt is not None and attempt.state in (AttemptState.LEASED, AttemptState.STORING)
            if attempt is None or not held or lease not in ("", attempt.lease):
                gone.append(task_id)
            else:
                attempt.lease_end = self._clock.monotonic() + self._lease_seconds
                before, attempt.session = attempt.session, session
                if session is not None and session.turn_count > (before.turn_count if before else 0):
                    self.moved_at = self._clock.monotonic()
        return gone

    def return_tasks(self, gateway: str, *, but: Collection[tuple[str, str]] = ()) -> None:
        """Return the tasks of a gateway that left the run or restarted, except these tasks with these leases."""
        for attempt in self.leased(lambda a: a.gateway == gateway and (a.task_id, a.lease) not in but):
            self._expire(attempt)

    def release(self, task_id: str, reason: str, *, again: bool, lease: str = "") -> None:
        """End an attempt without a trajectory; do nothing when it is not leased, or has another lease."""
        attempt = self._tasks.get(task_id)
        if attempt is not None and attempt.state is AttemptState.LEASED and lease in ("", attempt.lease):
            self._ends[m.TASKS_RELEASED] += 1
            attempt.released += reason not in _NO_FAULTS
            self._return(attempt, "" if again and attempt.released <= self._max_releases else reason)

    def find(self, task_id: str) -> Attempt | bytes:
        """Return an attempt of an open group, or the digest of what was taken for a task of a closed one.

        Raises NotFound for a task that this coordinator does not know, or that ended without a trajectory.
        """
        attempt = self._tasks.get(task_id)
        if attempt is not None and attempt.state is not AttemptState.MISSING:
            return attempt
        if digest := self._settled.get(task_id):
            return digest
        raise NotFound(f"task {task_id[:140]!r} is not open: its group closed, or another coordinator issued it")

    def begin_storing(self, attempt: Attempt) -> None:
        """Note that a trajectory is being stored; its group stays open meanwhile."""
        attempt.state = AttemptState.STORING

    def cancel_storing(self, attempt: Attempt) -> None:
        """Note that a trajectory could not be stored; its gateway may send it again while the lease lives."""
        attempt.state = AttemptState.LEASED
        attempt.lease_end = self._clock.monotonic() + self._lease_seconds

    def take(self, attempt: Attempt, trajectory: Trajectory, digest: bytes) -> None:
        """Add a durable trajectory to its group."""
        attempt.state, attempt.trajectory, attempt.digest = AttemptState.TAKEN, trajectory, digest
        self.moved_at = self._clock.monotonic()
        self._ends[m.TASKS_TAKEN] += 1
        self._close_if_done(attempt.group)

    def refuse(self, attempt: Attempt) -> None:
        """Count a trajectory that breaks the contract; repeat the attempt while it has tries left."""
        attempt.refused += 1
        self._ends[m.TASKS_REFUSED] += 1
        self._return(attempt, BAD_TRAJECTORY if attempt.refused > self._max_refusals else "")

    def on_agent_left(self, incarnation: str) -> None:
        """Return the tasks of an environment service that left the run, and lease it no further ones."""
        self._left.append(incarnation)  # a waiting call of `lease` must not get a task
        for attempt in self.leased(lambda a: a.agent == incarnation):
            self._expire(attempt)

    def on_agent_joined(self, incarnation: str) -> None:
        """Lease tasks to an environment service again, even if its membership had ended."""
        if incarnation in self._left:
            self._left.remove(incarnation)

    def leased(self, chosen: Callable[[Attempt], object] = lambda _attempt: True) -> list[Attempt]:
        """Return the leased attempts, or those that are chosen, in order of admission."""
        return [a for a in self._tasks.values() if a.state is AttemptState.LEASED and chosen(a)]

    def describe(self) -> str:
        """Describe the agents that the open groups wait for, and the end of the wait; empty without open groups."""
        now, states = self._clock.monotonic(), Counter(attempt.state for attempt in self._tasks.values())
        parts: list[str] = []
        by_gateway: dict[str, list[Attempt]] = {}
        for attempt in self.leased():
            by_gateway.setdefault(attempt.gateway or "unknown gateway", []).append(attempt)
        for gateway, attempts in sorted(by_gateway.items()):
            sessions = [attempt.session for attempt in attempts if attempt.session is not None]
            idle = [s for s in sessions if s.idle_since is not None and now - s.idle_since >= _IDLE_SECONDS]
            words = []
            if idle:
                left = format_duration(max(max(s.expires_at for s in idle) - now, 0.0))
                ending = "they expire" if len(idle) > 1 else "it expires"
                words.append(f"{_count(len(idle), 'session')} idle, {ending} in {left}")
            if busy := len(sessions) - len(idle):
                words.append(f"{_count(busy, 'session')} at work")
            if without := [attempt for attempt in attempts if attempt.session is None]:
                left = format_duration(max(max(attempt.lease_end for attempt in without) - now, 0.0))
                words.append(f"{_count(len(without), 'task')} without a session, leased for {left}")
            parts.append(f"{gateway}: {', '.join(words)}")
        if waiting := states[AttemptState.WAITING]:
            parts.append(f"{_count(waiting, 'task')} for which no agent asks")
        if self._offers:
            parts.append(f"{_count(len(self._offers), 'group')} that no agent has brought")
        return "; ".join(parts)

    def time_left(self, attempt: Attempt) -> float:
        """Return the seconds until the group of a leased attempt closes."""
        assert attempt.group.deadline is not None
        return max(attempt.group.deadline - self._clock.monotonic(), 0.0)

    # -- time -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """End leases and groups whose time is up."""
        while True:
            self.tick()
            await self._clock.sleep(_TICK_SECONDS)

    def tick(self) -> None:
        """End the leases and the groups whose time is up."""
        now = self._clock.monotonic()
        for attempt in list(self._tasks.values()):
            if attempt.state is AttemptState.LEASED and attempt.lease_end <= now:
                self._expire(attempt)
        for group in list(self._groups.values()):
            if group.deadline is not None and group.deadline <= now:
                self._close_late(group)

    def _expire(self, attempt: Attempt) -> None:
        log.warning("lease of a task ended: task=%s gateway=%s", attempt.task_id, attempt.gateway or "unknown")
        self._ends[m.TASKS_EXPIRED] += 1
        self._return(attempt, "")

    def _close_late(self, group: TaskGroup) -> None:
        """End the attempts of a group at its deadline; wait for a trajectory that is being stored."""
        for attempt in group.attempts:
            if attempt.state in (AttemptState.WAITING, AttemptState.LEASED):
                if attempt.state is AttemptState.LEASED:
                    self._ends[m.TASKS_EXPIRED] += 1
                attempt.state, attempt.reason = AttemptState.MISSING, EXPIRED
        self._close_if_done(group)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Attempt]:
        """Yield the attempts for any agent, those of evaluations first, because the run waits for them."""
        groups = [group for group in self._groups.values() if group.own is None]
        for group in sorted(groups, key=lambda group: not group.evaluation):
            for attempt in group.attempts:
                if attempt.state is AttemptState.WAITING:
                    yield attempt

    def _grant(self, attempt: Attempt, gateway: str, agent: str = "") -> None:
        group, now = attempt.group, self._clock.monotonic()
        if attempt.state is AttemptState.WAITING:
            attempt.state, attempt.lease = AttemptState.LEASED, secrets.token_hex(_LEASE_BYTES)
            attempt.leases.add(attempt.lease)
            attempt.leased_at, attempt.session = now, None
        seconds = min(self._lease_seconds, _OPENING_LEASE_SECONDS) if agent else self._lease_seconds
        attempt.gateway, attempt.agent, attempt.lease_end = gateway, agent, now + seconds
        if not group.leased:
            group.leased, group.deadline = True, now + self._group_seconds
            group.on_lease()

    def _return(self, attempt: Attempt, reason: str) -> None:
        """Let an attempt wait for another agent, or end it for a reason."""
        attempt.state, attempt.reason = (AttemptState.MISSING if reason else AttemptState.WAITING), reason
        group = attempt.group
        if group.deadline is not None and group.deadline <= self._clock.monotonic():
            self._close_late(group)
        self._close_if_done(group)
        self._notify()

    def _close_if_done(self, group: TaskGroup) -> None:
        if not any(attempt.open for attempt in group.attempts):
            group.closed.set()

    def _open_own(self, group: TaskGroup, own: OwnProblem) -> None:
        """Give the places of a group of the agents' own to the agents that wait for it."""
        # Set a deadline: if all agents have left by now, their group would otherwise never close.
        group.deadline = self._clock.monotonic() + self._group_seconds
        own.opened.set_result(group)
        if self._own.setdefault((own.owner, own.key), own) is not own:  # another opening of this key came first
            self._close_late(group)

    def _forget_own(self, own: OwnProblem) -> None:
        if self._own.get((own.owner, own.key)) is own:
            del self._own[own.owner, own.key]

    def _take_offer(self, problem: OwnProblem) -> OwnProblem:
        while self._offers:
            place = self._offers.popleft()
            if not place.done():
                place.set_result(problem)
                self._own[problem.owner, problem.key] = problem
                return problem
        raise Overloaded(
            "the run takes no further group now: as many as its policy lag allows are open or wait to be trained",
            reason="NO_ROOM_FOR_GROUP",
            retry_after=_RETRY_SECONDS,
        )

    def _check_not_ended(self) -> None:
        if self._ended:
            raise WrongState(
                "the run has trained all its steps, and no task follows; end the agent", reason="RUN_ENDED"
            )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def check_reason(reason: str) -> str:
    """Return the reason of a released task, or raise InvalidInput when it is not UPPER_SNAKE_CASE."""
    if not reason or len(reason) > 63 or not reason.replace("_", "A").isalnum() or reason != reason.upper():
        raise InvalidInput(f"reason is {reason[:80]!r}; it must be 1 to 63 characters in UPPER_SNAKE_CASE")
    return reason


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
