"""Prepares a process for vLLM: environment variables, log levels, and a folder where vLLM's workers meet."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import uuid
from pathlib import Path
from typing import Final

CPU_BLOCK_TOKENS: Final = 32
_ENVIRONMENT: Final = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# The path of a Unix socket has at most 107 bytes, and vLLM appends a UUID.
_SOCKET_FOLDER_BYTES: Final = 107 - len(f"/{uuid.UUID(int=0)}")
_CPU: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def prepare(*, on_gpus: bool) -> None:
    """Set the environment of vLLM and of trainer processes. Call it before torch and vLLM are imported."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # ninja, which builds kernels, is in this environment even if the environment is not activated.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if on_gpus and importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM 0.26 imports it without a check
    if not on_gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        for name, value in _CPU.items():
            os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)


def server_environment(*, kv_cache_gib: int) -> dict[str, str]:
    """Return the environment of `vllm serve`; `kv_cache_gib` is that of an engine on CPU, 0 on GPUs."""
    found = _ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "WARNING"}
    if kv_cache_gib:
        cores = str(len(os.sched_getaffinity(0)))
        return found | {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib), "OMP_NUM_THREADS": cores}
    if importlib.util.find_spec("flashinfer") is None:
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM 0.26 imports it without a check
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]  # of ninja, which builds kernels
    return found | {"PATH": os.pathsep.join(path)}


def meet_in(scratch: Path) -> None:
    """Let the engine's processes meet in a folder; before vLLM 0.32 they meet at a port that listens everywhere."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    if len(os.fsencode(scratch)) <= _SOCKET_FOLDER_BYTES:
        os.environ["VLLM_RPC_BASE_PATH"] = str(scratch)  # by default vLLM leaves its sockets in the temporary folder
    for module in (uniproc_executor, multiproc_executor):
        by_file = hasattr(module, "get_file_store_init_method")
        name = "get_file_store_init_method" if by_file else "get_distributed_init_method"
        setattr(module, name, lambda *_address: f"file://{scratch}/{uuid.uuid4().hex}")
