"""Starts vLLM and its core process, and ends them.

The core process is forked from this one after vLLM was imported; on CPU vLLM would start a
new interpreter and import everything again. That halves the start (11 of 25 s on two cores)
and saves a few hundred megabytes. It is safe because `fork=True` is for a process that has
started no threads yet: no gRPC server, no parallel tensor operation, no CUDA.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
import uuid
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import vllm
from pydantic import ValidationError
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import multiproc_executor, uniproc_executor

from fourfold.errors import ConfigError, Unavailable
from fourfold.host.process_tree import die_with_parent
from fourfold.host.scratch import Scratch
from fourfold_rollout.engine import EngineSettings
from fourfold_rollout.vllm.compile_cache import compiled_once
from fourfold_rollout.vllm.engine_args import check_whole_prompts, checked, refuse_values
from fourfold_rollout.vllm.graphs import graph_limits
from fourfold_rollout.vllm.patches.scheduler import scheduler_for

_log = logging.getLogger(__name__)

_WORKER: Final = "fourfold_rollout.vllm.worker.RolloutWorker"
_CORE_LOGGER: Final = "vllm.v1.engine.core"
# Its errors of one call or request, after which it goes on.
_SURVIVED: Final = ("Invocation of ", "Unexpected error pre-processing ")
_NOTE_BYTES: Final = 2000
# Samples of one prompt share its whole blocks: with vLLM's 128 they share nothing of a short prompt, and with the
# least that its CPU kernels take the 96 samples of a quickstart step cost half.
_CPU_BLOCK_TOKENS: Final = 32
# By "fp8" vLLM means a checkpoint that is fp8 already.
_QUANTIZATIONS: Final = {"fp8": "fp8_per_tensor"}
_NO_UTILISATION: Final = 0.01
_READ_BYTES: Final = 2 * _NOTE_BYTES
_SOCKET_FOLDER: Final = "VLLM_RPC_BASE_PATH"
_SHORT_ROOT: Final = Path("/tmp")
_ROOT_BYTES: Final = 107 - len(f"/fourfold-engine-12345678/{uuid.UUID(int=0)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngine:
    """A vLLM that is ready."""

    llm: AsyncLLM
    processes: tuple[BaseProcess, ...]
    """Direct children: the core process."""
    note: CrashNote
    scratch: Scratch
    """Where its processes meet: files and sockets."""
    vocabulary_size: int
    kv_cache_tokens: int
    """0: not known."""
    version: str


def launch(settings: EngineSettings, *, fork: bool) -> LaunchedEngine:
    """Start vLLM; returns when it can sample. Blocks for some ten seconds.

    Call it in a thread that lives as long as the process: the kernel ends the engine with it.

    Args:
        settings: what to start.
        fork: this process has a single thread and nothing that a fork would break.

    Raises:
        ConfigError: vLLM cannot run this model, these settings or these options.
        Unavailable: the engine's process died while it started.
    """
    arguments = engine_args(settings)
    try:
        config = arguments.create_engine_config()
    except (ValueError, OSError, NotImplementedError) as error:
        if isinstance(error, ValidationError):
            refuse_values(error, settings.options)
        raise ConfigError(f"model {settings.folder}: vLLM cannot serve it: {_one_line(error)}") from error
    if config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = scheduler_for(config)
    note, began = CrashNote(), time.monotonic()
    before = set(multiprocessing.active_children())
    # vLLM itself chose in the lines above: "spawn" on CPU, "fork" with CUDA.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if fork and threading.active_count() == 1 else "spawn"
    scratch = meet_in_a_folder()
    _ForkGuard.arm()
    try:
        with _compiled_once(config):
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except BaseException as error:
        scratch.remove()
        if not isinstance(error, RuntimeError | ValueError | OSError):
            raise
        cause = note.read() or _one_line(error)
        raise Unavailable(f"the engine of model {settings.folder} did not start: {cause}") from error
    finally:
        _ForkGuard.disarm()
    processes = tuple(p for p in multiprocessing.active_children() if p not in before)
    cache = config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    _log.info("%s; started in %.1f s", _decided(config, settings, tokens), time.monotonic() - began)
    return LaunchedEngine(
        llm=llm,
        processes=processes,
        note=note,
        scratch=scratch,
        vocabulary_size=config.model_config.get_vocab_size(),
        kv_cache_tokens=int(tokens),
        version=vllm.__version__,
    )


def engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    """Return what vLLM is asked for.

    Raises:
        ConfigError: one of the options of the recipe is none of this vLLM's.
    """
    options: dict[str, Any] = {}
    if settings.gpus:
        options["tensor_parallel_size"] = settings.gpus
        options["enable_sleep_mode"] = settings.sleep_mode
        if settings.kv_cache_gib is None:
            options["gpu_memory_utilization"] = settings.gpu_memory_utilization
        else:  # vLLM asks for the utilisation even then, and fails where others have taken more than the rest
            options["gpu_memory_utilization"] = _NO_UTILISATION
            options["kv_cache_memory_bytes"] = settings.kv_cache_gib << 30
    else:
        options["block_size"] = _CPU_BLOCK_TOKENS
        check_whole_prompts(settings.options)
        options["enable_chunked_prefill"] = False
    if settings.quantization:
        options["quantization"] = _QUANTIZATIONS[settings.quantization]
    sequences, largest_graph = graph_limits(settings.max_concurrent_samples)
    if not settings.enforce_eager and "cudagraph_capture_sizes" not in settings.options:
        options["max_cudagraph_capture_size"] = largest_graph
    options |= checked(settings.options)
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
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # requests carry every parameter; the folder's defaults must not mix in
        worker_extension_cls=_WORKER,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **options,
    )


def end_processes(engine: LaunchedEngine, *, timeout: float) -> None:
    """Shut vLLM down, and kill what is left of it after `timeout` seconds. Blocks at most a little longer."""
    worker = threading.Thread(target=engine.llm.shutdown, name="engine-shutdown", daemon=True)
    worker.start()
    worker.join(timeout)
    for process in engine.processes:
        if process.pid is not None and process.is_alive():
            _kill_group(process.pid)
        process.join(timeout=0.5)
    engine.scratch.remove()
    # vLLM calls shutdown() again when the object is collected, at a time when its modules may be gone.
    engine.llm.shutdown = lambda *_args, **_kwargs: None  # type: ignore[method-assign]


def meet_in_a_folder() -> Scratch:
    """Let the processes of an engine meet in a private folder; return it, to be removed after the engine's end.

    Its workers meet in a file: vLLM before 0.32 has them meet at a TCP port of all interfaces, and later ones leave
    their file in the system's temporary folder. There vLLM also leaves three Unix sockets of each engine, between the
    front end and the core process.
    """
    root = Path(tempfile.gettempdir())
    # The name of a Unix socket is short.
    scratch = Scratch("engine", root=root if len(os.fsencode(root)) <= _ROOT_BYTES else _SHORT_ROOT)
    os.environ[_SOCKET_FOLDER] = str(scratch.path)  # vLLM reads it when it makes a socket
    for module in (uniproc_executor, multiproc_executor):
        by_file = hasattr(module, "get_file_store_init_method")
        name = "get_file_store_init_method" if by_file else "get_distributed_init_method"
        setattr(module, name, lambda *_address: f"file://{scratch.path}/{uuid.uuid4().hex}")
    return scratch


class CrashNote:
    """The first error that the core process logs, in memory that both processes share. Only when it was forked."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("fourfold-crash-note")
        handler = _NoteHandler(self._descriptor)
        logging.getLogger(_CORE_LOGGER).addHandler(handler)

    def read(self) -> str:
        """Return the note, or an empty text."""
        return os.pread(self._descriptor, _READ_BYTES, 0).decode(errors="replace")


