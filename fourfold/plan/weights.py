"""What `fourfold plan` says about new weights on their way to the engines."""

from __future__ import annotations

from fourfold.config import Config
from fourfold.model.folder import ModelShape
from fourfold.plan.memory import GIB, weight_bytes

_HOW = {
    "cuda_ipc": "read by the engine's GPUs out of the trainer's memory (CUDA IPC)",
    "nccl": "from GPU to GPU by NCCL",
    "shm": "through shared memory",
    "gloo": "by gloo",
}
_ON_GPUS = (
    "read by the engine's GPUs out of the trainer's memory where they reach it (CUDA IPC), else by NCCL, and through "
    "main memory where neither goes"
)
_ON_CPU = "through shared memory, or by gloo between containers of one machine"
_PAUSE = {
    "keep": "Samples that run stop where they are and go on under the new weights, with the keys and values that the "
    "old ones computed.",
    "wait": "Samples that run finish first.",
    "abort": "Samples that run are ended, and sampled anew.",
}


def weight_plan(config: Config, shape: ModelShape) -> list[str]:
    """Return how much travels on which way, what running samples do meanwhile, and what is compared afterwards."""
    weights = config.weights
    how = _HOW.get(weights.backend, _ON_GPUS if config.weights_stay_on_gpus else _ON_CPU)
    engines = max(config.rollout.replicas, 1)
    reach = "the engine" if engines == 1 else f"each of {engines} engines"
    return [
        f"{weight_bytes(config, shape) / GIB:.2f} GiB reach {reach} after every step, {how}.",
        f"{_PAUSE[weights.pause]} {_compared(config)}",
    ]


def _compared(config: Config) -> str:
    first, every = config.weights.verify_first, config.weights.verify_every
    probe = "the log-probabilities of a probe prompt every time"
    if every == 1:
        return f"Sums of all tensors are compared with the trainer's, and {probe}."
    begin = f"in the first {first} updates and " if first else ""
    return f"Sums of all tensors are compared with the trainer's {begin}every {every} versions, {probe}."
