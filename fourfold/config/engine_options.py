"""Options of the engine that a recipe may not give under `[rollout.vllm]`, because Fourfold sets them itself.

The others are checked against the installed vLLM when a rollout service starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# The key that sets it, or why nobody may.
_SET_BY: Final = {
    "model": "model.source",
    "dtype": "model.dtype",
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
    "quantization": "rollout.quantization",
    "enable_sleep_mode": "rollout.sleep_mode",
    "data_parallel_size": "rollout.replicas",
}
_FIXED: Final = {
    "callers choose when they get tokens": ("stream_interval",),
    "tokens go in and out, no texts": ("tokenizer", "skip_tokenizer_init"),
    "requests carry every parameter": ("generation_config", "override_generation_config", "logits_processors"),
    "log-probabilities are those of the distribution that was sampled from": ("logprobs_mode", "max_logprobs"),
    "a probe reads the log-probabilities of a prompt": ("kv_sharing_fast_prefill",),
    "the samples of a group share their prompt": ("enable_prefix_caching",),
    "weights come through its own worker": ("worker_cls", "worker_extension_cls", "weight_transfer", "enable_lora"),
    "no code of a model folder is run": ("trust_remote_code",),
    "every sampled token is the policy's own": ("speculative", "spec_"),
    "an engine is one process group on one machine": (
        "pipeline_parallel",
        "data_parallel",
        "distributed_executor_backend",
        "master_",
        "nnodes",
        "node_rank",
        "device_ids",
    ),
    "it logs and counts itself": (
        "disable_log_stats",
        "enable_log_requests",
        "use_tqdm_on_load",
        "log_",
        "otlp_",
    ),
    "it decides whether to take a sample": ("max_num_queued", "scheduler_cls"),
}


def check_options(options: Mapping[str, object]) -> None:
    """Refuse what Fourfold sets, and values that are neither a number, a text, a truth value nor a list of them.

    Raises:
        ValueError: names the option, and the key that sets it or the reason why none does.
    """
    for name, value in options.items():
        if (key := _SET_BY.get(name)) is not None:
            raise ValueError(f"`{name}` is what the recipe sets as `{key}`; set it there")
        for reason, starts in _FIXED.items():
            if name.startswith(starts):
                raise ValueError(f"`{name}` is set by Fourfold: {reason}; remove it")
        if not all(
            isinstance(one, bool | int | float | str) for one in (value if isinstance(value, list) else [value])
        ):
            raise ValueError(f"`{name}` = {value!r}; options are numbers, texts, true, false, or lists of them")
