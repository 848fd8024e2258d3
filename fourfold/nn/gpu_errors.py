"""Tells the errors after which a process can compute again from those that end its use of the GPU."""

from __future__ import annotations

import torch


def is_fatal(error: BaseException) -> bool:
    """Return whether no CUDA call can succeed in this process any more."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    kind = getattr(torch, "AcceleratorError", None)
    text = str(error)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in text or "device-side assert" in text
