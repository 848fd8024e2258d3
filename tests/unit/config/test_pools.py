"""Pools of engines: their keys come from [rollout] unless they set them, and errors name the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import config
from fourfold.config import Config, gpu_places
from fourfold.errors import ConfigError
from tests.unit.config.test_config import RECIPE, refused, write

POOLS = """
[rollout]
gpu_memory_utilization = 0.7
gpus_per_replica = 1
max_batched_tokens = 128
vllm = { block_size = 16, kv_cache_dtype = "fp8" }

[[rollout.pool]]
name = "Big_One"
gpu = "H100"
gpus_per_replica = 2
replicas = 2
vllm = { block_size = 32 }

[[rollout.pool]]
name = "small"
gpu = "L40S"
dtype = "float32"
quantization = "fp8"
replicas = 3
"""


def load(tmp_path: Path, text: str) -> Config:
    return config.load(write(tmp_path, RECIPE + text))


def test_a_pool_has_the_keys_of_the_table_that_it_does_not_set(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS)
    big, small = settings.rollout_pools
    assert (big.name, big.gpu, big.gpus_per_replica, big.replicas, big.dtype) == ("Big_One", "H100", 2, 2, "bfloat16")
    assert (small.name, small.gpu, small.gpus_per_replica, small.dtype, small.quantization) == (
        "small", "L40S", 1, "float32", "fp8",
    )  # fmt: skip
    assert {pool.gpu_memory_utilization for pool in (big, small)} == {0.7}
    assert {pool.max_batched_tokens for pool in (big, small)} == {128}
    assert big.vllm == {"block_size": 32, "kv_cache_dtype": "fp8"}
    assert small.vllm == {"block_size": 16, "kv_cache_dtype": "fp8"}
    assert settings.rollout_replicas == 5
    assert (settings.rollout_pool(""), settings.rollout_pool("small")) == (big, small)
    with pytest.raises(KeyError):
        settings.rollout_pool("large")


def test_services_and_gpus_of_each_pool_have_its_name(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS + '[trainer]\ndevice = "cuda"\n')
    assert gpu_places(settings) == {
        "rollout-big-one-0": (0, 1), "rollout-big-one-1": (2, 3), "rollout-small-0": (4,), "rollout-small-1": (5,),
        "rollout-small-2": (6,), "trainer-0": (7,),
    }  # fmt: skip


def test_without_pools_the_table_is_the_one_pool(tmp_path: Path) -> None:
    settings = load(tmp_path, "[rollout]\nreplicas = 2\nmax_concurrent_samples = 8\n")
    (pool,) = settings.rollout_pools
    assert (pool.name, pool.member_prefix, pool.replicas, pool.dtype) == ("", "rollout", 2, "bfloat16")
    assert pool.max_concurrent_samples == 8 and pool.key("vllm") == "rollout.vllm"
    assert load(tmp_path, "").rollout_replicas == 1
    by_hand = load(tmp_path, "[rollout]\nreplicas = 0\n")
    assert (by_hand.rollout_pools[0].replicas, by_hand.rollout_replicas) == (0, 1)


def test_dump_is_the_inverse_of_load_with_pools(tmp_path: Path) -> None:
    settings = load(tmp_path, POOLS)
    again = tmp_path / "again.toml"
    again.write_text(config.dump(settings))
    assert config.load(again) == settings
    assert Config.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("replicas = 2\n[[rollout.pool]]\nname = 'a'", "rollout: replicas = 2 and [[rollout.pool]] exclude each other"),
        ("[[rollout.pool]]\nreplicas = 2", "DIR/recipe.toml:18  [[rollout.pool]] number 1 name: missing"),
        (
            "[[rollout.pool]]\nname = 'a'\n[[rollout.pool]]\nname = 'b'\ndtype = 'float8'",
            "DIR/recipe.toml:22  [[rollout.pool]] 'b' dtype = 'float8': input should be '', 'bfloat16' or 'float32'",
        ),
        ("[[rollout.pool]]\nname = 'a'\nmax_concurrent = 3", "[[rollout.pool]] 'a' max_concurrent: no such key. Did"),
        ("[[rollout.pool]]\nname = 'a'\ntool_parser = 'hermes'", "[[rollout.pool]] 'a' tool_parser: no such key. Did"),
        ("[[rollout.pool]]\nname = 'a b'", "[[rollout.pool]] 'a b' name = 'a b': string should match pattern"),
        ("[[rollout.pool]]\nname = 'a'\n" * 2, "2 tables [[rollout.pool]] have the name 'a'; give each a `name`"),
        (
            "[[rollout.pool]]\nname = 'a_b'\n[[rollout.pool]]\nname = 'A-b'",
            "have names that differ in case, - and _ only: 'a_b', 'A-b'",
        ),
        ("[[rollout.pool]]\nname = 'a'\ngpu = 'L40S'", "[[rollout.pool]] 'a': gpu = \"L40S\" needs a GPU; set"),
        (
            "quantization = 'fp8'\n[[rollout.pool]]\nname = 'a'\ngpus_per_replica = 1\n[[rollout.pool]]\nname = 'b'",
            "[[rollout.pool]] 'b': quantization = \"fp8\" needs a GPU; set gpus_per_replica to at least 1",
        ),
        (
            "sleep_mode = true\ngpus_per_replica = 1\n[[rollout.pool]]\nname = 'a'\ngpus_per_replica = 0",
            "rollout: sleep_mode = true needs a GPU; set gpus_per_replica of [[rollout.pool]] 'a' to at least 1",
        ),
        (
            "[[rollout.pool]]\nname = 'a'\nvllm = { tensor_parallel_size = 2 }",
            "[[rollout.pool]] 'a' vllm: `tensor_parallel_size` is set by the key `rollout.gpus_per_replica`",
        ),
        ("[[rollout.pool]]\nname = 'a'\nmax_concurrent_samples = 3", "[[rollout.pool]] 'a' max_concurrent_samples = 3"),
        (
            "[[rollout.pool]]\nname = 'a'\n[weights]\nbackend = 'nccl'\n[trainer]\ndevice = 'cuda'",
            "[[rollout.pool]] 'a' gpus_per_replica = 0; set weights.backend = \"auto\"",
        ),
        (
            "[[rollout.pool]]\nname = 'a'\n[placement]\ncolocated = true\n[trainer]\ndevice = 'cuda'",
            "[[rollout.pool]] 'a' gpus_per_replica = 0; set it to at least 1",
        ),
        (
            "gpus_per_replica = 1\n[[rollout.pool]]\nname = 'a'\nkv_cache_gib = 1\n[[rollout.pool]]\nname = 'b'\n"
            "[placement]\ncolocated = true\n[trainer]\ndevice = 'cuda'",
            "placement.colocated = true needs [[rollout.pool]] 'b' kv_cache_gib",
        ),
        (
            "gpus_per_replica = 1\nkv_cache_gib = 1\ngpu = 'L40S'\n[placement]\ncolocated = true\n"
            "[trainer]\ndevice = 'cuda'\ngpu = 'H100'",
            "has services share GPUs, and they ask for H100 and L40S; ask for one type of GPU",
        ),
        ("[trainer]\ngpu = 'H100'", 'trainer: gpu = "H100" needs a GPU; set device = "cuda", or remove it'),
        (
            "gpus_per_replica = 3\npipeline_parallel_size = 2",
            "rollout: pipeline_parallel_size = 2 must divide gpus_per_replica = 3; set it to 1, or gpus_per_replica to",
        ),
        (
            "pipeline_parallel_size = 2\n[[rollout.pool]]\nname = 'a'",
            "[[rollout.pool]] 'a': pipeline_parallel_size = 2 must divide gpus_per_replica = 0",
        ),
        (
            "vllm = { data_parallel_size = 2 }",
            "`data_parallel_size` is set by the key `rollout.replicas` of the recipe",
        ),
    ],
)
def test_a_mistake_in_a_pool_is_named(rollout: str, message: str, tmp_path: Path) -> None:
    text = refused(tmp_path, f"{RECIPE}[rollout]\n{rollout}\n")
    assert message in text
    assert len(text.splitlines()) == 1, text


def test_a_mistake_in_the_table_is_not_repeated_for_each_pool(tmp_path: Path) -> None:
    pools = "[[rollout.pool]]\nname = 'a'\n[[rollout.pool]]\nname = 'b'\n"
    text = refused(tmp_path, f"{RECIPE}[rollout]\ndtype = 'int8'\n{pools}")
    assert text.startswith("DIR/recipe.toml:18  rollout.dtype = 'int8'") and len(text.splitlines()) == 1


@pytest.mark.parametrize("value", [3, [3], [{"name": "a", "vllm": 3}]])
def test_a_pool_of_another_type_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout"):
        config.from_tables({"rollout": {"pool": value, "vllm": {}}}, source="here")
