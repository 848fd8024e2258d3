"""Measures the training data of the coordinator: reading many rows, their memory, and the look-up of positions.

    rows.jsonl --read_rows, template, tokens--> prompts in memory --PromptSet.at--> one prompt per position

Two sources are mixed 3 : 1; the first has three quarters of the rows. The tokenizer is a trivial one, with a token per
byte, so that the numbers are those of Fourfold. Times are CPU times of the only thread. Memory is the resident memory
of the process: after loading, and its peak while loading, which would show a second copy of the rows.

    python -m fourfold_bench.data_loading [--rows 1000000]
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from fourfold import config as configuration
from fourfold.config import Config
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option, run_script
from fourfold_coordinator.data.prompts import PromptSet, load_prompts

_WEIGHTS: Final = {"large": 3.0, "small": 1.0}
_LOOK_BACK: Final = 256  # positions of groups in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(BenchmarkSettings):
    """Sizes of the measurement."""

    rows: int = option("rows of both files together", default=1_000_000, least=1000)
    positions: int = option("positions to look up", default=200_000, least=1000)


class Bytes:
    """A tokenizer with one token per byte."""

    def render_chat(
        self, messages: Sequence[dict[str, Any]], /, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return "\n".join(str(message["content"]) for message in messages)

    def escape(self, value: Any, /) -> Any:
        return value

    def unescape(self, text: str, /) -> str:
        return text

    def encode(self, text: str, /, *, add_special: bool = False) -> list[int]:
        return list(text.encode())


def _write(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = {"question": f"What is {number} + {number + 1}? Think about it.", "answer": str(2 * number + 1)}
            file.write(json.dumps(row | {"level": number % 7}) + "\n")


def _config(folder: Path) -> Config:
    train = [{"path": str(folder / f"{name}.jsonl")} for name in _WEIGHTS]
    tables = {
        "name": "data", "steps": 1, "model": {"source": "none", "max_context_tokens": 256}, "data": {"train": train},
        "batch": {"prompts_per_step": 1, "group_size": 2}, "sampling": {"max_new_tokens": 8},
    }  # fmt: skip
    return configuration.from_tables(tables, source="benchmark")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _nanoseconds(at: Callable[[int], object], positions: Sequence[int]) -> float:
    began = time.process_time()
    for position in positions:
        at(position)
    return round(1e9 * (time.process_time() - began) / len(positions), 0)


def _look_ups(prompts: PromptSet, count: int) -> dict[str, float]:
    """Return the time of one position: one after the other, and in turns with positions of groups in flight."""
    behind = [position - offset for position in range(_LOOK_BACK, count // 2) for offset in (0, _LOOK_BACK)]
    return {
        "in_order_ns": _nanoseconds(prompts.at, range(count)),
        "with_look_back_ns": _nanoseconds(prompts.at, behind),
    }


class DataBenchmark(Benchmark[DataSettings]):
    """CPU seconds and memory of loading, and the time of one position."""

    name = "data_loading"
    summary = "rows of the training data: reading, memory, look-up of positions"
    settings = DataSettings
    libraries = ("numpy",)

    def measure(self, settings: DataSettings, run: BenchmarkRun) -> dict[str, Any]:
        _write(run.folder / "large.jsonl", settings.rows * 3 // 4)
        _write(run.folder / "small.jsonl", settings.rows - settings.rows * 3 // 4)
        process = psutil.Process()
        gc.collect()
        empty = process.memory_info().rss
        began = time.process_time()
        prompts = load_prompts(_config(run.folder), Bytes())
        seconds = time.process_time() - began
        held, peak = process.memory_info().rss - empty, _peak_bytes() - empty
        mixture = PromptSet(train=prompts.train, held_out=(), seed=0, weights=_WEIGHTS)
        return {
            "seconds": round(seconds, 1),
            "us_per_row": round(1e6 * seconds / settings.rows, 1),
            "bytes_per_row": round(held / settings.rows),
            "peak_over_held": round(peak / held, 3),
            "pool": _look_ups(prompts, settings.positions),
            "mixture": _look_ups(mixture, settings.positions),
        }

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results = document["results"]
        return [
            f"{document['parameters']['rows']:,} rows: {results['seconds']} s of CPU, {results['us_per_row']} us each",
            f"{results['bytes_per_row']} bytes of memory per row; peak {results['peak_over_held']} times that",
            *(
                f"{name}: {results[name]['in_order_ns']:.0f} ns per position, "
                f"{results[name]['with_look_back_ns']:.0f} ns in turns with earlier ones"
                for name in ("pool", "mixture")
            ),
        ]


if __name__ == "__main__":
    sys.exit(run_script(DataBenchmark()))
