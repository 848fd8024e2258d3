"""Implements `RolloutEngine` with vLLM's `AsyncLLM`. Works with vLLM 0.26 to 0.32.

It uses vLLM's calls below `generate`. `add_request` returns a collector per request, so that a batch is submitted in
order and ended with one abort, and outputs go to the caller's sink at once (`take_outputs`). Between a "pause" and a
"resume" message to the scheduler, the core process accepts any number of requests and then steps with all of them.

The methods are documented in `RolloutEngine`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, Final, Self, TypeVar

from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from fourfold.errors import DeadlinePassed, Internal, Unavailable
from fourfold.weights.apply.adapter import POLICY_ADAPTER
from fourfold.weights.worker_control import AbortFlag, not_proven, unwrap, unwrap_same
from fourfold_rollout.engine import (
    EngineDescription,
    EngineLoad,
    EngineSample,
    EngineSettings,
    EpochTerms,
    FeedTerms,
    OpenReport,
    SampleRequest,
)
from fourfold_rollout.vllm.crash import CrashWatch
from fourfold_rollout.vllm.launch import LaunchedEngine, end_processes, launch
from fourfold_rollout.vllm.logprob_table import LogprobTable
from fourfold_rollout.vllm.patches.front_end import OutputBarrier
from fourfold_rollout.vllm.sample import RunningSamples, VllmSample, logprob_values, probe_params, sampling_params

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Workers enforce their own deadlines. A worker without an answer this long after its deadline is stuck.
_STUCK_SECONDS: Final = 10.0
_DESCRIBE_SECONDS: Final = 30.0
_ABORT_SECONDS: Final = 10.0
_SHUTDOWN_SECONDS: Final = 1.2
_ABORT_FLAG: Final = "abort-flag"
# Extra rows, because rows of ending samples are still in use when new samples arrive.
_SPARE_ROWS: Final = 64
_LARGE_TABLE_BYTES: Final = 1 << 30


class VllmEngine:
    """Created before the event loop runs (`start`) and used on it after `attach`."""

    def __init__(self, launched: LaunchedEngine, settings: EngineSettings) -> None:
        self._launched = launched
        self._settings = settings
        self._llm = launched.llm
        # All requests name the adapter: on a CPU vLLM gives a request without one that of the last slot. The workers
        # have it, so nothing reads the path, which vLLM requires.
        self._adapter = LoRARequest("policy", POLICY_ADAPTER, "memory") if settings.adapter_rank else None
        self._barrier = OutputBarrier(launched.llm)
        self._abort_path = launched.scratch.path / _ABORT_FLAG
        self._abort_flag = AbortFlag.create(self._abort_path)
        self._running = RunningSamples()
        self._logprobs: LogprobTable | None = None
        self._order = asyncio.Lock()
        self._paused = False
        self._posted: set[asyncio.Task[Any]] = set()
        self._probe_numbers = itertools.count()
        self._scored = 0  # running calls of `prompt_logprobs`
        self._death: CrashWatch | None = None
        self._description: EngineDescription | None = None

    @classmethod
    def start(cls, settings: EngineSettings, *, fork: bool = False) -> Self:
        """Start vLLM and wait until it can sample; see `launch`."""
        return cls(launch(settings, fork=fork), settings)

    async def attach(self, on_death: Callable[[str], None]) -> None:
        """Use the engine on the running event loop; `on_death` is called once with the reason if the engine dies."""
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
            grammar_obstacle=self._grammar_obstacle(),
        )

    @property
    def description(self) -> EngineDescription:
        if self._description is None:
            raise RuntimeError("attach the engine to an event loop first")
        return self._description

    @property
    def running_count(self) -> int:
        # Scored prompts count: a pause must stop them, too, because weights must not change while they are computed.
        return len(self._running.samples) + self._scored

    def load(self) -> EngineLoad:
        samples = self._running.samples
        tokens = sum(self._barrier.token_count(sample.id) for sample in samples)
        return EngineLoad(
            running_samples=len(samples),
            sampled_tokens=self._running.past_tokens + tokens,
            held_tokens=tokens + sum(len(sample.request.prompt_token_ids) for sample in samples),
        )

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
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
                    await asyncio.sleep(0)  # vLLM's add_request never yields to the event loop
                await self._check_alive()  # `_on_death` has failed only the samples that were there before
                complete = True
            except EngineDeadError as error:
                raise await self._dead_error() from error
            finally:
                if hold:
                    await self._resume_scheduler()
                if not complete:
                    await self.abandon(samples)
        return samples

    async def abandon(self, samples: Sequence[EngineSample]) -> None:
        gone = [s for s in samples if isinstance(s, VllmSample) and self._running.remove(s)]
        if gone and not self._is_dead():
            await self._unless_dead(self._llm.abort([s.id for s in gone], internal=True), _ABORT_SECONDS)
        for sample in gone:
            sample.release()

    async def interrupt(self) -> None:
        await self._pause_and_resume("abort")

    async def settle(self) -> None:
        await self._pause_and_resume("keep")

    async def pause(self) -> None:
        await self._check_alive()
        async with self._order, AsyncExitStack() as on_error:
            on_error.push_async_callback(self._resume_scheduler)
            # Not AsyncLLM.pause_generation: it sleeps for 20 ms instead of waiting for the outputs.
            await self._unless_dead(self._llm.engine_core.pause_scheduler_async("keep", False), None)
            await self._unless_dead(self._barrier.passed(), None)
            for sample in tuple(self._running.samples):
                sample.request.sink.boundary(sample.request.index, self._barrier.token_count(sample.id))
            self._paused = True
            on_error.pop_all()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            await self._resume_scheduler()

    async def forget_prefixes(self, *, recompute: bool) -> None:
        # Without the patch, vLLM refuses to drop prefixes while samples run.
        if recompute or "scheduler" not in self._settings.disabled_patches:
            await self._unless_dead(self._llm.reset_prefix_cache(recompute, False), _ABORT_SECONDS)

    async def prompt_logprobs(self, token_ids: Sequence[int], *, first: bool = True) -> list[float]:
        self._scored += not first  # before the first await, so that a pause does not miss it
        try:
            return await self._prompt_logprobs(list(token_ids), first=first)
        finally:
            self._scored -= not first

    async def _prompt_logprobs(self, ids: list[int], *, first: bool) -> list[float]:
        await self._check_alive()
        number = next(self._probe_numbers)
        # vLLM reads no cached prefix for a request with prompt_logprobs. The salt prevents that others read this one.
        prompt = tokens_input(ids, cache_salt=f"probe-{number}")
        params = probe_params(first=first)
        collector = await self._llm.add_request(f"probe-{number}", prompt, params, lora_request=self._adapter)
        done = False
        try:
            result: Any = await self._unless_dead(collector.get(), None)
            done = True
        finally:
            if not done and not self._is_dead():
                await self._llm.abort([collector.request_id], internal=True)
        if result.prompt_logprobs is None or len(result.prompt_logprobs) != len(ids):
            raise Unavailable("the computation of log-probabilities was interrupted; try again", reason="INTERRUPTED")
        return [math.nan, *logprob_values(result.prompt_logprobs[1:], ids[1:])]

    async def prove_updates(self, *, timeout: float) -> str:
        proofs = unwrap(await self._call("weights_prove", timeout=timeout))
        refusal = next((str(proof["refusal"]) for proof in proofs if proof["refusal"]), "")
        if not all(proof["intact"] for proof in proofs):
            raise not_proven(refusal)
        return refusal

    async def open_weights(self, terms: EpochTerms, *, timeout: float) -> OpenReport:
        session = (terms.epoch, terms.backend, terms.manifest, list(terms.offers))
        places = (terms.receiver_count, terms.first_receiver_index)
        listen = (terms.host, terms.interface)
        replies = await self._call(
            "weights_open", *session, *places, timeout, str(self._abort_path), *listen, timeout=timeout
        )
        # Stages of a pipeline have different layers, and may apply them in different ways.
        reports = unwrap(replies)
        return OpenReport(
            direct_tensor_count=min(report["direct"] for report in reports),
            reload_tensor_count=max(report["reload"] for report in reports),
            reload_reason=next((report["reason"] for report in reports if report["reason"]), ""),
        )

    async def receive_weights(self, *, epoch: int, policy_version: int, skip_sums: bool, timeout: float) -> bytes:
        replies = await self._call("weights_receive", epoch, policy_version, timeout, skip_sums, timeout=timeout)
        return bytes(unwrap_same(replies))

    async def feed_weights(self, terms: FeedTerms, *, timeout: float) -> list[bytes]:
        numbers = (terms.epoch, terms.policy_version, terms.receiver_count)
        replies = await self._call("weights_feed", *numbers, terms.host, terms.interface, timeout, timeout=timeout)
        return [bytes(offer) for offer in unwrap(replies)[0]]

    async def mark_served(self, *, epoch: int, policy_version: int) -> None:
        unwrap_same(await self._call("weights_commit", epoch, policy_version, timeout=_ABORT_SECONDS))

    async def abort_weights(self, *, epoch: int) -> bool:
        states = unwrap(await self._call("weights_abort", epoch, timeout=_ABORT_SECONDS))
        return all(state == "clean" for state in states)

    def abort_transfers(self, *, epoch: int) -> None:
        self._abort_flag.abort(epoch)

    async def weight_sums(self, *, epoch: int) -> bytes:
        return bytes(unwrap_same(await self._call("weights_sums", epoch, timeout=_ABORT_SECONDS)))

    async def sleep(self, level: int, *, timeout: float) -> None:
        await self._unless_dead(self._llm.sleep(level), timeout + _STUCK_SECONDS)

    async def wake(self, tags: Sequence[str], *, timeout: float) -> None:
        await self._unless_dead(self._llm.wake_up(list(tags)), timeout + _STUCK_SECONDS)

    async def close(self) -> None:
        """End the engine's processes within about a second."""
        if self._death is not None:
            self._death.close()
        for task in tuple(self._posted):
            task.cancel()
        # vLLM cancels its output task last, and until then the task would log the end of the core process as a crash.
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        await asyncio.to_thread(end_processes, self._launched, timeout=_SHUTDOWN_SECONDS)
        if self._logprobs is not None:
            self._logprobs.close()

    def _grammar_obstacle(self) -> str:
        if "scheduler" in self._settings.disabled_patches:
            return "its patch `scheduler` is disabled"
        return "" if self._logprobs is not None else "it writes no table of log-probabilities; see the service's log"

    async def _open_logprobs(self) -> LogprobTable | None:
        """Let the workers write log-probabilities to a table; None if a worker cannot or the patch is disabled.

        vLLM's own way halves the tokens per second: it makes objects for every token in three processes.
        """
        settings = self._settings
        if "logprobs" in settings.disabled_patches:
            _log.info("Patch of log-probabilities disabled: log-probabilities come from vLLM itself")
            return None
        rows = settings.max_concurrent_samples + _SPARE_ROWS
        table = LogprobTable(rows, settings.max_context_tokens)
        terms = (table.path, table.slots, table.width, "seeds" not in settings.disabled_patches)
        reasons: list[str] = await self._call("logprobs_open", *terms, timeout=_DESCRIBE_SECONDS)
        if not any(reasons):
            if settings.gpus and table.byte_count > _LARGE_TABLE_BYTES:
                gib = round(table.byte_count / 2**30, 1)
                _log.info("Main memory was locked for log-probabilities", extra={"gib": gib, "samples": rows})
            return table
        table.close()
        reason = next(reason for reason in reasons if reason)
        _log.warning("log-probabilities come from vLLM itself, which samples much slower with them: %s", reason)
        return None

    async def _add(self, request: SampleRequest) -> VllmSample:
        table = self._logprobs
        row = None if table is None else table.acquire(request.max_tokens, flags=request.grammar is not None)
        sample = VllmSample(self._running, self._barrier, request, row)
        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        with ExitStack() as on_error:
            on_error.callback(sample.release)
            params = sampling_params(request, row, table)
            collector = await self._llm.add_request(request.key, prompt, params, lora_request=self._adapter)
            on_error.pop_all()
        self._running.samples.add(sample)
        sample.attach(collector)
        return sample

    async def _pause_and_resume(self, mode: Any) -> None:
        await self._check_alive()
        async with self._order:
            try:
                await self._unless_dead(self._llm.engine_core.pause_scheduler_async(mode, False), None)
            finally:
                self._paused = False
                await self._resume_scheduler()

    async def _resume_scheduler(self) -> None:
        await self._post(self._llm.engine_core.resume_scheduler_async())

    async def _post(self, message: Coroutine[Any, Any, Any]) -> None:
        """Send a message to the core process without waiting for the answer. Messages arrive in order."""
        task = asyncio.get_running_loop().create_task(message)
        self._posted.add(task)
        task.add_done_callback(self._forget_posted)
        await asyncio.sleep(0)  # lets the task run up to its wait for the answer: the message is sent

    def _forget_posted(self, task: asyncio.Task[Any]) -> None:
        self._posted.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved; the calls that wait for a dead engine raise the reason

    async def _call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Call a method of `RolloutWorker` or `WeightWorker` in every worker, which keeps to `timeout` itself."""
        work: Awaitable[list[Any]] = self._llm.collective_rpc(method, args=args)
        return await self._unless_dead(work, timeout + _STUCK_SECONDS)

    async def _unless_dead(self, work: Awaitable[_T], timeout: float | None) -> _T:
        """Await an answer of the engine; raise if the engine dies or does not answer."""
        assert self._death is not None, "attached"
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._death.reason}
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._check_alive()
                raise DeadlinePassed(f"the engine has not answered for {timeout:.1f} s")
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
        """Return the error of calls to a dead engine, once its cause is known."""
        assert self._death is not None, "attached"
        self._death.begin()
        return Unavailable(await asyncio.shield(self._death.reason), reason="ENGINE_DEAD")

    def _is_dead(self) -> bool:
        return self._death is None or self._death.begun or bool(self._llm.errored)

    def _on_death(self, on_death: Callable[[str], None], reason: str) -> None:
        for sample in tuple(self._running.samples):
            sample.fail(Unavailable(reason, reason="ENGINE_DEAD"))
        on_death(reason)
