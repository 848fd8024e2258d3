"""The report of a run, as people read it, and the question that it takes from a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.host.program import program
from fourfold_coordinator.cli.summary import answer_table, summary_lines
from fourfold_coordinator.data.question import last_message

PROMPT = "<|im_start|>system\nReply.<|im_end|>\n<|im_start|>user\nWhat is {}?<|im_end|>\n<|im_start|>assistant\n"


def answer(expression: str, completion: str, score: float | None) -> dict[str, Any]:
    return {"prompt": PROMPT.format(expression), "completion": completion, "answer": "12", "score": score}


def test_summary_says_what_was_learned_where_it_is_and_what_comes_next(tmp_path: Path) -> None:
    report = {
        "name": "demo", "seed": 17, "steps": 24, "seconds": 250.2, "seconds_per_step": 9.83,
        "peak_memory_bytes": 8_260_000_000, "dropped": {"REWARD_ERROR": 3},
        "eval_before": {"step": 0, "score": 0.106, "half_width": 0.071, "n": 160},
        "eval_after": {"step": 24, "score": 0.631, "half_width": None, "n": 160},
        "answers_before": [answer("3 * 4", "I think\nit is 34, because of this and that", 0.0)],
        "answers_after": [answer("3 * 4", "12", 1.0)],
    }  # fmt: skip
    (tmp_path / "curve.png").touch()
    text = "\n".join(summary_lines(report, tmp_path))
    assert "demo is done: 24 steps (9.8 s each) in 4:10 min, seed 17, at most 8.3 GB of memory." in text
    away = {**report, "peak_memory_without": ["trainer-0"]}
    assert "8.3 GB of memory (without trainer-0: not on the coord" in "\n".join(summary_lines(away, tmp_path))
    assert "Held-out score: 0.11 +- 0.07 (160 answers) before, 0.63 (160 answers) after training (95 %)." in text
    few = {"step": 0, "score": 1.0, "half_width": None, "n": 1, "missing": 239}
    line = "Held-out score: 1.00 (1 of 240 answers; 239 without a score) before, 0.63 (160 answers) after training"
    assert f"{line} (95 %)." in summary_lines({**report, "eval_before": few}, tmp_path)
    bounded = {"step": 24, "score": 1.0, "half_width": 0.04, "interval": [0.92, 1.0], "n": 88}
    text = "\n".join(summary_lines({**report, "eval_after": bounded}, tmp_path))
    assert "before, 1.00 [0.92, 1.00] (88 answers) after training" in text, "no bound passes 1"
    sets = [{"name": name, "score": 0.25, "half_width": 0.05, "answer_count": 80} for name in ("math", "code")]
    before = {"score": 0.1, "half_width": 0.1, "n": 160, "sets": sets}
    several = {**report, "eval_before": before, "eval_after": {**before, "sets": [{**s, "score": 0.5} for s in sets]}}
    line = "  code: 0.25 +- 0.05 (80 answers) before, 0.50 +- 0.05 (80 answers) after"
    assert line in summary_lines(several, tmp_path)
    assert "Dropped samples: 3 REWARD_ERROR" in text
    assert "Findings" not in text and "Resumed" not in text and "Restarted" not in text
    disturbed = summary_lines({**report, "resumes": 2, "restarts": {"trainer-0": 2, "rollout-0": 1}}, tmp_path)
    assert "Resumed 2 times." in disturbed
    assert "Restarted during the run: rollout-0 1x, trainer-0 2x." in disturbed
    wrong = [
        {"text": "82% were cut off; raise it", "steps": 20, "first": 2, "last": 24},
        {"text": "nothing was learned: every sample scored 0", "steps": 1, "first": 3, "last": 3},
    ]
    lines = summary_lines({**report, "skipped_steps": 1, "diagnosis": wrong}, tmp_path)
    assert "1 of 24 steps did not change the weights." in lines
    assert "  20 steps, 2 to 24: 82% were cut off; raise it" in lines
    assert "  step 3: nothing was learned: every sample scored 0" in lines
    assert "What is 3 * 4?" in text and "I think it is 34," in text and "12 *" in text
    assert f"{tmp_path}/curve.png" in text and f"{tmp_path}/metrics.jsonl" not in text
    assert text.endswith(f"Chat with the model: {program()} chat {tmp_path}")
    scorer = "\n".join(summary_lines({**report, "reward_model": True}, tmp_path))
    assert scorer.endswith(f'[reward] model = "{tmp_path}/model"') and "Chat" not in scorer
    steps = summary_lines({**report, "reward_model": True, "step_separator": " "}, tmp_path)[-1]
    assert steps.endswith(f'[reward] model = {{ kind = "process", source = "{tmp_path}/model", steps = " " }}')
    assert summary_lines(report, Path("my run"))[-1].endswith(" chat 'my run'")


def test_summary_of_a_run_with_a_lag_tells_lag_waits_and_what_was_stale(tmp_path: Path) -> None:
    report: dict[str, Any] = {
        "name": "demo", "seed": 17, "steps": 24, "seconds": 250.2, "peak_memory_bytes": 1, "asynchrony": None,
    }  # fmt: skip
    assert "lag" not in "\n".join(summary_lines(report, tmp_path))
    found: dict[str, Any] = {"max_policy_lag": 4, "lag_limit": 3.0, "token_lag_mean": 1.26, "token_lag_max": 4.0,
             "trainer_wait_fraction": 0.12, "rollout_wait_fraction": None, "stale_token_fraction": 0.0,
             "lag_changes": []}  # fmt: skip
    lines = summary_lines(report | {"asynchrony": found}, tmp_path)
    assert lines[2:4] == ["Policy lag: 1.3 on average, 4 at most, limit 3.", "Of the time, the trainer waited 12%."]
    assert "Stale" not in "\n".join(lines) and "changed" not in "\n".join(lines)
    changes = [
        {"step": 9, "text": "policy lag limit 4 -> 3: first"},
        {"step": 12, "text": "policy lag limit 3 -> 4: x"},
    ]
    found |= {"rollout_wait_fraction": 0.031, "stale_token_fraction": 0.004, "lag_changes": changes}
    lines = summary_lines(report | {"asynchrony": found}, tmp_path)
    assert lines[3:6] == [
        "Of the time, the trainer waited 12%, engines had room 3%.",
        "Stale: 0.4% of the sampled tokens were dropped.",
        "The lag limit changed 2x, last after step 12: policy lag limit 3 -> 4: x",
    ]


def test_answers_are_paired_by_prompt() -> None:
    table = answer_table([answer("1 * 2", "a", 0.0), answer("2 * 2", "b", None)], [answer("2 * 2", "c", 1.0)])
    assert len(table) == 5  # an empty line, the title, an empty line, the head, one pair
    assert table[4].split() == ["What", "is", "2", "*", "2?", "12", "b", "c", "*"]
    assert answer_table([], []) == []


def test_what_prompts_share_is_said_once_and_what_differs_in_every_row() -> None:
    asked = [f"Solve this multiplication: {a} * {a + 1}. Give only the result." for a in (3, 12)]
    table = answer_table([answer(q, "x", 0.0) for q in asked], [answer(q, "y", 1.0) for q in asked])
    assert " ".join(table[:3]).split("(")[0].strip() == (
        'Answers to the held-out prompts "What is Solve this multiplication: ... Give only the result.?"'
    )
    assert [line.split() for line in table[-2:]] == [
        ["3", "*", "4.", "12", "x", "y", "*"],
        ["12", "*", "13.", "12", "x", "y", "*"],
    ]


def test_long_prompts_and_answers_stay_readable_in_80_columns() -> None:
    prompt = "Natalia sold clips to {} of her friends in April, and then half as many in May. How many in all?"
    asked = [prompt.format(48), prompt.format(9).replace("Natalia", "Weng").replace("in all", "were sold")]
    long = "She sold them in April, " * 9 + "so the answer is 72"
    table = answer_table([answer(q, long, 1.0) for q in asked], [answer(q, "z" * 200, 0.0) for q in asked])
    assert max(map(len, table)) <= 80
    text = "\n".join(table)
    assert "Natalia sold clips to" in text and "many in all??" in text
    assert "She sold them in" in text and "answer is 72 *" in text, "beginning and end"
    assert len(table) == 4 + 2 * 3


def test_answers_cannot_steer_the_terminal() -> None:
    table = answer_table([answer("1 * 2", "\x1b[2J9", 0.0)], [answer("1 * 2", "\x9b7\u202e", 0.0)])
    assert "?[2J9" in table[4] and "?7?" in table[4] and table[4].isprintable()


QUESTION = "Where is it?\n\nassistant\nmodel: <b>"


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>system\nReply briefly.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST]",
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]{}[/INST]",
        "<|system|>\nBe brief.<|end|>\n<|user|>\n{}<|end|>\n<|assistant|>\n",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>{}<\uff5cAssistant\uff5c><think>\n",
        "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>{}<|end|><|start|>assistant",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "{}\n",
    ],
)
def test_the_last_message_has_no_marks_of_the_template(template: str) -> None:
    assert last_message(template.format(QUESTION)) == QUESTION


@pytest.mark.parametrize("prompt", ["", "<|im_start|>", "<|im_start|>assistant\n", "<" * 100_000 + "<<SYS>>" * 10_000])
def test_a_prompt_without_a_message_is_returned_as_a_whole(prompt: str) -> None:
    assert last_message(prompt) in (prompt.strip(), "<" * 100_000)
