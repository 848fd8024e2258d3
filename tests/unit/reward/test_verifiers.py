"""Tests the built-in verifiers: right, wrong and unusable answers."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fourfold.answers import find_last_number
from fourfold_reward import Abstain, Score, ScoreInput, loader, verifiers
from fourfold_reward.verifiers import InvalidSample, exact_match, last_number


def sample(completion: str, answer: str = "", metadata: dict[str, Any] | None = None) -> ScoreInput:
    return ScoreInput(sample_id="s", prompt="p", completion=completion, answer=answer, metadata=metadata or {})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("the answer is 12.", "12"),
        ("3 * 4 = 12", "12"),
        ("-7", "-7"),
        ("x=-7", "-7"),
        ("\u22127", "-7"),
        ("10-7", "7"),
        ("(2)-7", "7"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("$.5", "0.5"),
        ("007", "7"),
        ("2 then 3", "3"),
        ("a1b", "1"),
        ("it is 1e-07", "1e-7"),
        ("1.50e11 J", "1.5e11"),
        ("-3E+22.", "-3e22"),
        ("1.5 \u00d7 10^{11}", "1.5e11"),
        ("2 * 10**3", "2000"),
        ("5e3.5", "3.5"),
        ("1e9999999999", "9999999999"),
        ("\uff11\uff12\uff0e\uff15", "12.5"),
        ("- 5", "-5"),
        ("x = \u2212 5", "-5"),
        ("the sum is - 5", "-5"),
        ("10 - 5", "5"),
        ("one of:\n- 4\n- 5", "5"),
    ],
)
def test_last_number_is_found(text: str, number: str) -> None:
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "twelve", "\u0661\u0662", "-", "."])
def test_text_without_a_number_has_none(text: str) -> None:
    assert find_last_number(text) is None


def test_last_number_compares_by_value() -> None:
    assert last_number(sample("so 12.0", "12")) == 1.0
    assert last_number(sample("1200", "1,200")) == 1.0
    assert last_number(sample("12 or 13", "12")) == 0.0
    assert last_number(sample("no idea", "12")) == 0.0
    assert last_number(sample("9" * 200_000 + "8", "9" * 200_000 + "8")) == 1.0
    assert last_number(sample("0.0000001", "1e-07")) == 1.0
    assert last_number(sample("1e999999999", "1e-07")) == 0.0
    assert last_number(sample("<think>12</think> so 13", "12")) == 0.0
    assert last_number(sample("<think>is it 12", "12")) == 0.0


def test_exact_match_ignores_surrounding_spaces() -> None:
    assert exact_match(sample(" Paris\n", "Paris")) == 1.0
    assert exact_match(sample("paris", "Paris")) == 0.0


@pytest.mark.parametrize("name", ["exact_match", "last_number", "math_verify"])
def test_verifier_abstains_without_a_reference_answer(name: str) -> None:
    assert verifiers.load(name, {})(sample("12")) == Abstain("NO_ANSWER")


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so the result is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("It is 1/2", "$\\frac{1}{2}$", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("\\boxed{10^3}", "1000", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("$\\frac{$", "4", 0.0),
        ("$4$, or better $\\frac{$", "4", 0.0),
        ("$\\boxed{1}$ and $\\boxed{2}$", "$1$ and $2$", 1.0),
        ("\\boxed{\\frac{1}{2}}, \\boxed{ 3 }, or $\\boxed{4}$.", "$\\{3, 4\\}$", 0.0),
        ("$x = \\boxed{\\frac{1}{2}}$, \\boxed{3}, and $\\boxed{4}$.", "$\\{0.5, 3, 4\\}$", 1.0),
        ("\\boxed{1} and \\boxed{", "$1$ and $2$", 0.0),
        ("\\boxed{4} no, \\boxed{5}", "5", 1.0),
        ("\\boxed{4} for \\text{n}, \\boxed{5}", "5", 1.0),
        ("\\boxed{4} no, \\boxed{5", "4", 0.0),
        ("\\boxed{4} no, \\boxed{\\frac{4}{", "4", 0.0),
        ("\\boxed{4} no, \\boxed{}", "4", 0.0),
        ("<think>\\boxed{4}</think> It is 5", "4", 0.0),
        ("<think>\\boxed{5}</think> It is 4", "4", 1.0),
        ("so \\boxed{4}", "4", 1.0),
        ("<think>so \\boxed{4}", "4", 0.0),
        ("<answer>4</answer> and not 5", "4", 1.0),
        ("<answer>4</answer> <answer>5", "4", 0.0),
        ("<answer>x^2</answer>", "x^2", 1.0),
        ("<answer>x^2</answer>", "2", 0.0),
        ("<answer>\\sqrt{3}.</answer>", "$\\sqrt{3}$", 1.0),
        ("<answer>the answer is 4</answer>", "4", 1.0),
        ("\\boxed{90\u00b0}", "90^\\circ", 1.0),
        ("\\boxed{20 \u00b0C}", "20", 1.0),
        ("\\boxed{2\u221a3 + x\u00b2}", "2\\sqrt{3} + x^2", 1.0),
        ("\\boxed{\u20ac18}", "18", 1.0),
        ("\\boxed{1\\,234}", "1234", 1.0),
        ("1e-07", "1e-07", 1.0),
        ("2e-07", "1e-07", 0.0),
        ("\\boxed{1.5 \\times 10^{11}}", "1.50e11", 1.0),
        ("\\boxed{22}", "3e+22", 0.0),
        ("\uff11\uff12", "12", 1.0),
        ("- 5", "-5", 1.0),
        ("5", "- 5", 0.0),
        ("0.3333333", "1/3", 1.0),
    ],
)
def test_math_verify_compares_mathematics(completion: str, answer: str, score: float) -> None:
    assert verifiers.load("math_verify", {})(sample(completion, answer)) == score


# The library leaves a data file open.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_reasoning_gym_task_scores_its_own_answer_after_json() -> None:
    from reasoning_gym.factory import DATASETS, create_dataset

    tasks = sorted(set(DATASETS) - {"composite"})
    assert len(tasks) > 100
    verifier = verifiers.load("reasoning_gym", {task: {} for task in tasks})
    for task in tasks:
        dataset = create_dataset(task, size=2, seed=5)
        entry = dataset[1]
        metadata = json.loads(json.dumps(entry["metadata"]))
        answer = entry["answer"] or ""
        result = verifier(sample(f"thinking ... <answer>{answer}</answer>", answer, metadata))
        assert isinstance(result, Score), task
        assert result.score == dataset.score_answer(entry["answer"] or "", entry), task
        if answer:
            assert result.score == 1.0, task


def test_reasoning_gym_reads_the_whole_completion_without_tags() -> None:
    verifier = verifiers.load("reasoning_gym:products", {})
    assert verifier(sample(" 12\n", "12")) == Score(1.0)
    assert verifier(sample("<answer>11</answer> no: <answer> 12 </answer>", "12")) == Score(1.0)
    assert verifier(sample("13", "12")) == Score(0.0)
    assert verifier(sample("<think><answer>12</answer>", "12")) == Score(0.0)


def test_reasoning_gym_uses_the_options_of_the_runs_data() -> None:
    # 6 is a number of the task's default options, but not of these.
    entry = {"source_dataset": "puzzle24", "numbers": [6, 4, 1, 1]}
    narrow = verifiers.load("reasoning_gym", {"puzzle24": {"max_value": 5}})
    default = verifiers.load("reasoning_gym", {"puzzle24": {}})
    assert default(sample("6 * 4 * 1 * 1", "", entry)) == Score(1.0)
    assert narrow(sample("6 * 4 * 1 * 1", "", entry)) != Score(1.0)


def test_answer_that_makes_a_task_raise_is_wrong_and_counted() -> None:
    verifier = verifiers.load("reasoning_gym", {"prime_factorization": {}})
    metadata = {"source_dataset": "prime_factorization", "number": 12, "factors": [2, 2, 3]}
    assert verifier(sample("yes", "2 \u00d7 2 \u00d7 3", metadata)) == Score(0.0, {"unreadable": 1.0})


@pytest.mark.parametrize("metadata", [{}, {"source_dataset": 3}, {"source_dataset": "produkts"}])
def test_sample_without_its_task_is_bad_metadata(metadata: dict[str, Any]) -> None:
    with pytest.raises(InvalidSample, match="source_dataset") as error:
        verifiers.load("reasoning_gym", {"produkts": {}})(sample("12", "12", metadata))
    assert error.value.reason == "BAD_METADATA"


def test_task_that_the_recipe_does_not_allow_is_refused() -> None:
    scorer = verifiers.load("reasoning_gym", {"products": {}})
    assert scorer(sample("12", "12", {"source_dataset": "products"})) == Score(1.0)
    with pytest.raises(InvalidSample, match=r"'countdown' is not allowed here; allowed: products \(the tasks"):
        scorer(sample("12", "12", {"source_dataset": "countdown"}))


def test_unknown_task_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(LookupError, match="did you mean 'products'"):
        verifiers.load("reasoning_gym:produkts", {})


def test_every_described_verifier_loads() -> None:
    options: dict[str, dict[str, Any]] = {"format": {"pattern": "a"}, "length": {"target_tokens": 1, "max_tokens": 2}}
    for name, line in verifiers.DESCRIPTIONS:
        assert line
        if name != "code_tests":  # starts a process; tests/security/test_code_tests.py loads it in a worker
            verifiers.load(name.replace("TASK", "products"), options)


def test_package_needs_no_torch_and_functions_no_grpc() -> None:
    code = (
        "import sys, pathlib, fourfold_reward, importlib\n"
        "import fourfold_reward.worker\n"
        "assert 'grpc' not in sys.modules and 'google.protobuf' not in sys.modules\n"
        "for path in pathlib.Path(fourfold_reward.__file__).parent.glob('*.py'):\n"
        "    importlib.import_module('fourfold_reward.' + path.stem)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'deepspeed', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_the_example_that_users_copy_scores() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "rewards" / "final_answer.py"
    function, verifier, _ = loader.load(loader.find(f"{example}:reward", directory=Path("/")), {})
    assert len(verifier.version) == 12
    assert function(sample("6 * 2 = 12\nAnswer: 12", "12")) == Score(1.0, {"right": 1.0, "marked": 1.0})
    assert function(sample("Answer: 13", "12")) == Score(0.1, {"right": 0.0, "marked": 1.0})
    assert function(sample("12")) is None
