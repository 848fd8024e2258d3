"""Starts `fourfold bench` in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return the environment of a benchmark on few cores."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def bench(*words: str, folder: Path, timeout: float = 800.0) -> subprocess.CompletedProcess[str]:
    """Run `fourfold bench WORDS` in a folder to its end."""
    argv = [sys.executable, "-m", "fourfold", "bench", *words]
    return subprocess.run(
        argv, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )
