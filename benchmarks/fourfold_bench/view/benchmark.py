"""Measures `fourfold view` over a finished run: `fourfold bench view`.

    write the run, step by step, with an update of the index after each step
    fourfold view RUN  <--  headless Chromium: first contentful paint of each page, with an empty cache
                       <--  searches: seconds until the whole page of results is there

The texts are made up (`synthetic.py`); formats, code and sizes are those of a run.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote_plus

from fourfold.errors import ConfigError
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.view import browser
from fourfold_bench.view.synthetic import GROUP_SIZE, MARKED_WORD, RunShape, SyntheticRun
from fourfold_coordinator.state.trajectory_index import SampleQuery, TrajectoryIndex

PAINT_GOAL: Final = 1.0
SEARCH_GOAL: Final = 0.3
"""Seconds, medians."""
_TIMEOUT: Final = 60.0
_WRITTEN: Final = "written.json"  # what writing the run took


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings(BenchmarkSettings):
    """Settings of a measurement."""

    trajectories: int = option("trajectories of the run", default=100_000, least=100)
    tokens: int = option("sampled tokens of a trajectory", default=1024, least=1)
    steps: int = option("steps of the run", default=250, least=1)
    run: str = option(
        "use the run that an earlier measurement wrote to its --keep FOLDER", default="", metavar="FOLDER"
    )
    distinct_steps: int = option(
        "steps with texts of their own; later steps repeat these under other names", default=60, least=1
    )
    repeats: int = option("loads of each page, and of each search", default=7, least=1)


class ViewBenchmark(Benchmark[ViewSettings]):
    """The benchmark of the pages."""

    name: ClassVar[str] = "view"
    summary: ClassVar[str] = "measure the pages of `fourfold view` in a browser, over a run of 100,000 trajectories"
    settings = ViewSettings
    libraries: ClassVar[tuple[str, ...]] = ("starlette", "uvicorn", "jinja2", "selenium")

    def label(self, settings: ViewSettings) -> str:
        return "cpu"

    def packages(self, settings: ViewSettings) -> Mapping[str, str]:
        return {
            "starlette": "fourfold-coordinator[view]",
            "uvicorn": "fourfold-coordinator[view]",
            "selenium": "selenium",
        }

    def measure(self, settings: ViewSettings, run: BenchmarkRun) -> dict[str, Any]:
        if absent := browser.missing():
            raise ConfigError(f"no {' and no '.join(absent)}; apt-get install chromium chromium-driver")
        place = Path(settings.run or run.folder)
        folder = place / "run"
        if not settings.run:
            (place / _WRITTEN).write_text(json.dumps(_write(folder, settings)), encoding="utf-8")
        written = json.loads((place / _WRITTEN).read_text(encoding="utf-8"))
        env = {**os.environ, "XDG_CACHE_HOME": str(run.folder / "cache")}
        with browser.serve([folder], env=env) as address:
            with browser.open_browser(run.folder / "profile") as driver:
                pages = {
                    name: _medians([browser.first_paint(driver, address + path) for _ in range(settings.repeats)])
                    for name, path in _pages(folder).items()
                }
            searches = {name: _search(address + path, settings.repeats) for name, path in _searches(folder).items()}
        return {"written": written, "pages": pages, "searches": searches}

    def table(self, document: Mapping[str, Any]) -> list[str]:
        found = document["results"]
        lines = ["page                          first paint       load"]
        lines += [
            f"{name:28}  {row['first_paint']:9.3f} s  {row['load']:7.3f} s" for name, row in found["pages"].items()
        ]
        lines += ["", "search                           median    slowest"]
        lines += [
            f"{name:28}  {row['median']:9.3f} s  {row['slowest']:7.3f} s" for name, row in found["searches"].items()
        ]
        return lines

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        found = document["results"]
        slow = [
            f"{name}: first paint after {row['first_paint']:.2f} s; the goal is {PAINT_GOAL:g} s"
            for name, row in found["pages"].items()
            if row["first_paint"] >= PAINT_GOAL
        ]
        return slow + [
            f"search {name}: {row['median']:.2f} s; the goal is {SEARCH_GOAL:g} s"
            for name, row in found["searches"].items()
            if row["median"] >= SEARCH_GOAL
        ]


def _write(folder: Path, settings: ViewSettings) -> dict[str, Any]:
    """Write the run, and its index after each step; return seconds and sizes."""
    prompts = round(settings.trajectories / settings.steps / GROUP_SIZE)
    shape = RunShape(
        steps=settings.steps,
        prompts_per_step=prompts,
        tokens=settings.tokens,
        distinct_steps=settings.distinct_steps,
    )
    source = SyntheticRun(folder, shape)
    index, lines, tokens, updates = TrajectoryIndex(folder), list[float](), list[float](), list[float]()
    for step in range(1, settings.steps + 1):
        if (seconds := source.write_step(step)) is not None:
            lines.append(seconds[0])
            tokens.append(seconds[1])
        began = time.process_time()
        index.update()
        updates.append(time.process_time() - began)
    source.finish()
    count = index.search(SampleQuery(), limit=1).count
    if not index.covers():
        raise RuntimeError("the index lacks lines")
    written = settings.steps * prompts * GROUP_SIZE
    return {
        "trajectories": written,
        "trajectories_counted": count,
        "trajectories_per_step": prompts * GROUP_SIZE,
        "bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
        "cpu_seconds_per_step": {
            "samples.jsonl": statistics.median(lines),
            "tokens.jsonl": statistics.median(tokens),
            "index_update": statistics.median(updates),
            "index_update_slowest": max(updates),
        },
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _pages(folder: Path) -> dict[str, str]:
    base, index = f"/run/{folder.name}", TrajectoryIndex(folder)
    sample = index.search(SampleQuery(), limit=1).rows[0].sample_id
    return {
        "runs": "/",
        "curves": base,
        "samples": f"{base}/samples",
        "sample": f"{base}/sample/{sample}",
        "search": f"{base}/samples?text={MARKED_WORD}",
        "answers": f"{base}/answers",
        "timeline": f"{base}/timeline",
        "weights": f"{base}/weights",
        "recipe": f"{base}/recipe",
        "compare": f"/compare?run={folder.name}",
    }


def _searches(folder: Path) -> dict[str, str]:
    """Return the addresses of searches, by what they search."""
    words = TrajectoryIndex(folder).search(SampleQuery(), limit=1).rows[0].line.completion.split()
    common = max(set(words), key=words.count)
    texts = {
        "rare word": f"text={MARKED_WORD}",
        "common word": f"text={quote_plus(common)}",
        "two common words": f"text={quote_plus(' '.join(words[:2]))}",
        "phrase": f"text={quote_plus(chr(34) + ' '.join(words[:3]) + chr(34))}",
        "beginning of a word": f"text={quote_plus(common[:3] + chr(42))}",
        "common word, highest score": f"text={quote_plus(common)}&order=highest+score",
        "common word, longest": f"text={quote_plus(common)}&order=longest",
        "score of 1": "score_from=1",
        "steps and scorer": "step_from=10&step_to=60&scorer=last_number%400.1.0",
        "stale": "lag_from=1",
        "least likely": "order=least+likely",
    }
    return {name: f"/run/{folder.name}/samples?{text}" for name, text in texts.items()}


def _search(address: str, repeats: int) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as response:
            response.read()
        seconds.append(time.perf_counter() - began)
    return {"median": statistics.median(seconds), "slowest": max(seconds)}


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


BENCHMARK: Final = ViewBenchmark()
