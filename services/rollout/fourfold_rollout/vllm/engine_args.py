"""Builds vLLM's `AsyncEngineArgs` from the engine's settings and the recipe's table [rollout.vllm].

    recipe: [rollout.vllm]  -->  names and types of `AsyncEngineArgs` (checked here)  -->  vLLM checks the values

vLLM checks values and their combinations when it makes its configuration. Names and types are checked here, because an
unknown name or a wrong type would raise a TypeError in vLLM that does not contain the key of the recipe.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs

from fourfold.errors import ConfigError
from fourfold.text import nearest_name
from fourfold_rollout.engine import EngineSettings

_WORKER_EXTENSION: Final = "fourfold_rollout.vllm.worker_extension.RolloutWorker"
# Samples of one prompt share the blocks that the prompt fills. With vLLM's default of 128 tokens a short prompt fills
# none. 32 is the minimum of the CPU kernels, and halves the time of the 96 samples of a quickstart step.
_CPU_BLOCK_TOKENS: Final = 32
# vLLM's "fp8" means a checkpoint that is fp8 already.
_QUANTIZATIONS: Final = {"fp8": "fp8_per_tensor"}
_UNUSED_UTILISATION: Final = 0.01
# On CPU, vLLM crashes when a step ends within the prompt of a seeded sample: it sets back the offset of the generator,
# which CPU generators do not have.
_PROMPT_SPLITTING: Final = ("enable_chunked_prefill", "long_prefill_token_threshold")
_NAMES: Final[Mapping[type, str]] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# The CUDA graph sizes that vLLM captures: multiples of 8 up to 256, then of 16, by default up to 512.
_FINE_GRAPHS: Final = 256
_LARGEST_GRAPH: Final = 512


def engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    """Return vLLM's arguments. Raises ConfigError: the installed vLLM does not have an option of the recipe."""
    options: dict[str, Any] = {}
    if settings.gpus:
        options["tensor_parallel_size"] = settings.gpus // settings.stages
        options["pipeline_parallel_size"] = settings.stages
        options["enable_sleep_mode"] = settings.sleep_mode
        if settings.kv_cache_gib is None:
            options["gpu_memory_utilization"] = settings.gpu_memory_utilization
        else:
            # vLLM ignores the utilisation then, but still fails at the start if that share of the GPU is not free.
            options["gpu_memory_utilization"] = _UNUSED_UTILISATION
            options["kv_cache_memory_bytes"] = settings.kv_cache_gib << 30
    else:
        options["block_size"] = _CPU_BLOCK_TOKENS
        _check_whole_prompts(settings.options, settings.options_key)
        options["enable_chunked_prefill"] = False
    if settings.quantization:
        options["quantization"] = _QUANTIZATIONS[settings.quantization]
    if settings.adapter_rank:
        options["enable_lora"], options["max_loras"] = True, 1
        options["max_lora_rank"] = next(rank for rank in get_args(MaxLoRARanks) if rank >= settings.adapter_rank)
        # Otherwise vLLM wraps the output embeddings, too. On CPU any request with prompt_logprobs then ends the engine.
        # vLLM itself finds the layers that it keeps as one, such as qkv_proj, by the names of their parts.
        options["lora_target_modules"] = list(settings.adapter_layers)
    sequences, largest_graph = graph_limits(settings.max_concurrent_samples)
    if not settings.enforce_eager and "cudagraph_capture_sizes" not in settings.options:
        options["max_cudagraph_capture_size"] = largest_graph
    options |= check_options(settings.options, settings.options_key)
    if settings.head_dtype:
        options["hf_overrides"] = {**options.get("hf_overrides", {}), "head_dtype": settings.head_dtype}
    return AsyncEngineArgs(
        model=str(settings.folder),
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_context_tokens,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(settings.max_batched_tokens, sequences),
        enforce_eager=settings.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled: after temperature, top-k and top-p
        generation_config="vllm",  # requests carry every parameter; ignore the folder's defaults
        worker_extension_cls=_WORKER_EXTENSION,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **options,
    )