class _NoteHandler(logging.Handler):
    """Writes down the first exception that ends the process; those after it are its consequences."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the note, once."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or str(record.msg).startswith(_SURVIVED) or os.fstat(self._descriptor).st_size:
            return
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        text = f"{_one_line(error)}{where}"
        os.pwrite(self._descriptor, text.encode()[:_NOTE_BYTES], 0)


class _ForkGuard:
    """Makes the forked core process the leader of its own group, which dies with this process."""

    _armed = False
    _parent = 0

    @classmethod
    def arm(cls) -> None:
        """From now on, until disarmed, a forked child is the core process."""
        cls._armed, cls._parent = True, os.getpid()

    @classmethod
    def disarm(cls) -> None:
        """Leave children alone."""
        cls._armed = False

    @classmethod
    def in_child(cls) -> None:
        """Run by every forked child."""
        if cls._armed:
            cls._armed = False  # its own children are vLLM's affair
            os.setsid()
            die_with_parent(cls._parent)


os.register_at_fork(after_in_child=_ForkGuard.in_child)


def _compiled_once(config: Any) -> AbstractContextManager[None]:
    if config.model_config.enforce_eager:
        return nullcontext()
    return compiled_once(Path(envs.VLLM_CACHE_ROOT), config.compute_hash())


def _decided(config: Any, settings: EngineSettings, kv_cache_tokens: int) -> str:
    """What vLLM made of the settings, for the log."""
    graph = config.compilation_config.max_cudagraph_capture_size
    graphs = f"CUDA graphs of up to {graph} tokens" if graph else "no CUDA graphs"
    scheduling = "asynchronous" if config.scheduler_config.async_scheduling else "synchronous"
    return (
        f"vLLM {vllm.__version__}: {settings.max_concurrent_samples} samples at once, "
        f"{config.scheduler_config.max_num_batched_tokens} tokens in a step, {scheduling} scheduling, "
        f"{graphs}, KV cache of {kv_cache_tokens} tokens "
        f"({kv_cache_tokens // settings.max_context_tokens} samples of full length)"
    )


def _kill_group(pid: int) -> None:
    """Kill the core process, and its group when it leads one."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_NOTE_BYTES] if text else type(error).__name__
