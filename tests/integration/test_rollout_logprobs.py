"""Compares log-probabilities that the worker writes to the service's memory with vLLM's own, in two real engines.

The cases are in `tests/support/logprob_driver.py`. One engine has the table, a KV cache so small that it preempts, and
steps that hold at most one sample of full length. The other is unchanged vLLM with room for all samples, which it
neither pauses nor preempts. Both use the same seeds. `tests/gpu/test_rollout_logprobs.py` covers chunked prompts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

TinyModel = Callable[..., Path]


class Answers(NamedTuple):
    """The samples of both engines by case, and the log of the engine without the table."""

    table: dict[str, Any]
    vllm: dict[str, Any]
    vllm_log: str


def _start(model: Path, folder: Path, **options: Any) -> tuple[subprocess.Popen[str], Path]:
    folder.mkdir()
    settings = {"model": str(model), "dtype": "float32", "gpus": 0, "eager": True, "audit": False, **options}
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHDYNAMO_DISABLE": "1"}  # vLLM would compile one function
    command = [sys.executable, "-m", "tests.support.logprob_driver", json.dumps(settings), str(folder / "answer.json")]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=env), folder


def _answer(process: subprocess.Popen[str], folder: Path) -> tuple[dict[str, Any], str]:
    try:
        code = process.wait(550)
    finally:
        process.kill()
        process.wait(10)
    log = (folder / "log").read_text()
    assert code == 0, log[-6000:]
    return json.loads((folder / "answer.json").read_text()), log


@pytest.fixture(scope="module")
def answers(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    model, folder = tiny_model("qwen2", dtype="float32"), tmp_path_factory.mktemp("logprobs")
    table = _start(model, folder / "table", worker="CountingWorker", blocks=40, batched=512, plain=False)
    vllm = _start(model, folder / "vllm", worker="UnableWorker", blocks=1000, batched=16384, plain=True)
    try:
        mine, _ = _answer(*table)
    finally:
        theirs, log = _answer(*vllm)
    return Answers(mine, theirs, log)


@pytest.mark.parametrize("case", ["mixed", "stopped", "paused", "recomputed", "abandoned", "preempted"])
def test_tokens_are_the_same_and_values_are_vllms(answers: Answers, case: str) -> None:
    mine, theirs = answers.table[case], answers.vllm[case]
    assert [s["ids"] for s in mine] == [s["ids"] for s in theirs]
    assert [s["finish"] for s in mine] == [s["finish"] for s in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert len(a["logprobs"]) == len(a["ids"])
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-4)


def test_the_cases_were_what_they_are_called(answers: Answers) -> None:
    assert answers.table["table"]
    assert not answers.vllm["table"]
    assert answers.table["preemptions"][0] > 0
    assert {s["finish"] for s in answers.table["stopped"]} == {"stop", "length"}
    assert {len(s["ids"]) for s in answers.table["mixed"]} == {24}


def test_an_interrupted_sample_ends_with_the_tokens_and_values_that_it_has(answers: Answers) -> None:
    mine, theirs = answers.table["interrupted"], answers.vllm["interrupted"]
    assert {s["finish"] for s in mine} == {"abort"}
    for a, b in zip(mine, theirs, strict=True):
        assert 0 < len(a["ids"]) == len(a["logprobs"]) < 400
        count = min(len(a["ids"]), len(b["ids"]))
        assert a["ids"][:count] == b["ids"][:count]
        np.testing.assert_allclose(a["logprobs"][:count], b["logprobs"][:count], atol=1e-4)


def test_every_row_is_given_back(answers: Answers) -> None:
    assert answers.table["free"] == answers.table["slots"] == 32


def test_a_value_that_nobody_wrote_is_an_error_of_its_call_alone(answers: Answers) -> None:
    assert all("without the log-probability of each" in error for error in answers.table["unwritten"])
    assert len(answers.table["unwritten"]) >= 1


def test_the_same_engine_without_the_table_gives_the_same(answers: Answers) -> None:
    for a, b in zip(answers.table["mixed"], answers.table["without"], strict=True):
        assert a["ids"] == b["ids"]
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-4)


def test_an_engine_that_cannot_says_why_once(answers: Answers) -> None:
    lines = [line for line in answers.vllm_log.splitlines() if "log-probabilities come from vLLM itself" in line]
    (line,) = lines
    assert line.endswith("much slower with them: it is a test")
