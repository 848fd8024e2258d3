"""`[rollout]`: the engines that sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fourfold.config.engine_options import check_options
from fourfold.config.table import Table

if TYPE_CHECKING:
    from fourfold.config.schema import Config


class AgentsConfig(Table):
    """What external agents may use of a rollout service: callers of the public port, and those with an agent's
    certificate. A token may have limits of its own, which replace the first three."""

    concurrent_calls: int = Field(default=128, ge=1)
    """Calls that one agent may have in flight; watches do not count. Each may hold 1 MiB of an unfinished request."""
    tokens_in_flight: int | None = Field(default=None, ge=1)
    """Tokens that one agent may have in flight: prompt plus max_tokens of every sample. Unset: what agents together
    may have."""
    calls_per_second: float = Field(default=100.0, gt=0)
    """Calls that one agent may make per second on average; as many may come at once."""
    coordinator_share: float = Field(default=0.75, ge=0, lt=1)
    """Share of the samples and of the KV cache's tokens that agents together can never use, so that they cannot stop
    the run. The coordinator may use everything that is free. A service without a coordinator reserves nothing."""


class RolloutConfig(Table):
    """The rollout services."""

    replicas: int = Field(default=1, ge=0)
    """Services that the launcher starts; 0: they are started by hand."""
    gpus_per_replica: int = Field(default=0, ge=0)
    """GPUs of each (its tensor parallelism); 0: CPU."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of the GPU's memory that the engine may take; it measures what is free when it starts."""
    kv_cache_gib: int | None = Field(default=None, ge=1)
    """KV cache of an engine, in GiB, on each of its GPUs. Unset: 1 on CPU, and on GPUs what `gpu_memory_utilization`
    leaves. Set it where others come and go on the GPU: an engine that measures fails when memory is freed meanwhile."""
    max_concurrent_samples: int | None = Field(default=None, ge=1)
    """Samples in flight in one service; more are refused (RESOURCE_EXHAUSTED). Unset: see `fourfold.plan.engine`."""
    max_batched_tokens: int | None = Field(default=None, ge=64)
    """Tokens that one engine step may process. Unset: see `fourfold.plan.engine`."""
    enforce_eager: bool | None = None
    """Skip compilation and CUDA graphs. Unset: true on CPU, false on GPUs."""
    quantization: Literal["", "fp8"] = ""
    """fp8: the engine rounds the weights to 8 bits as they arrive; the trainer goes on in `model.dtype`, and the
    algorithm's correction sees the difference. Needs GPUs. Empty: as they are."""
    sleep_mode: bool = False
    """Have the engine give its GPU memory up while the trainer trains (SleepEngine). Needs GPUs."""
    public_listen: str = ""
    """host:port of the public port for agents (TLS and a token); empty: none."""
    agents: AgentsConfig = AgentsConfig()
    vllm: dict[str, Any] = Field(default={})
    """Options of vLLM's engine by their own names, such as `block_size` or `kv_cache_dtype`. Checked against the
    installed vLLM when the service starts; those that Fourfold sets are refused."""

    @field_validator("vllm")
    @classmethod
    def _options(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_options(value)
        return value

    @model_validator(mode="after")
    def _needs_gpus(self) -> Self:
        if not self.gpus_per_replica and (self.quantization or self.sleep_mode):
            key = f'quantization = "{self.quantization}"' if self.quantization else "sleep_mode = true"
            raise ValueError(f"{key} needs a GPU; set gpus_per_replica to at least 1, or remove it")
        return self

    def check(self, config: Config) -> None:
        """Refuse a limit that the samples of one prompt exceed. One that is derived never does.

        Raises:
            ValueError: value, rule, fix.
        """
        limit = self.max_concurrent_samples
        asked = {"batch.group_size": config.batch.group_size}
        if config.data.held_out:
            asked["evaluation.samples_per_prompt"] = config.evaluation.samples_per_prompt
        for key, count in asked.items():
            if limit is not None and count > limit:
                raise ValueError(
                    f"rollout.max_concurrent_samples = {limit} is below {key} = {count}, and the samples of a prompt "
                    f"travel in one call; raise it to at least {count}, remove it (it follows from the batch then), or "
                    f"lower {key}"
                )
            if limit == count and self.public_listen and self.agents.coordinator_share:
                raise ValueError(
                    f"rollout.max_concurrent_samples = {limit} is {key}, and rollout.public_listen needs room for "
                    f"agents besides; raise it to at least {count + 1}, or remove it (it follows from the batch then)"
                )
