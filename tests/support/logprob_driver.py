"""Draws samples from a real engine and writes their log-probabilities (`python -m` this module SETTINGS ANSWER).

The samples are paused, computed again, abandoned, interrupted and preempted. With the setting "audit", requests also
ask vLLM for its own log-probabilities, which are of the same logits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from fourfold.errors import FourfoldError
from fourfold_rollout.engine import EngineSettings, SampleOutput, SampleRequest
from fourfold_rollout.vllm import environment
from fourfold_rollout.vllm.logprob_table import NO_SLOT

CONTEXT: Final = 512
SAMPLES: Final = 32
PROMPT_TOKENS: Final = (12, 100)
_WAYS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 20},
)
_PATIENCE: Final = 240.0


class RecordingSink:
    """Records the outputs of `count` samples."""

    def __init__(self, count: int) -> None:
        self.outputs: dict[int, list[SampleOutput]] = {i: [] for i in range(count)}
        self.boundaries: dict[int, int] = {}
        self.errors: list[str] = []
        self._running = set(range(count))
        self._moved = asyncio.Event()

    def put(self, index: int, output: SampleOutput) -> None:
        self.outputs[index].append(output)
        if output.finish is not None:
            self._running.discard(index)
        self._moved.set()

    def boundary(self, index: int, token_count: int) -> None:
        self.boundaries[index] = token_count

    def fail(self, error: FourfoldError) -> None:
        self.errors.append(str(error))
        self._running.clear()
        self._moved.set()

    @property
    def done(self) -> bool:
        return not self._running

    @property
    def token_count(self) -> int:
        return sum(len(o.token_ids) for outputs in self.outputs.values() for o in outputs)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE):
            while not reached():
                self._moved.clear()
                await self._moved.wait()

    async def end(self) -> None:
        await self.until(lambda: self.done)
        assert not self.errors, self.errors

    def answer(self) -> list[dict[str, Any]]:
        return [
            {
                "ids": [i for o in outputs for i in o.token_ids.tolist()],
                "logprobs": [v for o in outputs for v in o.logprobs.tolist()],
                "finish": outputs[-1].finish.value if outputs and outputs[-1].finish else None,
            }
            for outputs in self.outputs.values()
        ]


_names = itertools.count()


def requests(
    sink: RecordingSink, *, seed: int = 0, max_tokens: int = 40, stop: tuple[int, ...] = (), vocabulary: int
) -> list[SampleRequest]:
    """Return a request for each of the sink's samples: every way to sample, streaming and not."""
    return [
        SampleRequest(
            key=f"sample-{next(_names)}",
            prompt_token_ids=[(7 * i + 3 * j + seed) % (vocabulary - 3) + 3 for j in range(PROMPT_TOKENS[i % 5 == 4])],
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, **_WAYS[i % len(_WAYS)]},
            max_tokens=max_tokens,
            stop_token_ids=stop,
            seed=seed + i,
            cache_salt="",
            streaming=i % 2 == 0,
            sink=sink,
            index=i,
        )
        for i in sink.outputs
    ]


