"""Rates from the metrics of a run, and the predictions that `fourfold plan --rates` prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.cli.main import main
from fourfold.errors import ConfigError
from fourfold.model import folder as models
from fourfold.rollout.engine_step import EngineStep
from fourfold_tools.step_time.rates import read_rates, workload

RECIPES = Path(__file__).parents[4] / "recipes"
ROW: dict[str, Any] = {
    m.RESPONSE_LENGTH: 700.0,
    m.RESPONSE_LENGTH_MAX: 3000.0,
    m.TOTAL_LENGTH: 764.0,
    m.TRAIN_SPEED: 137_000.0,
    m.ROLLOUT_SPEED: 20_000.0,
    m.TIME_PUBLISH: 0.1,
    m.PAUSE_SECONDS: 0.01,
    m.TIME_REWARD: 0.02,
    m.TIME_REFERENCE: 0.3,
    m.TIME_OTHER: 0.005,
    m.TIME_STEP: 21.0,
    m.TIME_EVALUATE: 7.0,
    m.TIME_CHECKPOINT: 3.0,
}
STEP = {m.ENGINE_STEP_BASE: 2e-3, m.ENGINE_STEP_SAMPLE: 9.4e-6, m.ENGINE_STEP_CONTEXT: 1e-8}


def run_of(folder: Path, *rows: dict[str, Any], recipe: str = "") -> Path:
    """Write the folder of a run with these steps."""
    lines = [json.dumps({"step": number, **row}) for number, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if recipe:
        (folder / "config.toml").write_text(recipe)
    return folder


def test_rates_are_those_of_the_last_steps_without_the_first(tmp_path: Path) -> None:
    cold = ROW | {m.TRAIN_SPEED: 1.0, m.RESPONSE_LENGTH_MAX: 9000.0}
    run = read_rates(run_of(tmp_path, cold, ROW | STEP, ROW | {m.RESPONSE_LENGTH: 900.0, m.TOTAL_LENGTH: 964.0}, ROW))
    assert run.steps == (2, 4) and run.step_is_measured
    rates = run.rates
    assert rates.engine_step == EngineStep(base=2e-3, per_sample=9.4e-6, per_context_token=1e-8)
    assert (rates.train_tokens_per_second, rates.publish_seconds, rates.pause_seconds) == (137_000, 0.1, 0.01)
    assert (rates.reward_seconds, rates.other_seconds) == (0.32, 0.005)
    assert run.prompt_tokens == pytest.approx(64) and run.mean_new_tokens == pytest.approx((700 + 900 + 700) / 3)
    assert (run.longest_new_tokens, run.accepted) == (3000, 1)
    assert (run.step_seconds, run.lag) == (11, 0)


def test_the_newest_fit_and_the_lag_of_the_run_are_read(tmp_path: Path) -> None:
    newer = ROW | STEP | {m.ENGINE_STEP_BASE: 3e-3, m.LAG_LIMIT: 2.0}
    run = read_rates(run_of(tmp_path, ROW, ROW | STEP | {m.LAG_LIMIT: 4.0}, newer, newer | {m.ENGINE_STEP_BASE: None}))
    assert (run.rates.engine_step.base, run.lag) == (3e-3, 4)


def test_one_step_is_enough_and_old_steps_are_left_out(tmp_path: Path) -> None:
    assert read_rates(run_of(tmp_path, ROW)).steps == (1, 1)
    assert read_rates(run_of(tmp_path, *[ROW] * 50)).steps == (31, 50)


def test_a_line_that_is_being_written_and_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    broken = [ROW | {m.TRAIN_SPEED: value} for value in (None, math.nan, -1.0, 0.0, "fast", True)]
    run_of(
        tmp_path, ROW, *broken, ROW, ROW | {m.TIME_PUBLISH: None, m.ENGINE_STEP_BASE: math.inf} | {m.PUBLISH_SECONDS: 9}
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "len')
    run = read_rates(tmp_path)
    assert run.steps == (8, 9) and run.rates.publish_seconds == 0.1 and not run.step_is_measured


def test_without_engine_steps_the_engine_is_as_fast_with_any_number_of_samples(tmp_path: Path) -> None:
    one = read_rates(run_of(tmp_path, ROW)).rates.engine_step
    assert one.base == 0 and one.per_sample == pytest.approx(1 / 20_000)
    recipe = (RECIPES / "quickstart.toml").read_text() + "[rollout]\nreplicas = 4\n"
    four = read_rates(run_of(tmp_path, ROW, recipe=recipe)).rates.engine_step
    assert four.per_sample == pytest.approx(4 / 20_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read metrics.jsonl \(No such file or directory\); give a folder of runs/"),
        ("", "none of the 0 lines of metrics.jsonl has length/response_mean, .* give a run that has finished a step"),
        ('{"step": 1}\n[]\n7\n', "none of the 3 lines"),
    ],
)
def test_a_folder_without_metrics_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rates(tmp_path)


def test_sizes_are_the_recipes_and_lengths_the_runs(tmp_path: Path) -> None:
    config = configuration.load(RECIPES / "async_cpu.toml")
    shape = models.shape(config.model.source)
    run = read_rates(run_of(tmp_path, ROW | {m.FILTER_ACCEPT_RATE: 0.5}))
    work = workload(config, shape, run, 0)
    assert (work.groups_per_step, work.trained_share, work.group_size) == (24, 0.5, 8)
    assert (work.mean_new_tokens, work.max_new_tokens) == (16, 16), "the recipe allows no more"
    assert (work.concurrent_samples, work.kv_cache_tokens, work.shared_devices) == (256, 23_301, True)
    assert (work.pause, workload(config, shape, run, 1).pause) == ("wait", "keep")
    on_gpus = configuration.load(RECIPES / "async_gpu.toml")
    assert workload(on_gpus, shape, run, 0).kv_cache_tokens == math.inf
    assert not workload(on_gpus, shape, run, 0).shared_devices
    assert [workload(on_gpus, shape, run, lag).concurrent_samples for lag in (0, 4)] == [256, 480]


def test_plan_predicts_every_lag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (RECIPES / "async_gpu.toml").read_text().replace("max_policy_lag = 2", "max_policy_lag = 3")
    text = text.replace("max_context_tokens = 128", "max_context_tokens = 4096")
    text = text.replace("max_new_tokens = 16", "max_new_tokens = 4000").replace("= 12\ngroup_size", "= 32\ngroup_size")
    (tmp_path / "r.toml").write_text(text)
    assert main(["plan", str(tmp_path / "r.toml"), "--rates", str(run_of(tmp_path, ROW, ROW | STEP, ROW | STEP))]) == 0
    output = capsys.readouterr().out
    flat = " ".join(output.split())
    assert (
        f"speed from {tmp_path}, steps 2 to 3 (11 s each at a policy lag of 0, without evaluations and checkpoints, "
        f"which the predictions leave out, too): an engine step takes 2 ms + 9.4 us per sample + 10 ns per token in "
        f"the KV cache; the trainer trains 137,000 tokens/s; publish 100 ms, scoring 320 ms, other 5 ms. Prompts of 64 "
        f"and completions of 700 tokens on average, at most 3,000."
    ) in flat
    table = output[output.index("policy lag  s per step") :].splitlines()
    assert [line.split()[0] for line in table[1:6]] == ["0", "1", "2", "3", "4"]
    seconds = [float(line.split()[1]) for line in table[1:6]]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[4]
    assert table[1].split()[2] == "1.00" and table[1].endswith("the longest samples")
    assert table[6] == ""


def test_plan_says_what_it_assumes_without_engine_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "quickstart.toml"), "--rates", str(run_of(tmp_path, ROW))]) == 0
    flat = " ".join(capsys.readouterr().out.split())
    assert f"speed from {tmp_path}, step 1 (11 s each" in flat and ": an engine samples 20,000 tokens/s." in flat
    assert "assumed not to, and the speed-ups are lower bounds" in flat


def test_wrong_folders_and_combinations_are_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(RECIPES / "quickstart.toml")
    assert main(["plan", quickstart, "--rates", str(tmp_path)]) == 1
    assert f"fourfold: --rates {tmp_path}: cannot read metrics.jsonl" in capsys.readouterr().err
    assert main(["plan", quickstart, "--rates", str(tmp_path), "--resolved"]) == 1
    assert "--resolved and --rates exclude each other" in capsys.readouterr().err
