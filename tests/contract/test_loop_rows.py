"""Runs of rows: the real coordinator and loop against a toy trainer, without an engine or a reward service."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.config import Config
from fourfold.errors import ConfigError, PeerFault, Unavailable
from fourfold.model import folder as model_folder
from fourfold.plan.preflight import Preflight
from fourfold.reference.top_tokens import read_top
from fourfold.reference.v1.reference_service_pb2 import ComputeLogprobsResponse
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.rpc.responses import ResponseCheck
from fourfold.sample import Sample
from fourfold.tracing import spans
from fourfold.tracing.spans import Span
from fourfold.trainer.client import AsyncTrainerClient, train_step_ahead
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_coordinator.cli import run
from fourfold_coordinator.cli.summary import report_lines
from fourfold_coordinator.launch.fleet import services_of
from fourfold_coordinator.reporting.diagnosis import TrainingDiagnosis
from fourfold_coordinator.rewards.data_check import check_data
from fourfold_coordinator.rows.describe import describe_reference
from fourfold_coordinator.rows.reference_file import reference_path
from fourfold_coordinator.rows.row_source import RowBatch, RowSource
from tests.fakes.stage import Stage, hang_in_step, successor, until
from tests.fakes.toy import VOCABULARY, Member, make_config, toy_logprobs, write_model
from tests.fakes.toy_scorers import FakeReference
from tests.fakes.toy_trainer import FakeTrainer

ROWS = 10


def row_config(root: Path, *, steps: int = 6, preset: str = "sft", other: bool = False, **data: Any) -> Config:
    """Return a recipe of two passes over ten rows, four of them in a step: 4, 4, 2, 4, 4 and 2.

    `other`: the reference is another model than the one that training begins with.
    """
    tables = make_config(root).model_dump(include={"name", "seed", "model", "checkpoint", "retry"})
    path = root / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"{n} * {n} =", "completion": f" {n * n}"} for n in range(ROWS)]
    for n, row in enumerate(rows if preset not in ("sft", "distill") else []):
        row |= {"label": n % 2} if preset == "kto" else {"chosen": row.pop("completion"), "rejected": f" about {n}"}
    path.write_text("\n".join(map(json.dumps, rows)))
    return Config.model_validate(
        {
            **tables,
            "steps": steps,
            "data": {"train": {"path": str(path)}, "passes": 2.0, "chat": False, "cache": str(root / "tokens"), **data},
            "batch": {"rows_per_step": 4, "tokens_per_micro_batch": 256},
            "algorithm": {"preset": preset, **({"loss": {"top_k": 2}} if preset == "distill" else {})},
            "reference": {"source": str(write_model(root / "teacher"))} if other or preset == "distill" else {},
        }
    )


class RowStage(Stage):
    """A run of rows: its only service is the trainer."""

    def __init__(self, root: Path, **changes: Any) -> None:
        super().__init__(root)
        self.config = row_config(root, **changes)
        (self.folder / "config.toml").write_text(configuration.dump(self.config))
        self.rollouts = []
        self.batches: dict[int, list[Sample]] = {}  # what the trainer was sent, by step
        self.use(FakeTrainer("trainer-0", self.config))

    def use(self, trainer: FakeTrainer) -> None:
        """Let this trainer take the steps."""
        self.trainer = trainer
        trainer.on_batch = lambda samples: self.batches.update({trainer.step + 1: list(samples)})

    @property
    def members(self) -> list[Member]:
        return [self.trainer, *self.others]


@pytest.fixture
def make_rows(tmp_path: Path, make_stage: Callable[..., Stage]) -> Callable[..., RowStage]:
    """Return a function that makes stages; they are ended by `close`."""
    count = iter(range(100))

    def make(**changes: Any) -> RowStage:
        root = tmp_path / f"rows{next(count)}"
        root.mkdir()
        return RowStage(root, **changes)

    return make


def change_row(path: Path) -> None:
    path.write_text(path.read_text().replace(" 81", " 82"))


def damage_reference(stage: RowStage, *, cut: bool) -> Path:
    """Cut the file of the reference, or remove it; return its path."""
    (path,) = Path(stage.config.data.cache).glob("reference-*.bin")
    if cut:
        path.write_bytes(path.read_bytes()[:40])
    else:
        path.unlink()
    return path


def cut_largest_reference(stage: RowStage) -> None:
    path = max(Path(stage.config.data.cache).glob("reference-*.bin"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:40])


def count_references(stage: RowStage) -> int:
    return len(list(Path(stage.config.data.cache).glob("reference-*.bin")))


def begin_anew(stage: RowStage) -> None:
    """Remove what a run has written, but not what its data has in the cache."""
    for path in stage.folder.iterdir():
        if path.is_file() and path.name != "config.toml":
            path.unlink()


def tokens(batches: dict[int, list[Sample]]) -> list[list[bytes]]:
    return [[sample.token_ids.tobytes() for sample in batches[step]] for step in sorted(batches)]


async def kill_in_step(stage: RowStage, step: int) -> None:
    """Start the run, and kill coordinator and trainer while the trainer works on a step."""
    hangs = hang_in_step(stage, step)
    await stage.start()
    await hangs.wait()
    await stage.kill()
    await stage.trainer.kill()


async def undisturbed(make: Callable[..., RowStage]) -> list[list[bytes]]:
    stage = make()
    await stage.start()
    assert await stage.finish() == 0
    await stage.close()
    return tokens(stage.batches)


async def test_each_row_is_trained_once_per_pass(make_rows: Callable[..., RowStage]) -> None:
    stage = make_rows()
    await stage.start()
    assert await stage.finish() == 0
    batches = tokens(stage.batches)
    assert list(map(len, batches)) == [4, 4, 2, 4, 4, 2]
    for part in (batches[:3], batches[3:]):
        assert set(Counter(row for batch in part for row in batch).values()) == {1}
    assert all(not len(s.behavior_logprobs) and s.version_spans == () and s.score == 1 for s in stage.batches[1])
    report, rows = stage.report(), stage.lines("metrics.jsonl")
    assert (report["steps"], report["model"], report["eval_after"]) == (6, "/somewhere/model", None)
    assert len(report["began_from"]["model"]["sha256"]) == 64
    assert [row["data/pass"] for row in rows] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert all(0 < row["data/loss_tokens"] < row["data/tokens"] for row in rows)
    assert not (stage.folder / "samples.jsonl").exists(), "rows are in the data, and are not written again"
    ledger = stage.ledger()
    assert [row.data_position for row in ledger.steps()] == [4, 8, 10, 14, 18, 20] and not ledger.counts()
    ledger.close()
    await stage.close()


async def test_the_rows_of_the_next_step_are_read_while_the_trainer_works(
    make_rows: Callable[..., RowStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, read, take = make_rows(), list[int](), RowSource.take

    def note(rows: RowSource, step: int) -> RowBatch | None:
        read.append(step)
        return take(rows, step)

    async def wait(step: int) -> None:
        await until(lambda: step == 6 or step + 1 in read)

    monkeypatch.setattr(RowSource, "take", note)
    stage.trainer.on_train = wait
    await stage.start()
    assert await stage.finish() == 0
    assert read == [1, 2, 3, 4, 5, 6], "each once, and none after the last step"
    await stage.close()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_step_is_sent_while_the_one_before_is_trained(
    make_rows: Callable[..., RowStage], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    wanted, stage, ahead = await undisturbed(make_rows), make_rows(), list[int]()
    send = train_step_ahead

    async def note(
        client: AsyncTrainerClient, step: int, samples: Sequence[Sample], start: asyncio.Event, *, timeout: float
    ) -> TrainStepResponse:
        ahead.append(step)
        assert stage.trainer.step == step - 2, "the step before is not trained yet"
        if refused:
            raise Unavailable("a broken connection")
        return await send(client, step, samples, start, timeout=timeout)

    async def wait(step: int) -> None:
        await until(lambda: ahead[-1:] == [min(step + 1, 6)])

    monkeypatch.setattr("fourfold_coordinator.routing.trainer_session.train_step_ahead", note)
    stage.trainer.on_train = wait
    ended = list[Span]()
    spans.install(ended.append)
    await stage.start()
    assert await stage.finish() == 0
    assert ahead == [2, 3, 4, 5, 6] and tokens(stage.batches) == wanted
    spans.install(None)
    calls = {span.context: span for span in ended if span.kind == "client"}
    served = [calls[span.parent] for span in ended if span.kind == "server" and span.parent in calls]
    assert [call.attributes["fourfold.step"] for call in served if call.name.endswith("TrainStep")] == [*range(1, 7)]
    await stage.close()


async def test_an_older_trainer_gets_each_step_in_its_turn(
    make_rows: Callable[..., RowStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train what it has been sent when the coordinator dies."""
    wanted, stage, ahead = await undisturbed(make_rows), make_rows(), Mock()
    stage.trainer.contract_version = "1.9"
    monkeypatch.setattr("fourfold_coordinator.routing.trainer_session.train_step_ahead", ahead)
    await stage.start()
    assert await stage.finish() == 0
    assert tokens(stage.batches) == wanted and not ahead.called
    await stage.close()


