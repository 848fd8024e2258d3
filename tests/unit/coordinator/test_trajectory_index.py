"""Tests the index of the trajectories: searches, restores, kills, damage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fourfold_coordinator.state.sample_tokens import TOKENS_FILE, TokenSegment, decode_tokens, encode_tokens
from fourfold_coordinator.state.samples import SAMPLES_FILE
from fourfold_coordinator.state.trajectory_index import ORDERS, SamplePage, SampleQuery, TrajectoryIndex
from fourfold_coordinator.training.recovery import truncate_after
from tests.support.view_run import append_step, trajectory, write_run


def names(page: SamplePage) -> list[str]:
    return [row.sample_id for row in page.rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_every_line_is_found_once_and_a_second_update_adds_nothing(run: Path) -> None:
    index = TrajectoryIndex(run)
    assert index.update() == 18, "lines of both files"
    assert index.update() == 0 and index.covers()
    page = index.search(SampleQuery())
    assert page.count == 9 and len({*names(page)}) == 9 and page.rows[0].step == 3


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (SampleQuery(text="apples", order="oldest"), ["p1-0-1", "p2-0-1", "p3-0-1"]),
        (SampleQuery(text="appl*"), ["p3-0-1", "p2-0-1", "p1-0-1"]),
        (SampleQuery(text='"apples 2"'), ["p2-0-1"]),
        (SampleQuery(text='"2 apples"'), []),
        (SampleQuery(text="script step", step_to=1), ["p1-0-0"]),
        (SampleQuery(text='NEAR( " * -- apples'), []),
        (SampleQuery(text="appl"), []),
        (SampleQuery(text='" *'), []),
        (SampleQuery(score_from=1.0, order="oldest"), ["p1-0-0", "p2-0-0", "p3-0-0"]),
        (SampleQuery(score_to=0.5, step_from=3), ["p3-0-1"]),
        (SampleQuery(dropped="STALE", order="oldest"), ["q1-0-0", "q2-0-0", "q3-0-0"]),
        (SampleQuery(dropped="trained", step_from=3), ["p3-0-1", "p3-0-0"]),
        (SampleQuery(lag_from=2), ["q3-0-0"]),
        (SampleQuery(tokens_to=5, step_to=1), ["q1-0-0"]),
        (SampleQuery(scorer="other"), []),
        (SampleQuery(source="fruit", step_to=2), ["p2-0-1", "p1-0-1"]),
        (SampleQuery(group_id="p2-0", order="lowest score"), ["p2-0-1", "p2-0-0"]),
    ],
)
def test_a_search_finds_what_fits(run: Path, query: SampleQuery, found: list[str]) -> None:
    index = TrajectoryIndex(run)
    index.update()
    page = index.search(query)
    assert names(page) == found and page.count == len(found)


def test_a_trajectory_has_its_tokens_its_group_and_the_other_steps_of_its_prompt(run: Path) -> None:
    index = TrajectoryIndex(run)
    index.update()
    row = index.find("p2-0-1")
    assert row is not None and row.line.completion == "apples 2"
    (segment,) = index.tokens("p2-0-1")
    assert bytes(segment.token_ids.astype(np.uint8)).decode() == "What is 3 * 4?apples 2"
    assert np.isnan(segment.logprobs[:14]).all() and (segment.logprobs[14:] == -0.5).all()
    assert [r.sample_id for r in index.group(row)] == ["p2-0-0", "p2-0-1"]
    assert [r.step for r in index.same_prompt(row)] == [1, 2, 3]
    assert index.find("nothing") is None and index.tokens("nothing") == []


def test_a_restore_removes_rows_even_if_the_file_has_grown_again_since(run: Path) -> None:
    index = TrajectoryIndex(run)
    index.update()
    for name in (SAMPLES_FILE, TOKENS_FILE):
        truncate_after(run / name, 1)
    append_step(run, 2, [trajectory(f"r2-0-{i}", f"cherries {i}" * 99, step=2) for i in range(9)])
    assert (run / SAMPLES_FILE).stat().st_size > 3000
    index.update()
    assert index.covers() and index.search(SampleQuery()).count == 3 + 9
    assert names(index.search(SampleQuery(text="apples"))) == ["p1-0-1"]
    assert index.tokens("r2-0-8") and not index.tokens("p3-0-1")


def test_an_incomplete_line_waits_for_its_end_and_a_damaged_one_is_left_out(run: Path) -> None:
    index = TrajectoryIndex(run)
    line = (run / SAMPLES_FILE).read_bytes().splitlines()[0].replace(b"p1-0-0", b"z9-0-0")
    with (run / SAMPLES_FILE).open("ab") as file:
        place = file.tell()
        file.write(b'{"step": "no sample"}\n[1]\n' + line[:50])
    index.update()
    assert index.search(SampleQuery()).count == 9 and index.covers()
    assert index.left_out()[SAMPLES_FILE].startswith(
        f"2 of its lines cannot be read and are left out; in the one at byte {place}, step is 'no sample'"
    )
    with (run / SAMPLES_FILE).open("ab") as file:
        file.write(line[50:] + b"\n")
    assert index.update() == 1 and index.find("z9-0-0") is not None


def test_a_damaged_index_is_made_again(run: Path) -> None:
    index = TrajectoryIndex(run)
    index.update()
    index.path.write_bytes(b"no database " * 999)
    assert index.update() == 18 and index.covers()


def test_a_kill_in_an_update_loses_and_doubles_nothing(run: Path) -> None:
    """Kill updates of many lines at different moments; the last one ends the work."""
    for step in range(4, 24):
        append_step(run, step, [trajectory(f"k{step}-0-{i}", f"word{i} " * 300, step=step) for i in range(40)])
    code = f"""
