"""Tests the position that a restore chooses, and its changes to the files of a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fourfold.config import Config
from fourfold.errors import NotFound, WrongState
from fourfold.tracing import spans
from fourfold.trainer.v1.trainer_service_pb2 import TrainerStatus, TrainStepResponse
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.ledger import COORDINATOR_RESTARTED, Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.run_position import RunPosition
from fourfold_coordinator.state.sample_traces import SampleTraces
from fourfold_coordinator.training import recovery
from fourfold_coordinator.training.context import RunContext
from fourfold_coordinator.training.recovery import (
    TRAINER_KEY,
    newest_checkpoint,
    restore,
    rewrite_metrics,
    take_over,
    truncate_after,
)

CONFIG = Config.model_validate(
    {
        "name": "t",
        "steps": 9,
        "model": {"source": "m"},
        "data": {"train": {"path": "x.jsonl"}},
        "batch": {"prompts_per_step": 3, "group_size": 2},
        "sampling": {"max_new_tokens": 4},
        "trainer": {"step_timeout_seconds": 77.0},
    }
)


class Session:
    """A session with a trainer of the test; it remembers the deadline of every call."""

    def __init__(self, status: TrainerStatus, *, has_checkpoint: bool = True) -> None:
        self.status = status
        self.has_checkpoint = has_checkpoint
        self.policy_version, self.incarnation = -1, "a"
        self.timeouts: dict[str, float] = {}

    async def call(self, name: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        return await work(SimpleNamespace(trainer=self))

    async def wait_until_idle(self) -> TrainerStatus:
        return self.status

    async def get_status(self, *, timeout: float) -> TrainerStatus:
        self.timeouts["GetStatus"] = timeout
        return self.status

    async def load_checkpoint(self, step: int, *, timeout: float) -> TrainerStatus:
        self.timeouts["LoadCheckpoint"] = timeout
        if not self.has_checkpoint:
            raise NotFound("no such folder")
        return TrainerStatus(step=step, policy_version=step)

    async def raise_policy_version(self, version: int) -> int:
        self.policy_version = version
        return version


def run_of(folder: Path, ledger: Ledger, session: Session) -> RunContext:
    """A run whose recipe is not the one that sampled what is stored."""
    disk = DiskWriter(folder, RunBoard(name="t", step_count=9), wait_seconds=1.0)
    router = SimpleNamespace(traces=SampleTraces())
    parts = {"config": CONFIG, "folder": folder, "ledger": ledger, "session": session, "disk": disk, "router": router}
    return cast(RunContext, SimpleNamespace(**parts))


async def restored(folder: Path, ledger: Ledger, session: Session) -> RunPosition:
    return await restore(run_of(folder, ledger, session))


def lease(ledger: Ledger, step: int, *positions: int) -> list[str]:
    """Sample the prompts at these positions, and put them into the batch of a step."""
    groups = [ledger.issue(step=step, position=position, count=2).sample_ids for position in positions]
    samples = [name for group in groups for name in group]
    for state in (SampleState.RUNNING, SampleState.ROLLED, SampleState.READY):
        ledger.move(samples, state)
    ledger.lease(step, samples)
    return samples


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Four steps of three prompts each; a checkpoint after the second."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in range(1, 5):
        lease(ledger, step, *range(3 * step - 3, 3 * step))
        ledger.acknowledge(step, policy_version=step, skipped_reason="", data_position=3 * step)
        ledger.record_metrics(step, {"reward/mean": step / 10}, seconds=1.0)
        if step == 2:
            ledger.commit_checkpoint(step=2, data_position=6, policy_version=2)
    return ledger


@pytest.mark.parametrize(
    ("trainer_has", "chosen"),
    [
        (-1, (2, 6)),  # a trainer that does not say
        (1, (2, 6)),  # of an earlier step
        (2, (2, 6)),
        (4, (4, 12)),  # written before the coordinator died, and never committed
        (9, (2, 6)),  # of a step that the ledger does not know
    ],
)
def test_the_newest_checkpoint_that_both_sides_know(ledger: Ledger, trainer_has: int, chosen: tuple[int, int]) -> None:
    assert newest_checkpoint(ledger, TrainerStatus(checkpoint_step=trainer_has)) == chosen


def test_the_trainer_may_save_a_step_by_itself_before_its_numbers_are_known(ledger: Ledger) -> None:
    ledger.acknowledge(5, policy_version=5, skipped_reason="", data_position=15)
    assert newest_checkpoint(ledger, TrainerStatus(checkpoint_step=5)) == (5, 15)


def test_lines_of_later_steps_and_torn_lines_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = [json.dumps({"step": step, "text": "\u00e4"}, ensure_ascii=False) for step in (1, 1, 2, 3)]
    path.write_text("\n".join([*whole, '{"step": 2, "text": "to']), encoding="utf-8")
    truncate_after(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == whole[:3]
    truncate_after(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == whole[:3]
    truncate_after(path, 0)
    assert path.read_text(encoding="utf-8") == ""
    truncate_after(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_line_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    good = [b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 2, "text": "\xff"}\n']
    path.write_bytes(good[0] + b'{"st\n' + b'{"text": ""}\n' + b"[1]\n" + good[1] + good[2])
    truncate_after(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == [
        '{"step": 1}', '{"step": 2}', '{"step": 2, "text": "\ufffd"}',
    ]  # fmt: skip


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        fresh = path.with_name("samples.jsonl.new")
        assert fresh.read_text() == '{"step": 1}\n', "all of it was handed to the system"
        assert os.fstat(descriptor).st_ino == fresh.stat().st_ino
        done.append("fsync")

    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", note)
    truncate_after(path, 1)
    assert done == ["fsync", "replace"]


def test_a_last_line_without_its_end_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 1}')
    truncate_after(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_metrics_are_written_again_as_the_ledger_has_them(tmp_path: Path, ledger: Ledger) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.9}\n{"step": 7}\n{"st')
    ledger.restore(2)
    rewrite_metrics(path, ledger.steps())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}]
    assert not list(tmp_path.glob("*.new"))


async def test_versions_go_on_above_the_only_one_that_was_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.publishing(1, 1)
    session = Session(TrainerStatus(checkpoint_step=-1))
    assert await restored(tmp_path, ledger, session) == RunPosition(step=0, next_position=0)
    assert session.policy_version == 2, "an engine may hold version 1 of the weights that are lost"
    assert "restored: step=0 policy_version=2" in caplog.text


async def test_a_run_that_published_nothing_keeps_the_version_of_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(TrainerStatus(checkpoint_step=-1, policy_version=5))
    await restored(tmp_path, Ledger(tmp_path / "ledger.sqlite"), session)
    assert session.policy_version == 5
    assert "LoadCheckpoint" not in session.timeouts and not caplog.text


def answered(step: int, **fields: Any) -> TrainerStatus:
    """The status of a trainer that has done `step`."""
    last = TrainStepResponse(step=step, policy_version=step, metrics={"reward/mean": 0.7, "loss": math.nan})
    return TrainerStatus(step=step, policy_version=step, last_step=last, **fields)


async def taken_over(folder: Path, ledger: Ledger, status: TrainerStatus, known: str = "a") -> RunPosition | None:
    ledger.put({TRAINER_KEY: known})
    return await take_over(run_of(folder, ledger, Session(status)))


def test_a_recipe_of_more_steps_keeps_ready_samples_and_another_seed_does_not() -> None:
    changes: list[dict[str, int]] = [{}, {"steps": CONFIG.steps + 1}, {"seed": CONFIG.seed + 1}]
    digests = [recovery._recipe_sha256(CONFIG.model_copy(update=change)) for change in changes]
    assert digests[0] == digests[1] != digests[2]


async def test_a_trainer_at_the_last_step_of_the_ledger_is_kept(tmp_path: Path, ledger: Ledger) -> None:
    samples = lease(ledger, 5, 12)
    files = [tmp_path / name for name in ("samples.jsonl", "tokens.jsonl", "timeline.jsonl")]
    for file in files:
        file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (3, 4, 5)))
    position = await taken_over(tmp_path, ledger, answered(4))
    assert position == RunPosition(step=4, next_position=13, open_positions=(12,), trainer_kept=True)
    assert ledger.dropped() == {COORDINATOR_RESTARTED: 2} and ledger.state(samples[0]) is SampleState.DROPPED
    for file in files:
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [3, 4], file.name
    assert ledger.steps()[-1].metrics == {"reward/mean": 0.4}, "metrics that were recorded stay"


async def test_a_step_that_the_trainer_has_done_is_acknowledged(tmp_path: Path, ledger: Ledger) -> None:
    lost = lease(ledger, 5, 20)  # an earlier try of the step had drawn more prompts
    ledger.restore(4)
    samples = lease(ledger, 5, 14)
    position = await taken_over(tmp_path, ledger, answered(5))
    assert position == RunPosition(step=5, next_position=21, open_positions=(20,), trainer_kept=True)
    assert ledger.state(samples[0]) is SampleState.TRAINED and ledger.state(lost[0]) is SampleState.DROPPED
    row = ledger.steps()[-1]
    assert (row.policy_version, row.data_position) == (5, 21)
    assert row.metrics.pop("end_time").endswith("Z")
    assert row.metrics == {"reward/mean": 0.7, "loss": None, "diagnosis": "", "alarms": []}
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5


async def test_the_traces_of_a_step_that_is_acknowledged_end_as_trained(tmp_path: Path, ledger: Ledger) -> None:
    samples, (lost, *_) = lease(ledger, 5, 14), ledger.issue(step=6, position=15, count=1).sample_ids
    ended: list[spans.Span] = []
    spans.install(ended.append)
    try:
        ledger.put({TRAINER_KEY: "a"})
        context = run_of(tmp_path, ledger, Session(answered(5)))
        context.router.traces = SampleTraces(ratio=1.0)
        context.router.traces.follow(ledger, "run")
        assert await take_over(context) is not None
    finally:
        spans.install(None)
    roots = {span.attributes["fourfold.sample_id"]: span for span in ended if span.name == "sample"}
    assert roots.keys() == {*samples, lost}
    assert roots[lost].error == COORDINATOR_RESTARTED
    assert {(roots[name].error, roots[name].attributes.get("fourfold.step")) for name in samples} == {(None, 5)}


@pytest.mark.parametrize(
    ("status", "known"),
    [
        (answered(4), "b"),  # another process, which was brought to step 4 by somebody
        (answered(5), "a"),  # a step without a lease is not the ledger's
        (answered(3), "a"),
        (answered(6), "a"),
        (TrainerStatus(step=4, policy_version=2), "a"),  # below a version that was published
    ],
)
async def test_a_trainer_whose_weights_are_not_those_of_the_ledger_is_not_taken_over(
    tmp_path: Path, ledger: Ledger, status: TrainerStatus, known: str
) -> None:
    ledger.publishing(4, 4)
    assert await taken_over(tmp_path, ledger, status, known) is None
    assert ledger.last_step() == 4


async def test_a_step_without_a_result_is_not_taken_over(tmp_path: Path, ledger: Ledger) -> None:
    lease(ledger, 5, 12)
    assert await taken_over(tmp_path, ledger, TrainerStatus(step=5, policy_version=5)) is None


async def test_a_restored_trainer_is_known_from_then_on(tmp_path: Path, ledger: Ledger) -> None:
    await restored(tmp_path, ledger, Session(TrainerStatus(step=4, checkpoint_step=2)))
    assert ledger.get(TRAINER_KEY) == "a"


async def test_the_checkpoint_of_the_first_step_is_one_as_any_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=3)
    ledger.record_metrics(1, {"reward/mean": 0.5}, seconds=1.0)
    session = Session(TrainerStatus(step=1, checkpoint_step=1))
    assert await restored(tmp_path, ledger, session) == RunPosition(step=1, next_position=0)
    assert "LoadCheckpoint" in session.timeouts
    checkpoint = ledger.last_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.data_position, checkpoint.policy_version) == (1, 3, 1)


async def test_a_restore_goes_back_to_the_checkpoint_and_gives_every_call_a_deadline(
    tmp_path: Path, ledger: Ledger
) -> None:
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5)))
    ledger.publishing(4, 4)
    session = Session(TrainerStatus(step=4, checkpoint_step=2))
    assert await restored(tmp_path, ledger, session) == RunPosition(
        step=2, next_position=12, open_positions=(6, 7, 8, 9, 10, 11)
    )
    assert session.timeouts == {"GetStatus": 10.0, "LoadCheckpoint": 77.0}
    assert session.policy_version == 5
    assert ledger.last_step() == 2
    checkpoint = ledger.last_checkpoint()
    assert checkpoint is not None and (checkpoint.step, checkpoint.data_position) == (2, 6)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == [1, 2]


async def test_a_trainer_that_trained_and_has_no_checkpoint_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(WrongState, match="the trainer is at step 3, and the run has no checkpoint after step 0"):
        await restored(tmp_path, ledger, Session(TrainerStatus(step=3, checkpoint_step=-1)))


async def test_a_trainer_without_the_checkpoint_of_the_ledger_is_refused(tmp_path: Path, ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="last checkpoint is that of step 2, and the trainer does not have it"):
        await restored(tmp_path, ledger, Session(TrainerStatus(step=2), has_checkpoint=False))
