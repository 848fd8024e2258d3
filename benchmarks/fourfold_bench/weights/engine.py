"""Runs a vLLM with streams that decode all the time, for the thread that measures weight updates.

vLLM's `AsyncLLM` and the streams belong to the event loop of the main thread. The measuring thread calls
`collective_rpc` and `pause`, which wait for that loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from fourfold_bench.gpus import visible
from fourfold_bench.vllm_process import CPU_BLOCK_TOKENS, meet_in
from fourfold_bench.weights.benchmark import WeightSettings

T = TypeVar("T")

_WORKER: Final = "fourfold_bench.weights.worker.BenchWorker"
_CALL_SECONDS: Final = 300.0
_PROMPT_TOKENS: Final = 16


class ServingEngine:
    """One vLLM, made in the main thread before there are others. Implements `local.PublishEngine`."""

    def __init__(self, settings: WeightSettings, folder: Path, scratch: Path) -> None:
        """Start vLLM; return when it can sample."""
        os.environ.update(visible(settings.engine_device))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        meet_in(scratch)
        options: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS}
        if settings.on_gpus:
            options = {"gpu_memory_utilization": settings.engine_memory}
        arguments = AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=settings.context,
            max_num_seqs=max(1, settings.streams),
            max_num_batched_tokens=max(2048, settings.context),
            enforce_eager=settings.eager,
            enable_prefix_caching=False,
            generation_config="vllm",
            worker_extension_cls=_WORKER,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )
        config = arguments.create_engine_config()
        if threading.active_count() == 1:  # a fork saves a second import of vLLM, and is unsafe with threads
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.pauses: dict[str, float] = {}
        """Points in time of the last pause: "asked", "paused", "resumed" and "answered"."""
        self.took: dict[str, float] = {}
        """Seconds of the last call of each verb."""
        self.tokens: list[list[float]] = [[] for _ in range(settings.streams)]
        """When each stream got its tokens, in seconds of `time.perf_counter`."""

    def attach(self) -> None:
        """Start the streams on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._stream(index)) for index in range(self._settings.streams)]

    def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        """Call a verb in all workers; return their answers."""
        began = time.perf_counter()
        answers: list[Any] = self._wait(self._llm.collective_rpc(method, args=args))
        self.took[method] = time.perf_counter() - began
        return answers

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop vLLM's steps in the block; requests keep their tokens."""
        asked = time.perf_counter()
        self._wait(self._llm.engine_core.pause_scheduler_async("keep", False))
        paused = time.perf_counter()
        try:
            yield
        finally:
            resumed = time.perf_counter()
            self._wait(self._llm.engine_core.resume_scheduler_async())
            answered = time.perf_counter()
            self.pauses = {"asked": asked, "paused": paused, "resumed": resumed, "answered": answered}

    def wait_for_tokens(self, count: int, timeout: float) -> None:
        """Wait until every stream has got `count` tokens more.

        Raises:
            TimeoutError: the tokens did not come in time, or a stream has ended.
        """
        goals = [len(times) + count for times in self.tokens]
        end = time.monotonic() + timeout
        while any(len(times) < goal for times, goal in zip(self.tokens, goals, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise TimeoutError("a stream has ended")
            if time.monotonic() > end:
                raise TimeoutError(f"the streams did not get {count} tokens each within {timeout} s")
            time.sleep(0.005)

    async def stop(self) -> None:
        """Cancel the streams and end vLLM."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """End vLLM. Idempotent; call it on the event loop if there is one."""
        self._llm.shutdown()
        # vLLM calls it again when the object is collected, possibly after its modules are gone.
        self._llm.shutdown = lambda *_args, **_kwargs: None  # type: ignore[method-assign]

    async def _stream(self, index: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        count = 0
        while True:
            # The first requests differ in length, so that the streams do not all restart in one step.
            first = self._settings.context // 2 * index // self._settings.streams if not count else 0
            prompt = tokens_input([(7 * index + i) % self._vocabulary for i in range(_PROMPT_TOKENS)])
            params = SamplingParams(
                max_tokens=self._settings.context - _PROMPT_TOKENS - 1 - first,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            async for _ in self._llm.generate(prompt, params, f"stream-{index}-{count}"):
                self.tokens[index].append(time.perf_counter())
            count += 1

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None, "attached"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_SECONDS)
