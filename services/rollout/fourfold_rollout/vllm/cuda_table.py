"""The table of log-probabilities as a GPU sees it: host memory that its kernels write to."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

from fourfold.arrays import Float32Array

_PORTABLE_AND_MAPPED: Final = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def map_on_gpu(host: Float32Array, device: torch.device) -> tuple[Tensor | None, str]:
    """Lock the memory and map it on a GPU; return it as a tensor of that GPU, or None and the reason.

    It stays so until the process ends. All its pages are taken from now on.
    """
    cells = torch.from_numpy(host)
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        size = cells.numel() * cells.element_size()
        code = int(runtime.cudaHostRegister(cells.data_ptr(), size, _PORTABLE_AND_MAPPED))
        if code:
            return None, f"CUDA cannot map {size >> 20} MiB of the service's memory (error {code})"
        view = get_accelerator_view_from_cpu_tensor(cells)
    if view.device.type != "cuda" or view.shape != cells.shape:
        return None, "vLLM gives no view of host memory on a GPU"
    return view, ""
