"""`fourfold run` with everything real, whose reward is replaced by `fourfold reward` while it goes on.

The first service gives way to a second one; a third one is broken in three ways, and is rolled back; a fourth one is a
canary for a quarter of the groups, and is promoted. At last the second one is a shadow of it. With
FOURFOLD_REPLACE_RESULTS=DIR the outcome is written there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import until
from tests.integration.test_run_local import alive
from tests.support.tiny_run import logs_of, write_run
from tests.support.versioned_reward import score_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS = 48, 6
TABLES = """
[trainer]
learning_rate = 1e-4

[evaluation]
every_steps = 10
"""


@contextmanager
def serving(version: int, mode: Path) -> Iterator[str]:
    """Run a service of tests/support/versioned_reward.py; yield its address."""
    words = [sys.executable, "-m", "tests.support.versioned_reward", str(version), str(mode)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("READY ").strip()
        finally:
            process.kill()


class Run:
    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "runs" / "tiny"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fourfold", "run", "recipe.toml"], cwd=root, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        until(lambda: len(self.rows("metrics.jsonl")) >= step or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, logs_of(self.folder)

    def reward(self, action: str, *words: str) -> str:
        """Call `fourfold reward`; return what it prints."""
        command = [sys.executable, "-m", "fourfold", "reward", action, str(self.folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Run]:
    write_run(tmp_path, tiny_model("llama_tied"), prompts_per_step=PROMPTS, tables=TABLES)
    recipe = (tmp_path / "recipe.toml").read_text()
    recipe = recipe.replace("steps = 3", f"steps = {STEPS}")
    recipe = recipe.replace('function = "scorer.py:score"', 'function = "scorer.py:score"\ntimeout_seconds = 3')
    (tmp_path / "recipe.toml").write_text(recipe)
    made = Run(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate(timeout=10)


@pytest.mark.soak
def test_the_reward_is_replaced_three_times_and_nothing_is_lost(run: Run, tmp_path: Path) -> None:
    stalls: dict[str, float] = {}
    with ExitStack() as services:
        second, third, fourth = (services.enter_context(serving(v, tmp_path / f"mode{v}")) for v in (2, 3, 4))
        run.wait_for_step(2)
        assert f"length@2 at {second}" in run.reward("swap", "reward", "--target", second)
        run.wait_for_step(5)
        run.reward("swap", "reward", "--target", third)
        for number, mode in enumerate(("hang", "nan", "count")):
            run.wait_for_step(6 + number)
            (tmp_path / "mode3").write_text(mode)
            before = len(run.rows("metrics.jsonl"))
            time.sleep(6)
            assert len(run.rows("metrics.jsonl")) <= before + 1, f"no step has invented scores ({mode})"
            began = time.monotonic()
            (tmp_path / "mode3").write_text("")
            run.wait_for_step(before + 2)
            stalls[mode] = round(time.monotonic() - began, 1)
        (tmp_path / "mode3").write_text("hang")
        assert f"length@2 at {second}" in run.reward("rollback", "reward")
        run.wait_for_step(len(run.rows("metrics.jsonl")) + 1)
        assert "25% of the groups" in run.reward("canary", "reward", "--target", fourth, "--share", "0.25")
        run.wait_for_step(len(run.rows("metrics.jsonl")) + 5)
        run.reward("promote", "reward")
        run.reward("shadow", "reward", "--target", second, "--gradients")
        run.wait_for_step(len(run.rows("metrics.jsonl")) + 4)
        listed = run.reward("list")
        assert "gradient cosine" in listed and f"shadow    length@2 at {second}" in listed, listed
        output, errors = run.process.communicate(timeout=240)
    assert run.process.returncode == 0, errors + logs_of(run.folder)
    check(run, stalls, output)


def check(run: Run, stalls: dict[str, float], output: str) -> None:
    """No step is lost or repeated, every score is that of the scorer that the record names, and the report says so."""
    report = json.loads((run.folder / "report.json").read_text())
    metrics, samples = run.rows("metrics.jsonl"), run.rows("samples.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert report["dropped"] == {} and len({s["sample_id"] for s in samples}) == len(samples) == STEPS * PROMPTS * 4
    by_step: dict[int, set[str]] = defaultdict(set)
    by_group: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        ((score, weight, scorer),) = sample["terms"].values()
        by_step[sample["step"]].add(scorer)
        by_group[sample["group_id"]].add(scorer)
        if scorer.startswith("length@"):
            score_then = score_of(sample["completion"], int(scorer.removeprefix("length@")))
        else:
            score_then = len(sample["completion"]) % 5 / 4
        assert sample["score"] == score == score_then and weight == 1
    assert all(len(scorers) == 1 for scorers in by_group.values()), "no group is split"
    canary = [step for step, scorers in by_step.items() if len(scorers) > 1]
    assert all(by_step[step] == {"length@2", "length@4"} for step in canary), "only the canary is mixed"
    assert by_step[STEPS] == {"length@4"}
    order = [next(iter(by_step[step])).partition("@")[2] for step in sorted(by_step) if step not in canary]
    changes_of = [version for index, version in enumerate(order) if not index or version != order[index - 1]]
    assert changes_of[1:] == ["2", "3", "2", "4"], changes_of
    changes = [(entry["change"], entry["scorer"]) for entry in report["scorers"]["changes"]]
    assert changes == [(name, "reward") for name in ("swap", "swap", "rollback", "canary", "promote", "shadow")]
    cosines = [row["shadow/gradient_cosine"] for row in metrics if "shadow/gradient_cosine" in row]
    # Scores of the two versions differ by a constant, which no comparison within a group sees.
    assert len(cosines) >= 3 and min(cosines) > 0.999, cosines
    kinds = {row["kind"] for row in report["faults"]}
    assert {"NOT_FINITE", "WRONG_COUNT"} <= kinds, kinds
    assert not alive({run.process.pid})
    groups = [g for g in by_group if any(s["group_id"] == g and s["step"] in canary for s in samples)]
    share = sum(by_group[g] == {"length@4"} for g in groups) / len(groups)
    write_results(report, metrics, stalls=stalls, canary_share=share)


def write_results(report: dict[str, Any], metrics: list[dict[str, Any]], **facts: Any) -> None:
    if not (folder := os.environ.get("FOURFOLD_REPLACE_RESULTS")):
        return
    steps = {row["step"]: row["scorers"]["reward"] for row in metrics}
    found = {
        "command": "FOURFOLD_REPLACE_RESULTS=DIR pytest -m slow tests/integration/test_replace_reward_run.py",
        "scored_by_step": steps, "scorers": report["scorers"], "dropped": report["dropped"],
        "faults": report["faults"], **facts,
    }  # fmt: skip
    (Path(folder) / "replace-reward-cpu.json").write_text(json.dumps(found, indent=2) + "\n")
