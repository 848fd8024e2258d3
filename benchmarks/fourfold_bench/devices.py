"""GPUs by the names that torch, the driver and a child process give them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fourfold.errors import ConfigError
from fourfold.host import hardware


@cache
def usable() -> tuple[hardware.Gpu, ...]:
    """Return the GPUs of this benchmark, as they were when it began: CUDA_VISIBLE_DEVICES changes for an engine."""
    return tuple(hardware.visible_gpus())


def default_device() -> str:
    """Return the first GPU, or the CPU where there is none."""
    return "cuda:0" if usable() else "cpu"


def check_present(devices: Sequence[str]) -> None:
    """Check that this benchmark has them, before anything is written or started.

    Args:
        devices: "cpu", "cuda:0", ...

    Raises:
        ConfigError: one is no device, or not there.
    """
    for device in devices:
        if device != "cpu":
            physical_gpu(device)


def visible(*devices: str) -> dict[str, str]:
    """Return the environment of a process that shall see these devices alone, as its cuda:0, cuda:1, ..."""
    return hardware.gpu_environment(physical_gpu(device) for device in devices if device != "cpu")


def physical_gpu(device: str) -> str:
    """Return what the driver calls a device that this process calls "cuda:1".

    Raises:
        ConfigError: it is no GPU, or not there.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"device {device!r}: it must be cpu, or cuda:0, cuda:1, ...")
    there = usable()
    if not there:
        raise ConfigError(f"device {device}: this process sees no GPU (`fourfold doctor` says why); take cpu")
    number, count = int(index or "0"), len(there)
    if number >= count:
        raise ConfigError(f"device {device}: this process sees {count}, of which the last is cuda:{count - 1}")
    return there[number].id
