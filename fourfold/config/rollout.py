"""Defines `[rollout]`: the engines that sample, their pools, and the options of vLLM in a recipe.

    [rollout]             keys of all engines, and the defaults of the pools; without pools it describes the one pool
    [[rollout.pool]]      engines with options of their own: another GPU type, dtype, quantization or size

`Config.rollout_pools` gives the pools of both forms with every key filled in. Read engines from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.table import GpuType, Name
from fourfold.table import Table

# Options of vLLM's engine that are keys of the recipe.
_VLLM_KEYS: Final = {
    "model": "model.source",
    "dtype": "rollout.dtype",
    "max_model_len": "model.max_context_tokens",
    "seed": "seed",
    "max_num_seqs": "rollout.max_concurrent_samples",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "max_num_scheduled_tokens": "rollout.max_batched_tokens",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "num_gpu_blocks_override": "rollout.kv_cache_gib",
    "tensor_parallel_size": "rollout.gpus_per_replica",
    "pipeline_parallel_size": "rollout.pipeline_parallel_size",
    "quantization": "rollout.quantization",
    "enable_sleep_mode": "rollout.sleep_mode",
    "data_parallel_size": "rollout.replicas",
}
# Beginnings of the options that Fourfold sets itself, by the reason.
_VLLM_FIXED: Final = {
    "the caller of Generate sets how often it receives tokens": ("stream_interval",),
    "requests and replies contain tokens, not text": ("tokenizer", "skip_tokenizer_init"),
    "requests carry every sampling parameter": ("generation_config", "override_generation_config", "logits_processors"),
    "log-probabilities are those of the distribution that was sampled from": ("logprobs_mode", "max_logprobs"),
    "a probe reads the log-probabilities of a prompt": ("kv_sharing_fast_prefill",),
    "the samples of a group share their prompt": ("enable_prefix_caching",),
    "weights come through Fourfold's worker": ("worker_", "weight_transfer", "enable_lora", "lora_", "max_lora"),
    "code in a model folder is never run": ("trust_remote_code",),
    "every sampled token is the policy's own": ("speculative", "spec_"),
    "an engine is one process group on one machine": (
        "data_parallel",
        "distributed_executor_backend",
        "master_",
        "nnodes",
        "node_rank",
        "device_ids",
    ),
    "the service has its own logs and metrics": (
        "disable_log_stats",
        "enable_log_requests",
        "use_tqdm_on_load",
        "log_",
        "otlp_",
    ),
    "the service decides whether to accept a sample": ("max_num_queued", "scheduler_cls"),
}


class EngineConfig(Table):
    """The keys of an engine: those of `[rollout]` are the defaults of every `[[rollout.pool]]`."""

    gpu: GpuType = ""
    """Type of the GPUs, such as "L40S" or "H100": Ray's accelerator type; the local launcher looks for its words in the
    names that NVML gives. Empty: any."""
    dtype: Literal["", "bfloat16", "float32"] = ""
    """Type of the weights in the engine, which converts those of the trainer when it receives them. Empty:
    `model.dtype`."""
    gpus_per_replica: int = Field(default=0, ge=0)
    """GPUs of each service; 0: CPU. Every layer is split over all of them, or over those of its stage."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages with a part of the layers each, on gpus_per_replica / pipeline_parallel_size GPUs: for GPUs with slow
    links. Log-probabilities then come from vLLM itself, slowly. 1: one stage."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of the GPU's memory that the engine may use. The engine measures the free memory when it starts."""
    kv_cache_gib: int | None = Field(default=None, ge=1)
    """KV cache of an engine on each of its GPUs, in GiB. Unset: 1 on CPU; on GPUs the rest of `gpu_memory_utilization`.
    Set it if other processes use the GPU: an engine that measures fails when memory is freed during the measurement."""
    max_concurrent_samples: int | None = Field(default=None, ge=1)
    """Samples in flight in one service; more are refused (RESOURCE_EXHAUSTED). Unset: see `fourfold.plan.batch`."""
    max_batched_tokens: int | None = Field(default=None, ge=64)
    """Tokens that one engine step may process. Unset: see `fourfold.plan.batch`."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs. Unset: true on CPU, false on GPUs."""
    quantization: Literal["", "fp8"] = ""
    """fp8: the engine rounds the weights to 8 bits when it receives them; needs GPUs. The trainer stays in
    `model.dtype`, and `algorithm.correction` weighs the difference. Empty: no rounding."""
    disabled_vllm_patches: list[Literal["scheduler", "logprobs", "seeds"]] = Field(default=[])
    """Patches of vLLM to leave out, for example to find out whether one causes an error. The engine samples slower."""
    vllm: dict[str, Any] = Field(default={})
    """Options of vLLM's engine by their own names, such as `block_size` or `kv_cache_dtype`. Options that Fourfold sets
    are refused. The others are checked against the installed vLLM when the service starts. Those of a pool are added to
    those of `[rollout.vllm]`."""

    @field_validator("vllm")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            if (key := _VLLM_KEYS.get(name)) is not None:
                raise ValueError(f"`{name}` is set by the key `{key}` of the recipe; set that instead")
            for reason, beginnings in _VLLM_FIXED.items():
                if name.startswith(beginnings):
                    raise ValueError(f"`{name}` is set by Fourfold: {reason}; remove it")
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(one, bool | int | float | str) for one in values):
                raise ValueError(f"`{name}` = {value!r} must be a number, a text, true, false, or a list of these")
        return options

    def check_gpus(self) -> None:
        """Check the keys that depend on the number of GPUs; ValueError has value, rule and fix."""
        gpus, stages = self.gpus_per_replica, self.pipeline_parallel_size
        if gpus % stages or (stages > 1 and not gpus):
            raise ValueError(
                f"pipeline_parallel_size = {stages} must divide gpus_per_replica = {gpus}; set it to 1, or "
                f"gpus_per_replica to {max(-(-gpus // stages), 1) * stages}"
            )
        for key in ("quantization", "gpu"):
            if not self.gpus_per_replica and (value := getattr(self, key)):
                raise ValueError(f'{key} = "{value}" needs a GPU; set gpus_per_replica to at least 1, or remove it')


