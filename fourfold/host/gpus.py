"""NVIDIA GPUs: those of this machine, and those that this process may use. Nothing is started on them.

Numbers are the driver's, as `nvidia-smi` shows them. CUDA counts so only where CUDA_DEVICE_ORDER is PCI_BUS_ID, and by
itself puts the fastest first: whoever gives GPUs to a process gives it both variables (`environment`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

_PROC: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, or a slice of one (MIG)."""

    id: str
    """What CUDA_VISIBLE_DEVICES calls it: its number, or its UUID."""
    name: str
    """For people."""
    uuid: str = ""
    """Empty where nobody says."""
    memory_bytes: int | None = None
    """All of it; None where nobody says."""


def machine_gpus() -> list[Gpu]:
    """Return all GPUs of this machine; without nvidia-ml-py, or where NVML fails, what the kernel's driver lists."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return _listed_by_the_driver()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _listed_by_the_driver()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                id=str(number),
                name=pynvml.nvmlDeviceGetName(handle),
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                memory_bytes=_memory(pynvml, handle),
            )
            for number, handle in enumerate(handles)
        ]
    except pynvml.NVMLError:  # one of them is lost, or may not be asked
        return _listed_by_the_driver()
    finally:
        pynvml.nvmlShutdown()


def _memory(pynvml: Any, handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:  # of one that has none of its own, but the machine's
        return None


def _listed_by_the_driver() -> list[Gpu]:
    return [Gpu(id=str(number), name=path.name) for number, path in enumerate(sorted(_PROC.glob("*")))]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use, in CUDA's order: those that CUDA_VISIBLE_DEVICES names, else all.

    As in CUDA, an empty variable hides all, and so does a name that is not there with those after it.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return machine_gpus() if named is None else named_gpus(part.strip() for part in named.split(","))


def named_gpus(ids: Iterable[str]) -> list[Gpu]:
    """Return the GPUs of this machine with these ids, up to the first that is not there."""
    there, found = machine_gpus(), list[Gpu]()
    for name in ids:
        gpu = _called(name, there)
        if gpu is None:
            break
        found.append(replace(gpu, id=name))
    return found


def _called(name: str, there: list[Gpu]) -> Gpu | None:
    if name.isdecimal():
        return there[int(name)] if int(name) < len(there) else None
    if there and (name.startswith("MIG-") or (name.startswith("GPU-") and not there[0].uuid)):
        return Gpu(id=name, name=name, uuid=name)  # nobody here can tell whether it is there
    found = [gpu for gpu in there if name and gpu.uuid.startswith(name)]  # CUDA takes the beginning of one, too
    return found[0] if len(found) == 1 else None


def smallest_memory(gpus: Iterable[Gpu]) -> int | None:
    """Return the bytes of the smallest one; None where nobody says."""
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None), default=None)


def environment(ids: Iterable[str]) -> dict[str, str]:
    """Return the variables of a process that shall see these GPUs alone, as its cuda:0, cuda:1, ...; none: no GPU."""
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": order}
