"""The example of weight updates without services, with a real vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bench_command import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


# A soak test, because it starts vLLM twice, each time with processes that import it.
def test_weights_go_into_vllm_without_any_service(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "examples/weights_alone.py"), str(tiny_model("llama"))]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens changed: True" in done.stdout
    assert "equal to a fresh engine: True" in done.stdout
