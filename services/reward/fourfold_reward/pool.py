"""Runs reward functions in worker processes, with a real time limit for each sample.

    score() --> waiting (bounded) --> slot 0 --> worker process
                                  `-> slot 1 --> worker process

A slot is a task that owns one worker and gives it one sample at a time. When the time is up,
the slot kills the worker, whatever it is doing, and starts another: no sample waits for a
function that hangs, and only that sample gets an error. A sample whose caller went away
leaves the queue. Who waits for whom: `score` for its samples' futures, until its deadline; a
slot for a sample, then for its worker, at most `timeout_seconds`.

Built-in verifiers and reward functions never share a process: their rights differ (see
`confinement`). A slot has one worker for the kind of the configured verifier, and starts
another for the other kind when a sample asks for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fourfold.errors import ConfigError, Overloaded
from fourfold_reward.child import Child, WorkerDied
from fourfold_reward.confinement import Confinement
from fourfold_reward.loader import Verifier
from fourfold_reward.outcome import Outcome
from fourfold_reward.verifiers import GymOptions

_log = logging.getLogger(__name__)

# Importing a verifier's libraries is not the sample's fault, so it has a limit of its own.
LOAD_TIMEOUT_SECONDS: Final = 120.0
MAX_WAITING_SAMPLES: Final = 16_384
MAX_WAITING_BYTES: Final = 256 << 20
_MAX_RETRY_AFTER_SECONDS: Final = 30.0
_CONFINED: Final = Confinement()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample to score. The metadata stays text until it is in the worker."""

    sample_id: str
    prompt: str
    completion: str
    answer: str
    metadata_json: str
    verifier: Verifier
    size_bytes: int

    def request(self) -> dict[str, Any]:
        """Return what the worker is sent."""
        sample = {
            "sample_id": self.sample_id,
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
        }
        return {"score": sample, "metadata_json": self.metadata_json, "verifier": self.verifier.name}


@dataclass(slots=True)
class _Waiting:
    job: Job
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class LoadFailed(Exception):
    """A worker could not load a verifier; the text says why."""


