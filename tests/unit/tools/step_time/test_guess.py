"""Guesses of the time of a step before the first run, compared with steps that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.host.hardware import Gpu
from fourfold.model.folder import folder_shape
from fourfold.plan.models import ModelSizes, model_sizes
from fourfold_bench.models import SHAPES, parameter_count
from fourfold_tools.step_time import guess as module
from fourfold_tools.step_time.cost import predict
from fourfold_tools.step_time.guess import cpu_flops, device_of, guess, guess_text, parameters_per_token
from fourfold_tools.step_time.rates import workload

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks/results"
H200 = [Gpu(id="0", name="NVIDIA H200")]


def sizes_of(shape: str, folder: Path) -> ModelSizes:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    found = folder_shape(folder)
    return ModelSizes(policy=found, critic=found, adapters=None)


def recipe(**tables: dict[str, Any]) -> Config:
    data: dict[str, Any] = {
        "name": "guess",
        "steps": 10,
        "model": {"source": "m", "max_context_tokens": 576},
        "data": {"train": {"path": "p.jsonl"}},
        "sampling": {"max_new_tokens": 512},
        "batch": {"prompts_per_step": 32, "group_size": 8, "tokens_per_micro_batch": 9216},
        "reward": {"function": "last_number"},
        "rollout": {"gpus_per_replica": 1},
        "trainer": {"device": "cuda"},
    }
    for name, keys in tables.items():
        data[name] = {**data.get(name, {}), **keys}
    return Config.model_validate(data)


@pytest.mark.parametrize(
    "name", ["0.43b-hybrid-2026-11-27", "0.43b-separate-2026-11-23", "1.5b-hybrid-sleep-cuda-2026-11-25",
             "7b-hybrid-sleep-cuda-2026-11-26"]
)  # fmt: skip
def test_a_guess_is_within_a_factor_of_two_of_the_measured_step(name: str, tmp_path: Path) -> None:
    document = json.loads((RESULTS / f"step-{name}.json").read_text())
    used, phases = document["parameters"], document["results"]["phases"]
    ranks = 2 if used["layout"] == "hybrid" else 1
    shared = {"placement": {"colocated": True}} if ranks == 2 else {}
    config = recipe(
        batch={"prompts_per_step": used["prompts"]},
        trainer={"ranks": ranks},
        rollout={"replicas": ranks, "sleep_mode": used["sleep"], "kv_cache_gib": 30},
        reference={"replicas": ranks, "device": "cuda"},
        algorithm={"kl": {"coef": used["kl_coef"]}},
        **shared,
    )
    sizes, device = sizes_of(used["shape"], tmp_path), device_of(config, H200)
    assert device is not None
    basis = guess(config, sizes, device, used["prompt_tokens"])
    work = workload(config, sizes.policy, basis, 0)
    step = predict(basis.rates, work, 0).step_seconds
    trained, rates = document["results"]["tokens"]["trained"], basis.rates
    training = trained / rates.train_tokens_per_second + rates.other_seconds
    assert 1 / 2 < step / phases["wall"] < 2
    assert 1 / 2 < training / phases["train"] < 2


def test_a_step_of_a_small_model_takes_its_launches() -> None:
    config = configuration.load(ROOT / "recipes/quickstart_gpu.toml")
    sizes, device = model_sizes(config), device_of(config, H200)
    assert device is not None
    basis = guess(config, sizes, device, 43)
    step = predict(basis.rates, workload(config, sizes.policy, basis, 0), 0).step_seconds
    assert 1 / 2 < step / 0.9 < 2, "0.9 s: README.md"


def test_more_work_takes_longer(tmp_path: Path) -> None:
    sizes = sizes_of("1.5b", tmp_path)

    def speed(**tables: dict[str, Any]) -> float:
        config = recipe(**tables)
        device = device_of(config, H200)
        assert device is not None
        return guess(config, sizes, device, 64).rates.train_tokens_per_second

    plain = speed()
    assert speed(trainer={"ranks": 4}) == pytest.approx(4 * plain)
    assert speed(trainer={"gradient_checkpointing": True}) == pytest.approx(plain * 3 / 4)
    assert speed(batch={"mini_batches_per_step": 4}) == pytest.approx(plain * 3 / 4)
    assert speed(algorithm={"preset": "vapo"}) < plain / 2


def test_a_dense_model_uses_all_of_its_parameters(tmp_path: Path) -> None:
    for shape in ("0.43b", "7b"):
        embedding = SHAPES[shape]["vocab_size"] * SHAPES[shape]["hidden_size"]
        other = 0 if SHAPES[shape]["tie_word_embeddings"] else embedding  # that of the inputs multiplies nothing
        assert parameters_per_token(sizes_of(shape, tmp_path).policy) == pytest.approx(
            parameter_count(shape) - other, rel=1e-3
        )


def test_the_plan_names_what_it_guesses_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, config = sizes_of("7b", tmp_path), recipe()
    assert device_of(config, [replace(H200[0], name="Some GPU 9000")]) is None
    elsewhere = device_of(config, [])
    assert elsewhere is not None
    text, _ = guess_text(config, sizes, elsewhere, None)
    assert text.startswith("a guess from the data sheet of H100, as this machine has no GPU; on an H200, guesses")
    assert "for the 10 steps, if every answer has 512 tokens" in text
    monkeypatch.setattr(module, "cpu_flops", lambda: 1e11)
    here = device_of(configuration.load(ROOT / "recipes/quickstart.toml"), [])
    assert here is not None and here.train_flops == 6e10
    assert cpu_flops() > 1e8


def test_agents_have_no_guess() -> None:
    from fourfold.plan import report

    config = configuration.load(ROOT / "recipes/agents_guessing.toml")
    assert "speed       unknown." in report.describe(config)
