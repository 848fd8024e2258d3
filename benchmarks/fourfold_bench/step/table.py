"""What a step benchmark came to, as text, beside OpenRLHF where the work is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fourfold_bench.step.openrlhf import SECONDS, same_work
from fourfold_bench.step.phases import OTHER, PHASES, WALL
from fourfold_bench.step.settings import Settings
from fourfold_bench.text import aligned

_ORDER: Final = (*PHASES, OTHER, WALL)
_TERA: Final = 1e12
_MIB: Final = 1 << 20
_REFERENCE: Final = (
    "reference: what sampling did not hide; OpenRLHF's are the whole passes over old and reference log-probabilities"
)


def print_table(document: Mapping[str, Any]) -> None:
    """Print the phases, and below them what else was measured."""
    for line in lines(document):
        print(line)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the table, line by line."""
    settings, results = Settings(**document["parameters"]), document["results"]
    layout = settings.layout + (", sleep" if settings.sleep else "")
    head = (
        f"{settings.shape} on {settings.device}, {layout}: {settings.prompts} prompts x {settings.group_size}, "
        f"{settings.prompt_tokens} + {settings.new_tokens} tokens; mean of {settings.steps} steps after "
        f"{settings.warm_up}"
    )
    notes = [_REFERENCE] if same_work(settings) else []
    others = [*notes, *_others(settings, results)]
    return [head, "", *aligned(_phases(settings, results)), "", *others, "", *_parts(results["parts"])]


def _phases(settings: Settings, results: Mapping[str, Any]) -> list[list[str]]:
    seconds, by_step = results["phases"], results["phases_by_step"]
    others = SECONDS if same_work(settings) else {}
    rows = [["seconds", "mean", "share", *(f"OpenRLHF {name}" for name in others), "steps"]]
    for name in _ORDER:
        if name not in seconds:
            continue
        value = seconds[name]
        share = f"{value / seconds[WALL]:.1%}"
        theirs = [f"{column[name]:.2f}" if name in column else "" for column in others.values()]
        runs = " ".join(f"{step[name]:.3f}" for step in by_step)
        rows.append([name, f"{value:.3f}", share, *theirs, runs])
    if others:
        ratios = [f"{column[WALL] / seconds[WALL]:.2f} x" for column in others.values()]
        rows.append(["times as fast", "", "", *ratios, ""])
    return rows


def _others(settings: Settings, results: Mapping[str, Any]) -> list[str]:
    speeds, flop = results["tokens_per_second"], results["flop"]
    found = [
        f"tokens/s: {speeds['generate']:,.0f} sampled while generating, {speeds['train']:,.0f} in the trainer, "
        f"{speeds['step']:,.0f} of the whole step",
        "TFLOP a step: " + ", ".join(f"{name} {value / _TERA:,.3f}" for name, value in flop.items()),
    ]
    if mfu := results.get("mfu"):
        found.append(
            f"MFU: update {mfu['train']:.1%} of the trainer's GPUs, whole step {mfu['step']:.1%} of all "
            f"({settings.peak_tflops:.0f} TFLOP/s each)"
        )
    for device, most in results["gpu_mib"].items():
        found.append(f"most memory on {device}: {most} MiB")
    if end := results.get("end"):
        found.append(
            f"the run ended by itself {end['seconds']:.1f} s after these steps: one more, a checkpoint, an export of "
            f"{end['exported_bytes'] / _MIB:,.1f} MiB; no service was started again"
        )
    found.append(f"the first step was done {results['first_step_after_seconds']:.1f} s after the start")
    return found


def _parts(parts: Mapping[str, float]) -> list[str]:
    width = max(map(len, parts), default=0)
    return [f"{name:{width}}  {value:,.4f}" for name, value in sorted(parts.items())]
