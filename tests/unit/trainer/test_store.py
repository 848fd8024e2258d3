"""Tests that checkpoints and exports on disk are complete or absent, and which checkpoints are removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import tokenizers.models
import torch

from fourfold.algorithm.state import AlgorithmState, RunningMoments
from fourfold.errors import NotFound, Unavailable, WrongState
from fourfold.weights.manifest import AdapterSpec, TensorSpec, layout_of_rank_0
from fourfold_trainer.checkpoint import model_export
from fourfold_trainer.checkpoint import store as checkpoint_store
from fourfold_trainer.checkpoint.store import CheckpointStore, StepAnswer, TrainerState, atomic_folder, layout_of
from tests.support.descriptors import open_descriptors
from tests.support.trainer_driver import Case, config_of

LAYOUT = {"dtype": "float32", "weights": "ab"}


def store(folder: Path, *, keep: int = 2, keep_best: int = 0, **layout: object) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep=keep, keep_best=keep_best, layout={**LAYOUT, **layout})


def state(step: int, **more: object) -> TrainerState:
    answer = StepAnswer(step=step, policy_version=step, metrics={"train/grad_norm": float("inf"), "train/lr": 0.1})
    fields = {"policy_version": step, "lineage": f"lineage-{step}", "answer": answer, **more}
    return TrainerState(step=step, **fields)  # type: ignore[arg-type]


def write(folder: Path) -> None:
    checkpoint_store.write_tensors(folder / "policy-000.safetensors", {"master.0": torch.arange(4.0)})


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    store(tmp_path).save(state(12, skipped_step_count=3, batch_sha256="ab"), write)
    other = store(tmp_path)
    assert other.newest_step == 12
    found, folder = other.read(12)
    assert found == state(12, skipped_step_count=3, batch_sha256="ab")
    assert folder == tmp_path / "checkpoints/step-000012"
    assert safetensors.torch.load_file(folder / "policy-000.safetensors")["master.0"].tolist() == [0, 1, 2, 3]


def test_the_state_of_the_algorithm_is_read_back(tmp_path: Path) -> None:
    saved = state(1, algorithm_state=AlgorithmState(kl_coef=0.25, scores=RunningMoments(count=3, mean=1.5, m2=2.0)))
    store(tmp_path).save(saved, write)
    assert store(tmp_path).read(1)[0] == saved


def test_a_folder_without_its_last_file_is_no_checkpoint(tmp_path: Path) -> None:
    ours = store(tmp_path)
    ours.save(state(1), write)
    ours.save(state(2), write)
    (tmp_path / "checkpoints/step-000002/trainer.json").unlink()
    assert ours.newest_step == 1
    with pytest.raises(NotFound, match="there are: 1"):
        ours.read(2)


def test_another_layout_and_damage_are_told_apart(tmp_path: Path) -> None:
    store(tmp_path).save(state(1), write)
    with pytest.raises(WrongState, match="written with dtype = float32, the trainer runs with bfloat16"):
        store(tmp_path, dtype="bfloat16").read(1)
    (tmp_path / "checkpoints/step-000001/policy-000.safetensors").unlink()
    with pytest.raises(WrongState, match="damaged"):
        store(tmp_path).read(1)
    (tmp_path / "checkpoints/step-000001/trainer.json").write_text('{"format"')
    with pytest.raises(WrongState, match=r"trainer\.json is damaged"):
        store(tmp_path).read(1)


def test_what_engines_get_is_no_part_of_the_layout(tmp_path: Path) -> None:
    """Runs that send adapters and runs that send merged weights read each other's checkpoints."""
    config, merged = config_of(Case(name="x", model="x")), [TensorSpec(name="w", dtype="float32", shape=(4, 4))]
    adapters = [
        TensorSpec(name="a", dtype="float32", shape=(1, 4)),
        TensorSpec(name="b", dtype="float32", shape=(4, 1)),
    ]
    spec = AdapterSpec(rank=1, scale=1.0, base="0" * 64)
    layouts = [
        layout_of(config, layout_of_rank_0(merged, 1)),
        layout_of(config, layout_of_rank_0(adapters, 1, adapter=spec)),
    ]
    for name, writer, reader in (("merged", layouts[0], layouts[1]), ("adapters", layouts[1], layouts[0])):
        CheckpointStore(tmp_path / name, keep=2, layout=writer).save(state(1), write)
        assert CheckpointStore(tmp_path / name, keep=2, layout=reader).read(1)[0] == state(1)


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store(tmp_path).save(state(1), write)
    file = tmp_path / "checkpoints/step-000001/trainer.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(WrongState, match=r"has format 2, this version of the trainer reads 3; go on with the version"):
        store(tmp_path).read(1)


