"""The ledger against a small model, and what it refuses."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fourfold.errors import AlreadyExists, NotFound, WrongState
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import (
    LEGAL_TRANSITIONS,
    TRAINER_RESTORED,
    Ledger,
    RecordPlace,
    SampleState,
)
from tests.support.eval_results import make_result

LIVE = [SampleState.ISSUED, SampleState.RUNNING, SampleState.ROLLED, SampleState.READY, SampleState.LEASED]


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the ledger as the model says; refused calls change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.states: dict[str, SampleState] = {}
        self.step_of: dict[str, int] = {}
        self.trained_in: dict[str, int] = {}
        self.steps: dict[int, int] = {}  # step -> policy version
        self.checkpoints: dict[int, int] = {}
        self.highest = 0
        self.position = 0

    def teardown(self) -> None:
        self.ledger.close()
        shutil.rmtree(self.folder)

    def pick(self, data: Any, *states: SampleState) -> list[str]:
        ids = sorted(name for name, state in self.states.items() if not states or state in states)
        return data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=4, unique=True)) if ids else []

    @rule(count=st.integers(1, 4), again=st.booleans())
    def issue(self, count: int, again: bool) -> None:
        position = max(self.position - 1, 0) if again else self.position
        self.position = max(self.position, position + 1)
        step = len(self.steps) + 1
        issued = self.ledger.issue(step=step, position=position, count=count)
        assert not set(issued.sample_ids) & set(self.states), "ids are unique in the run"
        for sample_id in issued.sample_ids:
            self.states[sample_id], self.step_of[sample_id] = SampleState.ISSUED, step

    @precondition(lambda self: self.states)
    @rule(data=st.data(), to=st.sampled_from(list(SampleState)))
    def move(self, data: Any, to: SampleState) -> None:
        ids = self.pick(data)
        if all(to in LEGAL_TRANSITIONS[self.states[name]] for name in ids):
            if to is SampleState.DROPPED:
                self.ledger.drop(ids, "BECAUSE")
            else:
                self.ledger.move(ids, to)
            self.states.update(dict.fromkeys(ids, to))
        else:
            with pytest.raises(WrongState):
                self.ledger.move(ids, to)

    @precondition(lambda self: SampleState.READY in self.states.values())
    @rule(data=st.data())
    def train(self, data: Any) -> None:
        ids, step = self.pick(data, SampleState.READY), len(self.steps) + 1
        self.ledger.lease(step, ids)
        self.ledger.lease(step, ids)
        version = self.highest + data.draw(st.integers(0, 1))
        for _ in range(2):
            self.ledger.acknowledge(step, policy_version=version, skipped_reason="", data_position=self.position)
        self.steps[step] = version
        for name in ids:
            assert name not in self.trained_in, "a sample enters one step"
            self.states[name], self.trained_in[name] = SampleState.TRAINED, step
            self.step_of[name] = step
        self.ledger.publishing(version, step)
        self.highest = max(self.highest, version)

    @precondition(lambda self: SampleState.READY in self.states.values())
    @rule(data=st.data())
    def lease_and_die(self, data: Any) -> None:
        ids, step = self.pick(data, SampleState.READY), len(self.steps) + 1
        self.ledger.lease(step, ids)
        self.states.update(dict.fromkeys(ids, SampleState.LEASED))
        self.restore()

    @rule()
    def checkpoint(self) -> None:
        step = len(self.steps)
        if step:
            self.ledger.commit_checkpoint(step=step, data_position=self.position, policy_version=self.steps[step])
            self.checkpoints[step] = self.position

    @rule()
    def restore(self) -> None:
        point = self.ledger.last_checkpoint()
        step = point.step if point else 0
        assert step == max(self.checkpoints, default=0)
        lost = [n for n, s in self.states.items() if s in LIVE or (s is SampleState.TRAINED and self.step_of[n] > step)]
        assert self.ledger.restore(step) == len(lost)
        self.states.update(dict.fromkeys(lost, SampleState.DROPPED))
        self.steps = {s: v for s, v in self.steps.items() if s <= step}
        self.position = point.data_position if point else 0

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite")

    @invariant()
    def agrees(self) -> None:
        assert {name: self.ledger.state(name) for name in self.states} == self.states
        assert [row.step for row in self.ledger.steps()] == sorted(self.steps)
        assert self.ledger.last_step() == len(self.steps)
        assert self.ledger.highest_version() == self.highest
        assert sum(self.ledger.dropped().values()) == sum(s is SampleState.DROPPED for s in self.states.values())


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLedgerAgainstAModel = LedgerMachine.TestCase


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def ready(ledger: Ledger, count: int = 2, *, step: int = 1, position: int = 0) -> tuple[str, ...]:
    ids = ledger.issue(step=step, position=position, count=count).sample_ids
    for state in (SampleState.RUNNING, SampleState.ROLLED, SampleState.READY):
        ledger.move(ids, state)
    return ids


def acknowledge(ledger: Ledger, step: int, version: int) -> None:
    ledger.acknowledge(step, policy_version=version, skipped_reason="", data_position=step)


def test_a_move_is_whole_or_not_at_all(ledger: Ledger) -> None:
    ids = ledger.issue(step=1, position=0, count=2).sample_ids
    ledger.move(ids[:1], SampleState.RUNNING)
    with pytest.raises(WrongState, match=r"is ISSUED; it cannot become ROLLED"):
        ledger.move(ids, SampleState.ROLLED)
    assert [ledger.state(name) for name in ids] == [SampleState.RUNNING, SampleState.ISSUED]


def test_a_sample_that_was_never_issued_is_not_found(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="never issued"):
        ledger.move(["p0-0-0"], SampleState.RUNNING)


def test_nothing_is_dropped_without_a_reason(ledger: Ledger) -> None:
    ids = ledger.issue(step=1, position=0, count=2).sample_ids
    with pytest.raises(WrongState, match="without a reason"):
        ledger.drop(ids, "")


def test_a_trained_sample_enters_no_other_step(ledger: Ledger) -> None:
    ids = ready(ledger)
    ledger.lease(1, ids)
    acknowledge(ledger, 1, 1)
    with pytest.raises(WrongState, match="only READY"):
        ledger.lease(2, ids)
    with pytest.raises(WrongState):
        ledger.drop(ids, "CHANGED_MY_MIND")


def test_one_step_takes_one_batch(ledger: Ledger) -> None:
    first, second = ready(ledger), ready(ledger, position=1)
    ledger.lease(1, first)
    assert ledger.leased() == dict.fromkeys(first, "p0000000-0")
    with pytest.raises(AlreadyExists, match="leased with 2 other samples"):
        ledger.lease(1, second)
    with pytest.raises(WrongState, match="the next is 1"):
        ledger.lease(2, second)


def test_a_checkpoint_of_another_step_is_refused(ledger: Ledger) -> None:
    with pytest.raises(WrongState, match="0 steps are done"):
        ledger.commit_checkpoint(step=1, data_position=1, policy_version=1)


def test_a_restore_forgets_what_came_later_and_keeps_versions(ledger: Ledger) -> None:
    kept = ready(ledger)
    ledger.lease(1, kept)
    acknowledge(ledger, 1, 1)
    ledger.publishing(1, 1)
    for step in (0, 1):
        ledger.add_eval(EvalRow(step=step, score=0.5, half_width=None, answer_count=4, missing_count=0, answers=[]))
    ledger.commit_checkpoint(step=1, data_position=1, policy_version=1)
    lost = ready(ledger, step=2, position=1)
    ledger.lease(2, lost)
    acknowledge(ledger, 2, 2)
    ledger.publishing(2, 2)
    ledger.add_eval(EvalRow(step=2, score=0.7, half_width=0.1, answer_count=4, missing_count=0, answers=[]))
    unfinished = ledger.issue(step=3, position=2, count=2).sample_ids
    ledger.drop(ledger.issue(step=1, position=3, count=1).sample_ids, "NO_IDEA")
    ledger.drop(ledger.issue(step=2, position=4, count=3).sample_ids, "FILTERED")  # its prompt is issued again
    assert ledger.restore(1) == 4
    assert {ledger.state(name) for name in (*lost, *unfinished)} == {SampleState.DROPPED}
    assert {ledger.state(name) for name in kept} == {SampleState.TRAINED}
    assert ledger.dropped() == {TRAINER_RESTORED: 4 + 3, "NO_IDEA": 1}
    assert [row.step for row in ledger.evals()] == [0, 1]
    assert (ledger.last_step(), ledger.highest_version()) == (1, 2)
    again = ledger.issue(step=2, position=1, count=2)
    assert not set(again.sample_ids) & set(lost)


def test_a_killed_process_leaves_no_half_transaction(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ids = ledger.issue(step=1, position=0, count=2).sample_ids
    # What a kill between two statements leaves behind: an open transaction, never committed.
    ledger._db.execute("BEGIN IMMEDIATE")
    ledger._db.execute("UPDATE samples SET state = 'TRAINED'")
    shutil.copytree(tmp_path, tmp_path / "after")
    ledger._db.execute("ROLLBACK")
    after = Ledger(tmp_path / "after" / "ledger.sqlite")
    assert {after.state(name) for name in ids} == {SampleState.ISSUED}


def test_the_file_is_in_wal_mode(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_step_0_cannot_be_acknowledged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(WrongState, match="step 0 cannot be acknowledged: 0 steps are done"):
        ledger.acknowledge(0, policy_version=0, skipped_reason="", data_position=0)


def test_the_results_of_held_out_sets_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = EvalRow(
        2, 0.5, None, 16, 0, [], (make_result("math"), replace(make_result("code", score=0.25), interval=(0.2, 0.6)))
    )
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.add_eval(row)
        assert ledger.evals() == [row]
    assert list(row.scores().items()) == [
        ("eval/score", (0.5, None)), ("eval/math/score", (0.5, (0.25, 0.75))), ("eval/code/score", (0.25, (0.2, 0.6)))
    ]  # fmt: skip
    assert row.set_metrics()["eval/code/pass_at_2"] == 0.75 and row.set_metrics()["eval/math/maj_at_1"] == 0.5


def test_a_ledger_of_a_later_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    later = sqlite3.connect(path, isolation_level=None)
    later.execute("PRAGMA user_version = 99")
    with pytest.raises(WrongState, match="schema version 99; this release reads version 2: resume the run with"):
        Ledger(path)
    assert later.execute("PRAGMA user_version").fetchone() == (99,)
    later.close()


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    for content in (path.read_bytes()[:5000], b"text" * 2000):
        path.write_bytes(content)
        with pytest.raises(
            WrongState, match=r"ledger\.sqlite: damaged, or no ledger \(.*\); restore the file from a copy"
        ):
            Ledger(path)


def test_a_restore_keeps_the_groups_it_is_told_to_and_their_leased_samples_are_ready_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    groups = [ledger.issue(step=1, position=position, count=2) for position in range(3)]
    for group in groups:
        ledger.move(group.sample_ids, SampleState.RUNNING)
        ledger.move(group.sample_ids, SampleState.ROLLED)
        ledger.drop(group.sample_ids[1:], "RAISED")
        ledger.make_ready(group.sample_ids[:1], [RecordPlace(name, 1, 4) for name in group.sample_ids])
    ledger.lease(1, [group.sample_ids[0] for group in groups[:2]])
    assert [row.dropped for row in ledger.recorded()] == ["", "RAISED"] * 3
    assert ledger.restore(0, keep=["p0000000-0", "p0000002-0"]) == 1
    assert ledger.counts() == {SampleState.READY: 2, SampleState.DROPPED: 4}
    assert ledger.dropped() == {"RAISED": 2, TRAINER_RESTORED: 2}
    assert [row.position for row in ledger.recorded()] == [0, 0, 2, 2]
    ledger.lease(1, ["p0000002-0-0", "p0000000-0-0"])
    ledger.close()


def test_no_call_of_a_step_reads_all_rows(ledger: Ledger) -> None:
    queries: list[str] = []
    ledger._db.set_trace_callback(queries.append)
    ledger.lease(1, ready(ledger))
    acknowledge(ledger, 1, 1)
    ledger.commit_checkpoint(step=1, data_position=1, policy_version=1)
    ledger.release(1)
    ledger._db.set_trace_callback(None)
    explained = [q for q in queries if q.lstrip().startswith(("SELECT", "UPDATE", "DELETE"))]
    plans = {
        step for q in explained for (*_, step) in ledger._db.execute(f"EXPLAIN QUERY PLAN {q}") if "samples" in step
    }
    assert "SEARCH samples USING INDEX samples_of_step (step=?)" in plans, "the leased ones are of one step"
    assert all(step.startswith("SEARCH samples ") and "(step<?" not in step for step in plans), plans
