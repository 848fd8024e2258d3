"""Extends vLLM's worker for the benchmark: times the receive verb, profiles it, and loads single tensors.

With single tensors it is the engine's side of the update that post-training systems commonly do, for comparison:

    for every parameter: gather it (ZeRO-3), announce name, type and shape, broadcast it, `model.load_weights`
"""

from __future__ import annotations

import cProfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import BroadcastOptions, FileStore  # type: ignore[attr-defined]

from fourfold.weights.apply.vllm_worker import VllmModel, WeightWorker


class LoopGroup:
    """A NCCL or gloo group of trainer rank 0 (its rank 0) and the engine's workers, apart from torch's global group."""

    def __init__(self, rendezvous: Path, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Meet the other members through a file."""
        store = FileStore(str(rendezvous), size)
        store.set_timeout(timedelta(seconds=timeout))
        self._device = device
        self._group: Any
        distributed: Any = torch.distributed
        if device.type == "cuda":
            self._group = distributed.ProcessGroupNCCL(store, rank, size, distributed.ProcessGroupNCCL.Options())
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout)
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send from rank 0, or receive into `tensor`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()


class BenchWorker(WeightWorker):
    """A worker extension of vLLM with the verbs of `WeightWorker` and those of the benchmark."""

    _bench_seconds: float = 0.0
    _bench_profile: cProfile.Profile | None = None
    _bench_loop: LoopGroup | None = None
    _bench_model: VllmModel | None = None

    def weights_receive(self, *args: Any) -> Any:
        """Receive a version, and measure the time."""
        began = time.perf_counter()
        if self._bench_profile is not None:
            self._bench_profile.enable()
        answer = super().weights_receive(*args)
        if self._bench_profile is not None:
            self._bench_profile.disable()
        self._bench_seconds = time.perf_counter() - began
        return answer

    def bench_seconds(self) -> float:
        """Return the seconds of the last receive, measured in the worker."""
        return self._bench_seconds

    def bench_profile(self, path: str) -> None:
        """Start a profile (empty path), or write it to a file for `python -m pstats`."""
        if path and self._bench_profile is not None:
            self._bench_profile.dump_stats(path)
            self._bench_profile = None
        elif not path:
            self._bench_profile = cProfile.Profile()

    def loop_open(self, rendezvous: str, size: int, timeout: float) -> None:
        """Join the group that broadcasts single tensors."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        self._bench_loop = LoopGroup(Path(rendezvous), 1 + int(self.rank), size, device, timeout)  # type: ignore[attr-defined]
        # On CPU vLLM packs a layer's weight after loading; only the layerwise reload can load such a weight again.
        self._bench_model = VllmModel(self) if device.type == "cpu" else None

    def loop_begin(self) -> None:
        """Prepare vLLM for loading, if the device needs it."""
        if self._bench_model is not None:
            self._bench_model.begin_load()

    def loop_take(self, name: str, dtype: str, shape: list[int]) -> None:
        """Receive and load one tensor."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        assert self._bench_loop is not None, "opened"
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        self._bench_loop.broadcast(tensor)
        if self._bench_model is not None:
            self._bench_model.load([(name, tensor)])
        else:
            self.get_model().load_weights([(name, tensor)])  # type: ignore[attr-defined]

    def loop_end(self) -> None:
        """Return when all tensors are loaded."""
        if self._bench_model is not None:
            self._bench_model.finish_load()
        else:
            torch.cuda.synchronize()
