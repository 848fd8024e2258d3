"""Tests that functions of OpenRLHF and TRL run as they are: signatures, arguments, results."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.answers import answer_text
from fourfold.reward.function import ScoreInput
from fourfold_reward import loader, openrlhf_modules
from fourfold_reward.columns import take_answer
from fourfold_reward.protocol import Outcome, outcome_of
from fourfold_reward.signatures import Reads, adapt
from fourfold_reward.verifiers import InvalidSample

SAMPLE = ScoreInput(
    sample_id="s",
    prompt="<user>2 + 2?<end>",
    completion="It is 4.",
    answer="4",
    metadata={"level": 3, "source": "sums"},
    messages=({"role": "user", "content": "2 + 2?"},),
    completion_ids=(7, 8, 9),
)
PLAIN = ScoreInput(sample_id="s", prompt="2 + 2 =", completion=" 4", answer="4", metadata={"level": 3})


def score(
    function: Callable[..., Any], sample: ScoreInput = SAMPLE, *, answer_fields: Sequence[str] = ("answer",)
) -> Outcome:
    adapted, _ = adapt(function, answer_fields=answer_fields)
    result = adapted(sample)
    return outcome_of(asyncio.run(result) if asyncio.iscoroutine(result) else result)


def test_a_function_of_openrlhf_gets_texts_and_its_numbers_are_components() -> None:
    calls = []

    def reward_func(queries: Any, prompts: Any, labels: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append((queries, prompts, labels, kwargs))
        reward = np.array([0.5], np.float32)
        logs = {"accuracy": reward.mean(), "length": [8.0], "note": "x", "per_token": [1.0, 2.0], "bad\nname": 1.0}
        return {"rewards": reward, "scores": np.array([1.0]), "extra_logs": logs}

    outcome = score(reward_func)
    assert calls == [(["<user>2 + 2?<end>It is 4."], ["<user>2 + 2?<end>"], ["4"], {})]
    assert outcome.score == 0.5
    assert outcome.components == {"scores": 1.0, "accuracy": 0.5, "length": 8.0}
    assert adapt(reward_func, answer_fields=["answer"])[1] == Reads()


def test_a_file_may_score_in_processes_that_it_spawns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pool_score.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\nfrom multiprocessing import get_context\n"
        "def one(text):\n    return len(text)\n"
        "def f(sample):\n"
        "    with ProcessPoolExecutor(1, get_context('spawn')) as pool:\n"
        "        return pool.submit(one, sample.completion).result(60)\n"
    )
    verifier = loader.find("pool_score.py:f", directory=tmp_path)
    function, _, _ = loader.load(verifier, {})
    assert function(PLAIN) == 2


def test_a_file_is_loaded_also_if_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "on_a_full_disk.py").write_text("def f(sample):\n    return 2.0\n")
    verifier = loader.find("on_a_full_disk.py:f", directory=tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loader, "Scratch", full)
    assert loader.load(verifier, {})[0](PLAIN) == 2.0


@pytest.mark.parametrize("answer", [np.array([2.0]), [2.0], 2.0, np.float32(2), np.array(2.0), {"rewards": [2.0]}])
def test_a_function_of_openrlhf_may_return_the_reward_alone(answer: Any) -> None:
    assert score(lambda queries, prompts, labels: answer).score == 2.0


@pytest.mark.parametrize(
    ("answer", "text"), [({"scores": [1.0]}, "returned a mapping with scores; it needs"), ([1.0, 2.0], "2 rewards")]
)
def test_a_result_that_is_no_reward_says_what_is_missing(answer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        score(lambda queries, prompts, labels: answer)


def test_a_function_of_trl_gets_the_conversation_and_the_columns() -> None:
    calls = []

    def accuracy(prompts: Any, completions: Any, solution: Any, **columns: Any) -> list[float]:
        calls.append((prompts, completions, solution, columns))
        return [float(solution[0] in completions[0][0]["content"])]

    assert score(accuracy, answer_fields=["solution"]).score == 1.0
    ((prompts, completions, solution, columns),) = calls
    assert prompts == [[{"role": "user", "content": "2 + 2?"}]]
    assert completions == [[{"role": "assistant", "content": "It is 4."}]]
    assert (solution, columns["level"], columns["source"], columns["completion_ids"]) == (
        ["4"],
        [3],
        ["sums"],
        [[7, 8, 9]],
    )
    assert "answer" not in columns
    score(accuracy, answer_fields=["reward_model.solution"])
    assert calls[1][2] == solution


def test_the_answer_has_the_names_of_all_sources_that_the_row_leaves_free() -> None:
    def columns_of(completions: Any, **columns: Any) -> list[float]:
        assert (columns["answer"], columns["solution"], columns["level"]) == (["4"], ["4"], [3])
        return [1.0]

    assert score(columns_of, answer_fields=["answer", "extra.solution", "level"]).score == 1.0


@pytest.mark.parametrize("value", [["Paris", "City of Paris"], 4, 0, True, 0.5, {"a": [1]}, "[1]", None])
def test_an_answer_keeps_its_value_in_every_signature(value: Any) -> None:
    sample = ScoreInput(sample_id="s", prompt="", completion="", answer=answer_text(value), answer_value=value)
    got: list[Any] = []

    def openrlhf(queries: Any, prompts: Any, labels: Any) -> list[float]:
        got.extend(labels)
        return [0.0]

    def trl(completions: Any, gold: Any) -> list[float]:
        got.extend(gold)
        return [0.0]

    def native(sample: ScoreInput) -> float:
        got.append(sample.answer_value)
        return 0.0

    for function in (openrlhf, trl, native):
        score(function, sample, answer_fields=["golden.gold"])
    assert got == ["" if value is None else value, value, value]
    assert [type(each) for each in got[1:]] == [type(value)] * 2


def test_an_answer_that_is_a_text_is_its_own_value() -> None:
    assert SAMPLE.answer_value == "4"
    assert take_answer({"answer_value": "x"}, "4") == "4", "a column of that name is no answer"
    assert take_answer({"answer_value": [4]}, "[4]") == [4]


def test_components_that_are_no_object_are_an_error_of_the_sample() -> None:
    with pytest.raises(ValueError, match="components"):
        outcome_of({"score": 1, "components": [1]})
    named = {f"c{i}": 1.0 for i in range(40)}
    assert len(outcome_of({"score": 1, "components": named, **{f"n{i}": 1.0 for i in range(40)}}).components) == 64


def test_the_numbers_of_a_dictionary_are_components_and_its_texts_are_left_out() -> None:
    result = {"score": -1.0, "acc": True, "pred": "x", "n": np.int64(3), "bad": float("nan"), "list": [1, 2], 5: 1.0}
    outcome = score(lambda sample: result)
    assert (outcome.score, outcome.components) == (-1.0, {"acc": 1.0, "n": 3.0})
    outcome = score(lambda sample: {"score": 1, "acc": 0.0, "components": {"acc": 0.5, "b": 1}})
    assert outcome.components == {"acc": 0.5, "b": 1.0}
    assert len(score(lambda sample: {"score": 1.0, **{f"n{i}": i for i in range(99)}}).components) == 64
    with pytest.raises(ValueError, match="needs the key 'score'"):
        score(lambda sample: {"acc": 1.0})


def test_a_tensor_of_several_numbers_is_no_score_and_no_component() -> None:
    class Tensor:
        def __float__(self) -> float:
            raise RuntimeError("a Tensor with 3 elements cannot be converted to Scalar")

    outcome = score(lambda sample: Tensor())
    assert (outcome.score, outcome.error_reason) == (None, "NOT_A_NUMBER")
    assert score(lambda sample: {"score": 1.0, "each": Tensor()}).components == {}


def test_a_plain_prompt_makes_texts_as_in_trl() -> None:
    def lengths(completions: Any, **columns: Any) -> list[float]:
        assert columns["prompts"] == ["2 + 2 ="]
        return [float(len(text)) for text in completions]

    assert score(lengths, PLAIN).score == 2.0


def test_a_function_of_trl_without_columns_gets_none() -> None:
    assert score(lambda prompts, completions: [float(len(completions))]).score == 1.0


def test_none_abstains_and_an_async_function_is_awaited() -> None:
    async def skips(completions: Any, **_: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None]

    outcome = score(skips)
    assert (outcome.score, outcome.abstain_reason) == (None, "NO_SCORE")


def test_components_come_from_log_metric_or_from_the_element() -> None:
    def logs(completions: Any, log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_extra("texts", ["x"])
        log_metric("format", 0.25)
        log_metric("endless", float("inf"))
        return [1.0]

    assert dict(score(logs).components) == {"format": 0.25}
    parts = {"score": 2.0, "components": {"format": 0.5}}
    outcome = score(lambda completions, **_: [parts])
    assert (outcome.score, dict(outcome.components)) == (2.0, {"format": 0.5})


@pytest.mark.parametrize("name", ["completion_ids", "completions_ids"])
def test_a_function_that_takes_ids_reads_tokens(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def count({name}, **kwargs):\n    return [float(len(ids)) for ids in {name}]", namespace)
    assert adapt(namespace["count"], answer_fields=["answer"])[1] == Reads(tokens=True, messages=True)
    assert score(namespace["count"]).score == 3.0


def test_an_instance_is_called_by_the_signature_of_its_class() -> None:
    class Scaled:
        def __call__(self, completions: Any, answer: Any, **_: Any) -> list[float]:
            return [float(answer[0])]

    assert score(Scaled()).score == 4.0


def test_a_column_that_the_row_lacks_is_an_error_of_the_sample() -> None:
    with pytest.raises(InvalidSample, match="no column 'solution'; it has answer, level, source") as error:
        score(lambda completions, solution: [1.0])
    assert error.value.reason == "BAD_METADATA"


def _of_a_trainer(completions: Any, trainer_state: Any) -> list[float]:
    return [1.0]


def _two(first: Any, second: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_of_a_trainer, "it needs trainer_state, which only a trainer"),
        (_two, r"OpenRLHF's \(queries, prompts, labels\)"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        adapt(function, answer_fields=["answer"])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{2} and \boxed{3", "2"),
        ("none", None),
    ],
)
def test_the_last_complete_box_is_found(text: str, content: str | None) -> None:
    assert openrlhf_modules.extract_boxed_answer(text) == content


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [("4", " 4 ", True), (r"\frac{1}{2}", "0.5", True), ("x+1", "1+x", True), ("5", "4", False), (None, "4", False)],
)
def test_answers_are_compared_as_mathematics(given: str | None, truth: str, equal: bool) -> None:
    assert openrlhf_modules.grade_answer(given, truth) is equal


def test_a_file_that_imports_openrlhf_runs_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "math.py").write_text(
        "from openrlhf.utils import extract_boxed_answer, grade_answer\n"
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    found = [extract_boxed_answer(q[len(p):]) for q, p in zip(queries, prompts)]\n"
        "    return {'rewards': [float(grade_answer(f, label)) for f, label in zip(found, labels)]}\n"
    )
    function, _, _ = loader.load(loader.find("math.py:reward_func", directory=tmp_path), {})
    sample = ScoreInput(sample_id="s", prompt="1/2?", completion=r"It is \boxed{\frac{1}{2}}", answer="0.5")
    assert outcome_of(function(sample)).score == 1.0
