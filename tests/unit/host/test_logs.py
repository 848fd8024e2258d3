"""Logs: JSON lines in files, short lines on a terminal, no secrets in either."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold.host import logs


class Terminal(io.StringIO):
    """A text stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """Restore the root logger after each test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_is_one_json_line_if_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    logs.setup("rollout-0", run_dir=tmp_path)
    logs.setup("rollout-0", run_dir=tmp_path)  # twice is once
    logging.getLogger("fourfold.x").info("two\nlines %d", 3, extra={"step": 4, "path": Path("a"), "_ray": 1})
    (record,) = records(err.getvalue())
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "info",
        "member": "rollout-0",
        "logger": "fourfold.x",
        "message": "two\nlines 3",
        "step": 4,
        "path": "a",
    }
    assert not list(tmp_path.iterdir()), "the launcher redirects stderr to the log file"


def test_on_a_terminal_lines_are_short_and_the_file_gets_the_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    logs.setup("rollout-0", run_dir=tmp_path)
    logging.getLogger("fourfold.x").warning("slow", extra={"seconds": 4})
    assert err.getvalue()[8:] == " warning: slow  seconds=4\n"
    (record,) = records((tmp_path / "logs" / "rollout-0.log").read_text())
    assert (record["message"], record["seconds"]) == ("slow", 4)


def test_a_process_that_prints_what_happens_keeps_its_terminal_for_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    logs.setup("coordinator-0", run_dir=tmp_path, terse=True)
    logging.getLogger("fourfold.x").info("joined")
    logging.getLogger("fourfold.x").warning("slow")
    assert [line[9:] for line in err.getvalue().splitlines()] == ["warning: slow"]
    written = records((tmp_path / "logs" / "coordinator-0.log").read_text())
    assert [record["message"] for record in written] == ["joined", "slow"]
    logs.setup("coordinator-0", terse=True)
    logging.getLogger("fourfold.x").info("nowhere else")
    assert "nowhere else" in err.getvalue()


def test_a_traceback_stays_in_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    logs.setup("m")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("fourfold.x").exception("failed")
    (record,) = records(err.getvalue())
    assert record["traceback"].endswith("ValueError: why")


@pytest.mark.parametrize("terminal", [True, False])
def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal() if terminal else io.StringIO())
    logs.setup("m")
    secret = "hunter2"
    fields: dict[str, object] = {
        "lease_token": secret,
        "offers": [secret],
        "authorization": secret,
        "private_key": secret,
        "data": secret.encode(),
        "header": f"authorization: Bearer {secret}",
    }
    logging.getLogger("fourfold.x").error("called with Bearer %s", secret, extra=fields)
    assert secret not in err.getvalue()
    assert "[7 bytes]" in err.getvalue()
    logging.getLogger("fourfold.x").error("no bearer token; send `authorization: Bearer TOKEN`")
    assert "no bearer token; send `authorization: Bearer TOKEN`" in err.getvalue()
    logging.getLogger("fourfold.x").info("ok", extra={"tokens": 12, "max_tokens": 3})
    assert "12" in err.getvalue().splitlines()[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_long_texts_are_shortened(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal() if terminal else io.StringIO())
    logs.setup("m")
    long = "x" * (8 << 20)
    try:
        raise ValueError(long)
    except ValueError:
        fields = {"target": long, "targets": [long], "count": 3}
        logging.getLogger("fourfold.x").exception("refused %s, again %s", long, "the end", extra=fields)
    assert len(err.getvalue()) < 50_000
    assert "refused xxx" in err.getvalue() and "again the end" in err.getvalue()
    assert "[8388608 characters]" in err.getvalue()


def test_on_a_terminal_control_characters_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    logs.setup("m")
    logging.getLogger("fourfold.x").warning("two\nlines \x1b[2J\x9b1m\r", extra={"peer": "a\x07b"})
    assert err.getvalue()[8:] == " warning: two\nlines ?[2J?1m?  peer=a?b\n"


def test_the_log_file_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    monkeypatch.setattr(sys, "stderr", Terminal())
    logs.setup("m", run_dir=tmp_path)
    for number in range(200):
        logging.getLogger("fourfold.x").info("line %d", number)
    files = {path.name: path for path in (tmp_path / "logs").iterdir()}
    assert files.keys() == {"m.log", "m.log.1"}
    assert all(path.stat().st_size <= 2000 for path in files.values())
    assert records(files["m.log"].read_text())[-1]["message"] == "line 199"
