"""Tests which lines of metrics.jsonl a sink gets."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict

from fourfold_coordinator.launch.run_names import LEDGER_FILE, METRICS_FILE
from fourfold_coordinator.sinks.rows import NewRows
from tests.support.eval_results import make_result

from .conftest import RunFolder


def open_rows(run: RunFolder) -> NewRows:
    return NewRows(run.folder / METRICS_FILE, run.folder / LEDGER_FILE, run.folder / "demo.sent")


def rewards(rows: NewRows) -> list[tuple[int, float]]:
    return [(row.step, row.values.get("reward/mean", row.values.get("eval/score", -1.0))) for row in rows]


def test_every_row_is_sent_once(run: RunFolder) -> None:
    rows = open_rows(run)
    found = list(rows)
    assert [row.step for row in found] == [0, 1, 2, 3]
    assert found[0].values == {"eval/score": 0.25, "eval/half_width": 0.125}
    assert found[1].values == {"reward/mean": 0.25}  # no texts, and nothing that was not finite
    assert found[1].time == 1795654801.0
    assert list(rows) == []
    run.write_steps([0.25, 0.5, 0.75, 1.0])
    assert rewards(rows) == [(4, 1.0)]
    assert list(open_rows(run)) == []  # of a new process
    assert open_rows(run).last_step == 4


def test_a_sink_that_died_gets_the_row_again(run: RunFolder) -> None:
    rows = iter(open_rows(run))
    assert [next(rows).step, next(rows).step, next(rows).step] == [0, 1, 2]
    rows.close()  # type: ignore[attr-defined]
    assert [row.step for row in open_rows(run)] == [2, 3]


def test_steps_that_a_resumed_run_repeats_are_sent_again(run: RunFolder) -> None:
    rows = open_rows(run)
    list(rows)
    run.write_steps([0.25], minute=0)  # restored to the checkpoint of step 1
    assert list(rows) == []
    run.write_steps([0.25, 0.5, 0.75], minute=9)  # the first step has another time, too: it was done again
    assert rewards(rows) == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_after_a_changed_line_all_lines_are_new(run: RunFolder) -> None:
    rows = open_rows(run)
    list(rows)
    run.write_steps([0.25, 0.625, 0.75])
    assert rewards(rows) == [(2, 0.625), (3, 0.75)]


def test_damaged_lines_are_passed_over(run: RunFolder) -> None:
    path = run.folder / METRICS_FILE
    whole = path.read_bytes()
    path.write_bytes(b'[]\n{"step": "x"}\n{"step": true}\n\xff\xfe\n' + whole[:-10])
    (run.folder / "demo.sent").write_text("nonsense\n1 zz\n")
    rows = open_rows(run)
    assert [row.step for row in rows] == [0, 1, 2]
    path.write_bytes(whole)
    assert [row.step for row in rows] == [3]


def test_evaluations_of_a_later_release_hold_up_no_step(run: RunFolder) -> None:
    for sets, found in (
        (json.dumps([asdict(make_result("math")) | {"median": 0.5}]), [0, 1, 2, 3]),
        ("[5]", [1, 2, 3]),
    ):
        with sqlite3.connect(run.folder / LEDGER_FILE) as db:
            db.execute("UPDATE evals SET sets = ?", (sets,))
            db.execute("PRAGMA user_version = 99")
        db.close()
        rows = NewRows(run.folder / METRICS_FILE, run.folder / LEDGER_FILE, run.folder / f"{len(found)}.sent")
        assert [row.step for row in rows] == found


def test_a_run_without_files_has_no_rows(run: RunFolder) -> None:
    (run.folder / LEDGER_FILE).unlink()
    assert [row.step for row in open_rows(run)] == [1, 2, 3]
    (run.folder / METRICS_FILE).unlink()
    assert list(open_rows(run)) == []
