"""What a rollout benchmark came to, as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold_bench.text import aligned


def print_table(document: Mapping[str, Any]) -> None:
    """Print speeds, and below them what else was measured."""
    for line in lines(document):
        print(line)


def lines(document: Mapping[str, Any]) -> list[str]:
    """Return the table, line by line."""
    parameters, results = document["parameters"], document["results"]
    samples = parameters["prompts"] * parameters["group_size"]
    head = (
        f"{parameters['shape']} on {parameters['device']}: {samples} samples of {parameters['prompt_tokens']} + "
        f"{parameters['new_tokens']} tokens, {parameters['clients']} clients; median of {parameters['rounds']} rounds"
    )
    return [head, "", *aligned(_speeds(results)), "", *_others(results)]


def _speeds(results: Mapping[str, Any]) -> list[list[str]]:
    summary, service = results["summary"], results["service"]
    seconds = {"service": service["seconds"], "service beside streams": service["beside_seconds"]}
    seconds |= {f"LLM.generate, {way}": runs for way, runs in results.get("alone", {}).get("seconds", {}).items()}
    rows = [["", "tokens/s", "of LLM.generate", "s a round", "rounds"]]
    for name, speed in summary["tokens_per_second"].items():
        ratio = summary.get("ratio", {}).get(name)
        runs = seconds[name]
        rows.append(
            [
                name,
                f"{speed:,.0f}",
                "" if ratio is None else f"{ratio:.3f}",
                f"{statistics.median(runs):.3f}",
                " ".join(f"{run:.2f}" for run in runs),
            ]
        )
    return rows


def _others(results: Mapping[str, Any]) -> list[str]:
    service, found = results["service"], []
    found.append(f"start: service {service['start_seconds']:.1f} s")
    if alone := results.get("alone"):
        found[0] += f", vLLM alone {alone['start_seconds']:.1f} s"
    found.append(f"first token, engine idle: {_milliseconds(service['first_token'])}")
    if streams := service["streams"]:
        found.append(f"first token of a stream, beside the batch: {_milliseconds(streams['first_token'])}")
        found.append(f"gap between messages of a stream: {_milliseconds(streams['gaps'])}")
    for device, most in service["gpu_mib"].items():
        found.append(f"memory on {device}: service {most} MiB" + _beside(results, device))
    if greedy := results["summary"].get("greedy"):
        found.append(
            f"greedy: {greedy['equal_tokens']} of {greedy['tokens']} tokens equal, log-probabilities at most "
            f"{greedy['largest_difference']:.4f} nats apart"
        )
    found.append(f"samples checked: {service['samples']}, {service['tokens']} tokens")
    return found + [f"the service warned: {text}" for text in service["warnings"]]


def _beside(results: Mapping[str, Any], device: str) -> str:
    alone = results.get("alone")
    return f", vLLM alone {alone['gpu_mib'][device]} MiB" if alone else ""


def _milliseconds(seconds: Sequence[float]) -> str:
    """Return median, 95th percentile and largest, in milliseconds."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    high = ordered[round(0.95 * (len(ordered) - 1))]
    return f"{1e3 * statistics.median(ordered):.1f} ms, p95 {1e3 * high:.1f}, largest {1e3 * ordered[-1]:.1f}"
