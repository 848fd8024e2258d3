"""The environment variables that vLLM reads, set for this process and its engine before vLLM is imported.

Users set none. What somebody did set for vLLM stays as it is, but for the few lines that keep
a machine safe: addresses, and the switch that would let pickled objects in.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import Final

from fourfold_rollout.engine import EngineSettings

_ALWAYS: Final = {
    # Everything of one engine is on this host, and nothing of it may be reached from outside.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
_DEFAULTS: Final = {
    "NCCL_SOCKET_IFNAME": "lo",  # who has the trainer on another machine names a network for it
    "VLLM_CONFIGURE_LOGGING": "0",  # our own logging formats its records
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    # Outputs that are worked off between two turns of the event loop: 32 that end with a few hundred tokens each take
    # some milliseconds, with everything that is done with them.
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "32",
    "HF_HUB_OFFLINE": "1",  # models are folders
    "TOKENIZERS_PARALLELISM": "false",
}
# They warn of what we have chosen: no tokenizer, eager execution, our own number of threads.
_NOISY_LOGGERS: Final = (
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    # Names every module without weights of its own; the applier checks what was loaded.
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.platforms.cpu",
    "vllm.renderers.base",
    "vllm.triton_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.worker.cpu_worker",
)
# vLLM's own account of a start: seconds of loading, of compiling (or reading what was compiled before), of capturing.
_STARTUP: Final = {
    "vllm.compilation.decorators": ("%sDirectly load AOT compilation", "Directly load AOT compilation"),
    "vllm.compilation.monitor": ("%storch.compile took", "torch.compile took"),
    "vllm.v1.engine.core": ("init engine ",),
    "vllm.v1.worker.gpu_model_runner": ("Model loading took", "Graph capturing finished"),
    "vllm.v1.worker.gpu.model_runner": ("Model loading took", "Graph capturing finished"),
}
_CPU: Final = {
    # The worker lives in vLLM's core process: one process and one import of vLLM less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class _Only(logging.Filter):
    """Lets information through when it begins as it should, and all that is worse."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide by the text before its numbers are filled in."""
        return record.levelno != logging.INFO or str(record.msg).startswith(self._beginnings)


def prepare(settings: EngineSettings) -> None:
    """Set the variables. Must run before torch and vLLM are imported: OpenMP reads its own when it is loaded."""
    os.environ.update(_ALWAYS)
    defaults = dict(_DEFAULTS)
    if settings.gpus == 0:
        defaults |= _CPU
        defaults["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        if settings.enforce_eager:
            # It would compile one small function, for the first probe: half a minute on a machine that is busy.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib or 1)
    elif importlib.util.find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM 0.26 asks for it without looking
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, beginnings in _STARTUP.items():
        logger = logging.getLogger(name)
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        logger.addFilter(_Only(beginnings))
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
