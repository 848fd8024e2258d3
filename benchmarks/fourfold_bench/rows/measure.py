"""Runs a generated recipe of rows with `fourfold run`, then TRL on the same rows, each alone on the machine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold import metrics as m
from fourfold.config import Config, from_tables
from fourfold.errors import Unavailable
from fourfold_bench.gpus import GpuMemory, usable, visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.models import SHAPES, forward_flop, text_of
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.rows.benchmark import OURS, RowsSettings
from fourfold_bench.step import phases
from fourfold_bench.step.measure import RunWatch, explanation
from fourfold_trainer.flops import utilisation

NAME: Final = "bench-rows"
ROWS_FILE: Final = "rows.jsonl"
SETTINGS_FILE: Final = "settings.json"
_SEED: Final = 17
_NEVER: Final = 1_000_000
_SPREAD: Final = 0.8  # standard deviation of the logarithm of a length
_IN_LOSS: Final = 0.45
_IGNORED: Final = -100
END: Final = "w1"
_PRESETS: Final = {"sft": "sft", "dpo": "dpo", "reward-training": "reward-model"}
_MEMORY_SECONDS: Final = 0.05


def measure(settings: RowsSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure; return JSON values by system.

    Raises:
        ConfigError: the settings break a rule of recipes.
        Unavailable: a run failed; with the end of its output.
        Internal: the metrics of a run do not have the measured steps.
    """
    lengths = write_rows(settings, run.folder / ROWS_FILE)
    with BenchProcesses(run.folder) as processes:
        path = processes.write_recipe(recipe(settings, run.folder))
        model = processes.write_model(settings.shape, context=settings.max_tokens)
        if settings.has_pairs:  # a text that was never trained to end is refused
            (model / "generation_config.json").write_text(json.dumps({"eos_token_id": int(END[1:])}), encoding="utf-8")
        began = time.monotonic()
        processes.run("plan", "-m", "fourfold", "plan", path, timeout=settings.timeout)
        encoding = time.monotonic() - began
    words = ["-m", "fourfold_bench.step.launch", str(run.folder), path]
    systems = {OURS: measure_run(settings, run.folder, lengths, OURS, words)}
    systems[OURS]["plan_seconds"] = round(encoding, 3)
    if settings.peer:
        settings.write(run.folder / SETTINGS_FILE)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
        words = [*launch, "-m", "fourfold_bench.rows.trl", str(run.folder)]
        systems[settings.peer] = measure_run(settings, run.folder, lengths, settings.peer, words)
    return {"mean_tokens": float(lengths.mean()), "tokens": int(lengths.sum()), "systems": systems}


def measure_run(
    settings: RowsSettings, folder: Path, lengths: np.ndarray[Any, Any], name: str, words: Sequence[str]
) -> dict[str, Any]:
    """Run a system to its last measured step; return its numbers."""
    run_dir = folder / "runs" / (NAME if name == OURS else name)
    with GpuMemory(settings.devices, every=_MEMORY_SECONDS) as memory, BenchProcesses(folder / name) as processes:
        watch = RunWatch(settings, run_dir, memory)
        env = visible(*settings.devices) if settings.on_gpus else {}
        processes.start(name, *words, env={**env, "HF_HUB_OFFLINE": "1"})
        try:
            processes.wait(name, timeout=settings.timeout, until=watch.poll)
        except Unavailable as error:
            raise Unavailable(explanation(processes.log(name)) or error.message) from None
    rows = phases.read_steps(run_dir, warm_up=settings.warm_up, steps=settings.steps)
    peak = max(watch.peak.values(), default=0) / 1024
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as lines:
        loss = next(row[m.POLICY_LOSS] for row in map(json.loads, lines) if row["step"] == settings.loss_step)
    most = {name: max(row.get(name, 0.0) for row in rows) or None for name in (m.GPU_PEAK, m.GPU_RESERVED)}
    return summarise(settings, rows, lengths) | {
        "first_step_after_seconds": watch.first_step_seconds,
        "tensors_gib": most[m.GPU_PEAK],
        "reserved_gib": most[m.GPU_RESERVED],
        "gpu_peak_gib": round(peak, 2) or None,
        "loss": loss,
        "steps": rows,
    }


