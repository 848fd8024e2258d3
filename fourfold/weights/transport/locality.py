"""Finds which processes and GPUs of a host can read each other's memory, and the address of a host. Needs no torch.

NVIDIA's management library sees every GPU of the host, including those that this process may not use:

    engine's GPU --- the same as a rank's ------------ reads its memory
                 `-- peer access (NVLink, PCIe) ------ reads its memory
                 `-- none, or one of them in MIG mode  does not read it: CUDA isolates MIG slices
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psutil

from fourfold.errors import NO_ADDRESS, WrongState
from fourfold.install import install_command

_log = logging.getLogger(__name__)
# NVML_P2P_CAPS_INDEX_READ of nvml.h. nvidia-ml-py exports a 1-tuple under that name, which its own call rejects.
_P2P_READ: Final = 0
_HOST_FILES: Final = (
    "/proc/sys/kernel/random/boot_id",
    "/proc/self/ns/pid",
    "/proc/self/ns/ipc",
    "/proc/self/ns/net",
)
_SHARED_MEMORY: Final = Path("/dev/shm")
_INTERFACE_FIX: Final = "start it with --advertise ADDRESS, or name the network of all machines in weights.interface"


def host_id() -> str:
    """Return a name that is equal only for processes that can map each other's memory, or "" if that is not known.

    It is a hash of host name, boot, user, namespaces (PID, IPC, network) and the mount of shared memory: 32 hexadecimal
    digits that disclose none of these. Initial namespaces have the same number on every host, so without the id of the
    boot two hosts could look like one.
    """
    parts = [_read(Path(path)) for path in _HOST_FILES]
    if not all(parts):
        return ""
    try:
        shared = _SHARED_MEMORY.stat()
        parts.append(f"{shared.st_dev} {shared.st_ino}")
    except OSError:
        parts.append("none")
    return hashlib.sha256("\0".join([socket.gethostname(), str(os.getuid()), *parts]).encode()).hexdigest()[:32]


def listen_address(host: str, interface: str = "") -> str:
    """Return the IP address of this machine on which peers reach it: that of `interface`, or else that of `host`.

    Raises WrongState: there is no such interface, it has no address, or no interface of this machine has the address
    of `host`.
    """
    if interface:
        known = psutil.net_if_addrs()
        own = [item for item in known.get(interface, []) if item.family in (socket.AF_INET, socket.AF_INET6)]
        if not own:
            raise WrongState(
                f"weights.interface = {interface!r}: this machine ({socket.gethostname()}) has no such interface with "
                f"an IP address; it has {', '.join(sorted(known))}",
                reason=NO_ADDRESS,
            )
        return min(own, key=lambda item: item.family != socket.AF_INET).address.partition("%")[0]
    try:
        found = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)))
    except OSError as error:
        raise WrongState(f"{_unusable(host)} ({error}); {_INTERFACE_FIX}", reason=NO_ADDRESS) from None
    for address in found:
        if not ipaddress.ip_address(address).is_unspecified and _can_listen(address):
            return address
    raise WrongState(
        f"{_unusable(host)}: none of its interfaces has {' or '.join(found)}; {_INTERFACE_FIX}", reason=NO_ADDRESS
    )


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
        command = install_command("nvidia-ml-py")
        _log.warning("Peer access of GPUs unknown: nvidia-ml-py is not installed; %s", command)
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


def _unusable(host: str) -> str:
    return f"machine {socket.gethostname()} cannot receive weights on {host!r}, the address its service is known by"


def _can_listen(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


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
