"""Broadcasts a model tensor by tensor, as post-training systems commonly do: the baseline of the weight benchmark.

    for every parameter: gather it (ZeRO-3), announce name, type and shape, broadcast it, `model.load_weights`

Trainer ranks import this module, too, so it must not import vLLM.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import BroadcastOptions, FileStore  # type: ignore[attr-defined]


class LoopGroup:
    """A NCCL or gloo group of trainer rank 0 (its rank 0) and the engine's workers, apart from torch's global group."""

    def __init__(self, rendezvous: Path, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Meet the other members through a file."""
        store = FileStore(str(rendezvous), size)
        store.set_timeout(timedelta(seconds=timeout))
        self._group: Any
        distributed: Any = torch.distributed
        if device.type == "cuda":
            self._group = distributed.ProcessGroupNCCL(store, rank, size, distributed.ProcessGroupNCCL.Options())
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=timeout)
            self._group = distributed.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send from rank 0, or receive into `tensor`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
