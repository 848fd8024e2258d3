"""Arrays to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of `array` on `device`; with CUDA it is under way when this returns.

    From ordinary memory CUDA would copy only when all work before it is done, and the caller would wait for that.

    Args:
        array: of any shape.
        device: where to.
        dtype: of the result; None: that of the array.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).to(dtype or tensor.dtype)
