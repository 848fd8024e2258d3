"""Free space is looked at before a run starts, before it is resumed, and by a coordinator that is started by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fourfold.cli import main as cli_main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "words", [["run", "r.toml"], ["run", "--resume", "runs/r"], ["serve", "coordinator", "r.toml"]]
)
def test_a_run_that_cannot_begin_for_want_of_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100 << 20))
    recipe = (ROOT / "recipes" / "quickstart.toml").read_text()
    (tmp_path / "r.toml").write_text(recipe)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.toml").write_text(recipe)
    assert cli_main.main(words) == 1
    assert "100 MiB of disk free, a run needs at least 256 MiB to start; free some space" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "r" / "ledger.sqlite").exists()