def summarise(
    settings: RowsSettings, rows: list[dict[str, Any]], lengths: np.ndarray[Any, Any]
) -> dict[str, float | None]:
    """Return the rates over the measured steps, and the share in which the trainer did not train if it is known."""
    seconds, tokens = (sum(row[name] for row in rows) for name in (m.TIME_STEP, m.DATA_TOKENS))
    if "end_time" in rows[0]:  # a run trains on while it reports a step, which is in no step's time
        first, last = (datetime.fromisoformat(row["end_time"]).timestamp() for row in (rows[0], rows[-1]))
        seconds = last - first + rows[0][m.TIME_STEP]
    squares = tokens * float((lengths**2).sum() / lengths.sum())
    with_head = settings.kind != "reward-training"
    flop = 3 * forward_flop(settings.shape, tokens=tokens, squares=squares, with_head=with_head)
    gpu = usable()[0].name if settings.on_gpus else ""
    found: dict[str, float | None] = {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds / len(rows),
        "mfu": utilisation(flop, seconds=seconds, gpu_count=settings.ranks, gpu=gpu),
    }
    if all(m.TRAIN_SPEED in row for row in rows):
        found["idle_share"] = 1 - sum(row[m.DATA_TOKENS] / row[m.TRAIN_SPEED] for row in rows) / seconds
    return found


def write_rows(settings: RowsSettings, path: Path) -> np.ndarray[Any, Any]:
    """Write rows that all systems read alike; return the lengths of their samples, int64 [n], of pairs two each.

    A row is token ids and labels; a pair is texts, whose answers end with the word `END`, so that no system adds one.
    Frequencies of tokens follow Zipf's law, so that the loss falls within the measured steps.
    """
    random, words = np.random.default_rng(_SEED), int(SHAPES[settings.shape]["vocab_size"])
    middle = np.log(settings.mean_tokens) - _SPREAD**2 / 2
    drawn = random.lognormal(middle, _SPREAD, (2 if settings.has_pairs else 1, settings.rows))
    lengths = np.clip(drawn, 8, settings.max_tokens).astype(np.int64)
    answers = np.maximum(np.rint(lengths * _IN_LOSS).astype(np.int64), 1)
    prompts = lengths[0] - answers[0]
    answers = np.minimum(answers, settings.max_tokens - prompts)
    ends = np.cumsum(1 / np.arange(1, words + 1))

    def draw(count: int) -> list[int]:
        found: list[int] = np.searchsorted(ends, random.random(count) * ends[-1]).tolist()
        return found

    with path.open("w", encoding="utf-8") as file:
        for prompt, *sides in zip(prompts.tolist(), *answers.tolist(), strict=True):
            ids = draw(prompt)
            if settings.has_pairs:
                chosen, rejected = (f"{text_of(draw(side - 1))} {END}" for side in sides)
                row: dict[str, Any] = {"prompt": f"{text_of(ids)} ", "chosen": chosen, "rejected": rejected}
            else:
                answer = draw(sides[0])
                row = {"input_ids": ids + answer, "labels": [_IGNORED] * prompt + answer}
            file.write(json.dumps(row) + "\n")
    of_samples: np.ndarray[Any, Any] = (prompts + answers).T.ravel()
    return of_samples


def recipe(settings: RowsSettings, folder: Path) -> Config:
    """Return the recipe, with a step after the measured ones; raises ConfigError if it breaks a rule."""
    tables: Mapping[str, Any] = {
        "name": NAME,
        "seed": _SEED,
        "steps": settings.last_step + 1,
        "model": {"source": str(folder / "model"), "max_context_tokens": settings.max_tokens},
        "data": {
            "train": {"path": str(folder / ROWS_FILE)},
            "chat": not settings.has_pairs,
            "order": "file",
            "cache": str(folder / "tokens"),
        },
        "batch": {
            "rows_per_step": settings.rows_per_step,
            "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        },
        "algorithm": {"preset": _PRESETS[settings.kind]},
        "trainer": {
            "ranks": settings.ranks,
            "device": settings.device,
            "zero_stage": settings.zero_stage,
            "learning_rate": settings.learning_rate,
            "liger_kernels": settings.liger,
            "gradient_checkpointing": settings.checkpointing,
        },
        "checkpoint": {"every_steps": _NEVER},
        "evaluation": {"every_steps": _NEVER},
    }
    return from_tables(tables, source="the benchmark's recipe")
