"""Tests the phases, the FLOP, the recipe and the table of `fourfold bench step`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold import metrics as m
from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError, Internal
from fourfold.host.hardware import Gpu
from fourfold_bench import gpus, harness
from fourfold_bench.gpus import GpuMemory
from fourfold_bench.models import forward_flop, parameter_count
from fourfold_bench.processes import BenchProcesses
from fourfold_bench.step import measure, phases, recipe
from fourfold_bench.step.benchmark import BENCHMARK, StepSettings
from fourfold_bench.step.openrlhf import SECONDS
from fourfold_coordinator.launch.fleet import services_of
from fourfold_coordinator.launch.placement import assign_gpus


def _settings(*words: str) -> StepSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    return StepSettings.from_arguments(parser.parse_args(list(words)))


GPU = _settings("--device", "cuda")


def _row(step: int, *, wall: float = 0.0, **times: float) -> dict[str, Any]:
    row: dict[str, Any] = {f"time/{name}": value for name, value in times.items()}
    row |= {m.TIME_STEP: wall, m.TIME_OTHER: wall - sum(times.values())}
    row |= {m.RESPONSE_LENGTH: 512.0, m.TOTAL_LENGTH: 576.0, m.TRAINED_SAMPLES: 512.0, m.SKIPPED_STEPS: 0.0}
    row |= {m.ROLLOUT_SPEED: 512 * 512 / 3.0, m.TRAIN_SPEED: 576 * 512 / 2.5}
    row |= {"weights/publish_seconds": 0.1, "diagnosis": ""}
    return {"step": step, **row}


def _write_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_phases_and_the_rest_add_up_to_the_wall_time(tmp_path: Path) -> None:
    times = {"generate": 3.0, "reward": 0.1, "reference": 0.2, "train": 2.6, "publish": 0.1}
    rows = [_row(step, wall=6.5, **times) for step in (1, 2, 3, 4)]
    measured = phases.read_steps(_write_run(tmp_path / "run", rows), warm_up=1, steps=2)
    assert [row["step"] for row in measured] == [2, 3]
    found = phases.phases(measured[1])
    assert found["wall"] == 6.5
    assert found["other"] == pytest.approx(0.5)
    assert sum(value for name, value in found.items() if name != "wall") == pytest.approx(found["wall"])
    assert "sleep" not in found, "nobody slept"
    inside = phases.parts(measured[0])
    assert (inside["train/inside_seconds"], inside["train/outside_seconds"]) == pytest.approx((2.5, 0.1))
    assert inside["weights/publish_seconds"] == 0.1


def test_a_step_that_is_missing_or_learned_nothing_is_an_error(tmp_path: Path) -> None:
    rows = [_row(1), _row(2) | {m.SKIPPED_STEPS: 1.0, "diagnosis": "all scores are equal"}]
    run = _write_run(tmp_path / "run", rows)
    with pytest.raises(Internal, match="step 2 changed nothing: all scores are equal"):
        phases.read_steps(run, warm_up=1, steps=1)
    with pytest.raises(Internal, match="step 2 or 3 is not in"):
        phases.read_steps(run, warm_up=2, steps=1)
    rows = [_row(step) | {m.SKIPPED_STEPS: 1.0} for step in (1, 2)]  # since the start of the run
    assert len(phases.read_steps(_write_run(tmp_path / "warm", rows), warm_up=1, steps=1)) == 1


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"kl_coef": -1.0}, r"recipe  algorithm.kl.coef = -1.0: input should be greater than or equal to 0"),
        ({"backend": "nccl", "layout": "hybrid"}, "nccl"),
    ],
)
def test_what_no_recipe_may_say_is_one_clear_error_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        recipe.write(replace(GPU, **given), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_flop_are_those_of_the_papers() -> None:
    assert parameter_count("0.135b") == 134_515_008
    assert round(parameter_count("0.43b") / 1e9, 3) == 0.428
    assert parameter_count("7b") == 7_615_616_512
    matrices = 6 * parameter_count("0.43b") * 512 * 576
    attention = 6 * 24 * 1024 * 512 * 576**2
    forward = forward_flop("0.43b", tokens=512 * 576, squares=512 * 576**2)
    assert 3 * forward == pytest.approx(matrices + attention)
    rows = [_row(2, wall=6.2, generate=3.0, train=2.6)]
    found = measure.summarise(GPU, rows)["flop"]
    assert found == pytest.approx({"update": 3 * forward, "reference": forward, "sampling": forward})
    assert not measure.summarise(replace(GPU, kl_coef=0.0), rows)["flop"]["reference"]


def test_mfu_is_that_of_the_run_and_by_the_same_peak_that_of_the_whole_step() -> None:
    rows = [
        _row(step, wall=wall, generate=1.0, train=2.0) | {m.MFU: mfu}
        for step, wall, mfu in ((2, 4.0, 0.3), (3, 6.0, 0.4))
    ]
    found = measure.summarise(GPU, rows, gpu="NVIDIA H200")
    whole = sum(found["flop"].values())
    assert found["mfu"] == pytest.approx({"train": 0.35, "step": whole / (5.0 * 2 * 989.5e12)})
    assert "mfu" not in measure.summarise(GPU, rows, gpu="Some GPU 9000") | measure.summarise(GPU, rows)


def test_the_default_is_the_work_that_openrlhf_was_measured_on(tmp_path: Path) -> None:
    assert GPU.is_openrlhf_work
    assert not replace(GPU, group_size=4).is_openrlhf_work and not replace(GPU, kl_coef=0.0).is_openrlhf_work
    assert GPU.samples * (GPU.prompt_tokens + GPU.new_tokens) == 294_912
    config = recipe.write(GPU, tmp_path)
    assert config.steps == 5, "the last one writes the checkpoint"
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator, config.algorithm.kl.placement) == (
        1e-3, "k3", "loss",
    )  # fmt: skip
    assert (config.trainer.zero_stage, config.trainer.optimizer, config.batch.updates_per_step) == (3, "adamw", 1)
    assert config.weights.verify_first == 1
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 5 * 64
    assert {len(row["question"].split()) for row in rows} == {64}


def test_layouts_put_services_where_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "usable", lambda: (Gpu(id="0", name="one"), Gpu(id="1", name="another")))

    def places(settings: StepSettings) -> dict[str, tuple[str, ...]]:
        config = recipe.write(settings, tmp_path)
        gpus = measure.environment(settings)["CUDA_VISIBLE_DEVICES"].split(",")
        visible = [Gpu(id=name, name="one") for name in gpus]
        return assign_gpus(services_of(config), visible, colocated=config.placement.colocated)

    assert places(GPU) == {"rollout-0": ("1",), "trainer-0": ("0",), "reference-0": ("0",)}
    assert places(replace(GPU, layout="hybrid", sleep=True)) == {
        "rollout-0": ("0",),
        "rollout-1": ("1",),
        "trainer-0": ("0", "1"),
        "reference-0": ("0",),
        "reference-1": ("1",),
    }
    assert places(replace(GPU, layout="shared")) == {
        "rollout-0": ("0",),
        "trainer-0": ("0",),
        "reference-0": ("0",),
    }
    assert measure.environment(_settings("--device", "cpu"))["CUDA_VISIBLE_DEVICES"] == ""


def test_each_engine_has_room_for_its_share() -> None:
    assert (GPU.engine_samples, GPU.engine_cache_gib) == (512, 17)
    hybrid = replace(GPU, layout="hybrid", prompts=63)
    assert (hybrid.engine_samples, hybrid.replicas) == (256, 2)
    assert replace(GPU, kv_cache_gib=40).engine_cache_gib == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group-size", "1"], "--group-size 1: advantages compare the samples of a prompt"),
        (["--warm-up", "0"], "--warm-up 0: it must be at least 1"),
        (["--sleep"], "--sleep is for engines that share GPUs"),
        (["--liger"], "--liger: these kernels need GPUs"),
        (["--tokens-per-micro-batch", "-5"], "--tokens-per-micro-batch -5: it must be at least"),
        (["--reference-tokens", "8"], "--reference-tokens 8: it must be at least"),
        (["--timeout", "0"], "--timeout 0.0: it must be above 0"),
    ],
)
def test_bad_arguments_get_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench", "step", "--device", "cpu", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fourfold: {message}") and error.count("\n") == 1
    with pytest.raises(ConfigError):
        _settings("--device", "cpu", *words)


def test_the_table_is_side_by_side_with_openrlhf() -> None:
    row = _row(2, wall=6.2, generate=3.0, reward=0.1, reference=0.2, sleep=0.05, train=2.6, wake=0.05, publish=0.1)
    results = measure.summarise(GPU, [row | {m.MFU: 0.33}] * 3, gpu="NVIDIA H200")
    results |= {"gpu_mib": {"cuda:0": 70_000}, "first_step_after_seconds": 80.0}
    text = "\n".join(BENCHMARK.table({"parameters": GPU.document(), "results": results}))
    for layout, theirs in SECONDS.items():
        assert f"OpenRLHF {layout}" in text
        assert f"{theirs['wall'] / 6.2:.2f} x" in text
    assert results["phases"]["other"] == pytest.approx(0.1)
    for part in ("other", "0.100", "MFU: train phase 33.0% of the trainer's GPUs", "87,381 sampled", "70000 MiB"):
        assert part in text, part
    small = replace(GPU, prompts=8)
    assert "OpenRLHF" not in "\n".join(BENCHMARK.table({"parameters": small.document(), "results": results}))


def _finish(folder: Path, *, log: str, weights: bytes) -> dict[str, Any]:
    """Return what the benchmark says of a run that exits with 0 and leaves this."""
    watch = measure.RunWatch(GPU, folder / "run", GpuMemory([], every=1.0))
    for name in ("logs", "model"):
        (watch.run_dir / name).mkdir(parents=True)
    (watch.run_dir / "logs" / "trainer-0.log").write_text(log)
    if weights:
        (watch.run_dir / "model" / "model.safetensors").write_bytes(weights)
    with BenchProcesses(folder) as processes:
        processes.start("run", "-c", "pass")
        return measure.wait_for_end(processes, watch)


def test_a_run_must_end_with_an_export_and_without_a_restart(tmp_path: Path) -> None:
    ready = "READY 127.0.0.1:1\n"
    end = _finish(tmp_path / "whole", log=ready, weights=b"1234")
    assert end["exported_bytes"] == 4 and end["seconds"] >= 0
    row = _row(2, wall=6.2, generate=3.0, train=2.6)
    results = measure.summarise(GPU, [row]) | {"gpu_mib": {}, "first_step_after_seconds": 80.0, "end": end}
    assert "no service was restarted" in "\n".join(BENCHMARK.table({"parameters": GPU.document(), "results": results}))
    with pytest.raises(Internal, match="there are no weights in"):
        _finish(tmp_path / "none", log=ready, weights=b"")
    with pytest.raises(Internal, match="trainer-0 was started 2 times"):
        _finish(tmp_path / "again", log=f"{ready}died\n{ready}", weights=b"1234")
