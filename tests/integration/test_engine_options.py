"""Checks of `[rollout.vllm]` against the installed vLLM, and the configuration that vLLM derives from the settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import ConfigError
from fourfold_rollout.engine import EngineSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_quiet() -> Iterator[None]:
    before = os.environ.copy()
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    yield
    os.environ.clear()
    os.environ.update(before)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    from fourfold_rollout.vllm.engine_args import check_options

    return check_options(options)


def test_known_names_with_values_of_their_types_pass() -> None:
    options = {
        "block_size": 32,
        "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 8],
        "enable_chunked_prefill": True,
        "cpu_offload_gb": 1,
        "async_scheduling": False,
        "load_format": "dummy",
    }
    assert checked(options) == options
    assert checked({"attention_backend": "flash_attn"})["attention_backend"].name == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blok_size", 32, "rollout.vllm.blok_size: the installed vLLM has no such option; did you mean `block_size`?"),
        ("qqq", 1, "no such option; see its documentation of engine arguments"),
        ("block_size", "32", "rollout.vllm.block_size = '32': the rule is a whole number; change or remove it"),
        ("block_size", True, "block_size = True: the rule is a whole number"),
        ("enable_chunked_prefill", 1, "the rule is true or false"),
        ("cpu_offload_gb", "1", "the rule is a number"),
        ("kv_cache_dtype", "fp9", "kv_cache_dtype = 'fp9': the rule is one of auto, "),
        ("attention_backend", "flash", "attention_backend = 'flash': the rule is one of FLASH_ATTN, "),
        ("cudagraph_capture_sizes", ["8"], "the rule is a list, each a whole number"),
        ("compilation_config", 3, "the rule is a table, which a recipe cannot give"),
    ],
)
def test_a_mistake_is_named_with_its_rule(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked({name: value})
    assert message in str(caught.value)


def test_a_value_that_vllm_refuses_is_named_before_anything_starts(tiny_model: Callable[..., Path]) -> None:
    from fourfold_rollout.vllm.launch import launch

    bad = settings(tiny_model("qwen2"), enforce_eager=True, options={"block_size": -5})
    rule = r"^rollout.vllm.block_size = -5: Input should be greater than 0 \(vLLM's rule\); change or remove it$"
    with pytest.raises(ConfigError, match=rule):
        launch(bad, fork=False)


def test_an_engine_for_adapters_wraps_their_layers_alone(tiny_model: Callable[..., Path]) -> None:
    from fourfold_rollout.vllm.launch import launch

    adapters: dict[str, Any] = {"adapter_rank": 9, "adapter_layers": ("q_proj", "up_proj")}
    found = config(tiny_model("qwen2"), **adapters).lora_config
    assert (found.max_lora_rank, found.max_loras, found.target_modules) == (16, 1, ["q_proj", "up_proj"])
    with pytest.raises(ConfigError, match=r'GPT2LMHeadModel, which takes no LoRA .*; set weights.adapters = "merged"'):
        launch(settings(tiny_model("gpt2"), **adapters), fork=False)


def test_the_lowest_temperature_is_the_lowest_that_vllm_takes_as_it_is() -> None:
    from vllm import SamplingParams

    for temperature in (0.0, MIN_TEMPERATURE, 1.5):
        assert SamplingParams(temperature=temperature).temperature == temperature
    assert SamplingParams(temperature=MIN_TEMPERATURE * 0.99).temperature == MIN_TEMPERATURE


def config(folder: Path, **keys: Any) -> Any:
    from fourfold_rollout.vllm.engine_args import engine_args

    return engine_args(settings(folder, **keys)).create_engine_config()


def settings(folder: Path, **keys: Any) -> EngineSettings:
    defaults: dict[str, Any] = {
        "folder": folder, "dtype": "bfloat16", "max_context_tokens": 512, "max_concurrent_samples": 100,
        "max_batched_tokens": 512, "enforce_eager": False, "kv_cache_gib": 1, "gpus": 0, "gpu_memory_utilization": 0.5,
        "seed": 0,
    }  # fmt: skip
    return EngineSettings(**defaults | keys)


@pytest.mark.parametrize("options", [{"enable_chunked_prefill": True}, {"long_prefill_token_threshold": 64}])
def test_prompts_are_not_split_on_a_cpu(tiny_model: Callable[..., Path], options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"rollout.vllm.{next(iter(options))} = .*: on CPU prompts are computed whole"
    ):
        config(tiny_model("qwen2"), options=options)


def test_a_second_start_of_a_recipe_finds_what_was_compiled(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2")
    first = config(folder)
    assert config(folder, seed=7, gpu_memory_utilization=0.3, kv_cache_gib=2).compute_hash() == first.compute_hash()
    assert config(folder, max_batched_tokens=2048).compute_hash() != first.compute_hash(), "and another does not"


def test_logits_are_float32_on_request(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2")
    assert config(folder).model_config.head_dtype == torch.bfloat16
    made = config(folder, head_dtype="float32", options={"hf_overrides": {"rope_theta": 5000.0}})
    assert made.model_config.head_dtype == torch.float32
    assert made.model_config.hf_config.rope_theta == 5000.0, "the recipe's own override"


def test_limits_and_options_reach_vllm(tiny_model: Callable[..., Path]) -> None:
    made = config(tiny_model("qwen2"), options={"block_size": 64, "prefix_caching_hash_algo": "sha256_cbor"})
    assert made.scheduler_config.max_num_seqs == 104
    assert made.scheduler_config.max_num_batched_tokens == 512
    assert made.cache_config.prefix_caching_hash_algo == "sha256_cbor"
    assert not made.scheduler_config.enable_chunked_prefill, "vLLM's core would crash in a chunked prompt with a seed"
    assert made.cache_config.block_size == 64
    assert made.cache_config.enable_prefix_caching
    assert not made.scheduler_config.async_scheduling, "vLLM does not use it on CPU"
