"""Runs reward functions in worker processes, with a hard time limit for each sample.

    score() --> bounded queue --> slot 0 --> worker process
                              `-> slot 1 --> worker process

A slot is a task that owns a worker and gives it one sample at a time. At the time limit the slot kills the worker, even
inside C code, and starts another one, so that only this sample gets an error. Built-in verifiers and reward functions
never share a worker, because their rights differ (`worker_sandbox`): a slot starts a second worker when it needs one.

No library is used, because each of these (November 2026) unpickles a worker's reply in the service: code in the sandbox
could run code outside of it. Their other gaps:
- concurrent.futures, loky, multiprocess, aiomultiprocess: no time limit that kills the worker of a single task
- pebble: unbounded queue; billiard: a full queue blocks the thread, and with it the event loop
- anyio.to_process, trio-parallel: they kill on cancellation, but have no bounded queue
- ray, dask.distributed: the workers need sockets, which the sandbox refuses
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from fourfold.errors import ConfigError, Overloaded
from fourfold.host.timing import Histogram
from fourfold_reward.job import Job
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.protocol import Outcome
from fourfold_reward.signatures import Reads
from fourfold_reward.verifiers import GymOptions
from fourfold_reward.worker_process import WorkerDied, WorkerProcess
from fourfold_reward.worker_sandbox import WorkerSandbox

_log = logging.getLogger(__name__)

# The import of a verifier's libraries has a limit of its own, because no sample causes it.
LOAD_TIMEOUT_SECONDS: Final = 120.0
MAX_WAITING_SAMPLES: Final = 16_384
MAX_WAITING_BYTES: Final = 256 << 20
_MAX_RETRY_AFTER_SECONDS: Final = 30.0
_NEWEST_WEIGHT: Final = 0.1
_DEFAULT_SANDBOX: Final = WorkerSandbox()


@dataclass(slots=True)
class _QueuedJob:
    job: Job
    outcome: asyncio.Future[Outcome] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerPool:
    """Worker processes and their queue. Use it from one event loop."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        options: GymOptions,
        processes: int,
        timeout_seconds: float,
        on_failure: Callable[[str], None],
        sandbox: WorkerSandbox = _DEFAULT_SANDBOX,
        max_waiting_samples: int = MAX_WAITING_SAMPLES,
    ) -> None:
        """Create a pool; `start` starts the workers.

        Args:
            verifier: the default verifier; every worker of its kind loads it at the start.
            timeout_seconds: time limit of one sample.
            on_failure: called with a message if a slot ends because of a bug.
        """
        self.verifier = verifier
        self.pure = False
        self.reads = Reads()  # of the default verifier; known after `start`
        self._options = {task: dict(values) for task, values in options.items()}
        self._processes = processes
        self._timeout = timeout_seconds
        self._on_failure = on_failure
        self._sandbox = sandbox
        self._max_waiting = max_waiting_samples
        self._queue: deque[_QueuedJob] = deque()
        self._queued_bytes = 0
        self._queue_filled = asyncio.Event()
        self._slots: list[asyncio.Task[None]] = []
        self._workers: dict[int, WorkerProcess] = {}
        self._mean_seconds = 0.0
        self.busy = 0  # slots that score a sample, or start a worker for one
        self.seconds = Histogram()  # of each sample that got a worker
        self._start_error = ""

    async def start(self) -> None:
        """Start the workers and load the verifier in each. Afterwards `verifier` has its version.

        Raises ConfigError: the verifier cannot be loaded.
        """
        builtin = self.verifier.builtin
        try:
            # One worker first: if it fails, so would the others, and it returns the version that they must have.
            await self._start_worker(builtin)
        except VerifierError as error:
            raise ConfigError(f"reward.function: {error}") from None
        await asyncio.gather(*(self._try_start_worker(builtin) for _ in range(self._processes - 1)))
        workers = list(self._workers.values())
        for index in range(self._processes):
            slot = asyncio.create_task(self._run_slot(workers[index] if index < len(workers) else None))
            slot.add_done_callback(self._on_slot_end)
            self._slots.append(slot)

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes in order.

        Args:
            jobs: at least one.
            timeout: seconds; samples without an outcome then get an error, and the others keep theirs.

        Raises:
            Overloaded: the queue is full. No sample was queued.
        """
        size = sum(job.size_bytes for job in jobs)
        full = len(self._queue) + len(jobs) > self._max_waiting or self._queued_bytes + size > MAX_WAITING_BYTES
        if full and self._queue:  # an empty queue takes any call; the servicer limits its size
            raise Overloaded(
                f"{len(self._queue)} samples wait and {len(jobs)} more do not fit (limit {self._max_waiting} "
                f"samples, {MAX_WAITING_BYTES >> 20} MiB); come back later, or start more reward services",
                reason="QUEUE_FULL",
                # The expected time until half of the queue is empty.
                retry_after=min(
                    max(self._mean_seconds * len(self._queue) / (2 * self._processes), 0.1), _MAX_RETRY_AFTER_SECONDS
                ),
            )
        queued = [_QueuedJob(job) for job in jobs]
        self._queue.extend(queued)
        self._queued_bytes += size
        self._queue_filled.set()
        try:
            await asyncio.wait([entry.outcome for entry in queued], timeout=timeout)
            return [entry.outcome.result() if entry.outcome.done() else self._too_late() for entry in queued]
        finally:  # also when the caller went away
            self._withdraw(queued)

    async def close(self) -> None:
        """Stop the slots and kill the workers. Queued samples get no outcome."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()
        await asyncio.gather(*(self._discard(worker) for worker in list(self._workers.values())))

    @property
    def scorer(self) -> str:
        """Name and version of the default verifier."""
        return f"{self.verifier.name}@{self.verifier.version}"

    @property
    def process_count(self) -> int:
        return self._processes

    @property
    def waiting_samples(self) -> int:
        return len(self._queue)

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return list(self._workers)

    async def _run_slot(self, first: WorkerProcess | None) -> None:
        loop = asyncio.get_running_loop()
        workers: dict[bool, WorkerProcess | None] = {first.builtin: first} if first is not None else {}
        while True:
            while not self._queue:
                self._queue_filled.clear()
                await self._queue_filled.wait()
            queued = self._queue.popleft()
            self._queued_bytes -= queued.job.size_bytes
            builtin = queued.job.function.builtin
            self.busy += 1
            worker = workers.get(builtin) or await self._try_start_worker(builtin)
            started = loop.time()
            if worker is None:
                outcome = Outcome.error("WORKER_DIED", f"no worker process could be started: {self._start_error}")
            else:
                outcome, worker = await self._score_one(worker, queued.job)
            self.busy -= 1
            self.seconds.add(loop.time() - started)
            self._mean_seconds += _NEWEST_WEIGHT * (loop.time() - started - self._mean_seconds)
            if not queued.outcome.done():
                queued.outcome.set_result(outcome)
            # Replace a dead worker now: its start overlaps with the wait for the next sample.
            workers[builtin] = worker or await self._try_start_worker(builtin)

    async def _score_one(self, worker: WorkerProcess, job: Job) -> tuple[Outcome, WorkerProcess | None]:
        """Return the outcome of one sample, and the worker unless it had to be killed."""
        try:
            await self._load(worker, job.function)
            reply = await worker.call(job.request(), timeout=self._timeout)
            try:
                return Outcome.from_json(reply), worker
            except ValueError as error:
                raise WorkerDied(f"the worker sent an invalid reply: {error}") from None
        except VerifierError as error:
            return Outcome.error("NOT_FOUND", str(error)), worker
        except TimeoutError:
            _log.warning("worker killed at the time limit: sample=%s seconds=%g", job.sample_id, self._timeout)
            outcome = Outcome.error(
                "TIMEOUT",
                f"{job.function.name} took longer than {self._timeout:g} s and was killed; "
                "make it faster, or raise reward.timeout_seconds",
            )
        except WorkerDied as error:
            _log.warning("worker died: sample=%s cause=%s", job.sample_id, error)
            outcome = Outcome.error("WORKER_DIED", f"{error} while {job.function.name} scored this sample")
        await self._discard(worker)
        return outcome, None

    async def _start_worker(self, builtin: bool) -> WorkerProcess:
        worker = await WorkerProcess.start(self._sandbox, builtin=builtin, timeout_seconds=self._timeout)
        self._workers[worker.pid] = worker
        if builtin != self.verifier.builtin:
            return worker
        try:
            self.verifier = await self._load(worker, self.verifier)
        except VerifierError:
            await self._discard(worker)
            raise
        except WorkerDied as error:
            await self._discard(worker)
            raise VerifierError(f"{self.verifier.name!r}: {error} while it imported the function") from None
        return worker

    async def _try_start_worker(self, builtin: bool) -> WorkerProcess | None:
        try:
            return await self._start_worker(builtin)
        except (VerifierError, OSError) as error:
            self._start_error = str(error)
            _log.error("worker start failed: %s", error)
        return None

    async def _load(self, worker: WorkerProcess, verifier: Verifier) -> Verifier:
        """Load a verifier in a worker unless it is loaded; return it with its version."""
        if verifier.name in worker.loaded:
            return verifier
        request = {"load": asdict(verifier), "options": self._options}
        try:
            reply = await worker.call(request, timeout=LOAD_TIMEOUT_SECONDS)
        except TimeoutError:
            raise WorkerDied(f"the worker was stopped after {LOAD_TIMEOUT_SECONDS:g} s") from None
        if "error" in reply:
            raise VerifierError(str(reply["error"]))
        worker.loaded.add(verifier.name)
        if verifier.name == self.verifier.name:
            self.reads = Reads(tokens=bool(reply["reads_tokens"]), messages=bool(reply["reads_messages"]))
        return replace(verifier, version=str(reply["version"]))

    async def _discard(self, worker: WorkerProcess) -> None:
        await worker.kill()
        self._workers.pop(worker.pid, None)

    def _withdraw(self, queued: Sequence[_QueuedJob]) -> None:
        """Remove the jobs without an outcome from the queue."""
        pending = [entry for entry in queued if not entry.outcome.done()]
        for entry in pending:
            entry.outcome.cancel()
        if pending:
            self._queue = deque(entry for entry in self._queue if not entry.outcome.done())
            self._queued_bytes = sum(entry.job.size_bytes for entry in self._queue)

    def _too_late(self) -> Outcome:
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {len(self._queue)} samples wait for {self._processes} worker "
            "processes: try again, give the call more time, or raise reward.processes",
            code="UNAVAILABLE",
        )

    def _on_slot_end(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            _log.error("slot of the worker pool failed", exc_info=error)
            self._on_failure(f"the worker pool failed: {type(error).__name__}: {error}")
