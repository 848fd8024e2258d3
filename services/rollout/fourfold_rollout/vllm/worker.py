"""The engine's side of the rollout service, inside vLLM's worker processes: weights, and log-probabilities.

vLLM mixes `RolloutWorker` into its worker class. Its verbs are called with `collective_rpc`, take and return plain
values and never raise.
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
    """The verbs that the service calls in every worker. Mixed into vLLM's worker: no state before the first call."""

    def allow_amx(self) -> bool:
        """Ask the kernel for the tile registers of AMX; return whether this CPU has them and it gave them.

        vLLM's attention on CPU uses them and does not ask. A matrix product before it usually has, but those with small
        weights ask only for more than 4 tokens: of a small model, a first step of fewer ends the process by SIGILL.
        """
        return bool(torch.cpu._init_amx())

    def logprobs_open(self, path: str, slots: int, width: int) -> str:
        """From now on, write the log-probability of every token that is sampled for a request with a slot.

        The workers of an engine sample all the same; the one whose tokens vLLM takes writes.

        Args:
            path: of the service's `LogprobTable`.
            slots: rows of it.
            width: cells of a row.

        Returns:
            Why this worker cannot do it, for people; empty: it can.
        """
        try:
            return _open(self, path, slots, width)
        except Exception as error:
            _log.exception("log-probabilities cannot be taken in the worker")
            return f"{type(error).__name__}: {error}"


def _open(worker: Any, path: str, slots: int, width: int) -> str:
    runner = worker.model_runner
    modules = {base.__module__ for base in type(runner).__mro__}
    if reason := _obstacle(worker, runner):
        return reason
    if _V1 in modules:
        return _open_v1(worker, runner, path, slots, width)
    if _V2 in modules:
        return _open_v2(worker, runner, path, slots, width)
    return f"the model runner {type(runner).__module__}.{type(runner).__qualname__} is not known"


def _obstacle(worker: Any, runner: Any) -> str:
    """Return what of the engine's configuration nobody has thought through here."""
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


def _writes(worker: Any) -> bool:
    """Whether it is the worker whose tokens vLLM takes: the first of those that share the model."""
    return int(worker.rank) % int(worker.vllm_config.parallel_config.tensor_parallel_size) == 0


def _open_v1(worker: Any, runner: Any, path: str, slots: int, width: int) -> str:
    from fourfold_rollout.vllm.patches.logprobs_v1 import LogprobSampler, write_on_cpu, write_on_gpu

    hook = LogprobSampler(runner)
    # In every worker, before anything can fail in one alone: they must go on to sample the same.
    if reason := hook.install():
        return reason
    if worker.device.type == "cuda":
        from fourfold_rollout.vllm.patches.seeds_v1 import SeededSampling

        SeededSampling(runner).install()
    if not _writes(worker):
        return ""
    host = open_table(path, slots, width)
    if worker.device.type == "cpu":
        hook.write = write_on_cpu(host)
        return ""
    table, reason = _on_gpu(worker, host, torch.float32)
    if table is not None:
        hook.write = write_on_gpu(table)
    return reason


def _open_v2(worker: Any, runner: Any, path: str, slots: int, width: int) -> str:
    if worker.device.type != "cuda":
        return "the second model runner has kernels for GPUs only"
    if not _writes(worker):
        return ""
    from fourfold_rollout.vllm.patches.logprobs_v2 import LogprobSampler

    table, reason = _on_gpu(worker, open_table(path, slots, width), worker.vllm_config.model_config.dtype)
    if table is not None:
        LogprobSampler(runner, table).install()
    return reason


def _on_gpu(worker: Any, host: Float32Array, dtype: torch.dtype) -> tuple[torch.Tensor | None, str]:
    """Return the table as the worker's GPU sees it, after a try with logits of `dtype`; or None and the reason."""
    from fourfold_rollout.vllm.cuda_table import map_on_gpu
    from fourfold_rollout.vllm.logprob_kernel import check_table

    table, reason = map_on_gpu(host, worker.device)
    if table is None:
        return None, reason
    reason = check_table(table, host, worker.vllm_config.model_config.get_vocab_size(), dtype)
    return (None, reason) if reason else (table, "")
