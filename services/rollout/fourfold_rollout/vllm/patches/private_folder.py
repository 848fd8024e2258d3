"""Makes the processes of an engine meet in a private folder instead of a TCP port and the temporary folder."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path
from typing import Final

from vllm.v1.executor import multiproc_executor, uniproc_executor

from fourfold.host.scratch import Scratch

_SOCKET_FOLDER: Final = "VLLM_RPC_BASE_PATH"
_SHORT_ROOT: Final = Path("/tmp")
# The path of a Unix socket has at most 107 bytes.
_ROOT_BYTES: Final = 107 - len(f"/fourfold-engine-12345678/{uuid.UUID(int=0)}")


def use_private_folder() -> Scratch:
    """Let the processes of the next engine meet in a private folder; return it, to be removed after the engine's end.

    vLLM before 0.32 lets workers meet at a TCP port on all interfaces; later versions leave a file in the temporary
    folder. vLLM also leaves three Unix sockets of each engine there, between the front end and the core process.
    """
    root = Path(tempfile.gettempdir())
    scratch = Scratch("engine", root=root if len(os.fsencode(root)) <= _ROOT_BYTES else _SHORT_ROOT)
    os.environ[_SOCKET_FOLDER] = str(scratch.path)  # vLLM reads it when it makes a socket
    for module in (uniproc_executor, multiproc_executor):
        by_file = hasattr(module, "get_file_store_init_method")
        name = "get_file_store_init_method" if by_file else "get_distributed_init_method"
        setattr(module, name, lambda *_address: f"file://{scratch.path}/{uuid.uuid4().hex}")
    return scratch
