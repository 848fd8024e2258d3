"""Runs the rollout service: `fourfold serve rollout RECIPE` starts the engine, then opens the ports."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fourfold.config import Config, RolloutPool
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.host.imports import fast_imports
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.plan.batch import COORDINATOR_SHARE, engine_limits
from fourfold.plan.models import adapter_plan, sends_adapters
from fourfold.plan.weight_update import lora_update
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_control_service_pb2_grpc import add_RolloutControlServiceServicer_to_server
from fourfold.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from fourfold.rpc.channel import split_target
from fourfold.rpc.server import bind_error
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.weights.transport.locality import host_id
from fourfold_rollout.engine import EngineSettings
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.metrics_source import rollout_source
from fourfold_rollout.update.controller import WeightController
from fourfold_rollout.update.servicer import RolloutControlServicer
from fourfold_rollout.vllm import environment
from fourfold_rollout.vllm.text.process import TextProcess
from fourfold_rollout.warm_up import prove_updates, warm_up

if TYPE_CHECKING:
    from fourfold_rollout.vllm.engine import VllmEngine

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["RolloutService"]
_CONTROL_SERVICE: Final = control_pb.DESCRIPTOR.services_by_name["RolloutControlService"]
_log = logging.getLogger(__name__)


def main(options: ServeOptions) -> int:
    """Serve until a signal or a fatal error. The process exits here."""
    config, pool = options.config, _pool(options)
    host = ServiceHost(options, role=Role.ROLE_ROLLOUT)
    check_ports({"listen": options.listen, "rollout.public_listen": config.rollout.public_listen})
    folder = model_folder.resolve(config.model.source, config.data.chat_template)
    host.tokenizer_sha256 = tokenizer_sha256(folder)
    settings = engine_settings(config, pool, folder)
    if update := lora_update(config, model_folder.shape(config.model.source)):
        _log.info("Weight updates chosen: %s", update)
    environment.prepare(settings, options.host)
    with fast_imports():
        from fourfold_rollout.vllm.engine import VllmEngine

    parsers = config.rollout.tool_parser, config.rollout.reasoning_parser
    text = TextProcess(str(folder), *parsers)
    if any(parsers):
        text.start()  # the text process loads its libraries while the engine starts
    # The engine's process is forked from this one, which must happen before gRPC has threads.
    engine = VllmEngine.start(settings, fork=True)
    # The objects of vLLM and torch live as long as the process. A collection that visits them blocks the event loop for
    # half a second, so they are excluded from now on.
    gc.collect()
    gc.freeze()
    code = asyncio.run(_serve(host, pool, engine, settings, text))
    # The interpreter's own shutdown takes seconds to free the modules that vLLM imported.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_ports(addresses: Mapping[str, str]) -> None:
    """Check that the ports are free before the engine starts. Empty addresses are ignored.

    Args:
        addresses: by the key or option that sets each.

    Raises ConfigError: another process uses the port, or this machine does not have the address.
    """
    for key, address in addresses.items():
        if address and (reason := bind_error(*split_target(address))):
            raise ConfigError(f"{key} = {address!r}: {reason}")


def _pool(options: ServeOptions) -> RolloutPool:
    """Return the pool of this service. Raises ConfigError: there is none of this name."""
    try:
        return options.config.rollout_pool(options.pool)
    except KeyError:
        known = ", ".join(repr(pool.name) for pool in options.config.rollout.pool) or "none"
        raise ConfigError(
            f"--pool {options.pool!r} is not the name of a table [[rollout.pool]]; the recipe has {known}"
        ) from None


def engine_settings(config: Config, pool: RolloutPool, folder: Path) -> EngineSettings:
    limits = engine_limits(config, pool)
    on_cpu = pool.gpus_per_replica == 0
    assert pool.dtype, "filled in by `Config.rollout_pools`"
    adapters = adapter_plan(config) if sends_adapters(config) else None
    return EngineSettings(
        folder=folder,
        dtype=pool.dtype,
        head_dtype=config.model.head_dtype,
        max_context_tokens=config.model.max_context_tokens,
        max_concurrent_samples=limits.concurrent_samples,
        max_batched_tokens=limits.batched_tokens,
        enforce_eager=on_cpu if pool.enforce_eager is None else pool.enforce_eager,
        kv_cache_gib=pool.kv_cache_gib,
        gpus=pool.gpus_per_replica,
        stages=pool.pipeline_parallel_size,
        gpu_memory_utilization=pool.gpu_memory_utilization,
        seed=config.seed,
        sleep_mode=config.rollout.sleep_mode,
        quantization=pool.quantization,
        adapter_rank=config.trainer.lora.rank if adapters else 0,
        adapter_layers=adapters.kinds if adapters else (),
        options=pool.vllm,
        options_key=pool.key("vllm"),
        disabled_patches=frozenset(pool.disabled_vllm_patches),
    )


def model_stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids in generation_config.json and config.json."""
    ids = [*_eos_ids(folder / "generation_config.json"), *_eos_ids(folder / "config.json")]
    return tuple(dict.fromkeys(ids))


def model_sha256(folder: Path) -> bytes:
    """Return the 32-byte SHA-256 of config.json in canonical form, so that formatting does not change it."""
    canonical = json.dumps(_json(folder / "config.json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).digest()


async def _serve(
    host: ServiceHost, pool: RolloutPool, engine: VllmEngine, settings: EngineSettings, text: TextProcess
) -> int:
    config, folder = host.options.config, settings.folder
    has_agents = bool(host.options.coordinator)  # without a coordinator, all callers share everything
    update_timeout = config.weights.timeout_seconds
    await engine.attach(host.fatal)
    await warm_up(engine)
    await prove_updates(engine)
    if text.tool_parser or text.reasoning_parser:
        await text.ready()
    description = engine.description
    limits = GenerateLimits(
        max_context_tokens=description.max_context_tokens,
        vocabulary_size=description.vocabulary_size,
        max_concurrent_samples=settings.max_concurrent_samples,
        kv_cache_tokens=description.kv_cache_tokens,
        stop_token_ids=tuple(i for i in model_stop_token_ids(folder) if i < description.vocabulary_size),
        agent_samples=engine_limits(config, pool).agent_samples if has_agents else None,
        agent_token_share=1 - COORDINATOR_SHARE if has_agents else 1.0,
    )
    weights = WeightController(engine, update_timeout=update_timeout)
    model = ServedModel(name=config.model.source, tokenizer_sha256=host.tokenizer_sha256, limits=limits)
    servicer = RolloutServicer(model, engine, weights, host.quotas, text)
    control = RolloutControlServicer(
        engine, weights, model_sha256=model_sha256(folder), host_id=host_id(), update_timeout=update_timeout
    )
    host.server.add(_SERVICE, add_RolloutServiceServicer_to_server, servicer)
    host.server.add(_CONTROL_SERVICE, add_RolloutControlServiceServicer_to_server, control)
    if config.rollout.public_listen:
        public = host.public_server(config.rollout.public_listen, "rollout.public_listen")
        public.add(_SERVICE, add_RolloutServiceServicer_to_server, servicer)
    host.exporter.add(rollout_source(servicer, weights, kv_cache_tokens=description.kv_cache_tokens))
    host.on_drain += [servicer.drain, weights.close, text.close, engine.close]
    return await host.run()


def _eos_ids(path: Path) -> Iterator[int]:
    if not path.exists():
        return
    value = _json(path).get("eos_token_id")
    for token in value if isinstance(value, list) else [value]:
        if isinstance(token, int):
            yield token


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}); is this a Hugging Face model folder?") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object; is this a Hugging Face model folder?")
    return value
