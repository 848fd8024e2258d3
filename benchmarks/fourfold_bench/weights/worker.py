"""Extends vLLM's worker for the benchmark: times the receive verb, profiles it, and loads single tensors."""

from __future__ import annotations

import cProfile
import time
from pathlib import Path
from typing import Any

import torch

from fourfold.weights.apply.vllm_worker import VllmModel, WeightWorker
from fourfold_bench.weights.loop import LoopGroup


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
