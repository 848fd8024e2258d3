"""Tells which processes and which GPUs of a host can read each other's memory. Needs no torch.

NVIDIA's management library sees every GPU of the host, including those that this process may not use:

    engine's GPU --- the same as a rank's ------------ reads its memory
                 `-- peer access (NVLink, PCIe) ------ reads its memory
                 `-- none, or one of them in MIG mode  does not read it: CUDA isolates MIG slices
"""

from __future__ import annotations

import hashlib
import logging
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger(__name__)
# NVML_P2P_CAPS_INDEX_READ of nvml.h. nvidia-ml-py exports a 1-tuple under that name, which its own call rejects.
_P2P_READ: Final = 0


def host_id() -> str:
    """Return a name that is equal for processes that can map each other's memory.

    It is a hash of host name, boot, PID and IPC namespace: 32 hexadecimal digits that disclose none of these.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/ipc"):
        parts.append(_read(Path(path)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def reachable_gpus(device_uuids: Sequence[bytes]) -> list[bytes]:
    """Return the CUDA UUIDs (16 bytes each) of the host's GPUs that can read the memory of every one of `device_uuids`.

    In the driver's order. Empty without ranks on GPUs, when one of theirs is a MIG slice, and when the library or the
    driver is missing.
    """
    if not device_uuids:
        return []
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        _log.warning("Peer access of GPUs unknown: nvidia-ml-py is not installed; pip install nvidia-ml-py")
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.warning("Peer access of GPUs unknown: NVML did not start. error=%s", error)
        return []
    try:
        gpus = _whole_gpus(nvml)
        if any(wanted not in gpus for wanted in device_uuids):
            return []
        owners = [gpus[wanted] for wanted in set(device_uuids)]
        return [name for name, gpu in gpus.items() if all(gpu is owner or _reads(nvml, gpu, owner) for owner in owners)]
    finally:
        nvml.nvmlShutdown()


def _read(path: Path) -> str:
    try:
        return str(path.readlink()) if path.is_symlink() else path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _whole_gpus(nvml: Any) -> dict[bytes, Any]:
    """Return NVML handles by CUDA UUID, without GPUs in MIG mode and GPUs that this user may not query."""
    gpus = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if not _is_mig(nvml, handle):
                gpus[_cuda_uuid(nvml.nvmlDeviceGetUUID(handle))] = handle
    return gpus


def _is_mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # GPUs before Ampere have no MIG mode
        return False
    return bool(current)


def _reads(nvml: Any, reader: Any, owner: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(reader, owner, _P2P_READ)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _cuda_uuid(text: str | bytes) -> bytes:
    """Return the 16 bytes that CUDA calls the UUID of the device, from NVML's "GPU-6e1f..."."""
    word = text.decode("ascii") if isinstance(text, bytes) else text
    return uuid.UUID(word.removeprefix("GPU-")).bytes
