"""vLLM's `AsyncLLM` as our `Engine`. Works with vLLM 0.26 to 0.32.

vLLM's own asynchronous calls are used below `generate`: `add_request` gives a collector per
request, so that a batch is submitted in order and ended with one abort, and what vLLM puts into
the collector goes to the caller's sink at once. Between two messages
"pause" and "resume" of the scheduler the core process takes up any number of requests and
steps with all of them at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Self, TypeVar

from vllm.inputs.engine import tokens_input
from vllm.v1.engine.exceptions import EngineDeadError

from fourfold.errors import DeadlinePassed, Internal, Unavailable
from fourfold.weights.worker_control import AbortFlag, unwrap, unwrap_same
from fourfold_rollout.engine import (
    EngineDescription,
    EngineLoad,
    EngineSample,
    EngineSettings,
    EpochTerms,
    OpenReport,
    SampleOutput,
    SampleRequest,
)
from fourfold_rollout.vllm.crash import CrashWatch
from fourfold_rollout.vllm.launch import LaunchedEngine, end_processes, launch
from fourfold_rollout.vllm.logprob_table import LogprobTable
from fourfold_rollout.vllm.params import probe_params, sampling_params
from fourfold_rollout.vllm.patches.front_end import OutputBarrier
from fourfold_rollout.vllm.sample import VllmSample, logprob_values

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Workers keep their deadlines themselves; one that does not answer so long after it is stuck.
_STUCK_SECONDS: Final = 10.0
_DESCRIBE_SECONDS: Final = 30.0
_ABORT_SECONDS: Final = 10.0
_SHUTDOWN_SECONDS: Final = 1.2
_ABORT_FLAG: Final = "abort-flag"
# Rows for samples that end while others come.
_SPARE_ROWS: Final = 64
_LARGE_TABLE_BYTES: Final = 1 << 30


class VllmEngine:
    """Implements `Engine`. Made before the event loop runs (`start`), used on it after `attach`."""

    def __init__(self, launched: LaunchedEngine, settings: EngineSettings) -> None:
        self._launched = launched
        self._settings = settings
        self._llm = launched.llm
        self._barrier = OutputBarrier(launched.llm)
        self._abort_path = launched.scratch.path / _ABORT_FLAG
        self._abort_flag = AbortFlag.create(self._abort_path)
        self._live: dict[int, VllmSample] = {}
        self._logprobs: LogprobTable | None = None
        self._sampled = 0
        self._order = asyncio.Lock()
        self._paused = False
        self._posted: set[asyncio.Task[Any]] = set()
        self._probe_numbers = itertools.count()
        self._death: CrashWatch | None = None
        self._description: EngineDescription | None = None

    @classmethod
    def start(cls, settings: EngineSettings, *, fork: bool = False) -> Self:
        """Start vLLM and wait until it can sample; see `launch` for threads and errors."""
        return cls(launch(settings, fork=fork), settings)

    async def attach(self, on_death: Callable[[str], None]) -> None:
        """Begin to use the engine on the running event loop.

        Args:
            on_death: called once with the reason when the engine dies by itself.
        """
        self._death = CrashWatch(self._launched, partial(self._on_death, on_death))
        await self._unless_dead(self._llm.get_supported_tasks(), _DESCRIBE_SECONDS)
        if self._settings.gpus == 0:
            await self._call("allow_amx", timeout=_DESCRIBE_SECONDS)
        workers = unwrap(await self._call("weights_describe", timeout=_DESCRIBE_SECONDS))
        self._logprobs = await self._open_logprobs()
        self._description = EngineDescription(
            version=self._launched.version,
            device_type=workers[0]["device_type"],
            device_uuids=tuple(bytes(uuid) for worker in workers for uuid in worker["device_uuids"]),
            backends=tuple(workers[0]["backends"]),
            worker_count=len(workers),
            vocabulary_size=self._launched.vocabulary_size,
            max_context_tokens=self._settings.max_context_tokens,
            kv_cache_tokens=self._launched.kv_cache_tokens,
            sleep_mode=self._settings.sleep_mode and self._settings.gpus > 0,
        )

    @property
    def description(self) -> EngineDescription:
        """What it is; known after `attach`."""
        if self._description is None:
            raise RuntimeError("attach the engine to an event loop first")
        return self._description

    @property
    def running_count(self) -> int:
        """Samples submitted and not finished."""
        return len(self._live)

    def load(self) -> EngineLoad:
        """Return what it holds now."""
        samples = tuple(self._live.values())
        counts = [self._barrier.token_count(sample.id) for sample in samples]
        pending = sum(n - sample.given for sample, n in zip(samples, counts, strict=True))
        return EngineLoad(
            running_samples=len(samples),
            sampled_tokens=self._sampled + pending,
            held_tokens=sum(counts) + sum(len(sample.request.prompt_token_ids) for sample in samples),
        )

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        """Start samples; all of them join the same engine step, in this order."""
        await self._check_alive()
        samples: list[VllmSample] = []
        complete = False
        async with self._order:
            if self._logprobs is not None:
                self._logprobs.check_room(len(requests))
            hold = len(requests) > 1 and not self._paused
            if hold:
                await self._post(self._llm.engine_core.pause_scheduler_async("keep", False))
            try:
                for request in requests:
                    samples.append(await self._add(request))
                    await asyncio.sleep(0)  # vLLM's add_request gives the event loop no turn
                await self._check_alive()  # who comes after its death is told of it by nobody
                complete = True
            except EngineDeadError as error:
                raise await self._dead_error() from error
            finally:
                if hold:
                    await self._post(self._llm.engine_core.resume_scheduler_async())
                if not complete:
                    await self.abandon(samples)
        return samples

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        """End samples that nobody wants any more; finished ones are left alone."""
        gone = [s for s in samples if isinstance(s, VllmSample) and self.forget(s)]
        if gone and not self._is_dead():
            await self._unless_dead(self._llm.abort([s.id for s in gone], internal=True), _ABORT_SECONDS)
        for sample in gone:
            sample.release()

    async def interrupt(self) -> None:
        """End all running samples with the tokens they have, `Finish.ABORTED`."""
        await self._pause_and_resume("abort")

    async def settle(self) -> None:
        """Return when no step is under way any more."""
        await self._pause_and_resume("keep")

    async def pause(self) -> None:
        """Stop sampling where it stands; see `Engine`."""
        await self._check_alive()
        async with self._order:
            done = False
            try:
                # Not AsyncLLM.pause_generation: it sleeps 20 ms and hopes that the outputs are processed then.
                await self._unless_dead(self._llm.engine_core.pause_scheduler_async("keep", False), None)
                await self._unless_dead(self._barrier.passed(), None)
                for sample in tuple(self._live.values()):
                    sample.request.sink.boundary(sample.request.index, self._barrier.token_count(sample.id))
                self._paused = done = True
            finally:
                if not done:
                    await self._post(self._llm.engine_core.resume_scheduler_async())

    async def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused:
            self._paused = False
            await self._post(self._llm.engine_core.resume_scheduler_async())

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token after the ones before it, at temperature 1; the first is NaN."""
        await self._check_alive()
        ids = list(token_ids)
        number = next(self._probe_numbers)
        # vLLM reads no cached prefix for a request with prompt_logprobs; the salt keeps others from reading this one.
        prompt = tokens_input(ids, cache_salt=f"probe-{number}")
        collector = await self._llm.add_request(f"probe-{number}", prompt, probe_params())
        done = False
        try:
            result: Any = await self._unless_dead(collector.get(), None)
            done = True
        finally:
            if not done and not self._is_dead():
                await self._llm.abort([collector.request_id], internal=True)
        return [math.nan, *logprob_values(result.prompt_logprobs[1:], ids[1:])]

    async def open_weights(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        """Join an epoch; see `Engine`."""
        answers = await self._call(
            "weights_open",
            terms.epoch,
            terms.backend,
            terms.manifest,
            list(terms.offers),
            terms.receiver_count,
            terms.first_receiver_index,
            timeout,
            str(self._abort_path),
            timeout=timeout,
        )
        report = unwrap_same(answers)
        return OpenReport(
            direct_tensor_count=report["direct"],
            reload_tensor_count=report["reload"],
            reload_reason=report["reason"],
        )

    async def receive_weights(self, *, epoch: int, policy_version: int, skip_sums: bool, timeout: float) -> bytes:
        """Receive and load a version; return its digest."""
        answers = await self._call("weights_receive", epoch, policy_version, timeout, skip_sums, timeout=timeout)
        return bytes(unwrap_same(answers))

    async def commit_weights(self, *, epoch: int, policy_version: int) -> None:
        """Note that the received version is served now."""
        unwrap_same(await self._call("weights_commit", epoch, policy_version, timeout=_ABORT_SECONDS))

    async def abort_weights(self, *, epoch: int) -> bool:
        """Close the epoch; return whether the weights are whole and the served version's."""
        answers = unwrap(await self._call("weights_abort", epoch, timeout=_ABORT_SECONDS))
        return all(answer == "clean" for answer in answers)

    def stop_transfers(self, *, epoch: int) -> None:
        """End at once what the workers wait for; they look at a word of memory."""
        self._abort_flag.abort(epoch)

    async def weight_sums(self, *, epoch: int) -> bytes:
        """Return the sums of every tensor that was received last."""
        return bytes(unwrap_same(await self._call("weights_sums", epoch, timeout=_ABORT_SECONDS)))

    async def sleep(self, level: int, *, timeout: float) -> None:
        """Give memory up; vLLM's scheduler pauses until all is back."""
        await self._unless_dead(self._llm.sleep(level), timeout + _STUCK_SECONDS)

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        """Take memory again."""
        await self._unless_dead(self._llm.wake_up(list(tags)), timeout + _STUCK_SECONDS)

    async def close(self) -> None:
        """End the engine's processes; in about a second, whatever they do."""
        if self._death is not None:
            self._death.close()
        for task in tuple(self._posted):
            task.cancel()
        # vLLM cancels its reader of outputs last; before that the reader logs the end of the core as a crash.
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        await asyncio.to_thread(end_processes, self._launched, timeout=_SHUTDOWN_SECONDS)
        if self._logprobs is not None:
            self._logprobs.close()

    def is_running(self, sample: VllmSample) -> bool:
        """Return whether anybody wants what a sample gives."""
        return id(sample) in self._live

    def processed(self, sample: VllmSample) -> tuple[Sequence[int], Any]:
        """Return all tokens that vLLM has handed out of a running sample, and its log-probabilities if it has any."""
        return self._barrier.processed(sample.id)

    def ask_again(self, sample: VllmSample) -> None:
        """Have a sample `give` after vLLM's next outputs."""
        self._barrier.after_next(sample.flush)

    def note_output(self, sample: VllmSample, output: SampleOutput) -> None:
        """Count what a running sample has given."""
        self._sampled += len(output.token_ids)
        if output.finish is not None:
            self.forget(sample)

    def forget(self, sample: VllmSample) -> bool:
        """Know that a sample has ended; return whether it was running."""
        return self._live.pop(id(sample), None) is not None

    async def _open_logprobs(self) -> LogprobTable | None:
        """Have the workers write log-probabilities to a table; None, and a warning, when one of them cannot.

        vLLM's own way costs half of its tokens per second: objects for every token in three processes.
        """
        rows = self._settings.max_concurrent_samples + _SPARE_ROWS
        table = LogprobTable(rows, self._settings.max_context_tokens)
        terms = (table.path, table.slots, table.width)
        reasons: list[str] = await self._call("logprobs_open", *terms, timeout=_DESCRIBE_SECONDS)
        if not any(reasons):
            if self._settings.gpus and table.byte_count > _LARGE_TABLE_BYTES:
                gib = table.byte_count / 2**30
                _log.info("%.1f GiB of main memory are locked for log-probabilities: %d samples", gib, rows)
            return table
        table.close()
        reason = next(reason for reason in reasons if reason)
        _log.warning("log-probabilities come from vLLM itself, which samples much slower with them: %s", reason)
        return None

    async def _add(self, request: SampleRequest) -> VllmSample:
        row = None if self._logprobs is None else self._logprobs.acquire(request.max_tokens)
        sample = VllmSample(self, request, row)
        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        added = False
        try:
            collector = await self._llm.add_request(request.key, prompt, sampling_params(request, row))
            added = True
        finally:
            if not added:
                sample.release()
        self._live[id(sample)] = sample
        sample.attach(collector)
        return sample

    async def _pause_and_resume(self, mode: Any) -> None:
        await self._check_alive()
        async with self._order:
            try:
                await self._unless_dead(self._llm.engine_core.pause_scheduler_async(mode, False), None)
            finally:
                self._paused = False
                await self._post(self._llm.engine_core.resume_scheduler_async())

    async def _post(self, message: Coroutine[Any, Any, Any]) -> None:
        """Send a message to the core process without waiting for its answer. Messages arrive in order."""
        task = asyncio.get_running_loop().create_task(message)
        self._posted.add(task)
        task.add_done_callback(self._forget_posted)
        await asyncio.sleep(0)  # it runs up to its wait for the answer: it is sent

    def _forget_posted(self, task: asyncio.Task[Any]) -> None:
        self._posted.discard(task)
        if not task.cancelled():
            task.exception()  # of a dead engine: whoever waits for it is told why it died

    async def _call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call a verb in every worker; each has its own deadline, `timeout` from now."""
        answers: list[Any] = await self._unless_dead(
            self._llm.collective_rpc(method, args=args), timeout + _STUCK_SECONDS
        )
        return answers

    async def _unless_dead(self, work: Awaitable[_T], timeout: float | None) -> _T:
        """Await an answer of the engine, or its death."""
        assert self._death is not None, "attached"
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._death.reason}
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._check_alive()
                raise DeadlinePassed(f"the engine has not answered for {timeout} s")
        finally:
            if not task.done():
                task.cancel()
        error = task.exception()
        if isinstance(error, EngineDeadError):
            raise await self._dead_error() from error
        if error is not None:  # vLLM turns errors in its core process into plain exceptions
            raise Internal(f"the engine failed: {error}") from error
        return task.result()

    async def _check_alive(self) -> None:
        if self._is_dead():
            raise await self._dead_error()

    async def _dead_error(self) -> Unavailable:
        """Return the error of every call to a dead engine."""
        assert self._death is not None, "attached"
        self._death.begin()
        return Unavailable(await asyncio.shield(self._death.reason), reason="ENGINE_DEAD")

    def _is_dead(self) -> bool:
        return self._death is None or self._death.begun or bool(self._llm.errored)

    def _on_death(self, on_death: Callable[[str], None], reason: str) -> None:
        for sample in tuple(self._live.values()):
            sample.fail(Unavailable(reason, reason="ENGINE_DEAD"))
        on_death(reason)
