"""Runs a generated recipe with `fourfold run`, and reads the measured steps from its metrics."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fourfold import metrics as m
from fourfold.errors import Internal, Unavailable
from fourfold_bench.gpus import GpuMemory, usable, visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.models import forward_flop
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.profiling import Profile
from fourfold_bench.step import phases, recipe
from fourfold_bench.step.benchmark import StepSettings
from fourfold_trainer.flops import utilisation

if TYPE_CHECKING:
    from fourfold_bench.rows.benchmark import RowsSettings

_MEMORY_SECONDS: Final = 0.05
_RUN: Final = "run"
_FAILED: Final = "The run failed."
# A service prints this line each time that it is started.
_READY: Final = re.compile(r"^READY ", re.MULTILINE)


def measure(settings: StepSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure; return JSON values. The run folder is runs/bench-step in the benchmark's folder.

    Raises:
        ConfigError: the settings break a rule of recipes.
        Unavailable: the run failed; with the end of its output.
        Internal: its metrics do not have the measured steps, or the run did not end as it must.
    """
    folder, gpus = run.folder, [f"cuda:{index}" for index in range(settings.gpus)]
    with GpuMemory(gpus, every=_MEMORY_SECONDS) as memory, BenchProcesses(folder) as processes:
        path = processes.write_recipe(recipe.write(settings, folder))
        processes.write_model(settings.shape, context=settings.context)
        processes.start(_RUN, "-m", "fourfold_bench.step.launch", str(folder), path, env=environment(settings))
        watch = RunWatch(settings, folder / "runs" / "bench-step", memory)
        if run.profile is not None:
            watch.profile(run.profile, processes.pid(_RUN))
        try:
            processes.wait(_RUN, timeout=settings.timeout, until=watch.poll)
            end = {} if settings.stop else {"end": wait_for_end(processes, watch)}
        except Unavailable as error:
            raise Unavailable(explanation(processes.log(_RUN)) or error.message) from None
    rows = phases.read_steps(watch.run_dir, warm_up=settings.warm_up, steps=settings.steps)
    return summarise(settings, rows, gpu=usable()[0].name if settings.on_gpus else "") | {
        "first_step_after_seconds": watch.first_step_seconds,
        "gpu_mib": watch.peak,
        "steps": rows,
        **end,
    }


def wait_for_end(processes: BenchProcesses, watch: RunWatch) -> dict[str, Any]:
    """Wait until the run has ended with exit code 0; return its duration and the size of its export.

    Raises:
        Internal: the run exported nothing, or restarted a service.
    """
    began = time.monotonic()
    processes.wait(_RUN, timeout=watch.seconds_left)
    model = watch.run_dir / "model"
    written = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if not written:
        raise Internal(f"the run ended, but there are no weights in {model}")
    for log in sorted((watch.run_dir / "logs").glob("*.log")):
        starts = len(_READY.findall(log.read_text(encoding="utf-8", errors="replace")))
        if starts > 1:
            raise Internal(f"{log.stem} was started {starts} times; its log is {log}")
    return {"seconds": round(time.monotonic() - began, 3), "exported_bytes": written}


def explanation(log: Path) -> str:
    """Return the end of the run's output, from the line that tells why it failed; empty: there is none."""
    _, failed, why = log.read_text(encoding="utf-8").rpartition(_FAILED)
    return f"{failed}{why}".strip() if failed else ""


def environment(settings: StepSettings) -> dict[str, str]:
    """Return the environment of the launcher: the GPUs in the order of its placement, some perhaps more than once."""
    return visible(*(f"cuda:{index}" for index in settings.dealt_gpus) if settings.on_gpus else ())


def summarise(settings: StepSettings, rows: Sequence[Mapping[str, Any]], *, gpu: str = "") -> dict[str, Any]:
    """Return means over the measured steps: seconds by phase, their parts, speeds, FLOP and MFU.

    `gpu` is the name of the GPUs; no MFU is known without it, or if the trainer does not know its peak.
    """
    seconds = phases.means([phases.phases(row) for row in rows])
    sizes = phases.means([{name: row[name] for name in (m.RESPONSE_LENGTH, m.TOTAL_LENGTH)} for row in rows])
    length = sizes[m.TOTAL_LENGTH]
    sampled, tokens = settings.samples * sizes[m.RESPONSE_LENGTH], settings.samples * length
    forward = forward_flop(settings.shape, tokens=tokens, squares=tokens * length)
    flop = {"update": 3 * forward, "reference": forward if settings.kl_coef > 0 else 0.0, "sampling": forward}
    result: dict[str, Any] = {
        "phases": seconds,
        "phases_by_step": [phases.phases(row) for row in rows],
        "parts": phases.means([phases.parts(row) for row in rows]),
        "tokens": {"sampled": sampled, "trained": tokens},
        "tokens_per_second": {
            # Not sampled / seconds["generate"]: sampling begins while the weights of the step before are released.
            "generate": statistics.fmean(row[m.ROLLOUT_SPEED] for row in rows),
            "train": tokens / seconds["train"],
            "step": tokens / seconds[phases.WALL],
        },
        "flop": flop,
    }
    whole = utilisation(sum(flop.values()), seconds=seconds[phases.WALL], gpu_count=max(settings.gpus, 1), gpu=gpu)
    if whole is not None and all(m.MFU in row for row in rows):
        # Of the train phase on the trainer's GPUs, and of the whole step on all GPUs.
        result["mfu"] = {"train": statistics.fmean(row[m.MFU] for row in rows), "step": whole}
    return result


class RunWatch:
    """Follows a run by its metrics file: finished steps, the most memory of measured steps, and the profiled step."""

    def __init__(self, settings: StepSettings | RowsSettings, run_dir: Path, memory: GpuMemory) -> None:
        """Start the clock; make this object when the run is started."""
        self.run_dir = run_dir
        self.peak: dict[str, int] = {}
        """MiB by device."""
        self.first_step_seconds = 0.0
        """From the start of the run to the end of its first step."""
        self._settings, self._memory = settings, memory
        self._profile: tuple[Profile, int] | None = None
        self._began, self._done = time.monotonic(), 0
        self._path = run_dir / "metrics.jsonl"

    @property
    def seconds_left(self) -> float:
        """Until the run must have ended."""
        return self._began + self._settings.timeout - time.monotonic()

    def profile(self, profile: Profile, pid: int) -> None:
        """Profile process `pid` in the step after the measured ones."""
        self._profile = profile, pid

    def poll(self) -> bool:
        """Read the metrics file; return whether all steps are done."""
        if not self._path.exists() or self._path.read_bytes().count(b"\n") == self._done:
            return False
        self._done += 1
        say(f"step {self._done} is done")
        if self._done == 1:
            self.first_step_seconds = round(time.monotonic() - self._began, 3)
        if self._done == self._settings.warm_up:
            self._memory.used()
        if self._done == self._settings.warm_up + self._settings.steps:
            self.peak = {device: round(most) for device, most in self._memory.peak().items()}
            if self._profile is not None:
                self._profile[0].begin(_RUN, self._profile[1])
        if self._done < self._settings.last_step:
            return False
        if self._profile is not None:
            self._profile[0].end()
        return True
