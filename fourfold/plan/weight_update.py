"""Predicts the seconds of a weight update from the bytes, the number of engines and the network, and names the path.

    direct   every engine reads the trainer's memory, or memory of its host (cuda_ipc, shm); the trainer's work does not
             depend on the number of engines
    ring     one NCCL group of all engines: NCCL passes pieces on from GPU to GPU
    chain    gloo: each engine passes each chunk on when it has arrived

With B bytes at R bytes per second over the slowest link, chunks of C bytes that cost t seconds each, and N engines, a
chain takes B / R + (B / C) t + (N - 1) (C / R + t), and the trainer sends B.
"""

from __future__ import annotations

import math
from typing import Final

from fourfold.bounds import chunk_bytes
from fourfold.config import Config
from fourfold.model.folder import ModelShape
from fourfold.plan.memory import BYTES_PER_WEIGHT, weight_bytes
from fourfold.plan.models import adapter_obstacle, adapter_plan, sends_adapters

_GBIT: Final = 1e9 / 8
_NETWORKS: Final = (10, 100)  # Gbit/s
# Measured: 0.2 to 0.3 ms for chunks that cost almost nothing else, on a busy machine with two cores.
_CHUNK_SECONDS: Final = 0.3e-3
# Measured: copies of one core into shared memory.
_MEMORY_BYTES_PER_SECOND: Final = 5e9


def update_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of one update: those of the LoRA adapters, or of all weights."""
    adapters = adapter_plan(config) if sends_adapters(config) else None
    if adapters is None:
        return weight_bytes(config, shape)
    return adapters.parameter_count * BYTES_PER_WEIGHT[config.model.dtype]


def lora_update(config: Config, shape: ModelShape) -> str:
    """Return what the engines of a run with `trainer.lora` get, a clause; empty: the run has none, or no engines."""
    if not config.trainer.lora.rank or not config.needs_engines:
        return ""
    size, obstacle = f"{update_bytes(config, shape) / 1e6:,.1f} MB per update", adapter_obstacle(config)
    return (
        f"engines get merged weights, because {obstacle}: {size}" if obstacle else f"engines get the adapters: {size}"
    )


def chain_seconds(byte_count: int, engines: int, bytes_per_second: float) -> float:
    """Return the time until the last engine of a chain has everything; all links are equal."""
    size = min(chunk_bytes(byte_count), byte_count)
    return (math.ceil(byte_count / size) + engines - 1) * (size / bytes_per_second + _CHUNK_SECONDS)


def update_cost(config: Config, shape: ModelShape) -> str:
    """Return a sentence on the path of the weights, its reason and its duration."""
    byte_count, engines = update_bytes(config, shape), config.rollout_replicas
    backend = config.weights.backend
    if backend == "gloo" and engines > 1:
        times = " and ".join(_chain_text(byte_count, engines, gbit) for gbit in _NETWORKS)
        return (
            f"Chain: the trainer sends each shard once, to the first engine, and each engine passes it on while it "
            f"arrives: {times}."
        )
    network = " and ".join(_network_text(byte_count, gbit) for gbit in _NETWORKS)
    if backend == "gloo":
        return f"Direct, because there is one engine: {network}."
    if backend == "nccl":
        return f"Ring: NCCL passes the weights on from GPU to GPU, in the time of one copy: between hosts {network}."
    if backend == "auto" and config.weights_stay_on_gpus:
        return f"Direct or NCCL's ring, by what each engine reaches; to engines on other hosts {network}."
    if backend == "cuda_ipc":
        return "Direct: each engine reads the trainer's memory at the speed of the GPUs' memory or links."
    seconds = byte_count / _MEMORY_BYTES_PER_SECOND
    direct = f"all engines read the one copy in shared memory, which takes the trainer about {seconds:.2g} s"
    chain = " and ".join(_chain_text(byte_count, engines, gbit) for gbit in _NETWORKS)
    return f"Direct, because {direct}. Engines on other hosts are a chain: {chain}."


def _chain_text(byte_count: int, engines: int, gbit: int) -> str:
    return f"{chain_seconds(byte_count, engines, gbit * _GBIT):.2g} s at {gbit} Gbit/s"


def _network_text(byte_count: int, gbit: int) -> str:
    return f"{byte_count / (gbit * _GBIT):.2g} s at {gbit} Gbit/s"
