"""Runs `fourfold bench gateway` and `reward` on a small load; evaluates made metrics as other benchmarks do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold import metrics as m
from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold.host.clock import utc_text
from fourfold_bench import harness
from fourfold_bench.long_tail import measure as long_tail
from fourfold_bench.long_tail.benchmark import BENCHMARK as LONG_TAIL
from fourfold_bench.long_tail.benchmark import LongTailSettings
from fourfold_bench.models import write_config
from fourfold_bench.reward.benchmark import HERE
from fourfold_bench.rows import measure as of_rows
from fourfold_bench.rows.benchmark import BENCHMARKS, RowsSettings


def bench(folder: Path, *words: str) -> dict[str, Any]:
    """Run `fourfold bench`; return the result. Its goals are those of an idle machine, so the exit code is not read."""
    cli_main.main(["bench", *words, "--json", str(folder / "result.json")])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.slow
def test_the_gateway_is_measured_with_an_engine_that_answers_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--engine", "echo", "--seconds", "1", "--warm-up", "0", "--new-tokens", "8")
    result = bench(tmp_path, "gateway", *load, "--ways", "direct,http-logprobs")
    assert result["results"]["ways"].keys() == {"direct", "http-logprobs"}
    assert result["results"]["ways"]["http-logprobs"]["requests"] > 0
    assert "gateway, HTTP chat with logprobs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_reward_service_and_the_coordinator_are_measured(tmp_path: Path) -> None:
    load = ("--batch", "16", "--calls", "1", "--runs", "1", "--processes", "1", "--seconds", "0")
    result = bench(tmp_path, "reward", *load)
    assert result["benchmark"] == "reward-cpu" and result["results"]["open_loop"] == {}
    assert result["results"]["cpu"][HERE]["samples_per_second"] > 0


def _settings() -> LongTailSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(LONG_TAIL, parser)
    words = ["--device", "cuda", "--layout", "separate", "--lags", "0,2", "--steps", "2", "--warm-up", "1"]
    return LongTailSettings.from_arguments(parser.parse_args(words))


def _row(step: int, lag: int) -> dict[str, Any]:
    """Return the metrics of a step that took 4 s at lag 0, and 2 s at others."""
    ages = {m.TOKEN_LAG_MEAN: lag / 2, m.TOKEN_LAG_P95: float(lag), m.TOKEN_LAG_MAX: float(lag)}
    zeros = dict.fromkeys((m.STALE_TOKENS, m.DROPPED_SAMPLES, m.SKIPPED_STEPS, m.TIME_OTHER), 0.0)
    return {
        "step": step, "end_time": utc_text(1.8e9 + (2 if lag else 4) * step), m.LAG_LIMIT: float(lag), **ages, **zeros,
        m.TRAINED_TOKENS: 6000.0, m.TRAINED_SAMPLES: 8.0, m.RESPONSE_LENGTH: 750.0, m.RESPONSE_LENGTH_MAX: 4000.0,
        m.TOTAL_LENGTH: 814.0, m.TRAIN_SPEED: 100_000.0, m.ROLLOUT_SPEED: 20_000.0, m.ENGINE_SPEED_MAX: 30_000.0,
        m.ENGINE_STEP_BASE: 1.5e-3, m.ENGINE_STEP_SAMPLE: 6.1e-6, m.TRAINER_WAIT: 0.5, m.ROLLOUT_WAIT: 0.25,
        m.LENGTH_BIAS: 0.01, m.TIME_PUBLISH: 0.1,
    }  # fmt: skip


def test_the_steps_of_each_lag_of_a_long_tail_are_measured_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, set_to, rows = _settings(), list[int](), list[dict[str, Any]]()
    monkeypatch.setattr(long_tail, "change_lag", lambda _folder, lag: set_to.append(lag))
    series = long_tail.LagSeries(settings, tmp_path)

    def finish(*lags: int) -> bool:
        for lag in lags:
            rows.append(_row(len(rows) + 1, lag))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return series.poll()

    assert not finish(0, 0, 0) and set_to == [2]
    # The step that was under way still has the old lag.
    assert not finish(0, 2, 2, 2, 2, 2, 2, 2, 2) and finish(2)
    assert {lag: [row["step"] for row in found] for lag, found in series.done.items()} == {
        0: [1, 2, 3],
        2: [7, 8, 9, 10, 11, 12, 13],
    }

    config = long_tail.write_recipe(settings, tmp_path)
    write_config(tmp_path / "model", settings.shape, context=settings.step.context)
    results = long_tail.summarise(settings, config, series.done, tmp_path)
    assert [row["trained_tokens_per_second"] for row in results["lags"].values()] == [1500.0, 3000.0]
    times = {"first_step_after_seconds": 80.0, "seconds": 300.0, "gpu_mib": {}}
    document = {"parameters": settings.document(), "results": results | times}
    assert any("3,000" in line and "2.00" in line for line in LONG_TAIL.table(document))
    assert LONG_TAIL.failures(document) == []
    results["lags"]["2"]["speed_up"] = 1.5
    assert LONG_TAIL.failures(document) == ["lag 2: 1.50 times the trained tokens per second of lag 0; at least 2.0"]


def _rows(*words: str, kind: str = "sft") -> RowsSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARKS[kind], parser)
    return BENCHMARKS[kind].settings.from_arguments(parser.parse_args(["--device", "cpu", *words]))


def test_rows_of_fine_tuning_have_the_lengths_and_labels_that_all_systems_read(tmp_path: Path) -> None:
    settings = _rows("--rows", "400")
    lengths = of_rows.write_rows(settings, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == lengths.tolist() and max(lengths) <= settings.max_tokens
    assert 50 < lengths.mean() < 65
    trained = sum(label != -100 for row in rows for label in row["labels"])
    assert 0.44 < trained / lengths.sum() < 0.46
    for row in rows:
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    assert of_rows.recipe(settings, tmp_path).steps == 26


@pytest.mark.parametrize("kind", ["dpo", "reward-training"])
def test_pairs_have_texts_of_the_lengths_that_all_systems_read(tmp_path: Path, kind: str) -> None:
    settings = _rows("--rows", "50", "--learning-rate", "2e-5", kind=kind)
    lengths = of_rows.write_rows(settings, tmp_path / "rows.jsonl").reshape(-1, 2)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    found = [[len(f"{row['prompt']}{row[side]}".split()) for side in ("chosen", "rejected")] for row in rows]
    assert found == lengths.tolist() and lengths.max() <= settings.max_tokens
    assert all(row["prompt"].endswith(" ") and row["rejected"].endswith(" w1") for row in rows)
    config = of_rows.recipe(settings, tmp_path)
    assert config.algorithm.loss.reads == "pairs" and config.trainer.learning_rate == 2e-5
    assert RowsSettings.read(settings.write(tmp_path / "settings.json")).has_pairs
    with pytest.raises(ConfigError, match="--peer-pairs 3"):
        _rows("--peer", "trl", "--peer-pairs", "3", kind=kind)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        # 128 x 590 tokens in three passes of at most 32,768, as six packs of 4,096 each.
        (("--peer", "trl"), (6, 3)),
        # The rows of a step are dealt evenly: four passes of 32.
        (("--peer", "trl-rows"), (32, 4)),
        (("--peer", "trl-rows", "--ranks", "2"), (32, 2)),
    ],
)
def test_a_peer_gets_about_the_tokens_of_a_step(words: tuple[str, ...], sizes: tuple[int, int]) -> None:
    from fourfold_bench.rows.trl import batch_sizes

    settings = _rows("--rows-per-step", "128", "--max-tokens", "4096", "--rows", "200", *words)
    assert batch_sizes(settings, 590.0) == sizes


def test_the_table_of_fine_tuning_compares_speed_and_loss() -> None:
    settings = _rows("--peer", "trl", "--steps", "2", "--warm-up", "1")
    lengths = np.array([60, 40])
    steps = [{m.TIME_STEP: 2.0, m.DATA_TOKENS: 400.0, m.TRAIN_SPEED: 250.0} for _ in range(2)]
    ours = of_rows.summarise(settings, steps, lengths)
    assert ours["tokens_per_second"] == 200 and ours["idle_share"] == pytest.approx(0.2)
    memory = dict.fromkeys(("gpu_peak_gib", "tensors_gib", "reserved_gib"))
    rest = {"first_step_after_seconds": 9.0, "loss": 6.0} | memory
    systems = {"fourfold": ours | rest, "trl": ours | rest | {"tokens_per_second": 100.0, "loss": 5.0}}
    document = {"parameters": settings.document(), "results": {"mean_tokens": 50.0, "systems": systems}}
    table = "\n".join(BENCHMARKS["sft"].table(document))
    assert "2.00 times the tokens/s of trl, loss +20.00%" in table and "between steps: 20.00%" in table


def test_the_kernels_of_fine_tuning_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--liger: these kernels need GPUs"):
        _rows("--liger")
