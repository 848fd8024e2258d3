"""Maps the devices of a benchmark to the driver's GPUs and to child processes; measures the memory of GPUs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.host import hardware

_POLL_SECONDS: Final = 0.005
_MIB: Final = 1 << 20


@cache
def usable() -> tuple[hardware.Gpu, ...]:
    """Return the GPUs as they were when the benchmark began: it changes CUDA_VISIBLE_DEVICES for an engine later."""
    return tuple(hardware.visible_gpus())


def default_device() -> str:
    """Return "cuda:0", or "cpu" without a GPU."""
    return "cuda:0" if usable() else "cpu"


def check_present(devices: Sequence[str]) -> None:
    """Raise ConfigError unless all devices exist: "cpu", "cuda:0", ..."""
    for device in devices:
        if device != "cpu":
            physical_gpu(device)


def visible(*devices: str) -> dict[str, str]:
    """Return the environment of a process that sees these devices only, as its cuda:0, cuda:1, ..."""
    return hardware.gpu_environment(physical_gpu(device) for device in devices if device != "cpu")


def physical_gpu(device: str) -> str:
    """Return the driver's id of a device such as "cuda:1" of this process.

    Raises:
        ConfigError: the name is not that of a GPU, or there is no such GPU.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"device {device!r}: it must be cpu, or cuda:0, cuda:1, ...")
    gpus = usable()
    if not gpus:
        raise ConfigError(f"device {device}: this process sees no GPU (`fourfold doctor` shows why); use cpu")
    number, count = int(index or "0"), len(gpus)
    if number >= count:
        raise ConfigError(f"device {device}: this process sees {count} GPUs, the last one is cuda:{count - 1}")
    return gpus[number].id


class GpuMemory:
    """Polls the memory in use on each GPU through NVML, which needs no CUDA context."""

    def __init__(self, devices: Sequence[str], *, every: float = _POLL_SECONDS) -> None:
        """Start to poll every `every` seconds; without GPUs or NVML all answers are empty."""
        self._every = every
        self._handles: dict[str, Any] = {}
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]
        self._nvml = _find_nvml() if gpus else None
        if self._nvml is None:
            return
        self._nvml.nvmlInit()
        for device in gpus:
            name = physical_gpu(device)  # an index, or a UUID if CUDA_VISIBLE_DEVICES has UUIDs
            find = self._nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else self._nvml.nvmlDeviceGetHandleByUUID
            self._handles[device] = find(int(name) if name.isdigit() else name)
        self._thread = threading.Thread(target=self._poll, name="gpu-memory", daemon=True)
        self._thread.start()

    def __enter__(self) -> GpuMemory:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def used(self) -> dict[str, float]:
        """Return the memory in use, in MiB by device, and start new peaks."""
        now = self._read()
        self._peaks = dict(now)
        return {device: value / _MIB for device, value in now.items()}

    def peak(self) -> dict[str, float]:
        """Return the largest use since `used`, in MiB."""
        return {device: value / _MIB for device, value in self._peaks.items()}

    def _read(self) -> dict[str, int]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo if self._nvml is not None else None
        return {device: int(memory(handle).used) for device, handle in self._handles.items()} if memory else {}

    def _poll(self) -> None:
        while not self._stop.wait(self._every):
            for device, value in self._read().items():
                self._peaks[device] = max(self._peaks.get(device, 0), value)


def _find_nvml() -> Any:
    """Return NVIDIA's module, or vLLM's copy of it, or None."""
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return None