def test_old_ones_and_those_of_a_lost_future_go(tmp_path: Path) -> None:
    ours = store(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        ours.save(state(step), write)
    assert [ours.newest_step, *(step for step in (2, 4, 6, 8) if _there(ours, step))] == [8, 6, 8]
    ours.save(state(7, lineage="after a restore of 6"), write)
    assert [step for step in (6, 7, 8) if _there(ours, step)] == [6, 7]


def test_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    ours = store(tmp_path, keep=1, keep_best=2)
    for step, score in ((2, 0.5), (4, 0.9), (6, None), (8, 0.5), (10, 0.1), (12, None)):
        ours.save(state(step), write, score=score)
    assert steps(tmp_path) == [4, 8, 12]  # of equal ones the newer
    assert ours.newest_step == 12
    reopened = store(tmp_path, keep=1, keep_best=2)
    assert reopened.newest_step == 12 and reopened.read(12)[0].step == 12
    reopened.save(state(14), write, score=0.7)
    assert steps(tmp_path) == [4, 14], "the newest may be one of the best"
    reopened.save(state(16), write, score=-1.0)
    assert steps(tmp_path) == [4, 14, 16]


def test_an_old_one_that_cannot_be_removed_costs_no_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(f"{path} cannot be removed")

    ours = store(tmp_path, keep=1)
    ours.save(state(1), write)
    monkeypatch.setattr("fourfold_trainer.checkpoint.store.shutil.rmtree", refuse)
    ours.save(state(2), write)
    assert ours.newest_step == 2 and ours.read(2)[0] == state(2)


def test_a_sync_holds_nothing_open(tmp_path: Path) -> None:
    for _ in range(5):
        checkpoint_store.sync(tmp_path)
    assert not open_descriptors(str(tmp_path))


def test_an_adapter_is_settings_and_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoint_store, "sync", synced.append)
    folder = tmp_path / "adapter"
    for rank in (4, 8):  # the second takes the place of the first
        checkpoint_store.write_adapter(folder, f'{{"r": {rank}}}', {"a.lora_A.weight": torch.full((rank, 2), 0.5)})
        assert json.loads((folder / "adapter_config.json").read_text()) == {"r": rank}
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        assert {name: tensor.shape for name, tensor in tensors.items()} == {"a.lora_A.weight": (rank, 2)}
        with safetensors.safe_open(folder / "adapter_model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
        assert synced[-1] == folder, "the names last"


def test_the_best_of_a_lost_future_go(tmp_path: Path) -> None:
    ours = store(tmp_path, keep=1, keep_best=2)
    for step, score in ((2, 0.5), (4, 0.9)):
        ours.save(state(step), write, score=score)
    ours.save(state(3), write)
    assert steps(tmp_path) == [2, 3]


def test_a_score_that_comes_later_counts(tmp_path: Path) -> None:
    ours = store(tmp_path, keep=1, keep_best=1)
    ours.save(state(1), write)
    ours.save(state(1), never, score=0.5)
    ours.save(state(1), never)  # without one it keeps what it has
    ours.save(state(2), write)
    assert steps(tmp_path) == [1, 2] and ours.read(1)[0] == state(1)
    assert sorted(p.name for p in (tmp_path / "checkpoints/step-000001").iterdir()) == [
        "policy-000.safetensors",
        "trainer.json",
    ]


def test_the_same_step_is_written_again_only_when_it_is_another_state(tmp_path: Path) -> None:
    ours, written = store(tmp_path), []

    def counted(folder: Path) -> None:
        written.append(folder)
        write(folder)

    for lineage, version in (("a", 1), ("a", 1), ("b", 1), ("b", 5), ("b", 5)):
        ours.save(state(1, lineage=lineage, policy_version=version), counted)
    assert len(written) == 3
    assert ours.read(1)[0].policy_version == 5


def test_a_process_killed_while_it_writes_leaves_the_one_before(tmp_path: Path) -> None:
    store(tmp_path).save(state(1), write)
    program = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from fourfold_trainer.checkpoint.store import CheckpointStore, TrainerState, write_text

def write(folder):
    write_text(folder / "policy-000.safetensors", "half of it")
    print("half", flush=True)
    time.sleep(60)

store = CheckpointStore(Path(sys.argv[1]), keep=1, layout={"dtype": "float32", "weights": "ab"})
store.save(TrainerState(step=2), write)
"""
    argv = [sys.executable, "-c", program, str(tmp_path / "checkpoints")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[0].startswith(".partial-") and names[1:] == ["step-000001"]
    ours = store(tmp_path)  # as after a restart
    assert ours.newest_step == 1 and ours.read(1)[0].step == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_process_killed_while_it_removes_an_old_one_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = store(tmp_path, keep=1)
    ours.save(state(4), write)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # as if it died before
        ours.save(state(3, lineage="after a restore of an older one"), write)
    assert ours.newest_step == 3
    assert store(tmp_path).newest_step == 3 and steps(tmp_path) == [3]


def test_a_folder_is_replaced_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for text in ("old", "new"):
        with atomic_folder(target) as partial:
            (partial / "config.json").write_text(text)
            if text == "new":
                assert (target / "config.json").read_text() == "old"
    assert (target / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_another_process_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".partial-model-99").mkdir()
    with atomic_folder(tmp_path / "model") as partial:
        (partial / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_refuses_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(Unavailable, match=r"cannot be written .*; nothing was changed: make room"):
        store(tmp_path).save(state(1), write)


class Model:
    """The part of a Hugging Face model that `write_companions` uses."""

    def save_pretrained(self, folder: Path, *, state_dict: dict[str, torch.Tensor]) -> None:
        """Write the configuration."""
        assert not state_dict
        (folder / "config.json").write_text('{"model_type": "w"}')


def export(folder: Path, weight: torch.Tensor, *, source: Path) -> None:
    """Write a model of one weight."""
    writer = model_export.WeightsWriter(folder, {"w": (weight.dtype, tuple(weight.shape))})
    try:
        writer.write("w", weight)
        writer.finish()
    finally:
        writer.close()
    model_export.write_companions(Model(), folder, source=source, settings={"id2label": {"0": "value"}})


def source(folder: Path) -> Path:
    folder.mkdir()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model", "merges.txt")
    others = ("config.json", "model.safetensors", "model.safetensors.index.json", "README.md")
    for name in (*names, *others):
        (folder / name).write_text(f"{name} of the source")
    (folder / "original.json").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of the source")
    return folder


def test_an_export_has_the_tokenizers_files_and_the_trained_weights(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as partial:
        export(partial, torch.ones(2), source=source(tmp_path / "source"))
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "spiece.model", "merges.txt"}
    others = {"config.json", "model.safetensors", "additional_chat_templates"}
    assert {path.name for path in target.iterdir()} == copied | others
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "of the source"
    assert all((target / name).read_text() == f"{name} of the source" for name in copied)
    assert json.loads((target / "config.json").read_text()) == {"model_type": "w", "id2label": {"0": "value"}}
    assert safetensors.torch.load_file(target / "model.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("config", "padding", "found"),
    [
        ({"pad_token_id": 0, "eos_token_id": 2}, "<pad>", 0),
        ({"eos_token_id": 2}, "<pad>", 3),
        ({"eos_token_id": 2}, "<unknown>", 2),
        ({"eos_token_id": [2, 1]}, None, 2),
        ({}, None, None),
    ],
)
def test_an_exported_critic_pads_with_the_tokenizers_token_or_the_end_of_a_text(
    tmp_path: Path, config: dict[str, Any], padding: str | None, found: int | None
) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "<pad>": 3}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": padding}))
    assert model_export.pad_token_id(SimpleNamespace(**config), tmp_path) == found


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that fills the disk."""

    def fill() -> None:
        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", refuse)

    return fill


def test_weights_that_cannot_be_written_leave_the_old_export(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    target, tokenizer = tmp_path / "model", source(tmp_path / "source")
    with atomic_folder(target) as partial:
        export(partial, torch.ones(2), source=tokenizer)
    full_disk()
    with pytest.raises(Unavailable, match=r"No space left on device.*make room"), atomic_folder(target) as partial:
        export(partial, torch.zeros(2), source=tokenizer)
    assert not open_descriptors(str(tmp_path))
    assert safetensors.torch.load_file(target / "model.safetensors")["w"].tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]


def test_tensors_that_cannot_be_written_are_no_checkpoint(tmp_path: Path, full_disk: Callable[[], None]) -> None:
    ours = store(tmp_path)
    ours.save(state(1), write)
    full_disk()
    with pytest.raises(Unavailable, match=r"policy-000\.safetensors cannot be written .*No space left"):
        ours.save(state(2), write)
    assert not open_descriptors(str(tmp_path))
    assert ours.newest_step == 1 and steps(tmp_path) == [1]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that records flushes and renames in order: ("flush" or "place", name)."""
    events: list[tuple[str, str]] = []
    fsync, rename, exchange = os.fsync, Path.rename, checkpoint_store._exchange

    def noted_fsync(descriptor: int) -> None:
        events.append(("flush", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(("place", target.name))
        return rename(path, target)

    def noted_exchange(first: Path, second: Path) -> None:
        events.append(("place", second.name))
        exchange(first, second)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(checkpoint_store, "_exchange", noted_exchange)
    return events


def test_a_checkpoint_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, disk: list[tuple[str, str]]) -> None:
    store(tmp_path).save(state(1), write)
    hidden = f".partial-step-000001-{os.getpid()}"
    flushed = [("flush", name) for name in ("policy-000.safetensors", "trainer.json", hidden)]
    assert disk == [*flushed, ("place", "step-000001"), ("flush", "checkpoints")]


def test_an_export_is_on_the_disk_before_it_is_in_its_place(tmp_path: Path, disk: list[tuple[str, str]]) -> None:
    tokenizer = source(tmp_path / "source")
    for _ in range(2):  # the second one takes the place of the first
        disk.clear()
        with atomic_folder(tmp_path / "model") as partial:
            export(partial, torch.ones(2), source=tokenizer)
            names = {path.name for path in partial.rglob("*")}
        place = disk.index(("place", "model"))
        assert {name for what, name in disk[:place] if what == "flush"} == names | {partial.name}
        assert disk[place - 1] == ("flush", partial.name) and disk[place + 1 :] == [("flush", tmp_path.name)]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def never(folder: Path) -> None:
    raise AssertionError("it is there already")


def _there(ours: CheckpointStore, step: int) -> bool:
    try:
        return ours.read(step)[0].step == step
    except NotFound:
        return False
