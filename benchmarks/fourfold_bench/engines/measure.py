"""Runs the coordinator with simulated engines, and reads what its watch and its metrics say."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import psutil

from fourfold import metrics as m
from fourfold.config import Config, from_tables
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold_bench.engines.benchmark import EngineSettings
from fourfold_bench.engines.driver import VOCABULARY_SIZE, DriverPlan
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.profiling import Profile

_READY_SECONDS: Final = 60.0
_RUN_SECONDS: Final = 600.0
_PROMPTS: Final = 512
_REFERENCE_ROUNDS: Final = 5_000_000
_CONTEXT_TOKENS: Final = 4096


def measure(settings: EngineSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Return the results of `fourfold bench engines`."""
    counts, growth = [int(count) for count in settings.engines], []
    for tokens in map(int, settings.tokens):
        for count in counts:
            folder = run.folder / f"growth-{count}-{tokens}"
            profile = run.profile if count == max(counts) else None
            growth.append(_growth(settings, folder, count, tokens, profile))
            say(f"{count} engines, {tokens} tokens: {growth[-1]['cpu_us_per_sample']:.0f} us per sample")
    return {"growth": growth, "unequal": _unequal(settings, run.folder / "unequal") if settings.speeds else None}


def _growth(
    settings: EngineSettings, folder: Path, engines: int, tokens: int, profile: Profile | None
) -> dict[str, Any]:
    scene = Scene(folder, settings, engines=engines, tokens=tokens, samples=settings.samples)
    names, parts = [f"rollout-{index}" for index in range(engines)], min(settings.drivers, engines)
    capacity = max(settings.capacity // engines, settings.group_size)
    plans = [scene.plan(tuple(names[part::parts]), tokens=tokens, capacity=capacity) for part in range(parts)]
    measured, driver_cpu = scene.run(plans, steps=settings.warmup + settings.steps, profile=profile)
    # The first step after the warm-up begins at the end of the one before it: without a warm-up it has the start-up.
    steps = measured["steps"][settings.warmup :]
    samples = settings.samples * len(steps)
    seconds, cpu = sum(step["seconds"] for step in steps), [step["cpu"] for step in steps]
    return {
        "engines": engines,
        "tokens": tokens,
        "samples_per_second": samples / seconds,
        "cpu_us_per_sample": 1e6 * sum(cpu) / samples,
        "cpu_us_per_sample_by_step": [round(1e6 * one / settings.samples, 1) for one in cpu],
        "longest_gap_seconds": max(step["gap"] for step in measured["steps"]),
        "start_seconds": measured["start_seconds"],
        "start_gap_seconds": measured["start_gap"],
        "start_cpu_seconds": measured["start_cpu"],
        "expired_leases": measured["expired_leases"],
        "reference_seconds": _reference_seconds(),
        "drivers_us_per_sample": 1e6 * driver_cpu / (settings.samples * len(measured["steps"])),
    }


def _reference_seconds() -> float:
    """Return the CPU seconds of a fixed loop: on a busy machine, everything takes more CPU time, too."""
    began, total = time.process_time(), 0
    for number in range(_REFERENCE_ROUNDS):
        total += number
    return time.process_time() - began


def _unequal(settings: EngineSettings, folder: Path) -> dict[str, Any]:
    speeds, steps = [settings.speed_unit * int(speed) for speed in settings.speeds], settings.warmup + settings.steps
    tokens, count = settings.speed_tokens, len(settings.speeds)
    scene = Scene(folder, settings, engines=count, tokens=tokens * 3 // 2, samples=settings.speed_samples)
    names = [f"rollout-{index}" for index in range(count)]
    plan = scene.plan(
        tuple(names), tokens=tokens, capacity=settings.speed_capacity, speeds=tuple(speeds), silent=settings.silent
    )
    scene.run([plan], steps=steps)
    lines = (scene.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [json.loads(line)[m.TIME_GENERATE] for line in lines]
    sampled = _sampled_tokens(scene.run_dir, steps)
    finished = json.loads((folder / "run" / "finished-rollout-0.json").read_text(encoding="utf-8"))
    return {
        "share_by_step": [n / t / sum(speeds) for n, t in zip(sampled, times, strict=True)],
        "share": sum(sampled) / sum(times) / sum(speeds),
        "samples_by_engine": [finished[name] for name in names],
    }


def _sampled_tokens(run_dir: Path, steps: int) -> list[int]:
    """Return the sampled tokens of each step."""
    tokens = [0] * steps
    with (run_dir / "samples.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            tokens[row["step"] - 1] += row["completion_tokens"]
    return tokens


class Scene:
    """One coordinator with its engines, trainer and scorer."""

    def __init__(
        self,
        folder: Path,
        settings: EngineSettings,
        *,
        engines: int,
        tokens: int,
        samples: int,
        tables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepare the files; `tables` are further ones of the recipe."""
        folder.mkdir()
        self._tables = tables
        self._folder, self._settings = folder, settings
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self._model, self._engines, self._tokens, self._samples = folder / "model", engines, tokens, samples
        _write_model(self._model)
        self._sha256 = tokenizer_sha256(self._model).hex()

    def plan(
        self,
        names: tuple[str, ...],
        *,
        tokens: int,
        capacity: int,
        speeds: tuple[float, ...] = (),
        silent: bool = False,
    ) -> DriverPlan:
        """Return the plan of one driver."""
        return DriverPlan(
            names=names,
            address_file=str(self.run_dir / "coordinator.address"),
            tokenizer_sha256=self._sha256,
            tokens=tokens,
            latency=self._settings.latency,
            ends=self._settings.ends,
            capacity=capacity,
            speeds=speeds,
            silent=silent,
        )

    def run(
        self,
        plans: Sequence[DriverPlan],
        *,
        steps: int,
        profile: Profile | None = None,
        coordinator: Sequence[str] = ("fourfold_bench.engines.coordinator",),
    ) -> tuple[dict[str, Any], float]:
        """Run to the last step; return the watch's document, and the CPU seconds of the drivers.

        `coordinator` is the module of that process, with its first arguments.
        """
        with BenchProcesses(self._folder) as processes:
            drivers = [f"driver-{index}" for index in range(len(plans))]
            for name, plan in zip(drivers, plans, strict=True):
                path = plan.write(self._folder / f"{name}.json")
                processes.start(name, "-m", "fourfold_bench.engines.driver", str(path))
            processes.start("peers", "-m", "fourfold_bench.engines.peers", plans[0].address_file, self._sha256)
            (target, *_) = processes.ready("peers", *drivers, timeout=_READY_SECONDS)
            recipe = processes.write_recipe(self._config(target, steps))
            result = self._folder / "watch.json"
            processes.start("coordinator", "-m", *coordinator, recipe, str(self.run_dir), str(result))
            if profile is not None:
                profile.begin("coordinator", processes.pid("coordinator"))
            processes.wait("coordinator", timeout=_RUN_SECONDS)
            if profile is not None:
                profile.end()
            cpu = sum(sum(psutil.Process(processes.pid(name)).cpu_times()[:2]) for name in drivers)
            return json.loads(result.read_text(encoding="utf-8")), cpu

    def _config(self, scorer: str, steps: int) -> Config:
        tables = {
            "name": "engines",
            "steps": steps,
            "model": {"source": str(self._model), "max_context_tokens": _CONTEXT_TOKENS},
            "data": {"train": {"path": str(_write_prompts(self._folder / "prompts.jsonl"))}},
            "sampling": {"max_new_tokens": self._tokens},
            "batch": {
                "prompts_per_step": self._samples // self._settings.group_size,
                "group_size": self._settings.group_size,
                "tokens_per_micro_batch": _CONTEXT_TOKENS,
            },
            "rollout": {"replicas": self._engines},
            "reward": {"target": scorer},
            "checkpoint": {"every_steps": 1000},
            "weights": {"backend": "gloo"},
            **self._tables,
        }
        return from_tables(tables, source="the benchmark's recipe")


def _write_model(folder: Path) -> None:
    """Write a model folder with a byte-level tokenizer, whose words have four letters on average, and no weights."""
    from tokenizers import pre_tokenizers

    folder.mkdir()
    rng, letters = np.random.default_rng(0), list(string.ascii_lowercase)
    drawn = {"".join(rng.choice(letters, rng.integers(3, 6))) for _ in range(VOCABULARY_SIZE)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(drawn)[: VOCABULARY_SIZE - len(alphabet)]
    words += [f"w{index:06d}" for index in range(VOCABULARY_SIZE - len(alphabet) - len(words))]
    vocabulary = {word: index for index, word in enumerate([*alphabet, *words])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "pre_tokenizer": level,
        "decoder": level,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    config = {"vocab_size": VOCABULARY_SIZE, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")


def _write_prompts(path: Path) -> Path:
    rows = ({"question": f"What is {index} times {index + 7}? Answer.", "answer": "?"} for index in range(_PROMPTS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
