"""nvidia-ml-py on a machine whose GPUs FAKE_GPUS names: "H200 141, T400 4" are two, with so many GiB.

For another process put this folder on the path, before the real one.
"""

from __future__ import annotations

import os
from types import SimpleNamespace


class NVMLError(Exception):
    """The error of NVML."""


def _gpus() -> list[list[str]]:
    return [text.split() for text in os.environ["FAKE_GPUS"].split(",") if text.strip()]


def nvmlInit() -> None:
    if os.environ["FAKE_GPUS"] == "no driver":
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    if _gpus()[handle][0] == "lost":
        raise NVMLError("GPU is lost")
    return _gpus()[handle][0]


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}aaa"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    if _gpus()[handle][1] == "none":
        raise NVMLError("Not Supported")
    return SimpleNamespace(total=int(_gpus()[handle][1]) << 30)
