"""Which GPUs of this host can read each other's memory. No torch here.

Asked of NVIDIA's management library, which sees every GPU of the host, also those that another process was given:

    engine's GPU --- the same as a rank's ------------ reads its memory
                 `-- peer access (NVLink, PCIe) ------ reads its memory
                 `-- none, or one of them in MIG mode  does not: slices are kept apart
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

_log = logging.getLogger(__name__)
# NVML_P2P_CAPS_INDEX_READ of nvml.h; nvidia-ml-py has a tuple of it under that name, which it does not take.
_P2P_READ: Final = 0


def reachable_gpus(device_uuids: Sequence[bytes]) -> list[bytes]:
    """Return the CUDA UUIDs of the host's GPUs that can read the memory of every one of `device_uuids`.

    Args:
        device_uuids: CUDA UUIDs of the ranks' GPUs, 16 bytes each; a GPU may come twice.

    Returns:
        UUIDs in the order of the driver; none when there are no ranks on GPUs, when one of theirs is a slice (MIG), or
        when the library or the driver does not tell.
    """
    if not device_uuids:
        return []
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        _log.warning("no GPU is known to reach another without nvidia-ml-py; pip install nvidia-ml-py")
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.warning("the NVIDIA driver does not answer (%s), so that no GPU is known to reach another", error)
        return []
    try:
        gpus = _whole_gpus(nvml)
        if any(wanted not in gpus for wanted in device_uuids):
            return []
        owners = [gpus[wanted] for wanted in set(device_uuids)]
        return [name for name, gpu in gpus.items() if all(gpu is owner or _reads(nvml, gpu, owner) for owner in owners)]
    finally:
        nvml.nvmlShutdown()


def _whole_gpus(nvml: Any) -> dict[bytes, Any]:
    """Return the handles of the GPUs that are not in MIG mode, by CUDA UUID; those we may not look at are left out."""
    gpus = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if not _in_slices(nvml, handle):
                gpus[_cuda_uuid(nvml.nvmlDeviceGetUUID(handle))] = handle
    return gpus


def _in_slices(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU that has no such mode
        return False
    return bool(current)


def _reads(nvml: Any, reader: Any, owner: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(reader, owner, _P2P_READ)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _cuda_uuid(text: str | bytes) -> bytes:
    """Return the 16 bytes of "GPU-6e1f...": what CUDA calls the UUID of the device."""
    word = text.decode("ascii") if isinstance(text, bytes) else text
    return uuid.UUID(word.removeprefix("GPU-")).bytes
