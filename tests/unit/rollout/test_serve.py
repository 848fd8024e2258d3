"""The values that the rollout service reads from a recipe and a model folder before it starts its engine."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold import config
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_rollout.serve import _pool, check_ports, engine_settings, model_sha256, model_stop_token_ids

ROOT = Path(__file__).parents[3]


def write(folder: Path, **files: object) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_engine_gets_what_the_recipe_says() -> None:
    recipe = config.load(ROOT / "recipes" / "quickstart.toml")
    settings = engine_settings(recipe, recipe.rollout_pools[0], Path("/model"))
    assert settings.max_context_tokens == recipe.model.max_context_tokens
    assert settings.enforce_eager  # the default on CPU
    assert (settings.options, settings.head_dtype) == ({}, "")
    keys = {"vllm": {"block_size": 64}, "gpus_per_replica": 2, "sleep_mode": True, "quantization": "fp8"}
    exact = recipe.model.model_copy(update={"head_dtype": "float32"})
    changed = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=keys), "model": exact})
    on_gpu = engine_settings(changed, changed.rollout_pools[0], Path("/model"))
    assert (on_gpu.gpus, on_gpu.sleep_mode, on_gpu.quantization) == (2, True, "fp8")
    assert on_gpu.head_dtype == "float32"
    assert (settings.max_concurrent_samples, settings.max_batched_tokens) == (256, 8192)
    assert on_gpu.max_batched_tokens == 16384
    assert not on_gpu.enforce_eager
    assert on_gpu.options == {"block_size": 64}


def test_an_engine_gets_the_keys_of_its_pool() -> None:
    recipe = config.load(ROOT / "recipes" / "quickstart.toml")
    pools = [{"name": "a", "dtype": "float32"}, {"name": "b", "gpus_per_replica": 4, "pipeline_parallel_size": 2}]
    changed = config.from_tables(recipe.model_dump() | {"rollout": {"pool": pools}}, source="here")
    options = ServeOptions(role="rollout", recipe=Path("r.toml"), config=changed, member_id="rollout-b-0", pool="b")
    first, second = (engine_settings(changed, _pool(replace(options, pool=name)), Path("/model")) for name in ("", "b"))
    assert (first.dtype, first.gpus, first.stages, first.options_key) == ("float32", 0, 1, "[[rollout.pool]] 'a' vllm")
    assert (second.dtype, second.gpus, second.stages) == (recipe.model.dtype, 4, 2)
    unknown = "--pool 'c' is not the name of a table [[rollout.pool]]; the recipe has 'a', 'b'"
    with pytest.raises(ConfigError, match=re.escape(unknown)):
        _pool(replace(options, pool="c"))


def test_stop_tokens_are_those_of_both_files_once(tmp_path: Path) -> None:
    folder = write(tmp_path, generation_config={"eos_token_id": [5, 2]}, config={"eos_token_id": 2})
    assert model_stop_token_ids(folder) == (5, 2)


def test_a_model_without_stop_tokens_has_none(tmp_path: Path) -> None:
    assert model_stop_token_ids(write(tmp_path, config={"eos_token_id": None})) == ()


def test_model_hash_does_not_depend_on_how_config_json_is_written(tmp_path: Path) -> None:
    folder = write(tmp_path, config={"b": 1, "a": [1, 2]})
    before = model_sha256(folder)
    (folder / "config.json").write_text('{\n "a": [1, 2],\n\n "b": 1}')
    assert model_sha256(folder) == before == hashlib.sha256(b'{"a":[1,2],"b":1}').digest()


def test_broken_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        model_sha256(tmp_path)


def test_a_taken_port_is_found_before_the_engine_starts(unused_port: int) -> None:
    taken = f"127.0.0.1:{unused_port}"
    check_ports({"listen": "127.0.0.1:0", "rollout.public_listen": taken})
    check_ports({"listen": taken, "rollout.public_listen": ""})
    with socket.create_server(("127.0.0.1", unused_port)):
        with pytest.raises(ConfigError, match=rf"^rollout\.public_listen = '{taken}': port {unused_port} is in use by"):
            check_ports({"listen": "127.0.0.1:0", "rollout.public_listen": taken})