class RolloutPool(EngineConfig):
    """`[[rollout.pool]]`: engines with the same options. Keys that it does not set are those of `[rollout]`."""

    name: Name
    """Name in commands, and in the ids of its services: `rollout-NAME-0`."""
    replicas: int = Field(default=1, ge=0)
    """Services that the launcher starts; 0: they are started by hand."""

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        self.check_gpus()
        return self

    @property
    def member_prefix(self) -> str:
        """What the member ids of its services begin with, in the alphabet of certificates."""
        return f"rollout-{self.name.lower().replace('_', '-')}" if self.name else "rollout"

    @property
    def services(self) -> int:
        """Services that the run needs: those of the launcher, or 1 that is started by hand."""
        return max(self.replicas, 1)

    def key(self, name: str) -> str:
        """Return one of its keys as users know it."""
        return f"[[rollout.pool]] {self.name!r} {name}" if self.name else f"rollout.{name}"


class RolloutConfig(EngineConfig):
    """`[rollout]`: the rollout services and their engines."""

    replicas: int | None = Field(default=None, ge=0)
    """Services that the launcher starts; 0: they are started by hand. Unset: 1. With pools, each has its own."""
    sleep_mode: bool = False
    """Free the engines' GPU memory while the trainer trains (SleepEngine). All need GPUs."""
    public_listen: str = ""
    """host:port of the public port for agents (TLS and a token); empty: none."""
    tool_parser: str = ""
    """Name of vLLM's parser of tool calls for the model, such as `hermes`; empty: agents cannot use tools."""
    reasoning_parser: str = ""
    """Name of vLLM's parser of reasoning for the model, such as `qwen3`; empty: reasoning is part of the content."""
    pool: tuple[RolloutPool, ...] = Field(default=(), strict=False)
    """Pools of engines with options of their own; none: all engines are alike. Programs read `Config.rollout_pools`."""

    @model_validator(mode="before")
    @classmethod
    def _fill_pools(cls, value: Any) -> Any:
        pools = value.get("pool") if isinstance(value, Mapping) else None
        if not isinstance(pools, list | tuple):
            return value
        return {**value, "pool": [_filled(pool, value) if isinstance(pool, Mapping) else pool for pool in pools]}

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        if not self.pool:
            self.check_gpus()
        elif self.replicas is not None:
            raise ValueError(
                f"replicas = {self.replicas} and [[rollout.pool]] exclude each other; set `replicas` in each pool"
            )
        _check_names(self.pool)
        for pool in self.pool or (self,):
            if self.sleep_mode and not pool.gpus_per_replica:
                where = f" of [[rollout.pool]] {pool.name!r}" if isinstance(pool, RolloutPool) else ""
                raise ValueError(
                    f"sleep_mode = true needs a GPU; set gpus_per_replica{where} to at least 1, or remove it"
                )
        return self

    def pools(self, dtype: Literal["bfloat16", "float32"]) -> tuple[RolloutPool, ...]:
        """Return the pools with every key filled in; `dtype` is that of the model."""
        if self.pool:
            return tuple(pool.model_copy(update={"dtype": pool.dtype or dtype}) for pool in self.pool)
        keys = {key: getattr(self, key) for key in EngineConfig.model_fields}
        replicas = 1 if self.replicas is None else self.replicas
        return (RolloutPool.model_construct(**keys | {"name": "", "replicas": replicas, "dtype": self.dtype or dtype}),)


def _filled(pool: Mapping[str, Any], rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a pool with the keys of `[rollout]` that it does not set."""
    filled = {key: rollout[key] for key in EngineConfig.model_fields if key in rollout} | dict(pool)
    tables = [table["vllm"] for table in (rollout, pool) if isinstance(table.get("vllm"), Mapping)]
    return filled | ({"vllm": tables[0] | tables[1]} if len(tables) == 2 else {})


def _check_names(pools: tuple[RolloutPool, ...]) -> None:
    for key, rule in (("name", "have the name"), ("member_prefix", "have names that differ in case, - and _ only:")):
        counts = Counter(getattr(pool, key) for pool in pools)
        if alike := [pool.name for pool in pools if counts[getattr(pool, key)] > 1]:
            names = repr(alike[0]) if key == "name" else ", ".join(map(repr, alike))
            raise ValueError(f"{len(alike)} tables [[rollout.pool]] {rule} {names}; give each a `name` of its own")