def graph_limits(concurrent_samples: int) -> tuple[int, int | None]:
    """Return `max_num_seqs` and `max_cudagraph_capture_size` (None: vLLM's default is large enough).

    A full batch must be padded to a size that vLLM has captured, or it runs without a CUDA graph. vLLM captures sizes
    up to twice `max_num_seqs`, but whole decode steps only up to `max_num_seqs`, and nothing above 512 by default. With
    100 of 100 sequences the next size is 104 and is not captured; with 600 it is above 512.
    """
    sequences = concurrent_samples + 1  # room for one probe
    stride = 8 if sequences <= _FINE_GRAPHS else 16
    sequences = -(-sequences // stride) * stride
    return sequences, sequences if sequences > _LARGEST_GRAPH else None


def check_options(options: Mapping[str, Any], key: str = "rollout.vllm") -> dict[str, Any]:
    """Return the recipe's options, the table `key`, with the types of `AsyncEngineArgs`.

    Raises ConfigError: the installed vLLM has no option of that name, or the option has another type.
    """
    known = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs)}
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = nearest_name(name, known)
            hint = f"did you mean `{near}`?" if near else "see its documentation of engine arguments"
            raise ConfigError(f"{key}.{name}: the installed vLLM has no such option; {hint}")
        wanted = _alternatives(known[name])
        if wanted and not any(_fits(value, kind) for kind in wanted):
            rule = " or ".join(dict.fromkeys(_describe(kind) for kind in wanted if kind is not types.NoneType))
            raise ConfigError(f"{key}.{name} = {value!r}: the rule is {rule}; change or remove it")
        # vLLM takes enums by their members; a recipe has only the names.
        result[name] = next((_member(kind, value) for kind in wanted if _is_enum(kind) and _fits(value, kind)), value)
    return result


def _check_whole_prompts(options: Mapping[str, Any], key: str) -> None:
    for name in _PROMPT_SPLITTING:
        if options.get(name):
            raise ConfigError(
                f"{key}.{name} = {options[name]!r}: on CPU prompts are computed whole, as vLLM cannot sample "
                "with a seed after a part of one; remove it"
            )


def raise_for_option(error: ValidationError, options: Mapping[str, Any], key: str = "rollout.vllm") -> None:
    """Raise ConfigError for the recipe's option whose value vLLM refused; return if the cause is another one."""
    for refused in error.errors(include_url=False):
        # The location of a list's item, or of one type of a union, has more parts than the option's name.
        if name := next((str(part) for part in refused["loc"] if part in options), ""):
            raise ConfigError(
                f"{key}.{name} = {options[name]!r}: {refused['msg']} (vLLM's rule); change or remove it"
            ) from None


def _alternatives(hint: Any) -> list[Any]:
    """Return the types that a type hint allows; empty if only vLLM can check them."""
    if get_origin(hint) in (Union, types.UnionType):
        parts = [_alternatives(part) for part in get_args(hint)]
        return [kind for part in parts for kind in part] if all(parts) else []
    origin = get_origin(hint) or hint
    if origin in (*_NAMES, list, set, types.NoneType, Literal) or _is_table(origin) or _is_enum(origin):
        return [hint]
    return []


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if _is_enum(origin):
        return isinstance(value, str) and value.upper() in origin.__members__
    if origin in (list, set):
        items = get_args(kind)
        return isinstance(value, list) and all(
            not items or not (wanted := _alternatives(items[0])) or any(_fits(one, k) for k in wanted) for one in value
        )
    if origin is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is origin


def _member(kind: Any, name: str) -> Enum:
    member: Enum = kind[name.upper()]
    return member


def _describe(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return _one_of([str(choice) for choice in get_args(kind)])
    if _is_enum(origin):
        return _one_of(list(origin.__members__))
    if origin in (list, set):
        items = get_args(kind)
        return f"a list, each {_describe(items[0])}" if items and items[0] in _NAMES else "a list"
    return "a table, which a recipe cannot give" if _is_table(origin) else _NAMES[origin]


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _is_table(kind: Any) -> bool:
    return kind is dict or dataclasses.is_dataclass(kind)
