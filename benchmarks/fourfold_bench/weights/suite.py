"""Many configurations, each in a process of its own that is ended when it takes too long; the table comes last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError
from fourfold_bench.weights.table import print_table

_SECONDS: Final = 300.0

_ON_CPU: Final = "--engine-device cpu --shape 0.135b"
_SERVICES: Final = "--path services --zero3"
_APART: Final = "--trainer-device cuda:0 --engine-device cuda:1"
_TOGETHER: Final = "--trainer-device cuda:0 --engine-device cuda:0"
_ZERO3: Final = "--zero3 --engine-device cuda:1 --engine-memory 0.3 --backend cuda_ipc"

# Name of a suite -> name of a configuration -> arguments.
SUITES: Final[dict[str, dict[str, str]]] = {
    "h200": {
        "0.43b-nccl": f"--shape 0.43b --backend nccl {_APART} --compare loop",
        "0.43b-ipc-apart": f"--shape 0.43b --backend cuda_ipc {_APART}",
        "0.43b-ipc-together": f"--shape 0.43b --backend cuda_ipc {_TOGETHER}",
        "0.43b-services-nccl": f"{_SERVICES} --shape 0.43b --backend nccl {_APART}",
        "0.43b-services-ipc": f"{_SERVICES} --shape 0.43b --backend cuda_ipc {_TOGETHER}",
        "7b-nccl": f"--shape 7b --backend nccl {_APART} --compare loop --eager",
        "7b-ipc-together": f"--shape 7b --backend cuda_ipc {_TOGETHER} --eager",
        "7b-ipc-apart": f"--shape 7b --backend cuda_ipc {_APART} --eager",
        "7b-zero3-1": f"--shape 7b --trainer-device cuda:0 {_ZERO3} --eager",
        "7b-zero3-2": f"--shape 7b --trainer-device cuda:0,cuda:1 {_ZERO3} --eager --compare loop",
    },
    "cpu": {
        "0.135b-shm": f"{_ON_CPU} --backend shm --compare loop --rounds 10",
        "0.135b-gloo": f"{_ON_CPU} --backend gloo --rounds 10",
        "0.135b-services-shm": f"{_ON_CPU} {_SERVICES} --backend shm",
        "0.135b-shm-zero3-2": f"{_ON_CPU} --backend shm --zero3 --ranks 2 --rounds 10",
    },
}


def run_suite(suite: str, folder: Path, *, only: str) -> int:
    """Run the configurations whose name contains `only`; write one JSON file each; return 1 when one failed.

    Raises:
        ConfigError: no name does.
    """
    chosen = {name: arguments for name, arguments in SUITES[suite].items() if only in name}
    if not chosen:
        raise ConfigError(f"--only {only}: in no name of the suite; they are {', '.join(SUITES[suite])}")
    folder.mkdir(parents=True, exist_ok=True)
    documents, failed = [], []
    for name, arguments in chosen.items():
        path = folder / f"weights-{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json"
        print(f"{name}: fourfold bench weights {arguments}", flush=True)
        began = time.monotonic()
        code = _run([*arguments.split(), "--name", name, "--json", str(path)])
        print(f"{name}: {'ok' if not code else f'failed ({code})'}, {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(name)
        else:
            documents.append(json.loads(path.read_text(encoding="utf-8")))
    if documents:
        print()
        print_table(documents)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(arguments: Sequence[str]) -> int:
    """Run one in a session of its own, so that nothing of it is left; return its exit code, 124: it took too long."""
    command = [sys.executable, "-m", "fourfold", "bench", "weights", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
