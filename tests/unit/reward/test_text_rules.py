"""The verifiers `format` and `length`, and the options of built-in verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold_reward import ScoreInput, loader, verifiers
from fourfold_reward.configured import ConfiguredFunction
from fourfold_reward.scores import InvalidSample
from tests.fakes.toy import make_config


def sample(completion: str, tokens: int = 0) -> ScoreInput:
    return ScoreInput(sample_id="s", prompt="", completion=completion, completion_ids=range(tokens))


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think><answer>4</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think><answer>4</answer> ", 0.0),
        ("x<think>a</think><answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_matches_the_whole_completion(completion: str, score: float) -> None:
    function = verifiers.load("format", {"format": {"pattern": "<think>.*</think><answer>.*</answer>"}})
    assert function(sample(completion)) == score


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0.0), (80, 0.0), (81, -0.025), (100, -0.5), (119, -0.975), (120, -1.0), (500, -1.0)]
)
def test_length_is_the_soft_overlong_punishment_of_dapo(tokens: int, score: float) -> None:
    function = verifiers.load("length", {"length": {"target_tokens": 80, "max_tokens": 120}})
    result: Any = function(sample("x" * tokens, tokens))
    assert result.score == pytest.approx(score)
    assert result.components == {"tokens": tokens}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        *[(text, 1.0) for text in ("20", "20.", "4 * 5 = 20", "5 x 4 equals 20.", "4 \u00d7 5 is 20")],
        *[(text, 0.0) for text in ("21", "4 * 5 = 21", "4 * 5 = 20 is incorrect.", "4 * 5 is not 20", "", "20 or 20")],
        ("4 * 5 = 20 is incorrect and your response should be", 0.0),
    ],
)
def test_the_quickstart_scores_the_number_alone_or_the_equation(completion: str, score: float) -> None:
    table = configuration.load(Path(__file__).parents[3] / "recipes" / "quickstart.toml").reward[0]
    function = verifiers.load(table.function, {table.function: table.options})
    assert function(ScoreInput(sample_id="s", prompt="", completion=completion, answer="20")) == score
    assert function(sample(completion)) == verifiers.NO_ANSWER


def test_length_needs_the_tokens() -> None:
    function = verifiers.load("length", {"length": {"target_tokens": 1, "max_tokens": 3, "min": -4}})
    assert function(sample("abc", 2)).score == -2.0  # type: ignore[union-attr]
    with pytest.raises(InvalidSample, match="no token arrays"):
        function(sample("abc"))
    found = loader.find("length", directory=Path.cwd())
    assert loader.load(found, {"length": {"target_tokens": 1, "max_tokens": 2}})[2].tokens
    assert not loader.load(loader.find("exact_match", directory=Path.cwd()), {})[2].tokens


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("format", {}, "options.pattern = None"),
        ("last_number", {"pattern": "("}, "is no regular expression"),
        ("last_number", {"patern": "a"}, "options.patern is no option of last_number; it has pattern"),
        ("format", {"pattern": "("}, "is no regular expression"),
        ("format", {"pattern": "a", "patern": "b"}, "options.patern is no option of format"),
        ("length", {"target_tokens": 3}, "options.max_tokens = None"),
        ("length", {"target_tokens": 3, "max_tokens": 3}, "must be below"),
        ("length", {"target_tokens": True, "max_tokens": 3}, "options.target_tokens = True"),
        ("length", {"target_tokens": 1, "max_tokens": 3, "min": 0.5}, "options.min = 0.5"),
        ("length", {"target_tokens": 1, "max_tokens": 3, "min": float("nan")}, "options.min = nan"),
        ("code_tests", {"test_seconds": 0}, "options.test_seconds = 0"),
        ("code_tests", {"memory_mib": 64.5}, "options.memory_mib = 64.5"),
        ("code_tests", {"field": ""}, "options.field = ''"),
        ("code_tests", {"fields": "x"}, "options.fields is no option"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(loader.VerifierError, match=message.replace("(", r"\(")):
        loader.load(loader.find(name, directory=Path.cwd()), {name: options})


def configured(tmp_path: Path, **reward: Any) -> ConfiguredFunction:
    config: Config = make_config(tmp_path, reward=reward)
    return ConfiguredFunction.from_config(config, config.scorer(""))


def test_options_of_the_recipe_reach_the_default_function_alone(tmp_path: Path) -> None:
    found = configured(tmp_path, function="format", options={"pattern": "a"})
    assert found.options == {"format": {"pattern": "a"}}
    found = configured(tmp_path, function="code_tests", evaluate_text=True, timeout_seconds=20)
    assert found.options == {"code_tests": {"seconds": 16.0}}  # hanging tests fail before the sample has an error
    assert found.evaluating == "code_tests"
    found = configured(tmp_path, function="reasoning_gym:products", options={"seed": 3})
    assert found.options == {"products": {"seed": 3}}


def test_options_without_a_reader_are_refused(tmp_path: Path) -> None:
    for name in ("exact_match", "reasoning_gym", "package.module:function"):
        with pytest.raises(ConfigError, match="remove the options"):
            configured(tmp_path, function=name, options={"pattern": "a"})
    with pytest.raises(ConfigError, match="evaluate_text = true"):
        configured(tmp_path, function="code_tests")
