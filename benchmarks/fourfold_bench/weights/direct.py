"""Measures weight updates with the library alone: a vLLM in this process tree, and trainer ranks as child processes.

open twice -> warm-up rounds, with sums -> measured rounds, without -> rounds with sums -> rounds without data
-> for comparison, updates tensor by tensor
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from fourfold.weights.local import Publisher
from fourfold.weights.worker_control import unwrap
from fourfold_bench.gpus import GpuMemory
from fourfold_bench.models import write_config
from fourfold_bench.weights.benchmark import WeightSettings
from fourfold_bench.weights.engine import ServingEngine
from fourfold_bench.weights.phases import (
    Phase,
    Seconds,
    add_round,
    common_results,
    longest_gap,
    summaries,
    usual_gap,
)
from fourfold_bench.weights.rank_client import TrainerRank

_TOKENS_BETWEEN: Final = 4
_TOKEN_SECONDS: Final = 120.0
_CHANGE_SECONDS: Final = 60.0
_LOOP_ROUNDS: Final = 5


def measure(settings: WeightSettings, scratch: Path) -> dict[str, Any]:
    """Measure; return JSON values. Call it in a process without other threads: the engine forks."""
    with ExitStack() as closing:
        folder = write_config(scratch / "model", settings.shape)
        (scratch / "engine").mkdir()
        # The engine comes first: the ranks have threads here, with which a fork is not safe.
        engine = ServingEngine(settings, folder, scratch / "engine")
        closing.callback(engine.close)
        ranks = [
            TrainerRank(settings, folder, rank, scratch / "ranks") for rank in range(len(settings.trainer_devices))
        ]
        for rank in ranks:
            closing.callback(rank.stop)
        for rank in ranks:
            rank.wait()
        memory = closing.enter_context(GpuMemory([*settings.trainer_devices, settings.engine_device]))
        # The measuring thread must run as soon as an answer comes; the interpreter's default is 5 ms.
        sys.setswitchinterval(0.0005)
        return asyncio.run(_with_streams(engine, _DirectRounds(settings, engine, ranks, memory, scratch)))


async def _with_streams(engine: ServingEngine, rounds: _DirectRounds) -> dict[str, Any]:
    engine.attach()
    try:
        return await asyncio.to_thread(rounds.run)
    finally:
        await engine.stop()


class _DirectRounds:
    """Runs the rounds, in the measuring thread."""

    def __init__(
        self,
        settings: WeightSettings,
        engine: ServingEngine,
        ranks: Sequence[TrainerRank],
        memory: GpuMemory,
        scratch: Path,
    ) -> None:
        self._settings, self._engine, self._ranks, self._memory = settings, engine, list(ranks), memory
        self._scratch = scratch
        self._version = 0

    def run(self) -> dict[str, Any]:
        """Run all rounds; return JSON values."""
        settings = self._settings
        self._engine.wait_for_tokens(8, _TOKEN_SECONDS)
        before = self._memory.used()
        publisher = Publisher(self._ranks, [self._engine], backend=settings.backend, timeout=settings.timeout)
        with publisher:
            opens = []
            for _ in range(2):
                began = time.perf_counter()
                report = publisher.open()[0]
                opens.append(time.perf_counter() - began)
            opened = self._memory.used()
            self._rounds(publisher, settings.warm_up, verify=True)
            self._profile("")
            plain = self._rounds(publisher, settings.rounds, verify=False)
            self._profile(settings.profile)
            verified = self._rounds(publisher, settings.verified_rounds, verify=True)
            memory = before, opened, self._memory.peak()
            empty = self._empty_rounds(settings.rounds)
        results = common_results(
            self._ranks[0].manifest(),
            direct=report["direct"],
            reload=report["reload"],
            opens=opens,
            plain=plain,
            verified=verified,
            memory=memory,
            token_gap=usual_gap(self._engine.tokens),
        )
        results["without_data"] = summaries(empty)
        if settings.loop and settings.loop_is_possible:
            loop = self._loop(min(settings.rounds, _LOOP_ROUNDS))
            results["loop"] = summaries(loop)
            ratio = statistics.median(loop["stall"]) / statistics.median(plain["stall"])
            results["loop_ratio"] = round(ratio, 1)
        return results

    def _rounds(self, publisher: Publisher, count: int, *, verify: bool) -> Phase:
        phase: Phase = {}
        for _ in range(count):
            self._change()
            self._version += 1
            publisher.publish(self._version, verify=verify, pause=self._engine.pause)
            row = self._pause_row() | {"receive": self._engine.took["weights_receive"]}
            row["commit"] = self._engine.took["weights_commit"]
            row["worker"] = max(unwrap(self._engine.collective_rpc("bench_seconds", args=())))
            answers: list[Seconds] = unwrap(self._engine.collective_rpc("weights_timings", args=(publisher.epoch,)))
            row |= {f"worker_{name}": max(answer[name] for answer in answers) for name in answers[0]}
            self._finish_round(phase, row)
        return phase

    def _empty_rounds(self, count: int) -> Phase:
        """Pause, call the worker, resume, and call it again: an update without its data."""
        phase: Phase = {}
        for _ in range(count):
            self._engine.wait_for_tokens(_TOKENS_BETWEEN, _TOKEN_SECONDS)
            with self._engine.pause():
                self._engine.collective_rpc("bench_seconds", args=())
            self._engine.collective_rpc("bench_seconds", args=())
            whole = time.perf_counter() - self._engine.pauses["asked"]
            self._finish_round(phase, self._pause_row() | {"whole": whole})
        return phase

    def _loop(self, count: int) -> Phase:
        """Update the same weights tensor by tensor."""
        engine, timeout, phase = self._engine, self._settings.timeout, dict[str, list[float]]()
        tensors = self._ranks[0].call("tensors", timeout=timeout)
        place, size = str(self._scratch / "loop"), 1 + len(engine.collective_rpc("bench_seconds", args=()))
        opening = [rank.begin("loop_open", place, size, timeout) for rank in self._ranks]
        engine.collective_rpc("loop_open", args=(place, size, timeout))
        for opened in opening:
            opened(timeout)
        for index in range(count + 1):
            self._change()
            with engine.pause():
                sending = [rank.begin("loop_send") for rank in self._ranks]
                engine.collective_rpc("loop_begin", args=())
                for tensor in tensors:
                    engine.collective_rpc("loop_take", args=tuple(tensor))
                engine.collective_rpc("loop_end", args=())
                for sent in sending:
                    sent(timeout)
            self._finish_round(phase if index else {}, self._pause_row())  # the first round is a warm-up
        return phase

    def _change(self) -> None:
        """Change all weights, and let the streams decode, as between two steps."""
        for changed in [rank.begin("change") for rank in self._ranks]:
            changed(_CHANGE_SECONDS)
        self._engine.wait_for_tokens(_TOKENS_BETWEEN, _TOKEN_SECONDS)

    def _finish_round(self, phase: Phase, row: Seconds) -> None:
        """Wait until every stream decodes again, and add the round with the longest gap of a stream."""
        began, end = self._engine.pauses["asked"], self._engine.pauses["answered"]
        self._engine.wait_for_tokens(2, _TOKEN_SECONDS)
        tokens = self._engine.tokens
        row["gap"] = max((longest_gap(times, began, end) for times in tokens), default=0.0) - usual_gap(tokens)
        add_round(phase, row)

    def _pause_row(self) -> Seconds:
        """Return the parts of the last pause. In the stall the engine does not step."""
        at = self._engine.pauses
        return {
            "begin": at["paused"] - at["asked"],
            "stall": at["resumed"] - at["paused"],
            "resume": at["answered"] - at["resumed"],
        }

    def _profile(self, path: str) -> None:
        if self._settings.profile:
            self._engine.collective_rpc("bench_profile", args=(path,))
