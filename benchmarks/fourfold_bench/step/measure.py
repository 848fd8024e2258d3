"""One run of a generated recipe, and what its metrics say of the measured steps."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.errors import Internal, Unavailable
from fourfold_bench.children import Children
from fourfold_bench.devices import visible
from fourfold_bench.memory import GpuMemory
from fourfold_bench.sampler import Profile
from fourfold_bench.step import phases, recipe
from fourfold_bench.step.flops import step_flops
from fourfold_bench.step.settings import Settings

_MODEL_SECONDS: Final = 600.0
_MEMORY_SECONDS: Final = 0.05
_TERA: Final = 1e12
_FAILED: Final = "The run failed."
# What a service prints each time that it is started.
_READY: Final = re.compile(r"^READY ", re.MULTILINE)


def run(settings: Settings, folder: Path, profile: Profile | None = None) -> dict[str, Any]:
    """Measure; returns JSON values.

    Args:
        settings: what to measure.
        folder: of its own; the run folder is runs/bench-step in it.
        profile: of every process, in the step that the settings have for it.

    Raises:
        ConfigError: no recipe may say what the settings ask for.
        Unavailable: the run failed; with the end of what it said.
        Internal: its metrics are not those of the steps that were asked for, or it did not end as it should.
    """
    children = Children(folder)
    memory = GpuMemory([f"cuda:{index}" for index in range(settings.gpus)], every=_MEMORY_SECONDS)
    try:
        path = folder / "recipe.toml"
        path.write_text(configuration.dump(recipe.write(settings, folder)), encoding="utf-8")
        words = ("-m", "fourfold_bench.model", str(folder / "model"), settings.shape, str(settings.context))
        children.run("model", *words, timeout=_MODEL_SECONDS)
        env = environment(settings) | (profile.environment() if profile else {})
        children.start("run", "-m", "fourfold_bench.step.launch", str(folder), str(path), env=env)
        watch = Watch(settings, folder / "runs" / "bench-step", memory)
        if profile is not None:
            own, pid = profile, children.pid("run")
            watch.on_profile = [lambda: own.begin(pid), own.end]
        try:
            children.wait("run", timeout=settings.timeout, until=watch.look)
            end = {} if settings.stop else {"end": _finish(children, watch)}
        except Unavailable as error:
            raise Unavailable(_why(children.log("run")) or error.message) from None
    finally:
        children.stop()
        memory.stop()
    rows = phases.read_steps(watch.run_dir, warm_up=settings.warm_up, steps=settings.steps)
    return summarise(settings, rows) | {
        "first_step_after_seconds": watch.first_step_seconds,
        "gpu_mib": watch.peak,
        "steps": rows,
        **end,
    }


def _finish(children: Children, watch: Watch) -> dict[str, Any]:
    """Wait until the run has ended by itself, with exit code 0; return what its end was.

    Raises:
        Internal: it exported nothing, or a service was started again.
    """
    began = time.monotonic()
    children.wait("run", timeout=watch.seconds_left)
    model = watch.run_dir / "model"
    written = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if not written:
        raise Internal(f"the run ended, but there are no weights in {model}")
    for log in sorted((watch.run_dir / "logs").glob("*.log")):
        starts = len(_READY.findall(log.read_text(encoding="utf-8", errors="replace")))
        if starts > 1:
            raise Internal(f"{log.stem} was started {starts} times; its log is {log}")
    return {"seconds": round(time.monotonic() - began, 3), "exported_bytes": written, "restarts": 0}


def _why(log: Path) -> str:
    """Return why a run failed, in its own words: they end with the log of what died."""
    _, failed, why = log.read_text(encoding="utf-8").rpartition(_FAILED)
    return f"{failed}{why}".strip() if failed else ""


def environment(settings: Settings) -> dict[str, str]:
    """Return what the launcher shall see: the GPUs of the run by their number there, one perhaps more than once."""
    return visible(*(f"cuda:{index}" for index in settings.dealt_gpus) if settings.on_gpus else ())


def summarise(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over the measured steps: seconds by phase, their parts, speeds, FLOP and MFU."""
    seconds = phases.means([phases.phases(row) for row in rows])
    sizes = phases.means([{name: row[name] for name in (m.RESPONSE_LENGTH, m.TOTAL_LENGTH)} for row in rows])
    sampled = settings.samples * sizes[m.RESPONSE_LENGTH]
    tokens = settings.samples * sizes[m.TOTAL_LENGTH]
    flops = step_flops(
        settings.shape, samples=settings.samples, tokens=sizes[m.TOTAL_LENGTH], reference=settings.kl_coef > 0
    )
    result: dict[str, Any] = {
        "phases": seconds,
        "phases_by_step": [phases.phases(row) for row in rows],
        "parts": phases.means([phases.parts(row) for row in rows]),
        "tokens": {"sampled": sampled, "trained": tokens},
        "tokens_per_second": {
            "generate": sampled / seconds["generate"],
            "train": tokens / seconds["train"],
            "step": tokens / seconds[phases.WALL],
        },
        "flop": {"update": flops.update, "reference": flops.reference, "sampling": flops.sampling},
    }
    if settings.on_gpus:
        result["mfu"] = mfu(settings, update=flops.update, whole=flops.whole, seconds=seconds)
    return result


def mfu(settings: Settings, *, update: float, whole: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the GPUs' peak: of the update on the trainer's, and of the whole step on all of them."""
    peak = settings.peak_tflops * _TERA
    return {
        "train": update / (seconds["train"] * settings.ranks * peak),
        "step": whole / (seconds[phases.WALL] * settings.gpus * peak),
    }


class Watch:
    """Looks at a run from outside: says which steps are done, and notes the most memory of the measured ones."""

    def __init__(self, settings: Settings, run_dir: Path, memory: GpuMemory) -> None:
        """Begin, when the run begins."""
        self.run_dir = run_dir
        self.peak: dict[str, int] = {}
        """MiB by device."""
        self.first_step_seconds = 0.0
        """From the start of the run to the end of its first step."""
        self.on_profile: list[Callable[[], object]] = []
        """What to call when the step after the measured ones begins, and when it ends."""
        self._settings, self._memory = settings, memory
        self._began, self._done = time.monotonic(), 0
        self._path = run_dir / "metrics.jsonl"

    @property
    def seconds_left(self) -> float:
        """Until the run must have ended."""
        return self._began + self._settings.timeout - time.monotonic()

    def look(self) -> bool:
        """Look once; return whether all steps are done."""
        if not self._path.exists() or self._path.read_bytes().count(b"\n") == self._done:
            return False
        self._done += 1
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} step {self._done} is done\n")
        if self._done == 1:
            self.first_step_seconds = round(time.monotonic() - self._began, 3)
        if self._done == self._settings.warm_up:
            self._memory.used()
        if self._done == self._settings.warm_up + self._settings.steps:
            self.peak = {device: round(most) for device, most in self._memory.peak().items()}
            if self.on_profile:
                self.on_profile[0]()
        if self._done < self._settings.last_step:
            return False
        for call in self.on_profile[1:]:
            call()
        return True