async def drawn(engine: Any, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Draw samples to their end."""
    sink = RecordingSink(count)
    await engine.submit(requests(sink, **fields))
    await sink.end()
    return sink.answer()


async def paused(engine: Any, vocabulary: int, *, seed: int, recompute: bool) -> list[dict[str, Any]]:
    """Draw samples that are paused three times; with `recompute`, their tokens are computed again each time."""
    await engine._call("slow_down", 0.03, timeout=10)
    sink = RecordingSink(SAMPLES // 2)
    await engine.submit(requests(sink, seed=seed, max_tokens=40, vocabulary=vocabulary))
    for step in range(3):
        await sink.until(lambda step=step: sink.token_count >= 30 * step or sink.done)  # type: ignore[misc]
        await engine.pause()
        still = sink.token_count
        await asyncio.sleep(0.1)
        assert sink.token_count == still
        assert sink.boundaries  # some samples run: steps were slowed down
        if recompute:
            await engine.forget_prefixes(recompute=True)
        await engine.resume()
    await engine._call("slow_down", 0.005, timeout=10)
    await sink.end()
    return sink.answer()


async def abandoned(engine: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Abandon samples in the middle, and return other samples that were drawn in their rows."""
    first, second = RecordingSink(SAMPLES), RecordingSink(SAMPLES // 2)
    samples = await engine.submit(requests(first, seed=200, max_tokens=400, vocabulary=vocabulary))
    await first.until(lambda: first.token_count > 60)
    await engine.abandon(samples[: SAMPLES // 2])
    await engine.submit(requests(second, seed=300, max_tokens=30, vocabulary=vocabulary))
    await second.end()
    await engine.abandon(samples)
    assert not first.errors, first.errors
    return second.answer()


async def interrupted(engine: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Draw samples that are interrupted, and end with the tokens that they have."""
    sink = RecordingSink(SAMPLES // 2)
    await engine.submit(requests(sink, seed=500, max_tokens=400, vocabulary=vocabulary))
    await sink.until(lambda: sink.token_count > 40)
    await engine.interrupt()
    await sink.end()
    return sink.answer()


async def unwritten(engine: Any, vocabulary: int) -> list[str]:
    """Draw samples whose rows the worker does not know; return their errors."""
    from fourfold_rollout.vllm import engine as module

    engine_module: Any = module
    real = engine_module.sampling_params
    engine_module.sampling_params = lambda request, _, table: real(request, SimpleNamespace(slot=NO_SLOT), table)
    sink = RecordingSink(2)
    samples = await engine.submit(requests(sink, vocabulary=vocabulary))
    engine_module.sampling_params = real
    await sink.until(lambda: bool(sink.errors))
    await engine.abandon(samples)
    return sink.errors


async def all_of_it(engine: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Run every case; return the samples and observations by name."""
    reasons: list[str] = []
    await engine.attach(reasons.append)
    vocabulary = engine.description.vocabulary_size
    table = engine._logprobs
    answer: dict[str, Any] = {"table": table is not None, "workers": await engine._call("runner_name", timeout=10)}
    if options["audit"]:
        answer["own"] = compare_with_vllm()
    plain = {"vocabulary": vocabulary}
    answer["mixed"] = await drawn(engine, 18, max_tokens=24, **plain)
    stop = tuple(answer["mixed"][0]["ids"][5:6])
    answer["stopped"] = await drawn(engine, 6, stop=stop, **plain)
    if options["plain"]:
        answer["paused"] = await drawn(engine, SAMPLES // 2, seed=100, max_tokens=40, **plain)
        answer["recomputed"] = await drawn(engine, SAMPLES // 2, seed=600, max_tokens=40, **plain)
        answer["abandoned"] = await drawn(engine, SAMPLES // 2, seed=300, max_tokens=30, **plain)
        answer["interrupted"] = await drawn(engine, SAMPLES // 2, seed=500, max_tokens=60, **plain)
        answer["preempted"] = await drawn(engine, SAMPLES, seed=400, max_tokens=60, **plain)
    else:
        answer["paused"] = await paused(engine, vocabulary, seed=100, recompute=False)
        answer["recomputed"] = await paused(engine, vocabulary, seed=600, recompute=True)
        answer["abandoned"] = await abandoned(engine, vocabulary)
        answer["interrupted"] = await interrupted(engine, vocabulary)
        answer["unwritten"] = await unwritten(engine, vocabulary)
        await engine._call("count_preemptions", timeout=10)
        answer["preempted"] = await drawn(engine, SAMPLES, seed=400, max_tokens=60, **plain)
        answer["preemptions"] = await engine._call("count_preemptions", timeout=10)
    if table is not None:
        answer["free"], answer["slots"] = table.free_count, table.slots
        engine._logprobs = None  # vLLM's own log-probabilities, in the same engine
        answer["without"] = await drawn(engine, 18, max_tokens=24, **plain)
    await engine.close()
    assert not reasons
    return answer


def compare_with_vllm() -> dict[str, Any]:
    """Make every request with a row also ask vLLM; return a dict that gets the result of the comparison."""
    from fourfold_rollout.vllm import engine, sample

    engine_module: Any = engine

    seen = {"tokens": 0, "largest": 0.0}
    real_params, real_output = sample.sampling_params, sample.VllmSample._output

    def sampling_params(request: SampleRequest, row: Any, table: Any) -> Any:
        asked = real_params(request, row, table)
        asked.logprobs, asked.flat_logprobs = 0, True
        return asked

    def output(self: Any, completion: Any) -> SampleOutput:
        result = real_output(self, completion)
        own = sample.logprob_values(completion.logprobs, completion.token_ids)
        if self.row is not None:
            seen["tokens"] += len(own)
            seen["largest"] = max([seen["largest"], *(abs(a - b) for a, b in zip(result.logprobs, own, strict=True))])
        return result

    engine_module.sampling_params = sampling_params
    sample.VllmSample._output = output  # type: ignore[method-assign]
    return seen


def main() -> None:
    """Read the settings, run, write the answer."""
    options = json.loads(sys.argv[1])
    settings = EngineSettings(
        folder=Path(options["model"]),
        dtype=options["dtype"],
        max_context_tokens=CONTEXT,
        max_concurrent_samples=SAMPLES,
        max_batched_tokens=options["batched"],
        enforce_eager=options["eager"],
        kv_cache_gib=1,
        gpus=options["gpus"],
        gpu_memory_utilization=0.1,
        seed=0,
    )
    environment.prepare(settings, "127.0.0.1")
    from fourfold_rollout.vllm import engine, launch
    from fourfold_rollout.vllm import engine_args as engine_args_module

    engine_module: Any = engine
    launch_module: Any = launch
    engine_module._SPARE_ROWS = 0  # rows are taken again at once
    engine_args_module._WORKER_EXTENSION = f"tests.support.logprob_worker.{options['worker']}"  # type: ignore[misc]
    real_args = launch_module.engine_args

    def engine_args(*given: Any, **more: Any) -> Any:
        args = real_args(*given, **more)
        args.num_gpu_blocks_override = options["blocks"]
        return args

    launch_module.engine_args = engine_args
    running = engine.VllmEngine.start(settings, fork=options["gpus"] == 0)
    answer = asyncio.run(all_of_it(running, options))
    Path(sys.argv[2]).write_text(json.dumps(answer, default=float))


if __name__ == "__main__":
    main()