async def test_the_score_of_held_out_rows_is_their_loss(make_rows: Callable[..., RowStage]) -> None:
    stage = make_rows(steps=2, passes=0.0, holdout={"field": "", "groups": 3})
    await stage.start()
    assert await stage.finish() == 0
    evals, report = stage.report()["evals"], stage.report()
    assert [(row["step"], row["n"]) for row in evals] == [(0, 3), (2, 3)]
    # The toy's log-probabilities grow with the magnitude of its weight.
    assert report["eval_after"]["score"] < report["eval_before"]["score"] < 0
    assert report["eval_before"]["half_width"] > 0 and (found := report["eval_after"]["sets"][0])["name"] == "holdout"
    assert found["measure"] == "loss" and f"Held-out loss: {-report['eval_before']['score']:.2f} [" in "\n".join(
        report_lines(stage.folder)
    )
    trained = {row for batch in tokens(stage.batches) for row in batch}
    assert len(trained) == 7 and stage.trainer.scores[2] == report["eval_after"]["score"]
    await stage.close()


@pytest.mark.parametrize("preset", ["dpo", "kto"])
async def test_held_out_pairs_and_labels_are_compared_with_the_reference_before_step_1(
    make_rows: Callable[..., RowStage], preset: str
) -> None:
    stage = make_rows(steps=4, preset=preset, holdout={"field": "", "groups": 3})
    await kill_in_step(stage, 4)
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 0
    # Four steps of the first pass over seven rows and one of three held-out ones; the resumed run reads the file.
    assert stage.trainer.reference_steps == [] and count_references(stage) == 2
    before, after = (stage.report()[key] for key in ("eval_before", "eval_after"))
    (first,), (last,) = before["sets"], after["sets"]
    assert (before["score"], first["accuracy"], first["loss"], before["n"]) == (0.5, 0.5, pytest.approx(np.log(2)), 3)
    assert after["score"] == last["accuracy"] and last["loss"] != first["loss"]
    assert first["measure"] == ("label accuracy" if preset == "kto" else "accuracy")
    shown = "(3 answers)" if preset == "kto" else "(3 pairs)"
    assert shown in "\n".join(report_lines(stage.folder))
    rows = [json.loads(line) for line in (stage.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/holdout/loss"] == pytest.approx(last["loss"])
    assert not {"time/reward", "time/generate"} & rows[-1].keys() and "time/rows" in rows[-1]
    await stage.close()


async def test_a_diverged_run_ends_at_its_evaluation(
    make_rows: Callable[..., RowStage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_rows(steps=2, passes=0.0, holdout={"field": "", "groups": 3})
    monkeypatch.setattr(stage.trainer, "next_weights", lambda: 10**12)
    await stage.start()
    assert await stage.finish() == 1
    assert re.search(r"the training has diverged: trainer-0.*are not finite.*; lower", capsys.readouterr().err)
    await stage.close()


async def test_a_step_that_was_trained_before_the_coordinator_died_is_not_trained_again(
    make_rows: Callable[..., RowStage],
) -> None:
    wanted, stage = await undisturbed(make_rows), make_rows()
    answered = asyncio.Event()

    async def die(step: int) -> None:
        if step == 4 and not answered.is_set():
            answered.set()
            stage.trainer.lost_answers = 1  # the step is trained, and no coordinator gets to know

    stage.trainer.on_train = die
    await stage.start()
    await until(lambda: 4 in stage.trainer.batches)
    await stage.kill()
    await stage.start()
    assert await stage.finish() == 0
    assert tokens(stage.batches) == wanted and stage.trainer.loaded == []
    await stage.close()


@pytest.mark.parametrize("trainer_dies", [True, False])
async def test_a_step_that_was_sent_and_has_not_begun_when_its_caller_dies_is_trained_once(
    make_rows: Callable[..., RowStage], trainer_dies: bool
) -> None:
    wanted, stage = await undisturbed(make_rows), make_rows()
    saves = asyncio.Event()

    async def hang(step: int) -> None:
        if step == 4 and not saves.is_set():
            saves.set()
            await asyncio.sleep(30)

    stage.trainer.on_saved = hang
    await stage.start()
    await saves.wait()
    await until(lambda: 5 in stage.trainer.held)
    await stage.kill()
    if trainer_dies:
        await stage.trainer.kill()
        stage.use(successor(stage.trainer))
    else:
        await until(lambda: not stage.trainer.held)
        assert stage.trainer.step == 4
    await stage.start()
    assert await stage.finish() == 0
    assert tokens(stage.batches) == wanted and stage.trainer.loaded == [4] * trainer_dies
    await stage.close()


async def test_a_killed_run_goes_on_with_the_rows_after_its_checkpoint(make_rows: Callable[..., RowStage]) -> None:
    wanted, stage = await undisturbed(make_rows), make_rows()
    await kill_in_step(stage, 4)
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 0
    assert stage.trainer.loaded == [2] and tokens(stage.batches) == wanted
    await stage.close()


async def test_a_run_does_not_go_on_with_other_rows(
    make_rows: Callable[..., RowStage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_rows()
    hangs = hang_in_step(stage, 2)
    await stage.start()
    await hangs.wait()
    await stage.kill()
    change_row(Path(stage.config.data.train[0].path))
    await stage.start()
    assert await stage.finish() == 1
    assert "the data differs from the data that the run began with" in capsys.readouterr().err
    await stage.close()


async def test_steps_beyond_the_passes_end_the_run(
    make_rows: Callable[..., RowStage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_rows(steps=7)
    await stage.start()
    assert await stage.finish() == 1
    assert "steps = 7, and data.passes = 2 makes 6 steps; remove steps" in capsys.readouterr().err
    await stage.close()


@pytest.mark.parametrize(("preset", "samples"), [("dpo", 8), ("kto", 8), ("simpo", 8)])
async def test_answers_are_compared_with_the_weights_before_step_1(
    make_rows: Callable[..., RowStage], preset: str, samples: int
) -> None:
    stage = make_rows(preset=preset)
    await stage.start()
    assert await stage.finish() == 0
    assert [len(stage.batches[step]) for step in (1, 2, 3)] == [samples, samples, samples // 2]
    for sample in (sample for step in stage.batches for sample in stage.batches[step]):
        if preset == "simpo":
            assert not len(sample.reference_logprobs)
            continue
        answer, wanted = sample.action_mask, toy_logprobs(0, sample.token_ids)
        np.testing.assert_array_equal(sample.reference_logprobs[answer], wanted[answer])
    assert stage.trainer.reference_steps == ([] if preset == "simpo" else [1, 2, 3])
    if preset == "kto":
        assert [s.score is None for s in stage.batches[1]] == [False] * 4 + [True] * 4
    else:
        assert [s.score for s in stage.batches[1]] == [1.0, 0.0] * 4
    await stage.close()


async def test_a_killed_preparation_goes_on_where_it_was_and_a_resumed_run_reads_its_file(
    make_rows: Callable[..., RowStage],
) -> None:
    stage = make_rows(preset="dpo")
    hangs = asyncio.Event()

    async def hang() -> None:
        if len(stage.trainer.reference_steps) == 2 and not hangs.is_set():
            hangs.set()
            await asyncio.sleep(30)

    stage.trainer.on_probe = hang
    await stage.start()
    await hangs.wait()
    await stage.kill()
    await stage.trainer.kill()
    stage.use(successor(stage.trainer))
    await kill_in_step(stage, 4)
    assert stage.trainer.reference_steps == [2, 3]
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 0
    assert stage.trainer.loaded == [2] and stage.trainer.reference_steps == []
    await stage.close()


@pytest.mark.parametrize("cut", [True, False])
async def test_a_resumed_run_without_its_reference_says_how_to_get_it_again(
    make_rows: Callable[..., RowStage], capsys: pytest.CaptureFixture[str], cut: bool
) -> None:
    stage = make_rows(preset="dpo")
    await kill_in_step(stage, 4)
    path = damage_reference(stage, cut=cut)
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 1
    errors = capsys.readouterr().err
    assert f"step 3 needs the reference log-probabilities of {path}, and" in errors
    assert ("it has none, or damaged ones, for sample s0000003-" if cut else "the file is gone") in errors
    assert "start a run of the recipe that this one began with" in errors
    await stage.close()


async def test_a_second_run_of_the_recipe_computes_no_reference(make_rows: Callable[..., RowStage]) -> None:
    stage = make_rows(preset="dpo")
    await stage.start()
    assert await stage.finish() == 0
    await stage.close()
    begin_anew(stage)
    stage.use(FakeTrainer("trainer-1", stage.config))
    await stage.start()
    assert await stage.finish() == 0
    assert stage.trainer.reference_steps == [] and set(stage.batches) == set(range(1, 7))
    await stage.close()


def served_reference(stage: RowStage) -> FakeReference:
    """Give a stage a service with another model; return it. Its log-probabilities are those of the weight 3."""
    service = FakeReference("reference-0", stage.config)
    stage.others, service.weights = [service], 3
    return service


@pytest.mark.parametrize("preset", ["dpo", "kto"])
async def test_another_reference_is_computed_by_services_before_step_1(
    make_rows: Callable[..., RowStage], preset: str
) -> None:
    stage = make_rows(steps=4, preset=preset, other=True, holdout={"field": "", "groups": 3})
    service, hangs = served_reference(stage), asyncio.Event()
    assert [spec.name for spec in services_of(stage.config)] == ["trainer-0", "reference-0"]

    async def hang() -> None:
        if not hangs.is_set():
            hangs.set()
            await asyncio.sleep(30)

    service.on_call = hang  # the preparation is killed in its first call
    await stage.start()
    await hangs.wait()
    await stage.kill()
    in_step = hang_in_step(stage, 3)
    await stage.start()
    await in_step.wait()
    await stage.kill()
    await stage.trainer.kill()
    cut_largest_reference(stage)  # a resumed run has the services compute what is lost
    service.asked.clear()
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 0
    assert service.asked and stage.trainer.reference_steps == [] and count_references(stage) == 2
    samples = [sample for step in stage.batches for sample in stage.batches[step]]
    for sample in samples:
        answer, wanted = sample.action_mask, toy_logprobs(3, sample.token_ids)
        np.testing.assert_array_equal(sample.reference_logprobs[answer], wanted[answer])
    if preset == "kto":
        assert any(sample.score is None for sample in samples), "the joined answers have their reference, too"
    (before,) = stage.report()["eval_before"]["sets"]
    assert before["loss"] != pytest.approx(np.log(2)), "policy and reference differ from the beginning"
    assert stage.report()["began_from"]["reference"]["source"] == stage.config.reference.source
    # Another run of the recipe computes nothing.
    await stage.close()
    begin_anew(stage)
    service = served_reference(stage)
    stage.use(FakeTrainer("trainer-1", stage.config))
    await stage.start()
    assert await stage.finish() == 0
    assert service.asked == [] and stage.trainer.reference_steps == []
    await stage.close()


async def test_a_resumed_run_compares_with_another_reference(make_rows: Callable[..., RowStage]) -> None:
    stage = make_rows(preset="dpo")
    await kill_in_step(stage, 3)
    assert len(stage.trainer.reference_steps) > 0
    stage.config = row_config(stage.folder.parent, preset="dpo", other=True)
    (stage.folder / "config.toml").write_text(configuration.dump(stage.config))
    service = served_reference(stage)
    stage.use(successor(stage.trainer))
    await stage.start()
    assert await stage.finish() == 0
    assert len(service.asked) == 2 * ROWS
    for sample in (sample for step in (3, 4) for sample in stage.batches[step]):
        wanted = toy_logprobs(3, sample.token_ids)
        np.testing.assert_array_equal(sample.reference_logprobs[sample.action_mask], wanted[sample.action_mask])
    await stage.close()


@pytest.mark.parametrize("other", [True, False])
def test_the_reference_has_a_file_of_its_own_and_the_first_margin_is_judged(tmp_path: Path, other: bool) -> None:
    config = row_config(tmp_path, preset="dpo", other=other)
    rows = SimpleNamespace(digest=lambda: "rows")
    found = [
        reference_path(changed, rows, "digest").name  # type: ignore[arg-type]
        for changed in (config, config.model_copy(update={"batch": config.batch.model_copy(
            update={"tokens_per_micro_batch": 512})}))
    ]  # fmt: skip
    assert (found[0] == found[1]) == other, "services do not know the micro-batches of the updates"
    findings, _ = TrainingDiagnosis.from_config(config).examine(1, {m.PAIR_MARGIN: 0.2}, skipped_reason="", dropped={})
    assert bool(findings) != other
    assert ("reference services with" in describe_reference([], config)) == other


@pytest.mark.parametrize(
    ("keys", "steps", "error"),
    [
        (["data.passes=3"], 9, ""),
        (["data.passes=3", "steps=9"], 9, ""),
        (["data.passes=0", "steps=20"], 20, ""),
        (["data.passes=3", "steps=7"], 0, "steps = 7, and data.passes = 3 makes 9 steps; remove steps, or"),
        (["batch.rows_per_step=2"], 0, "batch.rows_per_step = 2: runs/r began with 4, from which data.passes counts"),
    ],
)
def test_a_resumed_run_counts_its_steps_from_the_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], steps: int, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/r").mkdir(parents=True)
    Path("runs/r/config.toml").write_text(configuration.dump(row_config(tmp_path)))
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    args = parser.parse_args(["--resume", "runs/r", *(word for key in keys for word in ("--set", key))])

    def steps_of() -> int:
        found = Preflight(run._resumed_config(args.resume, args))
        check_data(found)
        return found.config.steps

    if error:
        with pytest.raises(ConfigError, match=re.escape(error)):
            steps_of()
    else:
        assert steps_of() == steps


def test_the_check_of_the_data_refuses_long_pairs_and_equal_labels(tmp_path: Path) -> None:
    config = row_config(tmp_path, steps=0, preset="dpo", system_prompt="x " * 20)
    batch = config.batch.model_copy(update={"tokens_per_micro_batch": 64})
    with pytest.raises(ConfigError, match=r"a pair has \d+ tokens, and batch.tokens_per_micro_batch = 64 must hold it"):
        check_data(Preflight(config.model_copy(update={"batch": batch})))
    with pytest.raises(
        ConfigError, match=r"data.form = 'text' has answers, and .* `dpo` reads pairs; set one of pairs,"
    ):
        check_data(Preflight(row_config(tmp_path, steps=0, preset="dpo", form="text")))
    labelled, path = row_config(tmp_path, steps=0, preset="kto"), tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace('"label": 0', '"label": 1'))
    with pytest.raises(ConfigError, match=r"all 10 labels are 1; a loss of labelled answers needs both"):
        check_data(Preflight(labelled))
    good = path.read_text().splitlines()[0]
    path.write_text("\n".join([good, *[good.replace('"label": 1', '"label": 0')] * 59]))
    found = Preflight(labelled)
    check_data(found)
    assert "1.7% of the answers are desirable; algorithm.loss.desirable_weight = 59 " in found.warnings[0]


@pytest.mark.parametrize("manual", [False, True])
def test_the_launcher_starts_the_trainer_alone(tmp_path: Path, manual: bool) -> None:
    names: Sequence[str] = [service.name for service in services_of(row_config(tmp_path), manual=manual)]
    assert names == ([] if manual else ["trainer-0"])


@pytest.fixture
def teacher_stage(make_rows: Callable[..., RowStage], monkeypatch: pytest.MonkeyPatch) -> RowStage:
    """Return a run that learns from a teacher, whose service is in `others`."""
    stage = make_rows(preset="distill")
    stage.others = [FakeReference("reference-0", stage.config)]
    monkeypatch.setattr(model_folder, "shape", lambda _source: SimpleNamespace(vocabulary=VOCABULARY))
    return stage


async def test_rows_get_the_tokens_of_a_teacher_one_step_ahead(teacher_stage: RowStage) -> None:
    (teacher,) = teacher_stage.others
    assert isinstance(teacher, FakeReference)
    assert [spec.name for spec in services_of(teacher_stage.config)] == ["trainer-0", "reference-0"]
    await teacher_stage.start()
    assert await teacher_stage.finish() == 0
    assert list(map(len, tokens(teacher_stage.batches))) == [4, 4, 2, 4, 4, 2]
    for sample in (sample for batch in teacher_stage.batches.values() for sample in batch):
        assert sample.teacher_ids.tolist() == [[0, 1]] * len(sample.token_ids)
        assert sample.teacher_logprobs.tolist() == [[-1, -2]] * len(sample.token_ids)
    assert len(teacher.asked) == len(set(teacher.asked)) == 20, "each row once per pass"
    assert len(teacher_stage.lines("metrics.jsonl")) == 6


@pytest.mark.parametrize(
    ("top", "rule"),
    [
        (lambda n, k: (np.full((n, k), 3), np.full((n, k), -1.0)), "have an id twice in a row; they must be different"),
        (lambda n, k: (np.tile([0, VOCABULARY], (n, 1)), np.full((n, k), -1.0)), "have an id outside the vocabulary"),
        (lambda n, k: (np.tile([0, -1], (n, 1)), np.full((n, k), -1.0)), "have an id outside the vocabulary"),
        (lambda n, k: (np.tile([0, 1], (n, 1)), np.full((n, k), np.nan)), "are not finite and at most 0"),
        (lambda n, k: (np.tile([0, 1], (n, 1)), np.full((n, k), 0.5)), "are not finite and at most 0"),
        (lambda n, k: (np.tile([0, 1], (n, 1)), np.tile([-3.0, -1.0], (n, 1))), "do not descend; the likeliest token"),
        (lambda n, k: (np.tile([0, 1], (n, 1)), np.full((n, k), -0.1)), "probabilities that add up to 1.8097"),
        (lambda n, k: (np.zeros((n, 3)), np.zeros((n, 3))), "they need"),
    ],
)
def test_a_wrong_response_of_a_teacher_is_a_fault_of_it_by_name(top: Callable[..., Any], rule: str) -> None:
    asked = [Experience(sample_id="s0", token_ids=pack_ints([1, 2, 3]))]
    ids, logprobs = top(3, 2)
    check, limits = (
        ResponseCheck("reference-0 at there", "ComputeLogprobs"),
        {"top_k": 2, "vocabulary_size": VOCABULARY},
    )
    answer = ComputeLogprobsResponse(top_ids=[pack_ints(ids)], top_logprobs=[pack_floats(logprobs)])
    with pytest.raises(PeerFault, match=f"reference-0 at there.*{rule}"):
        read_top(answer, asked, check, **limits)
    with pytest.raises(
        PeerFault, match=r"answered 0 rows of top_ids for 1 samples; a service older than contract 1.11"
    ):
        read_top(ComputeLogprobsResponse(), asked, check, **limits)


async def test_a_teacher_that_answers_wrong_ends_the_run_with_its_name(
    teacher_stage: RowStage, capsys: pytest.CaptureFixture[str]
) -> None:
    (teacher,) = teacher_stage.others
    assert isinstance(teacher, FakeReference)
    teacher.top = lambda count, k: (np.zeros((count, k)), np.full((count, k), -1.0))
    await teacher_stage.start()
    assert await teacher_stage.finish() == 1
    assert re.search(r"reference-0.*an id twice in a row", capsys.readouterr().err)