import os, signal, sys
from pathlib import Path
from fourfold_coordinator.state import trajectory_index
trajectory_index._CHUNK_BYTES = 50_000
add, left = trajectory_index._add_samples, [int(sys.argv[1])]
def add_and_die(*args):
    add(*args)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
trajectory_index._add_samples = add_and_die
trajectory_index.TrajectoryIndex(Path({str(run)!r})).update()
"""
    index, grown = TrajectoryIndex(run), list[int]()
    for lines in (5, 333):
        child = subprocess.run([sys.executable, "-c", code, str(lines)], env=os.environ, check=False, timeout=60)
        assert child.returncode == -signal.SIGKILL
        grown.append(_committed(index))
    assert 0 <= grown[0] < grown[1] < 809, "both were killed in their work"
    index.update()
    found = index.search(SampleQuery(), limit=2000)
    assert index.covers() and len(found.rows) == len({*names(found)}) == 809
    assert index.search(SampleQuery(text="word39")).count == 20


def _committed(index: TrajectoryIndex) -> int:
    """Return the rows that are left when the journal of a killed writer is rolled back."""
    with contextlib.closing(sqlite3.connect(index.path)) as db:
        (count,) = db.execute("SELECT COUNT(*) FROM samples").fetchone()
    return int(count)


def test_tokens_survive_the_way_through_a_file_and_damage_is_an_error() -> None:
    segments = [
        TokenSegment(
            token_ids=np.array([1, 70_000, 200_000], np.int32),
            logprobs=np.array([np.nan, -0.1234, -99.0], np.float32),
        ),
        TokenSegment(token_ids=np.array([5], np.int32), logprobs=np.array([np.nan], np.float32)),
    ]
    text = json.loads(b'"%b"' % encode_tokens(segments))
    found = decode_tokens(text)
    assert [s.token_ids.tolist() for s in found] == [[1, 70_000, 200_000], [5]]
    np.testing.assert_allclose(found[0].logprobs, segments[0].logprobs, rtol=1e-3)
    for damaged in ("", "AAAA", text[:-8], "!"):
        with pytest.raises(ValueError, match="damaged tokens"):
            decode_tokens(damaged)


def test_words_of_most_trajectories_keep_every_order_and_condition(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = TrajectoryIndex(run)
    index.update()
    for order in ("highest score", "lowest score", "longest", "shortest", "newest", "least likely"):
        query = SampleQuery(text="3", step_from=2, order=order)
        expected = index.search(query)
        monkeypatch.setattr("fourfold_coordinator.state.trajectory_index.MAX_COUNT", 2)
        found = index.search(query)
        monkeypatch.undo()
        assert (found.count, found.capped, expected.capped) == (2, True, False)
        assert names(found) == names(expected) and len(found.rows) == 4, order


def test_the_docs_name_the_orders_of_samples() -> None:
    text = (Path(__file__).parents[3] / "docs/view.md").read_text()
    assert f"Orders: {', '.join(ORDERS)} |" in text
