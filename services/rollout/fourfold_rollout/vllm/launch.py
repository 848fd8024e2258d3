"""Starts vLLM and its core process, and ends them.

The core process is forked from this one after the import of vLLM. On CPU vLLM would start a new interpreter and import
everything again; the fork halves the start (11 of 25 s on two cores) and saves a few hundred megabytes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import vllm
from pydantic import ValidationError
from vllm import envs
from vllm.model_executor.models import supports_lora
from vllm.v1.engine.async_llm import AsyncLLM

from fourfold.errors import ConfigError, Unavailable
from fourfold.host.disk import explain_no_space
from fourfold.host.process_tree import die_with_parent, kill_group
from fourfold.host.scratch import Scratch
from fourfold_rollout.engine import EngineSettings
from fourfold_rollout.vllm.compile_cache import compiled_once
from fourfold_rollout.vllm.crash import CrashNote, one_line
from fourfold_rollout.vllm.engine_args import engine_args, raise_for_option
from fourfold_rollout.vllm.patches.front_end import disarm_shutdown
from fourfold_rollout.vllm.patches.private_folder import use_private_folder
from fourfold_rollout.vllm.patches.scheduler import scheduler_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngine:
    llm: AsyncLLM
    processes: tuple[BaseProcess, ...]  # direct children: the core process
    note: CrashNote
    scratch: Scratch  # the folder with the files and sockets at which its processes meet
    vocabulary_size: int
    kv_cache_tokens: int  # 0: not known
    version: str


def launch(settings: EngineSettings, *, fork: bool) -> LaunchedEngine:
    """Start vLLM; return when it can sample. Blocks for about ten seconds.

    Call it in a thread that lives as long as the process: the kernel ends the engine with the thread. `fork`: this
    process has one thread and nothing that a fork breaks (gRPC, CUDA, parallel tensor operations).

    Raises:
        ConfigError: vLLM cannot run this model, these settings or these options.
        Unavailable: the engine's process died during the start.
    """
    arguments = engine_args(settings)
    try:
        config = arguments.create_engine_config()
    except (ValueError, OSError, NotImplementedError) as error:
        if isinstance(error, ValidationError):
            raise_for_option(error, settings.options, settings.options_key)
        raise ConfigError(f"model {settings.folder}: vLLM cannot serve it: {one_line(error)}") from error
    if settings.adapter_rank:
        _check_adapters(config.model_config)
    if config.scheduler_config.scheduler_cls is None and "scheduler" not in settings.disabled_patches:
        config.scheduler_config.scheduler_cls = scheduler_for(config)
    note, began = CrashNote(), time.monotonic()
    before = set(multiprocessing.active_children())
    # Overrides the choice that vLLM made in `create_engine_config`: "spawn" on CPU, "fork" with CUDA.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if fork and threading.active_count() == 1 else "spawn"
    scratch, llm = use_private_folder(), None
    _ForkGuard.arm()
    try:
        eager = config.model_config.enforce_eager
        with nullcontext() if eager else compiled_once(Path(envs.VLLM_CACHE_ROOT), config.compute_hash()):
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError, OSError) as error:
        cause = note.read() or one_line(error)
        cause = "; ".join(filter(None, (cause, explain_no_space(cause, Path.cwd()))))
        raise Unavailable(f"the engine of model {settings.folder} did not start: {cause}") from error
    finally:
        _ForkGuard.disarm()
        if llm is None:
            scratch.remove()
    processes = tuple(p for p in multiprocessing.active_children() if p not in before)
    cache = config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    _log_choices(config, settings, tokens, time.monotonic() - began)
    return LaunchedEngine(
        llm=llm,
        processes=processes,
        note=note,
        scratch=scratch,
        vocabulary_size=config.model_config.get_vocab_size(),
        kv_cache_tokens=int(tokens),
        version=vllm.__version__,
    )


def _check_adapters(model: Any) -> None:
    """Raise ConfigError unless vLLM's class of the model takes LoRA adapters."""
    model_class, name = model.registry.resolve_model_cls(model.architectures, model)
    if not supports_lora(model_class):
        raise ConfigError(
            f"model {model.model}: vLLM runs it as {name}, which takes no LoRA adapters; "
            f'set weights.adapters = "merged", or trainer.lora.rank = 0'
        )


def end_processes(engine: LaunchedEngine, *, timeout: float) -> None:
    """Shut vLLM down and kill its remaining processes after `timeout` seconds. Blocks slightly longer at most."""
    worker = threading.Thread(target=engine.llm.shutdown, name="engine-shutdown", daemon=True)
    worker.start()
    worker.join(timeout)
    for process in engine.processes:
        if process.pid is not None and process.is_alive():
            process.kill()
            kill_group(process.pid)  # of the core process, if it leads one
        process.join(timeout=0.5)
    engine.scratch.remove()
    disarm_shutdown(engine.llm)


class _ForkGuard:
    """Makes the forked core process the leader of its own group, which dies with this process."""

    _armed = False
    _parent = 0

    @classmethod
    def arm(cls) -> None:
        """Treat the next forked child as the core process."""
        cls._armed, cls._parent = True, os.getpid()

    @classmethod
    def disarm(cls) -> None:
        cls._armed = False

    @classmethod
    def in_child(cls) -> None:
        if cls._armed:
            cls._armed = False  # vLLM itself ends the children of its core process
            os.setsid()
            die_with_parent(cls._parent)


os.register_at_fork(after_in_child=_ForkGuard.in_child)


def _log_choices(config: Any, settings: EngineSettings, kv_cache_tokens: int, seconds: float) -> None:
    """Log the values that vLLM derived from the settings."""
    fields = {
        "vllm": vllm.__version__,
        "concurrent_samples": settings.max_concurrent_samples,
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "scheduling": "asynchronous" if config.scheduler_config.async_scheduling else "synchronous",
        "cuda_graph_tokens": config.compilation_config.max_cudagraph_capture_size or 0,
        "kv_cache_tokens": kv_cache_tokens,
        "full_length_samples": kv_cache_tokens // settings.max_context_tokens,
        "seconds": round(seconds, 1),
    }
    _log.info("Engine started", extra=fields)
