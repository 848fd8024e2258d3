"""Defines the result of a weight update, for the metrics of its step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateResult:
    """Durations and probe differences of a weight update."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By metric name: the whole update and its parts; empty when nothing was sent."""
    probe_diffs: tuple[tuple[float, float], ...] = ()
    """Mean and largest |trainer - engine| on the probe, in nats, of every engine."""
