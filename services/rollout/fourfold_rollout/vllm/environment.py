"""Sets the environment variables and log levels of vLLM for this process and its engine, before vLLM is imported.

Users need to set none. Variables that are set already are kept, except those in `_ALWAYS`, which keep a machine safe.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import Final

from fourfold.host.network import NCCL_VARIABLE, nccl_interface
from fourfold_rollout.engine import EngineSettings

_ALWAYS: Final = {
    # All processes of an engine are on this host, and none may be reachable from outside.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
_DEFAULTS: Final = {
    "VLLM_CONFIGURE_LOGGING": "0",  # the service formats vLLM's log records
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    # Outputs processed in one turn of the event loop: 32 samples that end with a few hundred tokens take milliseconds.
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "32",
    "HF_HUB_OFFLINE": "1",  # models are folders
    "TOKENIZERS_PARALLELISM": "false",
}
# These loggers warn about deliberate settings: no tokenizer, eager execution, our own number of threads, no Triton.
_NOISY_LOGGERS: Final = (
    "torch._library.triton",
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    # It lists every module without weights of its own; `fourfold.weights.apply` checks the loaded tensors.
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.platforms.cpu",
    "vllm.renderers.base",
    "vllm.triton_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.worker.cpu_worker",
)
# vLLM's messages about its start, by their beginnings: seconds of loading, compiling (or reading the cache), capturing.
_STARTUP: Final = {
    "vllm.compilation.decorators": ("%sDirectly load AOT compilation", "Directly load AOT compilation"),
    "vllm.compilation.monitor": ("%storch.compile took", "torch.compile took"),
    "vllm.v1.engine.core": ("init engine ",),
    "vllm.v1.worker.gpu_model_runner": ("Model loading took", "Graph capturing finished"),
    "vllm.v1.worker.gpu.model_runner": ("Model loading took", "Graph capturing finished"),
}


class _StartupFilter(logging.Filter):
    """Passes INFO records with one of the given beginnings, and all records of other levels."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.INFO or str(record.msg).startswith(self._beginnings)


def prepare(settings: EngineSettings, host: str) -> None:
    """Set the variables; `host` is the one at which others reach the service.

    Call it before torch and vLLM are imported: OpenMP reads its variables when it is loaded.
    """
    os.environ.update(_ALWAYS)
    os.environ[NCCL_VARIABLE] = nccl_interface(host if settings.gpus else "localhost")
    defaults = dict(_DEFAULTS)
    if settings.gpus == 0:
        # The worker runs in vLLM's core process, which saves a process and an import of vLLM.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        defaults["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        if settings.enforce_eager:
            # Otherwise vLLM compiles one small function for the first probe: half a minute on a busy machine.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib or 1)
    elif importlib.util.find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM 0.26 uses FlashInfer without checking that it is installed
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, beginnings in _STARTUP.items():
        logger = logging.getLogger(name)
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        logger.addFilter(_StartupFilter(beginnings))
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
