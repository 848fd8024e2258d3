"""Runs reward functions in worker processes, with a hard time limit for each sample.

    score() --> bounded queue --> runner 0 --> worker process        score() and the queue: sample_queue.py
                              |-> runner 1 --> worker process
                              '-> extra runner, while the sample of another one is stuck

A runner is a task that takes a worker for each batch: as many samples as the worker scores in about 50 ms, so that
slow functions still spread over the workers. At the time limit the runner kills the worker, even inside C code, so that
only this sample gets an error; samples behind it go back to the front of the queue. Long before that, when a sample
runs 20 times longer than usual, it counts as stuck: the pool starts another runner, so that `processes` workers always
make progress, and the runner that is too many afterwards ends. As long as samples get stuck, spare workers are kept
ready. `fourfold.workers.pool` keeps the workers.

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
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Final

from fourfold.errors import ConfigError
from fourfold.workers import frames
from fourfold.workers.child import WorkerDied
from fourfold.workers.pool import Pool
from fourfold_reward.backend import MAX_WAITING_SAMPLES
from fourfold_reward.batch import Batch, FunctionTimes, QueuedJob, Worker
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.protocol import MAX_REPLY_BYTES, Outcome
from fourfold_reward.sample_queue import QueuedScorer
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


class WorkerPool(QueuedScorer):
    """Worker processes and their queue. Use it from one event loop, in the main thread."""

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
        super().__init__(
            workers=processes,
            title="worker processes",
            remedy="raise reward.processes",
            max_waiting=max_waiting_samples,
        )
        self.verifier = verifier
        self.reads = Reads()  # of the verifier; known after `start`
        self._options = {task: dict(values) for task, values in options.items()}
        self._processes = processes
        self._timeout = timeout_seconds
        self._sandbox = sandbox
        self._times = FunctionTimes()
        self._pool = Pool(self._launch, title="worker pool", on_failure=on_failure)
        self._runners = 0
        self.stuck = 0  # runners whose sample runs much longer than usual
        self._lately_stuck = 0  # samples that got stuck in the last _SPARE_SECONDS

    async def start(self) -> None:
        """Start the workers and load the verifier in each. Afterwards `verifier` has its version.

        Raises ConfigError: the verifier cannot be loaded.
        """
        try:
            await self._pool.start(self._processes)
        except WorkerDied as error:
            raise ConfigError(f"reward.function: {error}") from None
        for _ in range(self._processes):
            self._add_runner()

    async def close(self) -> None:
        """Stop the runners and kill the workers. Queued samples get no outcome."""
        await self._pool.close()

    @property
    def scorer(self) -> str:
        """Name and version of the verifier."""
        return f"{self.verifier.name}@{self.verifier.version}"

    @property
    def process_count(self) -> int:
        """Return `processes`, or more while extra workers run."""
        return max(self._processes, self._runners)

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return self._pool.pids()

    # -- queue --------------------------------------------------------------------------------------------------------

    def _take_batch(self) -> list[QueuedJob]:
        """Take samples from the queue: at most about 50 ms of work, and a share of each idle worker."""
        most = 1
        if mean := self._times.mean:  # without a known time a sample goes alone
            share = max(self._share, int(_UNDIVIDED_SECONDS / mean))
            most = max(min(int(_BATCH_SECONDS / mean), _BATCH_SAMPLES, share), 1)
        return self._queue.take(most, _BATCH_BYTES)

    # -- runners ------------------------------------------------------------------------------------------------------

    def _on_filled(self) -> None:
        """Let runners take samples; start extra ones in the place of stuck ones."""
        super()._on_filled()
        while self.stuck and self._queue and self._active < self._processes and self._runners < self._max_workers:
            self._add_runner()

    @property
    def _active(self) -> int:
        """Return the number of runners that make progress or wait."""
        return self._runners - self.stuck

    @property
    def _max_workers(self) -> int:
        return self._processes + min(_EXTRA_PER_PROCESS * self._processes, MAX_EXTRA_WORKERS)

    def _resize(self) -> None:
        """Keep a worker for each runner, and spare ones while samples get stuck.

        A sample behind a stuck one then waits for no start. Their number grows with that of stuck samples.
        """
        spares = min(1 + self.stuck // 2, _MAX_SPARES) if self._lately_stuck else 0
        self._pool.resize(min(self.process_count + spares, self._max_workers))

    def _add_runner(self) -> None:
        self._runners += 1
        self._resize()
        self._pool.tasks.add(self._run())

    async def _run(self) -> None:
        while self._active <= self._processes:
            await self._wait_for_samples()
            self.busy += 1  # also while it waits for a worker
            try:
                await self._score_next()
            finally:
                self.busy -= 1
        self._runners -= 1  # now, so that no second runner finds itself too many
        self._resize()

    # -- batches ------------------------------------------------------------------------------------------------------

    async def _score_next(self) -> None:
        """Score the next batch, and give or put back all of its samples."""
        try:
            worker = await self._pool.take()
        except (WorkerDied, OSError) as error:
            for entry in self._queue.take(1, _BATCH_BYTES):
                entry.set_result(Outcome.error("WORKER_DIED", f"no worker process could be started: {error}"))
            return
        if not (entries := self._take_batch()):  # other runners have taken the sample meanwhile
            self._pool.put(worker)
            return
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
            self._pool.put(worker)
            return
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
        await self._pool.kill(worker)
        if current is not None:
            current.set_result(outcome)

    def _on_scored(self, count: int, seconds: float) -> None:
        """Count samples that took `seconds` together."""
        self.seconds.add(seconds / count, count)
        weight = 1 - (1 - _NEWEST_WEIGHT) ** count
        self._mean_seconds += weight * (seconds / count - self._mean_seconds)

    def _on_stuck(self, batch: Batch) -> None:
        self.stuck += 1
        self._lately_stuck += 1
        asyncio.get_running_loop().call_later(_SPARE_SECONDS, self._forget_stuck)
        self._queue.put_back(batch.give_up_rest())
        self._on_filled()
        self._resize()

    def _forget_stuck(self) -> None:
        self._lately_stuck -= 1
        self._resize()

    def _on_moving(self) -> None:
        self.stuck -= 1

    # -- workers ------------------------------------------------------------------------------------------------------

    async def _launch(self) -> Worker:
        """Start a worker that has loaded the verifier. Raises WorkerDied: it cannot be loaded."""
        rights = partial(self._sandbox.rights, builtin=self.verifier.builtin, timeout_seconds=self._timeout)
        worker = await Worker.start(_MODULE, rights, frames.Frames(MAX_REPLY_BYTES), purpose="reward-worker")
        try:
            self.verifier = await self._load(worker)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, VerifierError):
                raise WorkerDied(str(error)) from None
            if isinstance(error, WorkerDied):
                raise WorkerDied(f"{self.verifier.name!r}: {error} while it imported the function") from None
            raise
        return worker

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
