"""`fourfold run` with everything real: one trace of a sample through five processes, in files and at a collector."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.otlp import FoundSpan, check_trace, http_receiver, read_files
from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(500)]

TABLES = """
[trainer]
learning_rate = 1e-3

[algorithm]
kl = {{ coef = 0.01 }}

[tracing]
file = true
endpoint = "{endpoint}"
sample_ratio = 1.0
"""
SERVICES = {f"fourfold-{role}" for role in ("coordinator", "rollout", "reward", "reference", "trainer")}


def test_one_trace_goes_through_five_processes(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    with http_receiver() as collector:
        write_run(tmp_path, tiny_model("llama_tied"), prompts_per_step=2, tables=TABLES, endpoint=collector.endpoint)
        words = [sys.executable, "-m", "fourfold", "run", "recipe.toml", "--set", "steps=2"]
        done = subprocess.run(words, cwd=tmp_path, timeout=450, capture_output=True, text=True, check=False)
    run_dir = tmp_path / "runs" / "tiny"
    assert done.returncode == 0, done.stderr + logs_of(run_dir)
    written = read_files(run_dir / "traces")
    assert {(s.service, s.name, s.span_id) for s in written} == {
        (s.service, s.name, s.span_id) for s in collector.spans
    }
    traces = defaultdict[bytes, list[FoundSpan]](list)
    for span in written:
        traces[span.trace_id].append(span)
    roots = {trace_id: check_trace(trace) for trace_id, trace in traces.items()}  # trees, nested in time, no orphan
    assert Counter(root.name for root in roots.values())["sample"] == 2 * 2 * 4
    for trace_id, root in roots.items():
        if root.name == "sample":
            _check_sample(root, traces[trace_id])


def _check_sample(root: FoundSpan, trace: list[FoundSpan]) -> None:
    assert {span.service for span in trace} == SERVICES
    by_id = {span.span_id: span for span in trace}

    def path(span: FoundSpan) -> list[tuple[str, str]]:
        """Return service and name from the root to a span."""
        above = path(by_id[span.parent]) if span.parent else []
        return [*above, (span.service.removeprefix("fourfold-"), span.name.rpartition("/")[2])]

    ends = {tuple(path(span)) for span in trace}
    start = ("coordinator", "sample")
    for phase, call, service, work in (
        ("generate", "Generate", "rollout", "generate"),
        ("generate", "Generate", "rollout", "queue"),
        ("train", "TrainStep", "trainer", "optimizer_step"),
    ):
        assert (start, ("coordinator", phase), ("coordinator", call), (service, call), (service, work)) in ends
    for call, service in (("Score", "reward"), ("ComputeLogprobs", "reference")):
        assert (start, ("coordinator", "score"), ("coordinator", call), (service, call)) in ends
    (sampled,) = (span for span in trace if span.service == "fourfold-rollout" and span.name.endswith("/Generate"))
    assert 1 <= sampled.attributes["gen_ai.usage.output_tokens"] <= 8
    assert sampled.attributes["gen_ai.response.finish_reasons"][0] in ("stop", "length")
    (trained,) = (s for s in trace if s.service == "fourfold-coordinator" and s.name.endswith("/TrainStep"))
    assert trained.attributes["fourfold.step"] in (1, 2) and "fourfold.policy.loss" in trained.attributes
    assert root.attributes["fourfold.policy_version"] == trained.attributes["fourfold.policy_version"]
