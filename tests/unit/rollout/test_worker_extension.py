"""The worker's access to AMX on CPU. Integration tests cover the other methods with real engines."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import torch

from fourfold_rollout.vllm.worker_extension import RolloutWorker

_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_PERM = 0x1022
_XFEATURE_XTILE_DATA = 18


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="AMX is x86's, asked of Linux")
def test_the_kernel_lets_a_process_that_asked_use_amx() -> None:
    assert RolloutWorker().allow_amx() == torch.cpu.get_capabilities()["amx_tile"]
    granted = ctypes.c_ulong()
    if torch.cpu.get_capabilities()["amx_tile"]:
        assert ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, ctypes.byref(granted)) == 0
        assert granted.value >> _XFEATURE_XTILE_DATA & 1
