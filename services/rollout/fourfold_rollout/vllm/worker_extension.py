"""The methods that the service calls in vLLM's worker processes: weights (`WeightWorker`) and log-probabilities.

vLLM mixes `RolloutWorker` into its worker class. The service calls its methods with `collective_rpc`; they take and
return plain values and never raise.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from fourfold.arrays import Float32Array
from fourfold.weights.apply.vllm_worker import WeightWorker
from fourfold_rollout.vllm.logprob_table import open_table

_log = logging.getLogger(__name__)
_V1: Final = "vllm.v1.worker.gpu_model_runner"
_V2: Final = "vllm.v1.worker.gpu.model_runner"


class RolloutWorker(WeightWorker):
    """Mixed into vLLM's worker, so there is no `__init__` and no state before the first call."""

    def allow_amx(self) -> bool:
        """Ask the kernel for the AMX tile registers; return whether this CPU has them and access was granted.

        vLLM's CPU attention uses them without asking. An earlier matrix product usually asks, but with small weights
        only above 4 tokens: with a small model, a first step of fewer tokens ends the process by SIGILL.
        """
        return bool(torch.cpu._init_amx())

    def logprobs_open(self, path: str, slots: int, width: int, patch_seeds: bool) -> str:
        """Write the log-probability of every token sampled for a request with a slot, from now on.

        All workers of an engine sample the same tokens; only the worker whose tokens vLLM uses writes.

        Args:
            path: of the service's `LogprobTable`.
            slots: rows of the table.
            width: cells of a row.
            patch_seeds: also sample the seeded requests of a batch at once (`patches/seeds_v1.py`).

        Returns:
            Why this worker cannot do it; empty if it can.
        """
        try:
            return _open(self, path, slots, width, patch_seeds)
        except Exception as error:  # an exception would end vLLM's worker; after a reason, vLLM's own code is used
            _log.exception("Worker failed to open the table of log-probabilities")
            return f"{type(error).__name__}: {error}"


def _open(worker: Any, path: str, slots: int, width: int, patch_seeds: bool) -> str:
    runner = worker.model_runner
    modules = {base.__module__ for base in type(runner).__mro__}
    if reason := _unsupported(worker, runner):
        return reason
    if _V1 in modules:
        return _open_v1(worker, runner, path, slots, width, patch_seeds)
    if _V2 in modules:
        return _open_v2(worker, runner, path, slots, width)
    return f"the model runner {type(runner).__module__}.{type(runner).__qualname__} is not known"


def _unsupported(worker: Any, runner: Any) -> str:
    """Return the setting of the engine that the patches do not support; empty if there is none."""
    config = worker.vllm_config
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            return f"{name} is {getattr(parallel, name)}"
    if config.speculative_config is not None:
        return "speculative decoding gives several tokens a step"
    if getattr(runner, "batch_sharder", None) is not None:
        return "each worker samples a part of the batch"
    if worker.device.type not in ("cpu", "cuda"):
        return f"the device is {worker.device.type}"
    return ""


def _is_writer(worker: Any) -> bool:
    """Return whether vLLM uses the tokens of this worker: it is the first of those that share the model."""
    return int(worker.rank) % int(worker.vllm_config.parallel_config.tensor_parallel_size) == 0


def _open_v1(worker: Any, runner: Any, path: str, slots: int, width: int, patch_seeds: bool) -> str:
    from fourfold_rollout.vllm.patches.logprobs_v1 import LogprobSampler, write_on_cpu, write_on_gpu

    sampler = LogprobSampler(runner)
    # Install in every worker before a step that may fail in a single worker, because all must sample the same tokens.
    if reason := sampler.install():
        return reason
    if worker.device.type == "cuda" and patch_seeds:
        from fourfold_rollout.vllm.patches.seeds_v1 import SeededSampling

        SeededSampling(runner).install()
    if not _is_writer(worker):
        return ""
    host = open_table(path, slots, width)
    if worker.device.type == "cpu":
        sampler.write = write_on_cpu(host)
        return ""
    table, reason = _on_gpu(worker, host, torch.float32)
    if table is not None:
        sampler.write = write_on_gpu(table)
    return reason


def _open_v2(worker: Any, runner: Any, path: str, slots: int, width: int) -> str:
    if worker.device.type != "cuda":
        return "Model Runner V2 has kernels for GPUs only"
    if not _is_writer(worker):
        return ""
    from fourfold_rollout.vllm.patches.logprobs_v2 import LogprobSampler

    table, reason = _on_gpu(worker, open_table(path, slots, width), worker.vllm_config.model_config.head_dtype)
    if table is not None:
        LogprobSampler(runner, table).install()
    return reason


def _on_gpu(worker: Any, host: Float32Array, dtype: torch.dtype) -> tuple[torch.Tensor | None, str]:
    """Map the table on the worker's GPU and test it with logits of `dtype`; return it, or None and the reason."""
    from fourfold_rollout.vllm.logprob_kernel import check_table, map_on_gpu

    table, reason = map_on_gpu(host, worker.device)
    if table is None:
        return None, reason
    reason = check_table(table, host, worker.vllm_config.model_config.get_vocab_size(), dtype)
    return (None, reason) if reason else (table, "")
