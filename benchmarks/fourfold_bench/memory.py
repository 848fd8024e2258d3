"""Memory of the GPUs as the driver sees it: what an update takes besides the models, without a context on them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from fourfold_bench.devices import physical_gpu

_POLL_SECONDS: Final = 0.005
_MIB: Final = 1 << 20


class GpuMemory:
    """Watches the most that was in use on each device since the last look."""

    def __init__(self, devices: Sequence[str], *, every: float = _POLL_SECONDS) -> None:
        """Begin to look, every so many seconds; on CPUs it watches nothing."""
        self._every = every
        self._handles: dict[str, Any] = {}
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]
        if not gpus:
            return
        pynvml = _find_nvml()
        if pynvml is None:
            return
        pynvml.nvmlInit()
        self._nvml = pynvml
        for device in gpus:
            name = physical_gpu(device)
            find = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            self._handles[device] = find(int(name) if name.isdigit() else name)
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
        while not self._stop.wait(self._every):
            for device, value in self._read().items():
                self._peaks[device] = max(self._peaks.get(device, 0), value)


def _find_nvml() -> Any:
    """Return NVIDIA's module, or the copy in vLLM, or None."""
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return None
