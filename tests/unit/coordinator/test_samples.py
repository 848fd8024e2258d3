"""Lines of samples.jsonl are JSON, whatever a model writes."""

from __future__ import annotations

import json
import random

import numpy as np

from fourfold.sample import Sample, ScoreTerm, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.state.samples import Trajectory, to_lines


def trajectory(text: str) -> Trajectory:
    mask = np.array([False, True, True])
    sample = Sample(
        sample_id="p-0-0",
        group_id="p-0",
        token_ids=np.arange(3, dtype=np.int32),
        behavior_logprobs=np.array([np.nan, -0.5, -1], np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(VersionSpan(policy_version=-1, token_count=1), VersionSpan(policy_version=2, token_count=2)),
        temperature=1.0,
        score=0.3,
        scorer="exact@1",
        terms=(ScoreTerm(name="right", scorer="exact@1", score=0.6, weight=0.5),),
    )
    prompt = Prompt(
        index=0, text="a\t\u00e9", token_ids=mask[:1], answer='"', metadata_json="{}", group_key="0", source="sums"
    )
    return Trajectory(prompt=prompt, segments=(sample,), completion=text, dropped="FILTERED")


def test_a_line_has_the_documented_keys_in_order() -> None:
    (line,) = to_lines(3, [trajectory("12")]).decode().splitlines()
    assert line == (
        '{"step": 3, "sample_id": "p-0-0", "group_id": "p-0", "prompt": "a\\t\u00e9", "completion": "12", '
        '"answer": "\\"", "prompt_tokens": 1, "completion_tokens": 2, "logprob_mean": -0.75, '
        '"version_spans": [[-1, 1], [2, 2]], "truncated": false, "score": 0.3, "scorer": "exact@1", '
        '"terms": {"right": [0.6, 0.5, "exact@1"]}, "dropped": "FILTERED", "source": "sums"}'
    )


def test_any_completion_is_written_as_json_writes_it() -> None:
    pick = random.Random(0)
    texts = ["", "\\", '"', "\n", "\x00", "\x1f\n", "\x7f\u2028\U0001f600", "a\r\nb"]
    texts += ["".join(pick.choice('ab"\\\n\t\x01\u4e2d') for _ in range(pick.randrange(30))) for _ in range(500)]
    texts += ["".join(pick.choice('ab"\\\n\u4e2d') for _ in range(pick.randrange(30))) for _ in range(500)]
    lines = to_lines(1, map(trajectory, texts)).decode().split("\n")
    assert lines.pop() == ""
    assert [json.loads(line)["completion"] for line in lines] == texts
    for text, line in zip(texts, lines, strict=True):
        written = json.dumps(text, ensure_ascii=False).replace("\u2028", "\\u2028")
        assert f'"completion": {written}, "answer"' in line


def test_no_text_ends_a_line_for_any_reader() -> None:
    text = "a\u2028b\u2029c\x85d\x1ce\x0bf\ng\r\u00e2\u0080\u00a8"
    lines = to_lines(1, [trajectory(text), trajectory(text)]).decode().splitlines()
    assert [json.loads(line)["completion"] for line in lines] == [text, text]
