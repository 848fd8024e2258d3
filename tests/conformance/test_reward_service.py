"""Our reward service and the examples keep the contract, as `fourfold conformance` sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main


@pytest.mark.slow
@pytest.mark.lock
def test_the_services_of_this_repository_keep_the_contract(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "findings.json"
    assert cli_main.main(["conformance", "reward", target, "--json", str(out)]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert {finding["status"] for finding in document["findings"]} == {"ok", "skipped"}
    assert "ok       info " in capsys.readouterr().out


def test_a_target_that_is_not_there_is_one_failure(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["conformance", "reward", f"127.0.0.1:{unused_tcp_port}", "--timeout", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("broken   info") and "UNAVAILABLE" in lines[1]
    assert lines[-2].split() == ["rules", "ok", "broken", "skipped", "not", "run"]
    assert lines[-1].split()[:3] == ["0", "1", "0"]
