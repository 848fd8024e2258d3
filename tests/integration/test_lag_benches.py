"""Tests `fourfold bench long-tail` and `fourfold bench learning-curves` with real runs of tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold import metrics as m
from tests.support.bench_command import bench
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]


def test_one_run_is_measured_at_several_lags(tmp_path: Path) -> None:
    out, kept = tmp_path / "result.json", tmp_path / "kept"
    words = ("--device", "cpu", "--lags", "0,2", "--json", str(out), "--keep", str(kept))
    done = bench("long-tail", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    assert list(results["lags"]) == ["0", "2"]
    for lag, row in results["lags"].items():
        assert row["token_lag"]["max"] <= int(lag) and row["skipped_steps"] == 0
        assert row["trained_tokens_per_second"] == pytest.approx(
            row["completion_tokens"] * 6 / row["step_seconds"], rel=1e-6
        ), "3 prompts x 2"
        assert 1 < row["completion_tokens"] < 48, "some samples end before the limit"
        assert row["predicted"]["trained_tokens_per_second"] > 0
    assert results["lags"]["0"]["token_lag"]["mean"] == 0 < results["lags"]["2"]["token_lag"]["mean"]
    lags = [row[m.LAG_LIMIT] for row in results["steps"] if row.get(m.LAG_LIMIT) is not None]
    assert lags == sorted(lags)
    starts = {
        log.stem: log.read_text().count("READY ") for log in (kept / "runs" / "bench-step" / "logs").glob("*.log")
    }
    assert starts["rollout-0"] == starts["trainer-0"] == 1, "engine and trainer keep running"
    assert (tmp_path / "result.png").stat().st_size < 200_000


def test_a_recipe_is_trained_at_several_lags(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", dtype="float32")
    tables = "\n[trainer]\nlearning_rate = 1e-3\n\n[rollout]\nenforce_eager = true\n"
    write_run(tmp_path, model, prompts_per_step=3, tables=tables)
    recipe = tmp_path / "recipe.toml"
    # Each run has a working folder of its own.
    text = recipe.read_text().replace('"data.jsonl"', f'"{tmp_path}/data.jsonl"')
    recipe.write_text(
        text.replace('"scorer.py:', f'"{tmp_path}/scorer.py:').replace("[model]", '[model]\ndtype = "float32"')
    )
    out = tmp_path / "result.json"
    words = ("--device", "cpu", "--recipe", str(recipe), "--answers", "8", "--json", str(out))
    done = bench("learning-curves", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    assert set(results["runs"]) == {"lag-0-seed-5", "lag-1-seed-5"}
    for lag, row in results["lags"].items():
        assert row["answers"] == 8 and row["token_lag_max"] <= int(lag)
        assert len(row["reward"]["mean"]) == 2
    assert results["lags"]["1"]["difference"]["runs"]
    assert "held-out score" in done.stdout
    assert (tmp_path / "result.png").stat().st_size < 200_000
