"""A small folder of a run with hostile texts, for the pages of `fourfold view`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.host.disk import append_lines
from fourfold.sample import Sample, ScoreTerm, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.sample_tokens import TOKENS_FILE, to_token_lines
from fourfold_coordinator.state.samples import SAMPLES_FILE, Trajectory, to_lines
from tests.fakes.toy import write_model
from tests.support.eval_results import make_result

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u202e & \"quotes\""
RECIPE = """
name = "{name}"
seed = 1
steps = 9

[model]
source = "{model}"

[data]
train = {{ path = "x.jsonl" }}

[sampling]
max_new_tokens = 64

[batch]
prompts_per_step = 2
group_size = 2

[trainer]
learning_rate = {rate}
"""


def trajectory(
    name: str, text: str, *, step: int, prompt: str = "What is 3 * 4?", score: float | None = 1.0, **values: Any
) -> Trajectory:
    """Return a trajectory whose tokens are the bytes of its texts; `name` is that of its group, "-" and a number."""
    group = name.rpartition("-")[0]
    before, after = prompt.encode(errors="replace"), text.encode(errors="replace")
    mask = np.arange(len(before) + len(after)) >= len(before)
    # The toy tokenizer numbers the letters of a byte-level alphabet.
    ids = np.frombuffer(before + after, np.uint8).astype(np.int32)
    spans = (
        VersionSpan(policy_version=-1, token_count=len(before)),
        VersionSpan(policy_version=values.pop("version", step - 1), token_count=len(after)),
    )
    terms = (ScoreTerm(name="reward", scorer="s@1", score=score, weight=1.0),) if score is not None else ()
    sample = Sample(
        sample_id=name,
        group_id=group,
        token_ids=ids,
        behavior_logprobs=np.where(mask, np.float32(-0.5), np.float32(np.nan)),
        action_mask=mask,
        loss_mask=mask,
        version_spans=spans,
        temperature=1.0,
        score=score,
        scorer="s@1",
        terms=terms,
    )
    own = Prompt(
        index=0,
        text=prompt,
        token_ids=ids[: len(before)],
        answer="12",
        metadata_json="{}",
        group_key="a",
        source=values.pop("source", ""),
    )
    return Trajectory(prompt=own, segments=(sample,), completion=text, **values)


def append_step(folder: Path, step: int, trajectories: Sequence[Trajectory], **metrics: Any) -> None:
    """Append the lines of one step to the files of a run."""
    append_lines(folder / TOKENS_FILE, to_token_lines(step, trajectories))
    append_lines(folder / SAMPLES_FILE, to_lines(step, trajectories))
    row = {
        "step": step,
        "reward/mean": 0.1 * step,
        "time/generate": 2.0,
        "time/train": 1.0,
        "time/step": 3.5,
        "end_time": "2026-01-02T03:04:05.678Z",
        **metrics,
    }
    append_lines(folder / "metrics.jsonl", json.dumps(row).encode() + b"\n")


def write_run(folder: Path, *, rate: float = 1e-5, text: str = HOSTILE) -> Path:
    """Write a finished run of three steps in a folder; return it."""
    folder.mkdir(parents=True)
    model = write_model(folder / "model")
    (folder / "config.toml").write_text(RECIPE.format(name=folder.name, model=model, rate=rate))
    for step in (1, 2, 3):
        group = f"p{step}-0"
        found = [
            trajectory(f"{group}-0", f"{text} in step {step}", step=step),
            trajectory(f"{group}-1", f"apples {step}", step=step, score=0.0, source="fruit"),
            trajectory(f"q{step}-0-0", "pears", step=step, prompt="Pears?", dropped="STALE", score=None, version=0),
        ]
        alarms = {"alarms": ["few scores differ; raise sampling.temperature"]} if step == 2 else {}
        append_step(folder, step, found, **alarms)
    line = {"step": 3, "start": 1e9, "end": 1e9 + 4, "members": {"rollout-0<b>": {"generate": [[0.0, 2.0]]}}}
    append_lines(folder / "timeline.jsonl", json.dumps(line).encode() + b"\n")
    answers = [{"prompt": "3 * 4", "completion": text, "answer": "12", "score": 0.0}]
    results = (make_result("math", score=0.75, interval=(0.4, 0.9)), make_result("code", score=0.25))
    sets = [asdict(result) for result in results]
    evals = [{"step": step, "score": 0.5, "half_width": 0.1, "n": 8, "missing": 0, "sets": sets} for step in (0, 3)]
    report = {
        "name": folder.name, "steps": 9, "evals": evals, "eval_before": evals[0], "eval_after": evals[1],
        "answers_before": answers, "answers_after": [{**answers[0], "completion": "12", "score": 1.0}],
        "diagnosis": [{"text": "few scores differ", "steps": 1, "first": 2, "last": 2}], "seconds": 9.0,
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))
    return folder
