"""Distinguishes errors that end a process's use of the GPU from errors after which it can continue."""

from __future__ import annotations

import os
import re

import torch


def is_fatal(error: BaseException) -> bool:
    """Return whether no CUDA call can succeed in this process any more."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    kind = getattr(torch, "AcceleratorError", None)
    text = str(error)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in text or "device-side assert" in text


def explain_out_of_memory(error: torch.OutOfMemoryError) -> str:
    """Return the facts of PyTorch's text: the GPU without free memory, the size asked for, the memory of each process.

    PyTorch counts the GPUs that the process sees; the text names that of the machine.
    """
    facts = str(error).partition(" If reserved but unallocated")[0].removeprefix("CUDA out of memory. ")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")

    def of_machine(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"GPU {visible[number] if number < len(visible) and visible[number] else number}"

    return "out of memory: " + re.sub(r"GPU (\d+)", of_machine, facts).rstrip(".")
