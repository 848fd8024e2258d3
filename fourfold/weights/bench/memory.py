"""Memory of the GPUs as the driver sees it: what an update takes besides the models, without a context on them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from fourfold.weights.bench.settings import physical_gpu

_POLL_SECONDS: Final = 0.005
_MIB: Final = 1 << 20


class GpuMemory:
    """Watches the most that was in use on each device since the last look."""

    def __init__(self, devices: Sequence[str], visible: str) -> None:
        """Begin; on CPUs it watches nothing.

        Args:
            devices: "cpu", "cuda:0", ...
            visible: CUDA_VISIBLE_DEVICES as it was for who named the devices; empty: all.
        """
        self._handles: dict[str, Any] = {}
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]
        if not gpus:
            return
        try:
            import pynvml
        except ModuleNotFoundError:
            return
        pynvml.nvmlInit()
        self._nvml = pynvml
        for device in gpus:
            index = int(physical_gpu(device.partition(":")[2], visible))
            self._handles[device] = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._thread = threading.Thread(target=self._watch, name="gpu-memory", daemon=True)
        self._thread.start()

    def used(self) -> dict[str, float]:
        """Return what is in use now, in MiB by device, and forget the peaks."""
        now = self._read()
        self._peaks = dict(now)
        return {device: value / _MIB for device, value in now.items()}

    def peak(self) -> dict[str, float]:
        """Return the most since `used`, in MiB."""
        return {device: value / _MIB for device, value in self._peaks.items()}

    def stop(self) -> None:
        """End."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> dict[str, int]:
        return {device: int(self._nvml.nvmlDeviceGetMemoryInfo(h).used) for device, h in self._handles.items()}

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            for device, value in self._read().items():
                self._peaks[device] = max(self._peaks.get(device, 0), value)
