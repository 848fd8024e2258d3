"""`fourfold conformance rollout` on a rollout service with a real vLLM CPU engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from tests.support.rollout_process import start

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.lock, pytest.mark.timeout(700)]


def test_a_service_with_vllm_keeps_the_contract(
    tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny_model("qwen2"), tmp_path / "findings.json"
    service = start(model, tmp_path)
    try:
        words = ["conformance", "rollout", service.target, "--model", str(model), "--json", str(out)]
        words += ["--timeout", "180"]  # beside other work, the first grammar waits for a process that imports vLLM
        assert cli_main.main(words) == 0, capsys.readouterr().out
    finally:
        service.close()
    skipped = {finding["name"] for finding in json.loads(out.read_text())["findings"] if finding["status"] != "ok"}
    assert skipped == set()
