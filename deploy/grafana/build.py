"""Writes fourfold.json, the Grafana dashboard, from the table of its panels: python deploy/grafana/build.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).with_name("fourfold.json")
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}

ROWS: Final[dict[str, list[tuple[str, str, dict[str, str]]]]] = {
    "Learning": [
        ("Reward", "none", {"mean": 'fourfold_run_metric{run="$run",metric="reward/mean"}'}),
        ("Held-out score", "none", {"score": 'fourfold_run_metric{run="$run",metric="eval/score"}'}),
        ("Useful groups", "percentunit", {"useful": 'fourfold_run_metric{run="$run",metric="groups/useful"}'}),
        ("Completion length", "none", {"tokens": 'fourfold_run_metric{run="$run",metric="length/response_mean"}'}),
        ("Logprob mismatch", "none", {"mean": 'fourfold_run_metric{run="$run",metric="mismatch/logprob_diff_mean"}'}),
        ("Policy", "none", {"entropy": 'fourfold_run_metric{run="$run",metric="policy/entropy"}'}),
    ],
    "Run": [
        ("Steps", "none", {"done": 'fourfold_run_step{run="$run"}', "of": 'fourfold_run_steps{run="$run"}'}),
        ("Time of a step", "s", {"{{metric}}": 'fourfold_run_metric{run="$run",metric=~"time/.*"}'}),
        ("Phase", "none", {"{{phase}}": 'fourfold_run_phase{run="$run"}'}),
        (
            "Waits and conditions",
            "none",
            {"waits": 'fourfold_run_waiting{run="$run"}', "conditions": 'fourfold_run_conditions{run="$run"}'},
        ),
        ("Members", "none", {"{{role}} {{state}}": 'fourfold_run_members{run="$run"}'}),
        ("Faults", "cps", {"{{reason}}": 'rate(fourfold_run_faults_total{run="$run"}[5m])'}),
    ],
    "Rollout": [
        ("Sampled tokens per second", "none", {"{{member}}": 'fourfold_rollout_tokens_per_second{run="$run"}'}),
        ("Samples", "none", {"{{member}} {{state}}": 'fourfold_rollout_samples{run="$run"}'}),
        (
            "Free KV cache",
            "percentunit",
            {
                "{{member}}": 'fourfold_rollout_kv_cache_free_tokens{run="$run"} '
                '/ fourfold_rollout_kv_cache_tokens{run="$run"}'
            },
        ),
        ("Policy version", "none", {"{{member}}": 'fourfold_rollout_policy_version{run="$run"}'}),
        (
            "Time in weight updates",
            "percentunit",
            {
                "{{member}} {{phase}}": 'rate(fourfold_rollout_update_seconds_total{run="$run",phase!="READY"}[5m])',
            },
        ),
        ("Open sessions of agents", "none", {"{{member}}": 'fourfold_gateway_sessions{run="$run"}'}),
    ],
    "Trainer, reward, reference": [
        (
            "Trained tokens per second",
            "none",
            {"tokens": 'rate(fourfold_trainer_trained_tokens_total{run="$run"}[5m])'},
        ),
        (
            "Trainer's phases",
            "percentunit",
            {"{{phase}}": 'rate(fourfold_trainer_phase_seconds_total{run="$run"}[5m])'},
        ),
        ("Reward outcomes", "cps", {"{{outcome}}": 'rate(fourfold_reward_samples_total{run="$run"}[5m])'}),
        (
            "Time of a reward, 95 %",
            "s",
            {
                "{{member}}": "histogram_quantile(0.95, sum by (member, le) "
                '(rate(fourfold_reward_sample_seconds_bucket{run="$run"}[5m])))'
            },
        ),
        ("Waiting for rewards", "none", {"{{member}}": 'fourfold_reward_waiting_samples{run="$run"}'}),
        (
            "Reference tokens per second",
            "none",
            {"{{member}}": 'rate(fourfold_reference_tokens_total{run="$run"}[5m])'},
        ),
    ],
    "Services": [
        ("Ready", "none", {"{{member}}": 'fourfold_ready{run="$run"}'}),
        (
            "Failed calls per second",
            "cps",
            {"{{member}} {{method}} {{code}}": 'rate(fourfold_calls_total{run="$run",code!="OK"}[5m])'},
        ),
        ("Refused calls per second", "cps", {"{{reason}}": 'rate(fourfold_refused_calls_total{run="$run"}[5m])'}),
        ("CPU of the main process", "none", {"{{member}}": 'rate(process_cpu_seconds_total{run="$run"}[5m])'}),
        (
            "Memory with children",
            "bytes",
            {
                "{{member}}": 'process_resident_memory_bytes{run="$run"} '
                '+ fourfold_children_resident_memory_bytes{run="$run"}'
            },
        ),
        ("Calls in flight", "none", {"{{member}} {{method}}": 'fourfold_calls_in_flight{run="$run"}'}),
    ],
}
"""Rows of panels: title, unit of Grafana, and the expression of each legend."""


def build() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for number, panel in enumerate(row):
            place = {"x": number % _COLUMNS * _WIDTH, "y": y + number // _COLUMNS * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(*panel, place=place))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    for number, each in enumerate(panels, start=1):
        each["id"] = number
    return {
        "title": "Fourfold",
        "uid": "fourfold",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "label": "Run",
                    "datasource": _SOURCE,
                    "query": "label_values(fourfold_run_step, run)",
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": panels,
    }


def _panel(title: str, unit: str, expressions: dict[str, str], *, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(expressions.items())
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(build(), indent=1) + "\n", encoding="ascii")
