"""The private folder in which the processes of an engine meet, and which is removed with the engine."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.executor import multiproc_executor, uniproc_executor

from fourfold_rollout.vllm.patches.private_folder import use_private_folder

_NAMES = ("get_file_store_init_method", "get_distributed_init_method")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore vLLM's functions and its variable afterwards."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp")
    for module in (uniproc_executor, multiproc_executor):
        for name in _NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.parametrize("long", [False, True])
def test_sockets_of_an_engine_are_in_its_private_folder(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        root = Path(short) / ("x" * 80) if long else Path(short)
        root.mkdir(exist_ok=True)
        monkeypatch.setattr("tempfile.tempdir", str(root))
        scratch = use_private_folder()
        path = get_open_zmq_ipc_path().removeprefix("ipc://")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)  # its name is short enough
        assert Path(path).parent == scratch.path and scratch.path.stat().st_mode & 0o777 == 0o700
        assert scratch.path.parent == (Path("/tmp") if long else root)
        scratch.remove()
        assert not scratch.path.exists() and [*root.iterdir()] == []