class WorkerPool:
    """`processes` workers and their queue. Use it from one event loop."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        options: GymOptions,
        processes: int,
        timeout_seconds: float,
        on_failure: Callable[[str], None],
        confinement: Confinement = _CONFINED,
        max_waiting_samples: int = MAX_WAITING_SAMPLES,
    ) -> None:
        """Make a pool; nothing runs before `start`.

        Args:
            verifier: loaded by every worker before it is ready.
            options: of reasoning-gym tasks, by task.
            processes: number of workers.
            timeout_seconds: longest time one sample may take.
            on_failure: called with a message when a slot ends by a bug of ours.
            confinement: rights of the workers.
            max_waiting_samples: more are refused.
        """
        self.verifier = verifier
        self._options = {task: dict(values) for task, values in options.items()}
        self._processes = processes
        self._timeout = timeout_seconds
        self._on_failure = on_failure
        self._confinement = confinement
        self._max_waiting = max_waiting_samples
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._work = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._children: dict[int, Child] = {}
        self._mean_seconds = 0.0
        self._start_error = ""

    async def start(self) -> None:
        """Start the workers and load the verifier in each; afterwards `verifier` has its version.

        Raises:
            ConfigError: the function cannot be loaded; the message says why.
        """
        try:
            builtin = self.verifier.builtin
            await self._start_child(builtin)  # alone: it tells whether the others can start, and the version
        except LoadFailed as error:
            raise ConfigError(f"reward.verifier: {error}") from None
        await asyncio.gather(*(self._try_start_child(builtin) for _ in range(self._processes - 1)))
        children = list(self._children.values())
        for index in range(self._processes):
            slot = asyncio.create_task(self._run_slot(children[index] if index < len(children) else None))
            slot.add_done_callback(self._slot_ended)
            self._slots.append(slot)

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes in order.

        Args:
            jobs: at least one.
            timeout: seconds after which samples that have no outcome yet get an error; the others keep theirs.

        Raises:
            Overloaded: the queue is full; nothing was queued.
        """
        size = sum(job.size_bytes for job in jobs)
        full = len(self._waiting) + len(jobs) > self._max_waiting or self._waiting_bytes + size > MAX_WAITING_BYTES
        if full and self._waiting:  # a call that is too large for an empty queue is the servicer's to refuse
            raise Overloaded(
                f"{len(self._waiting)} samples wait and {len(jobs)} more do not fit (limit {self._max_waiting} "
                f"samples, {MAX_WAITING_BYTES >> 20} MiB); come back later, or start more reward services",
                reason="QUEUE_FULL",
                retry_after=self._retry_after(),
            )
        entries = [_Waiting(job) for job in jobs]
        self._waiting.extend(entries)
        self._waiting_bytes += size
        self._work.set()
        try:
            await asyncio.wait([entry.outcome for entry in entries], timeout=timeout)
            return [entry.outcome.result() if entry.outcome.done() else self._not_reached() for entry in entries]
        finally:
            self._withdraw(entries)

    async def close(self) -> None:
        """Stop the slots and kill the workers; samples that wait get no outcome any more."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()
        await asyncio.gather(*(self._discard(child) for child in list(self._children.values())))

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that live."""
        return list(self._children)

    async def _run_slot(self, first: Child | None) -> None:
        children: dict[bool, Child | None] = {first.builtin: first} if first is not None else {}
        while True:
            entry = await self._take()
            builtin = entry.job.verifier.builtin
            child = children.get(builtin) or await self._try_start_child(builtin)
            started = asyncio.get_running_loop().time()
            if child is None:
                outcome = Outcome.error("WORKER_DIED", f"no worker process could be started: {self._start_error}")
            else:
                outcome, child = await self._score_one(child, entry.job)
            seconds = asyncio.get_running_loop().time() - started
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
            if not entry.outcome.done():
                entry.outcome.set_result(outcome)
            # Now, so that the next sample need not wait for it.
            children[builtin] = child or await self._try_start_child(builtin)

    async def _take(self) -> _Waiting:
        while not self._waiting:
            self._work.clear()
            await self._work.wait()
        entry = self._waiting.popleft()
        self._waiting_bytes -= entry.job.size_bytes
        return entry

    async def _score_one(self, child: Child, job: Job) -> tuple[Outcome, Child | None]:
        """Return the outcome of one sample, and the worker if it is still of use."""
        try:
            await self._load(child, job.verifier)
            reply = await child.ask(job.request(), timeout=self._timeout)
            try:
                return Outcome.from_json(reply), child
            except ValueError as error:
                raise WorkerDied(f"the worker sent {error}") from None
        except LoadFailed as error:
            return Outcome.error("NOT_FOUND", str(error)), child
        except TimeoutError:
            _log.warning("sample %s took longer than %g s; its worker was killed", job.sample_id, self._timeout)
            outcome = Outcome.error(
                "TIMEOUT",
                f"{job.verifier.name} took longer than {self._timeout:g} s and was killed; "
                "make it faster, or raise reward.timeout_seconds",
            )
        except WorkerDied as error:
            _log.warning("sample %s: %s", job.sample_id, error)
            outcome = Outcome.error("WORKER_DIED", f"{error} while {job.verifier.name} scored this sample")
        await self._discard(child)
        return outcome, None

    async def _start_child(self, builtin: bool) -> Child:
        child = await Child.start(self._confinement, builtin=builtin, timeout_seconds=self._timeout)
        self._children[child.pid] = child
        if builtin != self.verifier.builtin:
            return child
        try:
            self.verifier = await self._load(child, self.verifier)
        except LoadFailed:
            await self._discard(child)
            raise
        except WorkerDied as error:
            await self._discard(child)
            raise LoadFailed(f"{self.verifier.name!r}: {error} while it imported the function") from None
        return child

    async def _try_start_child(self, builtin: bool) -> Child | None:
        try:
            return await self._start_child(builtin)
        except (LoadFailed, OSError) as error:
            self._start_error = str(error)
            _log.error("a worker could not start: %s", error)
        return None

    async def _load(self, child: Child, verifier: Verifier) -> Verifier:
        """Load a verifier in a worker, unless it has it; return it with its version."""
        if verifier.name in child.loaded:
            return verifier
        request = {"load": verifier.to_json(), "options": self._options}
        try:
            reply = await child.ask(request, timeout=LOAD_TIMEOUT_SECONDS)
        except TimeoutError:
            raise WorkerDied(f"the worker was stopped after {LOAD_TIMEOUT_SECONDS:g} s") from None
        if "error" in reply:
            raise LoadFailed(str(reply["error"]))
        child.loaded.add(verifier.name)
        return verifier.with_version(str(reply["version"]))

    async def _discard(self, child: Child) -> None:
        await child.kill()
        self._children.pop(child.pid, None)

    def _withdraw(self, entries: Sequence[_Waiting]) -> None:
        pending = [entry for entry in entries if not entry.outcome.done()]
        for entry in pending:
            entry.outcome.cancel()
        if pending:
            self._waiting = deque(entry for entry in self._waiting if not entry.outcome.done())
            self._waiting_bytes = sum(entry.job.size_bytes for entry in self._waiting)

    def _not_reached(self) -> Outcome:
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {len(self._waiting)} samples wait for {self._processes} worker "
            "processes: try again, give the call more time, or raise reward.processes",
            code="UNAVAILABLE",
        )

    def _retry_after(self) -> float:
        estimate = self._mean_seconds * len(self._waiting) / (2 * self._processes)
        return min(max(estimate, 0.1), _MAX_RETRY_AFTER_SECONDS)

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            _log.error("a slot of the worker pool ended", exc_info=error)
            self._on_failure(f"the worker pool failed: {type(error).__name__}: {error}")
