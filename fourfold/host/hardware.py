"""Reads the GPUs, the processor and the free memory of this machine. Starts nothing on a GPU.

GPU numbers are the driver's, as `nvidia-smi` shows them. CUDA uses these numbers only if CUDA_DEVICE_ORDER is
PCI_BUS_ID; its default puts the fastest GPU first. So a process must get both variables of `gpu_environment`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU, or a slice of one (MIG)."""

    id: str  # its number or UUID, as in CUDA_VISIBLE_DEVICES
    name: str  # product name, for messages
    uuid: str = ""  # empty if unknown
    memory_bytes: int | None = None  # size of its memory; None if unknown


def machine_gpus() -> list[Gpu]:
    """Return all GPUs of this machine: from NVML, or, if nvidia-ml-py is absent or NVML fails, from /proc."""
    from_driver = [Gpu(id=str(number), name=path.name) for number, path in enumerate(sorted(_DRIVER.glob("*")))]
    try:
        import pynvml
    except ModuleNotFoundError:
        return from_driver
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return from_driver
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                id=str(number),
                name=pynvml.nvmlDeviceGetName(handle),
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                memory_bytes=_memory_bytes(pynvml, handle),
            )
            for number, handle in enumerate(handles)
        ]
    except pynvml.NVMLError:  # a GPU is lost, or this user may not query it
        return from_driver
    finally:
        pynvml.nvmlShutdown()


def _memory_bytes(pynvml: Any, handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # a GPU without memory of its own, such as GB10, shares the machine's
        return None


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in CUDA's order: those in CUDA_VISIBLE_DEVICES, or all if it is unset.

    As in CUDA, an empty variable hides all GPUs, and an unknown id hides itself and all ids after it.
    """
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    return machine_gpus() if ids is None else gpus_by_id(part.strip() for part in ids.split(","))


def gpus_by_id(ids: Iterable[str]) -> list[Gpu]:
    """Return the GPUs of this machine with these ids, up to the first id that is unknown."""
    gpus, found = machine_gpus(), list[Gpu]()
    for gpu_id in ids:
        gpu = _find(gpu_id, gpus)
        if gpu is None:
            break
        found.append(replace(gpu, id=gpu_id))
    return found


def _find(gpu_id: str, gpus: list[Gpu]) -> Gpu | None:
    if gpu_id.isdecimal():
        return gpus[int(gpu_id)] if int(gpu_id) < len(gpus) else None
    if gpus and (gpu_id.startswith("MIG-") or (gpu_id.startswith("GPU-") and not gpus[0].uuid)):
        return Gpu(id=gpu_id, name=gpu_id, uuid=gpu_id)  # cannot be checked: the UUIDs are unknown here
    found = [gpu for gpu in gpus if gpu_id and gpu.uuid.startswith(gpu_id)]  # CUDA accepts a unique prefix, too
    return found[0] if len(found) == 1 else None


def smallest_memory(gpus: Iterable[Gpu]) -> int | None:
    """Return the bytes of the GPU with the least memory; None if unknown."""
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)


def gpu_environment(ids: Iterable[str]) -> dict[str, str]:
    """Return the variables for a process that may use only these GPUs, as its cuda:0, cuda:1 and so on."""
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": order}


def has_fast_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether PyTorch multiplies bfloat16 matrices on this processor as fast as float32; True if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    flags = next((line.split() for line in lines if line.startswith("flags")), None)
    # On x86 the fast kernels need AVX-512. Measured on two cores, products of 512 to 2048 x 576 x 1536: AVX512-BF16
    # takes a quarter of float32's time, other AVX-512 about as long, AVX2 alone 4 to 8 times as long.
    return flags is None or "avx512bw" in flags


def available_memory() -> int:
    """Return the bytes of main memory that may still be used, on this machine or in this cgroup if that is less."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"/proc/meminfo: {error.strerror}; fourfold runs on Linux with /proc mounted") from None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    free = int(match.group(1)) << 10 if match else 0
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # the file is absent, or holds "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return max(free, 0)
