"""Runs reward functions in worker processes, with a hard time limit for each sample.

    score() --> bounded queue --> runner 0 --> worker process
                              |-> runner 1 --> worker process
                              '-> extra runner, while the sample of another one is stuck

A runner is a task that owns a worker and gives it batches: as many samples as the worker scores in about 50 ms, so that
slow functions still spread over the workers. At the time limit the runner kills the worker, even inside C code, so that
only this sample gets an error; samples behind it go back to the front of the queue. Long before that, when a sample
runs 20 times longer than usual, it counts as stuck: the pool starts another runner, so that `processes` workers always
make progress, and the runner that is too many afterwards ends. As long as samples get stuck, spare workers are kept
ready.

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
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.host.timing import Histogram
from fourfold.workers import frames
from fourfold.workers.child import WorkerDied
from fourfold_reward.backend import MAX_WAITING_SAMPLES, check_room
from fourfold_reward.batch import Batch, FunctionTimes, Queue, QueuedJob, Worker
from fourfold_reward.job import Job
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.protocol import MAX_REPLY_BYTES, Outcome
from fourfold_reward.signatures import Reads
from fourfold_reward.verifiers import GymOptions
from fourfold_reward.worker_sandbox import WorkerSandbox

_log = logging.getLogger(__name__)

_MODULE: Final = "fourfold_reward.worker"

# The import of a verifier's libraries has a limit of its own, because no sample causes it.
LOAD_TIMEOUT_SECONDS: Final = 120.0
MAX_EXTRA_WORKERS: Final = 64
"""Most workers beside the `processes` ones, in place of stuck ones; and at most 8 for each of `processes`."""
_EXTRA_PER_PROCESS: Final = 8
_MAX_SPARES: Final = 4
_SPARE_SECONDS: Final = 60.0  # how long spare workers stay after a sample got stuck
_BATCH_SECONDS: Final = 0.05  # expected time of a batch
_UNDIVIDED_SECONDS: Final = 0.002  # so short a batch is not worth a second worker
_BATCH_SAMPLES: Final = 512
_BATCH_BYTES: Final = 1 << 20
_NEWEST_WEIGHT: Final = 0.1
_DEFAULT_SANDBOX: Final = WorkerSandbox()


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
            verifier: the function that scores; every worker loads it at the start.
            timeout_seconds: time limit of one sample.
            on_failure: called with a message if a task of the pool ends because of a bug.
        """
        self.verifier = verifier
        self.pure = False
        self.reads = Reads()  # of the verifier; known after `start`
        self._options = {task: dict(values) for task, values in options.items()}
        self._processes = processes
        self._timeout = timeout_seconds
        self._on_failure = on_failure
        self._sandbox = sandbox
        self._max_waiting = max_waiting_samples
        self._queue = Queue(self._wake_runners)
        self._queue_filled = asyncio.Event()
        self._times = FunctionTimes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runners = 0
        self._idle = 0  # runners that wait for samples
        self.stuck = 0  # runners whose sample runs much longer than usual
        self._workers: dict[int, Worker] = {}
        self._spares: list[Worker] = []
        self._spares_starting = 0
        self._keeps_spares = False
        self._spare_taken = asyncio.Event()
        self._stuck_at = 0.0  # when a sample last got stuck
        self._closed = False
        self._mean_seconds = 0.0
        self.busy = 0  # runners that score samples, or start a worker for them
        self.seconds = Histogram()  # of each sample that got a worker
        self._start_error = ""

    async def start(self) -> None:
        """Start the workers and load the verifier in each. Afterwards `verifier` has its version.

        Raises ConfigError: the verifier cannot be loaded.
        """
        try:
            # One worker first: if it fails, so would the others, and it returns the version that they must have.
            await self._start_worker()
        except VerifierError as error:
            raise ConfigError(f"reward.function: {error}") from None
        await asyncio.gather(*(self._try_start_worker() for _ in range(self._processes - 1)))
        workers = list(self._workers.values())
        for index in range(self._processes):
            self._add_runner(workers[index] if index < len(workers) else None)

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes in order.

        Args:
            jobs: at least one.
            timeout: seconds; samples without an outcome then get an error, and the others keep theirs.

        Raises:
            Overloaded: the queue is full. No sample was queued.
        """
        check_room(
            jobs,
            waiting=len(self._queue),
            waiting_bytes=self._queue.size_bytes,
            max_waiting=self._max_waiting,
            seconds_per_sample=self._mean_seconds / self._processes,
        )
        outcomes = await self._queue.put(jobs, timeout=timeout)
        return [outcome or self._too_late() for outcome in outcomes]

    async def close(self) -> None:
        """Stop the runners and kill the workers. Queued samples get no outcome."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._discard(worker) for worker in list(self._workers.values())))

    @property
    def scorer(self) -> str:
        """Name and version of the verifier."""
        return f"{self.verifier.name}@{self.verifier.version}"

    @property
    def process_count(self) -> int:
        """Return `processes`, or more while extra workers run."""
        return max(self._processes, self._runners)

    @property
    def waiting_samples(self) -> int:
        return len(self._queue)

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return list(self._workers)

    # -- queue --------------------------------------------------------------------------------------------------------

    def _take_batch(self) -> list[QueuedJob]:
        """Take samples from the queue: at most about 50 ms of work, and a share of each idle worker."""
        most = 1
        if mean := self._times.mean:  # without a known time a sample goes alone
            share = max(-(-len(self._queue) // (1 + self._idle)), int(_UNDIVIDED_SECONDS / mean))
            most = max(min(int(_BATCH_SECONDS / mean), _BATCH_SAMPLES, share), 1)
        return self._queue.take(most, _BATCH_BYTES)

    # -- runners ------------------------------------------------------------------------------------------------------

    def _wake_runners(self) -> None:
        """Let runners take samples; start extra ones in the place of stuck ones."""
        self._queue_filled.set()
        while self.stuck and self._queue and self._active < self._processes and not self._closed:
            if not self._spares and not self._room:
                break
            self._add_runner(self._take_spare())

    @property
    def _active(self) -> int:
        """Return the number of runners that make progress or wait."""
        return self._runners - self.stuck

    @property
    def _room(self) -> int:
        """Return how many workers may be added."""
        most = self._processes + min(_EXTRA_PER_PROCESS * self._processes, MAX_EXTRA_WORKERS)
        return max(most - self._runners - len(self._spares) - self._spares_starting, 0)

    def _add_runner(self, worker: Worker | None) -> None:
        self._runners += 1
        self._add_task(self._run(worker))

    def _add_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("task of the worker pool failed", exc_info=error)
            self._on_failure(f"the worker pool failed: {type(error).__name__}: {error}")

    async def _run(self, worker: Worker | None) -> None:
        while self._active <= self._processes:
            while not self._queue:
                self._queue_filled.clear()
                self._idle += 1
                try:
                    await self._queue_filled.wait()
                finally:
                    self._idle -= 1
            worker = await self._score_next(worker)
        self._runners -= 1  # now, so that no second runner finds itself too many
        if worker is not None and self._keeps_spares and self._wanted_spares > 0:
            self._spares.append(worker)
        elif worker is not None:
            await self._discard(worker)

    async def _score_next(self, worker: Worker | None) -> Worker | None:
        """Score the next batch; start or replace the worker if that is necessary. Return the worker for the next."""
        scored = False
        self.busy += 1
        try:
            worker = await self._usable(worker)
            if batch := self._take_batch():  # other runners may have taken the sample meanwhile
                worker, scored = await self._score_batch(worker, batch), True
        finally:
            self.busy -= 1
        if scored and worker is None and self._active <= self._processes:
            # Now, because its start overlaps with the wait for the next sample.
            worker = await self._usable(None)
        return worker

    async def _usable(self, worker: Worker | None) -> Worker | None:
        """Return the worker, or a new one if there is none, or it ended or wrote something while it had no work."""
        if worker is not None and not worker.usable:
            await self._discard(worker)
            worker = None
        return worker or self._take_spare() or await self._try_start_worker()

    # -- batches ------------------------------------------------------------------------------------------------------

    async def _score_batch(self, worker: Worker | None, entries: Sequence[QueuedJob]) -> Worker | None:
        """Hand out the outcomes of a batch; return the worker unless it had to be killed."""
        if worker is None:
            entries[0].set_result(
                Outcome.error("WORKER_DIED", f"no worker process could be started: {self._start_error}")
            )
            self._queue.put_back(entries[1:])
            return None
        batch = Batch(
            worker,
            entries,
            self._times,
            timeout=self._timeout,
            on_scored=self._on_scored,
            on_stuck=self._on_stuck,
            on_moving=self._on_moving,
        )
        try:
            await batch.run()
            return worker
        except TimeoutError:
            cause = f"killed at the time limit of {self._timeout:g} s"
            outcome = Outcome.error(
                "TIMEOUT",
                f"{self.verifier.name} took longer than {self._timeout:g} s and was killed; "
                "make it faster, or raise reward.timeout_seconds",
            )
            self._on_scored(1, self._timeout)
        except WorkerDied as error:
            cause = str(error)
            outcome = Outcome.error("WORKER_DIED", f"{error} while {self.verifier.name} scored this sample")
        current = batch.current
        _log.warning("worker lost: sample=%s cause=%s", current.item.sample_id if current else "", cause)
        self._queue.put_back(batch.rest)
        await self._discard(worker)
        if current is not None:
            current.set_result(outcome)
        return None

    def _on_scored(self, count: int, seconds: float) -> None:
        """Count samples that took `seconds` together."""
        self.seconds.add(seconds / count, count)
        weight = 1 - (1 - _NEWEST_WEIGHT) ** count
        self._mean_seconds += weight * (seconds / count - self._mean_seconds)

    def _on_stuck(self, batch: Batch) -> None:
        self.stuck += 1
        self._stuck_at = asyncio.get_running_loop().time()
        self._queue.put_back(batch.give_up_rest())
        self._wake_runners()
        self._spare_taken.set()  # more are wanted now
        if not self._keeps_spares:
            self._keeps_spares = True
            self._add_task(self._keep_spares())

    def _on_moving(self) -> None:
        self.stuck -= 1

    # -- workers ------------------------------------------------------------------------------------------------------

    @property
    def _wanted_spares(self) -> int:
        """Return the number of missing spare workers, which grows with the number of stuck samples."""
        return min(1 + self.stuck // 2, _MAX_SPARES) - len(self._spares) - self._spares_starting

    async def _keep_spares(self) -> None:
        """Keep spare workers while samples get stuck, so that a sample behind a stuck one waits for no start."""
        loop = asyncio.get_running_loop()
        while (left := self._stuck_at + _SPARE_SECONDS - loop.time()) > 0:
            self._spare_taken.clear()
            for _ in range(min(self._wanted_spares, self._room)):
                self._spares_starting += 1
                self._add_task(self._start_spare())
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._spare_taken.wait()
        self._keeps_spares = False
        while (spare := self._take_spare()) is not None:
            await self._discard(spare)

    async def _start_spare(self) -> None:
        worker = await self._try_start_worker()
        self._spares_starting -= 1
        if worker is not None and self._keeps_spares:
            self._spares.append(worker)
        elif worker is not None:
            await self._discard(worker)
        self._wake_runners()  # a sample may have got stuck meanwhile, with no room for another worker

    def _take_spare(self) -> Worker | None:
        self._spare_taken.set()
        return self._spares.pop() if self._spares else None

    async def _start_worker(self) -> Worker:
        rights = partial(self._sandbox.rights, builtin=self.verifier.builtin, timeout_seconds=self._timeout)
        worker = await Worker.start(_MODULE, rights, frames.Frames(MAX_REPLY_BYTES), purpose="reward-worker")
        self._workers[worker.pid] = worker
        try:
            self.verifier = await self._load(worker)
        except VerifierError:
            await self._discard(worker)
            raise
        except WorkerDied as error:
            await self._discard(worker)
            raise VerifierError(f"{self.verifier.name!r}: {error} while it imported the function") from None
        return worker

    async def _try_start_worker(self) -> Worker | None:
        try:
            return await self._start_worker()
        except (VerifierError, OSError) as error:
            self._start_error = str(error)
            _log.error("worker start failed: %s", error)
        return None

    async def _load(self, worker: Worker) -> Verifier:
        """Load the verifier in a worker; return it with its version."""
        worker.send(frames.pack({"load": asdict(self.verifier), "options": self._options}))
        try:
            replies = await worker.receive(timeout=LOAD_TIMEOUT_SECONDS)
            if len(replies) > 1:
                raise ValueError(f"{len(replies)} replies to one request")
            reply = frames.unpack(replies[0])
        except TimeoutError:
            raise WorkerDied(f"the worker was stopped after {LOAD_TIMEOUT_SECONDS:g} s") from None
        except ValueError as error:
            raise WorkerDied(f"the worker sent an invalid reply: {error}") from None
        if "error" in reply:
            raise VerifierError(str(reply["error"]))
        if not {"version", "reads_tokens", "reads_messages", "pure"} <= reply.keys():  # the module wrote into the pipe
            raise WorkerDied("the worker sent an invalid reply")
        self.reads = Reads(tokens=bool(reply["reads_tokens"]), messages=bool(reply["reads_messages"]))
        self.pure = reply["pure"] is True
        return replace(self.verifier, version=str(reply["version"]))

    async def _discard(self, worker: Worker) -> None:
        await worker.kill()
        self._workers.pop(worker.pid, None)

    def _too_late(self) -> Outcome:
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {len(self._queue)} samples wait for {self._processes} worker "
            "processes: try again, give the call more time, or raise reward.processes",
            code="UNAVAILABLE",
        )
