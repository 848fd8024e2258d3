"""One benchmark: starts the processes, runs the rounds, and returns what they took.

open twice -> warm-up rounds, with sums -> measured rounds, without -> rounds with sums -> rounds without data
-> the loop, for comparison
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

from fourfold.host.scratch import Scratch
from fourfold.weights.local import Publisher
from fourfold.weights.worker_control import unwrap
from fourfold_bench.memory import GpuMemory
from fourfold_bench.shapes import write_config
from fourfold_bench.weights.engine import ServingEngine
from fourfold_bench.weights.numbers import Phase, Seconds, longest_gap, summary, usual_gap
from fourfold_bench.weights.ranks import Rank, start_ranks
from fourfold_bench.weights.settings import Settings

_TOKENS_BETWEEN: Final = 4
_TOKEN_SECONDS: Final = 120.0
_CHANGE_SECONDS: Final = 60.0


def run(settings: Settings) -> dict[str, Any]:
    """Measure; call it in a process that has started no threads and imported no torch. Returns JSON values."""
    with ExitStack() as closing:
        scratch = Scratch("bench")
        closing.callback(scratch.remove)
        folder = write_config(scratch.path / "model", settings.shape)
        (scratch.path / "engine").mkdir()
        engine = ServingEngine(settings, folder, scratch.path / "engine")
        closing.callback(engine.close)
        ranks = start_ranks(settings, folder, scratch.path)
        for rank in ranks:
            closing.callback(rank.stop)
        for rank in ranks:
            rank.wait()
        memory = GpuMemory([*settings.trainer_devices, settings.engine_device])
        closing.callback(memory.stop)
        # The measuring thread must get its turn at once when an answer comes.
        sys.setswitchinterval(0.0005)
        return asyncio.run(_with_streams(engine, Bench(settings, engine, ranks, memory, scratch.path)))


async def _with_streams(engine: ServingEngine, bench: Bench) -> dict[str, Any]:
    engine.attach()
    try:
        return await asyncio.to_thread(bench.run)
    finally:
        await engine.stop()


class Bench:
    """The measuring thread."""

    def __init__(
        self, settings: Settings, engine: ServingEngine, ranks: Sequence[Rank], memory: GpuMemory, scratch: Path
    ) -> None:
        self._settings, self._engine, self._ranks, self._memory = settings, engine, list(ranks), memory
        self._scratch = scratch
        self._version = 0

    def run(self) -> dict[str, Any]:
        """Run everything."""
        settings = self._settings
        self._engine.wait_for_tokens(8, _TOKEN_SECONDS)
        before = self._memory.used()
        publisher = Publisher(self._ranks, [self._engine], backend=settings.chosen_backend, timeout=settings.timeout)
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
            peak = self._memory.peak()
            empty = self._empty_rounds(settings.rounds)
        manifest = self._ranks[0].manifest()
        results: dict[str, Any] = {
            "bytes": manifest.byte_count,
            "tensors": len(manifest.tensors),
            "applied": {key: report[key] for key in ("direct", "reload")},
            "open": summary(opens),
            "gigabytes_per_second": round(manifest.byte_count / statistics.median(plain["receive"]) / 1e9, 2),
            "gpu_mib": {
                device: {"open": round(opened[device] - before[device]), "most": round(peak[device] - before[device])}
                for device in before
            },
            "plain": {name: summary(values) for name, values in plain.items()},
            "verified": {name: summary(values) for name, values in verified.items()},
            "without_data": {name: summary(values) for name, values in empty.items()},
        }
        if settings.loop and settings.loop_is_possible:
            loop = self._loop(min(settings.rounds, 5))
            results["loop"] = {name: summary(values) for name, values in loop.items()}
            ratio = statistics.median(loop["stall"]) / statistics.median(plain["stall"])
            results["loop_ratio"] = round(ratio, 1)
        results["token_gap"] = summary([usual_gap(self._engine.tokens)])
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
            row |= {f"worker_{name}": value for name, value in self._parts(publisher).items()}
            self._finish_round(phase, row)
        return phase

    def _parts(self, publisher: Publisher) -> Seconds:
        answers: list[Seconds] = unwrap(self._engine.collective_rpc("weights_timings", args=(publisher.epoch,)))
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def _empty_rounds(self, count: int) -> Phase:
        """Pause, call the worker, resume, call it again: all of an update but its data."""
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
        """The same weights, tensor by tensor."""
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
            self._finish_round(phase if index else {}, self._pause_row())  # the first one warms up
        return phase

    def _change(self) -> None:
        """Let every weight change and the streams go on, as between two steps."""
        for changed in [rank.begin("change") for rank in self._ranks]:
            changed(_CHANGE_SECONDS)
        self._engine.wait_for_tokens(_TOKENS_BETWEEN, _TOKEN_SECONDS)

    def _finish_round(self, phase: Phase, row: Seconds) -> None:
        """Wait until every stream goes on, then note what the round cost its clients."""
        began, end = self._engine.pauses["asked"], self._engine.pauses["answered"]
        self._engine.wait_for_tokens(2, _TOKEN_SECONDS)
        tokens = self._engine.tokens
        row["gap"] = max((longest_gap(times, began, end) for times in tokens), default=0.0) - usual_gap(tokens)
        for name, value in row.items():
            phase.setdefault(name, []).append(value)

    def _pause_row(self) -> Seconds:
        """Return what the last pause was made of. The stall is what the engine sees: it does not step."""
        at = self._engine.pauses
        return {
            "begin": at["paused"] - at["asked"],
            "stall": at["resumed"] - at["paused"],
            "resume": at["answered"] - at["resumed"],
        }

    def _profile(self, path: str) -> None:
        if self._settings.profile:
            self._engine.collective_rpc("bench_profile", args=(path,))
