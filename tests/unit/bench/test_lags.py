"""Tests `fourfold bench long-tail` and `fourfold bench learning-curves`: recipes, results, checks, tables and plots."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.cli import main as cli_main
from fourfold.errors import Internal
from fourfold.host.clock import utc_text
from fourfold_bench import harness, plots
from fourfold_bench.harness import Benchmark
from fourfold_bench.learning_curves import measure as curves
from fourfold_bench.learning_curves.benchmark import BENCHMARK as CURVES
from fourfold_bench.learning_curves.benchmark import CurveSettings
from fourfold_bench.learning_curves.prompts import write_prompts
from fourfold_bench.long_tail import measure as long_tail
from fourfold_bench.long_tail.benchmark import BENCHMARK as LONG_TAIL
from fourfold_bench.long_tail.benchmark import LongTailSettings, check
from fourfold_bench.models import SHAPES, write_config
from fourfold_bench.processes import BenchProcesses
from fourfold_coordinator.data.sources import read_rows

ROOT = Path(__file__).resolve().parents[3]
_RECIPE = str(ROOT / "recipes/quickstart_gpu.toml")


def _settings(benchmark: Benchmark[Any], *words: str) -> Any:
    parser = argparse.ArgumentParser()
    harness.add_arguments(benchmark, parser)
    return benchmark.settings.from_arguments(parser.parse_args(list(words)))


GPU: LongTailSettings = _settings(LONG_TAIL, "--device", "cuda", "--layout", "separate")


def _row(step: int, lag: int, *, seconds: float = 2.0, **changes: float) -> dict[str, Any]:
    return {
        "step": step,
        "end_time": utc_text(1.8e9 + seconds * step),
        m.LAG_LIMIT: float(lag),
        m.TRAINED_TOKENS: 6000.0,
        m.TRAINED_SAMPLES: 8.0,
        m.RESPONSE_LENGTH: 750.0,
        m.RESPONSE_LENGTH_MAX: 4000.0,
        m.TOTAL_LENGTH: 814.0,
        m.TRAIN_SPEED: 100_000.0,
        m.ROLLOUT_SPEED: 20_000.0,
        m.ENGINE_SPEED_MAX: 30_000.0,
        m.ENGINE_STEP_BASE: 1.5e-3,
        m.ENGINE_STEP_SAMPLE: 6.1e-6,
        m.TRAINER_WAIT: 0.5,
        m.ROLLOUT_WAIT: 0.25,
        m.TOKEN_LAG_MEAN: lag / 2,
        m.TOKEN_LAG_P95: float(lag),
        m.TOKEN_LAG_MAX: float(lag),
        m.STALE_TOKENS: 0.0,
        m.DROPPED_SAMPLES: 0.0,
        m.SKIPPED_STEPS: 0.0,
        m.LENGTH_BIAS: 0.01,
        m.TIME_PUBLISH: 0.1,
        m.TIME_OTHER: 0.0,
        **changes,
    }


def test_the_default_is_the_workload_with_a_long_tail(tmp_path: Path) -> None:
    assert GPU.mean_tokens == pytest.approx(764.3, abs=0.1)
    config = long_tail.write_recipe(GPU, tmp_path)
    assert len(set(config.sampling.stop_token_ids)) == 64
    assert max(config.sampling.stop_token_ids) < SHAPES["0.43b"]["vocab_size"]
    assert (config.batch.prompts_per_step, config.batch.group_size, config.sampling.max_new_tokens) == (32, 8, 4096)
    assert config.asynchrony.max_policy_lag == 0 and config.algorithm.correction.kind == "tis"
    assert config.rollout.max_concurrent_samples == 1024 and not config.rollout.sleep_mode
    assert config.rollout.kv_cache_gib == 49
    assert not config.needs_reference
    needed = sum(GPU.warm_up_steps(lag) + GPU.measured_steps(lag) for lag in GPU.policy_lags)
    assert config.steps > needed + 4, "the engine stays busy until the last measured step"
    assert [GPU.measured_steps(lag) for lag in GPU.policy_lags] == [4, 6, 6, 10], "whole rounds of lag + 1 steps"


@pytest.mark.parametrize("benchmark", ["long-tail", "learning-curves"])
@pytest.mark.parametrize("lags", ["1,0", "0,0", "-1,2", "many"])
def test_wrong_lags_are_one_line(benchmark: str, lags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench", benchmark, "--device", "cpu", f"--lags={lags}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fourfold: --lags {lags}: they must be") and error.count("\n") == 1


def test_the_next_lag_begins_when_enough_steps_of_the_last_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(long_tail, "change_lag", lambda _folder, lag: set_to.append(lag))
    series = long_tail.LagSeries(replace(GPU, lags=("0", "2"), steps=2, warm_up=1), tmp_path)
    assert not series.poll(), "the run has done no step"
    rows: list[dict[str, Any]] = []

    def finish(*lags: int) -> bool:
        for lag in lags:
            rows.append(_row(len(rows) + 1, lag))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return series.poll()

    assert not finish(0, 0) and not set_to
    assert not finish(0) and set_to == [2]
    # The step that was under way still has the old lag; a take-over may leave a row without any.
    assert not finish(0, 2, 2, 2, 2, 2, 2, 2, 2) and set_to == [2]
    assert finish(2)
    assert [row["step"] for row in series.done[0]] == [1, 2, 3]
    assert [row["step"] for row in series.done[2]] == [7, 8, 9, 10, 11, 12, 13], "without the steps that fill the queue"


def test_the_steady_state_is_measured_between_the_ends_of_steps() -> None:
    rows = [_row(3, 1, seconds=9.0), *(_row(step, 1) for step in (4, 5, 6))]
    rows[0]["end_time"] = utc_text(1.8e9 + 6.0)
    found = long_tail.steady_state(rows)
    assert found["steps"] == [4, 6]
    assert found["step_seconds"] == pytest.approx(2.0)
    assert found["trained_tokens_per_second"] == pytest.approx(3000.0)
    assert found["completion_tokens"] == 750.0
    assert found["token_lag"] == {"mean": 0.5, "p95": 1.0, "max": 1.0}
    with pytest.raises(Internal, match="steps after 3 are missing"):
        long_tail.steady_state([rows[0], *rows[2:]])


def _long_tail_document(tmp_path: Path, **changes: float) -> dict[str, Any]:
    folder = tmp_path / "bench"
    folder.mkdir()
    config = long_tail.write_recipe(GPU, folder)
    write_config(folder / "model", "0.43b", context=GPU.step.context)
    done = {
        0: [_row(step, 0, seconds=4.0) for step in range(2, 6)],
        2: [_row(step, 2) for step in range(10, 14)],
    }
    done[2][-1].update(changes)
    results = long_tail.summarise(GPU, config, done, folder)
    return {
        "benchmark": "long-tail-0.43b-separate-cuda",
        "parameters": GPU.document(),
        "results": results | {"first_step_after_seconds": 80.0, "seconds": 300.0, "gpu_mib": {}},
    }


def test_the_result_compares_lags_and_predictions(tmp_path: Path) -> None:
    document = _long_tail_document(tmp_path)
    lags = document["results"]["lags"]
    assert lags["2"]["speed_up"] == pytest.approx(2.0)
    assert lags["2"]["engine_share"] == pytest.approx(0.1)
    assert lags["2"]["predicted"]["speed_up"] > lags["0"]["predicted"]["speed_up"] == 1.0
    text = "\n".join(LONG_TAIL.table(document))
    for part in ("32 prompts x 8", "3,000", "2.00", "1.00 / 2 / 2"):
        assert part in text, part
    path = tmp_path / "plot.png"
    LONG_TAIL.plot(document, path)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({m.TOKEN_LAG_MAX: 3.0}, "lag 2: a token is 3 versions old"),
        ({m.STALE_TOKENS: 0.5}, "lag 2: 16.7% of the tokens are stale"),
        ({m.SKIPPED_STEPS: 1.0}, "lag 2: 1 steps changed nothing"),
        ({m.TRAINED_TOKENS: 1000.0}, "lag 2: trained completions are -28% longer"),
    ],
)
def test_a_wrong_steady_state_fails(tmp_path: Path, changes: dict[str, float], failure: str) -> None:
    failures = LONG_TAIL.failures(_long_tail_document(tmp_path, **changes))
    assert any(each.startswith(failure) for each in failures), failures


def test_missing_lags_and_low_speed_ups_fail(tmp_path: Path) -> None:
    lags = _long_tail_document(tmp_path)["results"]["lags"]

    assert check(GPU, lags) == ["lag 1 was not measured in 540 s", "lag 4 was not measured in 540 s"]
    slow = {**lags, "2": lags["2"] | {"speed_up": 1.9}}
    assert "lag 2: 1.90 times the trained tokens per second of lag 0; at least 2.0" in check(GPU, slow)
    assert len(check(replace(GPU, layout="shared"), slow)) == 2, "services on one GPU slow each other"


def test_a_change_of_the_lag_changes_nothing_else_of_the_recipe(tmp_path: Path) -> None:
    config = long_tail.write_recipe(_settings(LONG_TAIL, "--device", "cpu"), tmp_path)
    (tmp_path / "config.toml").write_text(configuration.dump(config))
    long_tail.change_lag(tmp_path, 3)
    found = configuration.load(tmp_path / "config.toml")
    assert found.asynchrony.max_policy_lag == 3
    assert found == config.model_copy(update={"asynchrony": found.asynchrony})


# -- learning curves ----------------------------------------------------------------------------------------------


def _curves(*words: str) -> CurveSettings:
    found: CurveSettings = _settings(CURVES, "--device", "cuda", "--recipe", _RECIPE, *words)
    return found


def _run(lag: int, seed: int, score: float, *, count: int = 704) -> dict[str, Any]:
    row = dict.fromkeys(curves._ROW, 0.5) | {m.TOKEN_LAG_MAX: float(lag)}
    rows = [row | {"step": step, m.REWARD_MEAN: step / 10} for step in range(1, 6)]
    evals = [{"step": 0, "score": 0.1, "n": count}, {"step": 5, "score": score, "n": count}]
    return {"lag": lag, "seed": seed, "rows": rows, "evals": evals, "dropped": {}, "seconds": 60.0}


def _curve_document(settings: CurveSettings, *runs: dict[str, Any]) -> dict[str, Any]:
    named = {f"lag-{run['lag']}-seed-{run['seed']}": run for run in runs}
    results = curves.summarise(named) | {"failed": {}, "runs": named, "seconds": 200.0}
    return {"benchmark": "learning-curves-x", "parameters": settings.document(), "results": results}


def test_every_lag_has_the_same_recipe_and_enough_answers() -> None:
    settings = _curves()
    base = configuration.load(_RECIPE)
    configs = [curves.make_recipe(settings, base, lag, 18) for lag in settings.policy_lags]
    assert [config.asynchrony.max_policy_lag for config in configs] == [0, 1, 2, 4]
    assert {config.algorithm.model_dump_json() for config in configs} == {configs[0].algorithm.model_dump_json()}
    assert configs[0].algorithm.correction.kind == "tis", "tokens of older weights are weighed"
    assert {(c.seed, c.steps, c.evaluation.every_steps) for c in configs} == {(18, 30, 10)}
    assert base.data.holdout is not None
    assert 2 * base.data.holdout.groups * configs[0].evaluation.samples_per_prompt >= 700
    assert configs[0].rollout.kv_cache_gib == 2 and configs[0].rollout.enforce_eager


def test_prompts_from_a_file_are_the_generated_ones(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    assert write_prompts(Path(_RECIPE), path) == 4096
    config = curves.make_recipe(_curves("--prompts", str(path)), configuration.load(_RECIPE), 0, 17)
    (train,), (original,) = config.data.train, configuration.load(_RECIPE).data.train
    assert train.path == str(path) and not train.reasoning_gym
    assert config.data.holdout is not None and config.data.holdout.groups == 9
    assert train.skip == original.skip, "the file has the rows that the recipe leaves out"
    rows, generated = read_rows(train), read_rows(original)
    first = [json.loads(json.dumps(next(generated), default=str)) for _ in range(3)]
    assert [next(rows) for _ in range(3)] == first
    assert "reasoning_gym" not in CURVES.packages(_curves("--prompts", str(path)))


def test_differences_are_of_equal_seeds() -> None:
    settings = _curves("--lags", "0,1,4")
    runs = [_run(0, 17, 0.8), _run(0, 18, 0.6), _run(1, 17, 0.81), _run(1, 18, 0.65), _run(4, 17, 0.5)]
    document = _curve_document(settings, *runs)
    found = document["results"]["lags"]
    assert found["1"]["difference"]["mean"] == pytest.approx(0.03)
    assert found["1"]["difference"]["standard_error"] == pytest.approx(0.02)
    assert found["0"]["difference"] is None
    assert found["0"]["reward"]["mean"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert CURVES.failures(document) == [], "lag 4 may differ"
    assert "+0.030 +- 0.020" in "\n".join(CURVES.table(document))


def test_runs_that_learn_less_or_fail_are_failures(tmp_path: Path) -> None:
    document = _curve_document(_curves(), _run(0, 17, 0.8), _run(1, 17, 0.7, count=600), _run(2, 17, 0.8))
    document["results"]["failed"] = {"lag-4-seed-17": "trainer-0 died"}
    document["results"]["lags"]["2"]["token_lag_max"] = 3.0
    assert CURVES.failures(document) == [
        "lag-4-seed-17: trainer-0 died",
        "lag 1: 600 answers; at least 700 in each run",
        "lag 1: the score differs by -0.100 from lag 0; at most 0.04",
        "lag 2: a token is 3 versions old",
    ]
    CURVES.plot(document, tmp_path / "plot.png")
    assert 1000 < (tmp_path / "plot.png").stat().st_size < 200_000


def test_runs_share_the_machine_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _curves("--parallel", "2", "--seconds", "60")
    base = configuration.load(_RECIPE)
    configs = {f"lag-{lag}-seed-17": curves.make_recipe(settings, base, lag, 17) for lag in (0, 1, 2, 4)}
    together: list[int] = []

    def start(_settings: Any, processes: BenchProcesses, folder: Path, config: Any, _index: int) -> None:
        folder.mkdir()
        code = "print('The run failed. no GPU'); raise SystemExit(1)" if "lag-1" in config.name else "pass"
        processes.start(config.name, "-c", code)
        together.append(sum(child.alive for child in processes._supervisor.children.values()))

    monkeypatch.setattr(curves, "_start", start)
    monkeypatch.setattr(curves, "read_run", lambda _folder, config: {"lag": config.asynchrony.max_policy_lag})
    done, failed = curves.run_all(settings, configs, tmp_path)
    assert [run["lag"] for name, run in sorted(done.items())] == [0, 2, 4]
    assert failed == {"lag-1-seed-17": "The run failed. no GPU"}
    assert max(together) <= 2


def test_runs_that_are_not_done_in_time_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _curves("--parallel", "1", "--seconds", "1.5")
    base = configuration.load(_RECIPE)
    configs = {f"lag-{lag}-seed-17": curves.make_recipe(settings, base, lag, 17) for lag in (0, 1)}

    def start(_settings: Any, processes: BenchProcesses, _folder: Path, config: Any, _index: int) -> None:
        processes.start(config.name, "-c", "import time; time.sleep(60)")

    monkeypatch.setattr(curves, "_start", start)
    done, failed = curves.run_all(settings, configs, tmp_path)
    assert not done and failed == dict.fromkeys(configs, "not done within 2 s")


# -- plots --------------------------------------------------------------------------------------------------------


def test_a_result_is_drawn_again_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(_curve_document(_curves(), _run(0, 17, 0.8))))
    assert plots.main([str(path)]) == 0
    assert (tmp_path / "result.png").exists()
    path.write_text(json.dumps({"benchmark": "rollout-x"}))
    assert plots.main([str(path)]) == 1
    assert "rollout-x has no plot" in capsys.readouterr().err


class _Failing(Benchmark[harness.BenchmarkSettings]):
    name = "failing"
    summary = "a benchmark that fails"
    settings = harness.BenchmarkSettings
    libraries = ()

    def measure(self, settings: harness.BenchmarkSettings, run: harness.BenchmarkRun) -> dict[str, Any]:
        return {"speed": 1}

    def table(self, document: Any) -> list[str]:
        return ["speed 1"]

    def failures(self, document: Any) -> list[str]:
        return ["too slow"]

    def plot(self, document: Any, path: Path) -> None:
        path.write_text("plot")


@pytest.mark.parametrize("installed", [True, False])
def test_a_failure_is_an_exit_code_after_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    parser = argparse.ArgumentParser()
    harness.add_arguments(_Failing(), parser)
    assert harness.run(_Failing(), parser.parse_args(["--json", str(tmp_path / "result.json")])) == 1
    assert json.loads((tmp_path / "result.json").read_text())["results"] == {"speed": 1}
    out = capsys.readouterr().out
    assert out.endswith("speed 1\n\nfailed: too slow\n")
    assert (tmp_path / "result.png").exists() == installed and ("no plot" in out) != installed
