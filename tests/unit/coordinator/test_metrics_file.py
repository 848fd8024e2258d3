"""Writing metrics never gets in the way of the run."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fourfold.host import disk
from fourfold.metrics import REWARD_MEAN
from fourfold_coordinator.state import metrics_file
from fourfold_coordinator.state.metrics_file import MetricsWriter


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(100):
        writer.write({"step": step, REWARD_MEAN: step / 3})
    writer.close()
    writer.close()
    records = lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(100))
    assert records[1][REWARD_MEAN] == 1 / 3
    assert writer.dropped_count == 0


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        writer.write({"step": step})
        writer.close()
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_values_that_json_has_not_become_null_and_numpy_becomes_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    writer.write(
        {
            "a": float("nan"),
            "b": float("inf"),
            "c": np.float32(0.5),
            "d": np.int64(3),
            "e": np.float64("nan"),
            "f": True,
        }
        | {"g": {"h": [float("-inf"), 1]}, "i": None, "j": Path("x")}
    )
    writer.close()
    assert (tmp_path / "m").read_text() == (
        '{"a": null, "b": null, "c": 0.5, "d": 3, "e": null, "f": true, "g": {"h": [null, 1]}, "i": null, "j": "x"}\n'
    )


def test_a_disk_that_stands_still_costs_records_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, moves = tmp_path / "metrics.jsonl", threading.Event()

    def stand_still(path: Path, line: bytes) -> None:
        moves.wait(20)
        disk.append_lines(path, line)

    monkeypatch.setattr(metrics_file, "append_lines", stand_still)
    writer = MetricsWriter(path)
    for step in range(3000):  # returns, although nothing is written
        writer.write({"step": step})
    assert 3000 - 1024 - 2 <= writer.dropped_count <= 3000 - 1024
    moves.set()
    assert not writer.close(timeout=20)
    assert lines(path)[0] == {"step": 0} and len(lines(path)) == 3000 - writer.dropped_count


def test_a_disk_that_fails_is_said_once_and_no_record_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_RETRY_SECONDS", 0.01)
    path = tmp_path / "later" / "metrics.jsonl"
    with caplog.at_level(logging.WARNING):
        writer = MetricsWriter(path)
        writer.write({"step": 1})
        writer.write({"step": 2})
        while not caplog.records:
            time.sleep(0.01)
        path.parent.mkdir()
        writer.write({"step": 3})
        assert writer.close()
    assert len(caplog.records) == 1
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_disk_that_never_works_again_costs_the_records_and_close_says_so(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "missing" / "metrics.jsonl")
    for step in range(3):
        writer.write({"step": step})
    assert not writer.close()
    assert writer.dropped_count == 3


def test_a_record_that_cannot_be_written_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(tmp_path / "m")
    loop: dict[str, object] = {}
    loop["self"] = loop
    writer.write(loop)
    writer.write({"step": 1})
    writer.close()
    assert writer.dropped_count == 1
    assert lines(tmp_path / "m") == [{"step": 1}]
