"""The page of the metrics, from fourfold/metrics.py."""

from __future__ import annotations

from typing import Final

from fourfold.metrics import METRICS
from scripts.reference.page import cell, page, table

_INTRODUCTION: Final = """\
One line of `runs/NAME/metrics.jsonl` is one step, with these keys. The trainer and the coordinator use the same
names. Each text starts with the unit, where there is one. A line also has `step`, `end_time` (the UTC time at which
the step ended, evaluation and checkpoint included, as text such as `2026-11-23T15:25:21.042Z`), `diagnosis` (the
problems of the step as text), `alarms` (those that were logged) and `lag_change` (change of the policy lag limit
after the step, with its reason). These are not metrics.

A metric is absent from a step in which there is nothing to measure: those of the critic without a critic, for
example. A loss of your own may add [metrics](../algorithms.md#a-loss-of-your-own). The terms are in the
[glossary](../glossary.md), and the metrics that Prometheus reads on the page on [monitoring](../monitoring.md)."""

_COVERED_TOKENS: Final = """\
Metrics of tokens cover those that were sampled and that no grammar forced, and of these

- the *tokens of the updates*: those in the loss whose trajectory has an advantage that is not 0, or all in the loss if
  that has a KL or an entropy term. Their share is `policy/covered_fraction`;
- *tokens with an old log-probability*: those of the updates; all, masked trajectories included, if a pass before the
  updates covers the batch. A KL term in the reward, `algorithm.kl.target` or `otb` needs this pass, and, with several
  updates in a step, a critic. Their share is `mismatch/covered_fraction`."""


def metrics_page() -> str:
    """Return docs/reference/metrics.md: one table for each first part of the names."""
    groups: dict[str, list[list[str]]] = {}
    for name, meaning in METRICS.items():
        groups.setdefault(name.partition("/")[0], []).append([f"`{name}`", cell(meaning)])
    blocks = [f"## `{group}/`\n\n{table(['metric', 'unit and meaning'], rows)}" for group, rows in groups.items()]
    return page("Metrics", "fourfold/metrics.py", _INTRODUCTION, _COVERED_TOKENS, *blocks)
