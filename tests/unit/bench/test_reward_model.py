"""Tests the settings, the summary and the table of `fourfold bench reward-model`."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.errors import ConfigError
from fourfold_bench import harness
from fourfold_bench.reward_model import measure, turns
from fourfold_bench.reward_model.benchmark import BACKEND, BENCHMARK, GRPC, RewardModelSettings, prompt_and_completion


def settings(*words: str) -> RewardModelSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    return RewardModelSettings.from_arguments(parser.parse_args(["--device", "cpu", *words]))


def test_all_ways_get_the_same_texts(tmp_path: Path) -> None:
    given = settings("--shortest", "8", "--longest", "100", "--median", "30", "--tokens", "4000")
    texts = given.texts()
    assert texts == RewardModelSettings.read(given.write(tmp_path / "s.json")).texts()
    lengths = [len(text) for text in texts]
    assert 4000 <= sum(lengths) < 4100 and min(lengths) >= 8 and max(lengths) <= 100
    assert 20 < np.median(lengths) < 45 and min(map(min, texts)) >= 3
    prompt, completion = prompt_and_completion(texts[0])
    assert [int(word[1:]) for word in (prompt + completion).split()] == texts[0]


def test_quick_is_a_quarter() -> None:
    assert (settings("--quick").tokens, settings("--quick").seconds) == (5000, 0.75)
    assert settings("--quick", "--tokens", "300").tokens == 300


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--median 600: it must be from --shortest, 64, to --longest, 100"):
        settings("--longest", "100")


def make_way(name: str, child: str, seconds: list[float], scores: list[float], error: str = "") -> measure.Way:
    way = measure.Way(name, child, {})
    way.seconds, way.scores, way.error = seconds, scores, error
    return way


def summary(*ways: measure.Way) -> dict[str, Any]:
    return measure.summarise(settings("--tokens", "4000"), ways)


def test_ways_are_compared_with_the_fastest_plain_one() -> None:
    scores = [0.0, 1.0, 2.0]
    found = summary(
        make_way("transformers, sdpa", "plain", [4.0, 2.0, 8.0], scores),
        make_way("transformers, flash_attention_2", "plain", [2.0], scores),
        make_way(BACKEND, "backend", [1.0, 1.0], scores),
        make_way(GRPC, "grpc", [], [], "no GPU"),
    )
    ways = found["ways"]
    assert ways["transformers, sdpa"]["ratio"] == 0.5 and ways[BACKEND]["ratio"] == 2.0
    assert ways[BACKEND]["difference"] == 0.0 and not found["disagreements"]
    document = {"parameters": settings().document(), "results": found}
    assert BENCHMARK.failures(document) == [f"{GRPC}: no GPU"]
    table = "\n".join(BENCHMARK.table(document))
    assert "2.000" in table and "failed" in table


def test_scores_that_differ_are_a_failure() -> None:
    found = summary(
        make_way("transformers, sdpa", "plain", [1.0], [0.0, 1.0, 2.0]),
        make_way(BACKEND, "backend", [1.0], [2.0, 1.0, 0.0]),
    )
    (text,) = BENCHMARK.failures({"results": found})
    assert text.startswith("scores differ: RewardModelBackend.score from transformers, sdpa")


def test_a_result_without_a_plain_way_has_no_ratio() -> None:
    found = summary(
        make_way("transformers, sdpa", "plain", [], [], "out of memory"), make_way(BACKEND, "backend", [1.0], [1.0])
    )
    assert "ratio" not in found["ways"][BACKEND]


def test_a_child_answers_in_turn(tmp_path: Path) -> None:
    threading.Thread(
        target=turns.serve, args=(tmp_path, "a", lambda request: {"n": request["n"] + 1}), daemon=True
    ).start()
    for number in range(2):
        path = turns.ask(tmp_path, "a", number, {"n": number})
        for _ in range(2000):
            if path.exists():
                break
            threading.Event().wait(0.005)
        assert path.read_text() == f'{{"n": {number + 1}}}'
