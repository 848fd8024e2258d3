"""`fourfold new`: the recipe that it writes for data, model and GPUs, and the questions that it asks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.config.algorithm import SAMPLE_PRESETS
from fourfold.errors import ConfigError
from fourfold.host.program import program
from fourfold.plan.preflight import check_recipe
from fourfold.plan.report import describe
from fourfold_coordinator.cli import new
from fourfold_coordinator.launch.fleet import services_of
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES
from tests.unit.model.test_folder import write_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new, "visible_gpus", list)
    write("sums.jsonl", [{"problem": f"{n} + {n}?", "solution": str(2 * n)} for n in range(20)])
    return tmp_path


def write(name: str, rows: Sequence[Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    return parser.parse_args(words)


def call(*words: str) -> Config:
    assert new.main(_parsed("mine.toml", *words)) == 0
    return configuration.load("mine.toml")


def test_columns_reward_and_lengths_come_from_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    config = call("--data", "sums.jsonl")
    assert (config.name, config.data.prompt_field, config.data.answer_field) == ("mine", "problem", "solution")
    assert config.reward[0].function == "last_number"
    assert config.model.dtype == "float32" and config.model.max_context_tokens == 128
    assert f"Next: {program()} plan mine.toml; {program()} run mine.toml" in capsys.readouterr().out
    found = check_recipe(config, Path("mine.toml"))
    assert found.warnings == []
    assert found.notes["reward"] == ["last_number: the reference answers of 4 rows score 1, 1, 1, 1."]
    assert found.notes["held out"] == ["read: 2 prompts in 2 task groups."]


def test_several_files_become_sources() -> None:
    write("more.jsonl", [{"problem": "1 + 1 in words?" * 9, "solution": "2"}])
    config = call("--data", "sums.jsonl", "--data", "more.jsonl")
    assert [source.path for source in config.data.train] == ["sums.jsonl", "more.jsonl"]
    assert config.model.max_context_tokens > 128, "the longest prompt is in the second file"
    write("other.jsonl", [{"problem": "x"}])
    with pytest.raises(
        ConfigError, match=r"--answer-field solution: no such column in other.jsonl; choose one of problem"
    ):
        new.main(_parsed("other.toml", "--data", "sums.jsonl", "--data", "other.jsonl"))


def test_an_answer_inside_of_an_object() -> None:
    write("rows.jsonl", [{"prompt": f"{n}", "reward_model": {"ground_truth": str(n)}} for n in range(20)])
    found = call("--data", "rows.jsonl", "--answer-field", "reward_model.ground_truth")
    assert (found.data.answer_field, found.reward[0].function) == ("reward_model.ground_truth", "last_number")
    with pytest.raises(ConfigError, match="'reward_model' has no key 'ground_trut'; did you mean `ground_truth`"):
        new.main(_parsed("other.toml", "--data", "rows.jsonl", "--answer-field", "reward_model.ground_trut"))


SOLUTION = "She has 1+N=<<1+N=M>>M apples.\n#### M"


@pytest.mark.parametrize(
    ("row", "keys", "reward"),
    [
        ({"question": "qN", "answer": SOLUTION}, {"prompt_field": "question", "answer_field": "answer"}, "last_number"),
        ({"question": "qN", "answer": f"$5: {SOLUTION}"}, {"answer_field": "answer"}, "last_number"),
        ({"question": "qN", "answer": "So.\n#### \\frac{1}{7N}"}, {"answer_field": "answer"}, "math_verify"),
        (
            {"instruction": "Add.", "input": "1+N", "output": "M"},
            {"template": "{instruction}\n{input}", "answer_field": "output"},
            "last_number",
        ),
        ({"instruction": "qN", "input": "", "output": "word"}, {"prompt_field": "instruction"}, "exact_match"),
        (
            {
                "data_source": "math_dapo", "prompt": [{"role": "user", "content": "qN"}], "ability": "math",
                "reward_model": {"ground_truth": "N", "style": "rule"}, "extra_info": {"answer": SOLUTION},
            },
            {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"},
            "last_number",
        ),
        (
            {"id": "N", "conversations": [{"from": "human", "value": "qN"}, {"from": "gpt", "value": "N"}]},
            {"prompt_field": "conversations", "answer_from_messages": True, "system_prompt": ""},
            "last_number",
        ),
        (
            {"messages": [{"role": "user", "content": "qN"}, {"role": "assistant", "content": "mail", "weight": 1}]},
            {"prompt_field": "messages", "answer_from_messages": True, "system_prompt": ""},
            "exact_match",
        ),
        (
            {"question": "qN", "context": "About N.", "answer": "Because of this one reason, it is so."},
            {"template": "{question}\n{context}"},
            "exact_match",
        ),
        (
            {"query": "qN", "response": "It is N and no more, so the answer is: N."},
            {"system_prompt": "Reply with only the final answer."},
            "last_number",
        ),
    ],
)  # fmt: skip
def test_rows_of_well_known_data_sets_get_their_fields_and_verifier(
    row: dict[str, Any], keys: dict[str, Any], reward: str
) -> None:
    text = json.dumps(row)
    write("rows.jsonl", [json.loads(text.replace("N", str(n)).replace("M", str(n + 1))) for n in range(12)])
    config = call("--data", "rows.jsonl", "--yes")
    found = {**config.data.model_dump(), "template": config.data.train[0].template}
    assert {key: found[key] for key in keys} == keys
    assert config.reward[0].function == reward
    assert ("scores equal texts alone" in Path("mine.toml").read_text()) == ("reason" in text)
    assert check_recipe(config, Path("mine.toml")).notes["reward"][0].endswith("rows score 1, 1, 1, 1.")


WORDS: Final = "It is a long story with more words than a verifier compares."


@pytest.mark.parametrize(
    ("row", "preset"),
    [
        ({"messages": [{"role": "user", "content": "qN"}, {"role": "assistant", "content": WORDS}]}, "sft"),
        ({"conversations": [{"from": "human", "value": "qN"}, {"from": "gpt", "value": WORDS}]}, "sft"),
        ({"instruction": "qN", "input": "i", "output": WORDS}, "sft"),
        ({"prompt": "qN", "completion": WORDS}, "sft"),
        ({"text": f"{WORDS} N", "url": "x"}, "pretrain"),
        ({"prompt": "qN", "chosen": "a", "rejected": "b"}, "dpo"),
        ({"prompt": "qN", "completion": "a", "label": True}, "kto"),
    ],
)
def test_rows_with_answers_get_a_recipe_that_trains_on_them(row: dict[str, Any], preset: str) -> None:
    rows = [json.loads(json.dumps(row).replace("N", str(n))) for n in range(60)]
    for found_row in rows[::2] if "label" in row else []:
        found_row["label"] = False
    write("rows.jsonl", rows)
    config = call("--data", "rows.jsonl", "--yes")
    assert (config.algorithm.preset, config.data.passes, config.batch.rows_per_step) == (preset, 1, 15)
    found = check_recipe(config, Path("mine.toml"))
    assert found.warnings == [] and "kept 60, dropped none" in found.notes["data"][0]
    if preset == "sft":
        assert config.data.holdout is not None and config.data.holdout.groups == 3 and found.config.steps == 4


def test_rows_recipe_takes_columns_steps_and_the_keys_that_the_template_needs(tmp_path: Path) -> None:
    write("rows.jsonl", [{"ask": f"q{n}", "say": "a"} for n in range(40)])
    words = ["--data", "rows.jsonl", "--preset", "sft", "--prompt-field", "ask", "--answer-field", "say"]
    config = call(*words, "--steps", "7", "--system-prompt", "Be kind.", "--gpus", "2")
    assert (config.steps, config.data.passes, config.trainer.ranks, config.data.system_prompt) == (7, 0, 2, "Be kind.")
    write_tokenizer(write_model(tmp_path / "model"), SHAPES["qwen3"], {"eos_token": "<|eot|>"})
    chat = [{"role": ("user", "assistant")[i % 2], "content": WORDS} for i in range(4)]
    write("chats.jsonl", [{"messages": chat}] * 8)
    assert new.main(_parsed("own.toml", "--data", "chats.jsonl", "--model", "model")) == 0
    data = configuration.load("own.toml").data
    assert (data.turns, data.end) == ("each", "token"), "earlier turns are written differently; another end token"
    Path("mine.toml").unlink()
    write("pairs.jsonl", [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(60)])
    scores = call("--data", "pairs.jsonl", "--preset", "reward-model")
    assert scores.data.holdout is not None and (scores.data.holdout.groups, scores.trainer.learning_rate) == (3, 1e-5)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--reward", "exact_match"], "--reward exact_match: sft trains on the answers"),
        (["--prompt-field", "x"], r"rows.jsonl, --preset sft: the rows have the columns a, b; .*data\.prompt_field"),
    ],
)
def test_rows_recipe_refuses_what_it_does_not_read(words: list[str], text: str) -> None:
    write("rows.jsonl", [{"a": "q", "b": "a"}])
    with pytest.raises(ConfigError, match=text):
        call("--data", "rows.jsonl", "--preset", "sft", *words)
    assert not Path("mine.toml").exists()


@pytest.mark.parametrize("preset", SAMPLE_PRESETS)
@pytest.mark.parametrize("gpus", [0, 2])
def test_presets_of_selections_and_teachers_get_what_they_need(preset: str, gpus: int) -> None:
    distills = preset == "on-policy-distill"
    words = ["--teacher", "builtin:smollm2-135m-instruct"] if distills else []
    config = call("--data", "sums.jsonl", "--preset", preset, "--gpus", str(gpus), "--max-new-tokens", "1500", *words)
    assert config.algorithm.preset == preset and bool(config.reference.source) is distills
    assert (config.algorithm.selection.kind, config.algorithm.selection.threshold) == {
        "rejection-sampling": ("above", 1.0), "online-dpo": ("best-worst", None), "on-policy-distill": ("none", None)
    }[preset]  # fmt: skip
    assert len({index for each in services_of(config) for index in each.place}) <= gpus


def test_a_teacher_is_for_distillation_alone_which_needs_one() -> None:
    with pytest.raises(ConfigError, match="--teacher is missing: the model that judges each token"):
        call("--data", "sums.jsonl", "--preset", "on-policy-distill")
    with pytest.raises(ConfigError, match="--preset grpo has no teacher; take on-policy-distill, or remove it"):
        call("--data", "sums.jsonl", "--preset", "grpo", "--teacher", "builtin:smollm2-135m-instruct")


def test_a_split_of_a_folder_is_in_the_recipe(folder: Path) -> None:
    (folder / "set").mkdir()
    write("set/train.jsonl", [{"prompt": "x", "answer": "1"}])
    write("set/test.jsonl", [{"prompt": "y", "answer": "2"}])
    with pytest.raises(ConfigError, match="several splits; set split to one of: test, train"):
        call("--data", "set")
    (source,) = call("--data", "set", "--split", "train").data.train
    assert (source.path, source.split) == ("set", "train")


def test_the_context_has_room_for_the_system_message() -> None:
    config = call("--data", "sums.jsonl", "--system-prompt", "word " * 300)
    assert config.model.max_context_tokens > 300 + config.sampling.max_new_tokens


@pytest.mark.parametrize("gpus", [1, 4])
def test_gpus_are_shared_by_engines_and_trainer(gpus: int) -> None:
    config = call("--data", "sums.jsonl", "--gpus", str(gpus), "--preset", "dapo", "--steps", "7")
    assert config.trainer.ranks == config.rollout.replicas == gpus
    assert config.placement.colocated and config.rollout.sleep_mode and config.trainer.device == "cuda"
    assert (config.algorithm.preset, config.steps, config.sampling.max_new_tokens) == ("dapo", 7, 1024)
    assert "7 steps of dapo" in describe(config)


def test_texts_of_the_user_are_quoted() -> None:
    Path('a "b".jsonl').write_text('{"the \\"prompt\\"": "x", "y": "$1$"}\n')
    words = ["--data", 'a "b".jsonl', "--prompt-field", 'the "prompt"', "--answer-field", "y"]
    config = call(*words, "--system-prompt", 'Say "yes"\nor [no].')
    assert config.data.train[0].path == 'a "b".jsonl'
    assert config.data.system_prompt == 'Say "yes"\nor [no].'
    assert config.reward[0].function == "math_verify"
    assert not config.data.held_out  # too few rows


def test_open_options_are_asked_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = {"Column with the prompt": "b", "Reward": "mine.py:score", "Algorithm": "rloo", "Longest": "16"}

    def answer(question: str) -> str:
        asked.append(question)
        return next((text for start, text in answers.items() if question.startswith(start)), "")

    write("other.jsonl", [{"a": 1, "b": "tell me"}])
    Path("mine.py").write_text("def score(sample):\n    return 1.0\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    config = call("--data", "other.jsonl")
    assert config.data.prompt_field == "b" and config.algorithm.preset == "rloo"
    assert config.sampling.max_new_tokens == 16 and config.reward[0].function == "mine.py:score"
    assert "Column with the prompt (of a, b), or a template with {COLUMN} []: " in asked
    assert "Reward: a verifier or FILE.py:FUNCTION []: " in asked, (
        "no verifier compares with an answer that is not there"
    )
    assert "Algorithm (grpo, dapo, gspo, rloo, ppo; others: docs/algorithms.md) [grpo]: " in asked
    assert "Model folder or hf:OWNER/NAME [builtin:smollm2-135m-instruct]: " in asked
    assert "System message []: " in asked and "Training steps [10]: " in asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data is missing"),
        (["--data", "nowhere.jsonl"], "does not exist"),
        (["--data", "empty.jsonl"], "has no rows"),
        (["--data", "other.jsonl"], "no column is the prompt by its name, of a, b; give --prompt-field COLUMN"),
        (
            ["--data", "sums.jsonl", "--prompt-field", "x"],
            "no such column in sums.jsonl; choose one of problem, solution",
        ),
        (["--data", "sums.jsonl", "--reward", "exact_mach"], "--reward 'exact_mach' is not a verifier.*exact_match"),
        (["--data", "sums.jsonl", "--steps", "-1"], "^fourfold new  steps = -1"),
        (["--data", "sums.jsonl", "--steps", "0"], "`steps` is missing or 0"),
        (["--data", "sums.jsonl", "--max-new-tokens", "0"], "`sampling.max_new_tokens` is missing or 0"),
        (["--data", "sums.jsonl", "--split", "train"], "is one file or one split; remove split and config"),
        (["--data", "numbers.jsonl"], "numbers.jsonl, row 0: a prompt is a text, or a list of messages"),
        (
            ["--data", "other.jsonl", "--prompt-field", "b"],
            "--reward is missing: no row has a text or a number as its reference answer, which ex",
        ),
        (["--data", "sums.jsonl", "--answer-field", "", "--reward", "last_number"], "--reward last_number: no row has"),
        (
            ["--data", "sums.jsonl", "--prompt-field", "{problm}"],
            "no such column in sums.jsonl; did you mean `problem`?",
        ),
        (["--data", "sums.jsonl", "--prompt-field", "{problem"], "--prompt-field: template = '{problem': "),
    ],
)
def test_mistakes_write_nothing(words: list[str], message: str) -> None:
    write("empty.jsonl", [])
    write("other.jsonl", [{"a": 1, "b": "tell me"}])
    write("numbers.jsonl", [{"prompt": [1, 2]}])
    with pytest.raises(ConfigError, match=message):
        call(*words)
    assert not Path("mine.toml").exists()


def test_a_wrong_answer_is_asked_for_again_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "Training data": "nowhere.jsonl",
        "Column with the prompt": "problm",
        "Column with the answer": "x",
        "Model folder": "nowhere",
        "Reward": "mine.py:scor",
        "Algorithm": "rlo",
        "Longest": "0",
        "Training steps": "many",
    }
    right = {"Training data": "sums.jsonl"}
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        start = next((start for start in wrong if question.startswith(start)), "")
        return wrong.pop(start, "") or next((text for key, text in right.items() if question.startswith(key)), "")

    Path("mine.py").write_text("def score(sample):\n    return 1.0\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert call().steps == 50, "twenty passes over 20 rows"
    assert not wrong and len(asked) == 9 + 8
    output = capsys.readouterr().out
    for words in (
        "'nowhere.jsonl' does not exist",
        "--prompt-field problm: no such column in sums.jsonl; did you mean `problem`?",
        "has no scor; name a function of that file",
        "--preset rlo is unknown; did you mean `rloo`?",
        "'many' is no number of at least 1",
    ):
        assert words in output, words


def test_nothing_is_asked_with_every_option_or_with_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(question: str) -> str:
        raise AssertionError(question)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", fail)
    options = {
        "data": "sums.jsonl", "prompt-field": "problem", "answer-field": "solution",
        "model": "builtin:smollm2-135m-instruct",
        "system-prompt": "", "reward": "exact_match", "preset": "rloo", "max-new-tokens": "16", "steps": "8",
    }  # fmt: skip
    config = call(*(word for key, value in options.items() for word in (f"--{key}", value)))
    assert (config.evaluation.every_steps, config.checkpoint.every_steps) == (4, 2), "a run of 8 steps"
    assert config.batch.group_size == 8
    Path("mine.toml").unlink()
    assert call("--data", "sums.jsonl", "--yes").checkpoint.every_steps == 12
    parser = argparse.ArgumentParser()
    new.add_arguments(parser)
    assert parser.epilog is not None and all(f"--{key}" in parser.epilog for key in options)


def test_the_end_of_the_input_stops_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", end)
    with pytest.raises(KeyboardInterrupt):
        call("--data", "sums.jsonl")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("nowhere/mine.toml", "nowhere/mine.toml: nowhere is no folder; make it, or give another name"),
        ("x" * 300, r"x+\S*: cannot be written \(File name too long\)"),
    ],
)
def test_a_place_that_takes_no_file_is_named_before_the_questions(recipe: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        new.main(_parsed(recipe, "--data", "not/read.jsonl"))


def test_the_next_commands_fit_a_name_with_a_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert new.main(_parsed("my recipe.toml", "--data", "sums.jsonl")) == 0
    assert f"Next: {program()} plan 'my recipe.toml'; {program()} run 'my recipe.toml'" in capsys.readouterr().out


def test_a_file_is_not_overwritten() -> None:
    Path("mine.toml").write_text("name")
    with pytest.raises(ConfigError, match=r"mine.toml exists already"):
        call("--data", "sums.jsonl")
    assert Path("mine.toml").read_text() == "name"
