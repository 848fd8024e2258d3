"""Checkpoints on disk: whole or not there; the newest few and the best few stay.

    checkpoints/step-000012/
        trainer.json            step, policy version, last answer, held-out score, layout; names every other file
        policy-000.safetensors  rank 0's part of the policy: weights, optimizer, random state (see shards.py)
        policy-001.safetensors  ...
        critic-000.safetensors  the same of the critic, where there is one

A checkpoint is written into a hidden folder, each file and folder flushed to the disk, and
renamed when it is complete: a crash leaves the folder of before. The same is done for exports.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
from torch import Tensor

from fourfold.algorithm.state import AlgorithmState, RunningMoments
from fourfold.config import Config
from fourfold.errors import NotFound, Unavailable, WrongState
from fourfold.weights.manifest import Manifest

FORMAT: Final = 3
STATE_FILE: Final = "trainer.json"
_PREFIX: Final = "step-"
_HIDDEN: Final = ".partial-"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
# What a Hugging Face folder holds besides weights.
_COMPANIONS: Final = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """What a step answered: kept, so that a repeated call gets it again."""

    step: int
    policy_version: int
    skipped_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where the trainer is; weights and optimizer aside, all that a restart needs."""

    step: int = 0
    policy_version: int = 0
    skipped_step_count: int = 0
    batch_sha256: str = ""
    """Of the last step's batch, hexadecimal."""
    lineage: str = ""
    """SHA-256 over the batches of all steps so far: two states of one step and other batches differ in it."""
    answer: StepAnswer | None = None
    """Of the last step."""
    algorithm_state: AlgorithmState = field(default_factory=AlgorithmState)


def layout_of(config: Config, manifest: Manifest) -> dict[str, object]:
    """Return what must be equal in a trainer that loads a checkpoint: the same for all ranks and stages."""
    shapes = sorted((spec.name, list(spec.shape)) for spec in manifest.tensors)
    return {"dtype": config.model.dtype, "weights": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()}


class CheckpointStore:
    """The checkpoints of one run. Belongs to one thread, except `newest_step`."""

    def __init__(self, folder: Path, *, keep: int, keep_best: int = 0, layout: Mapping[str, object]) -> None:
        """Open a folder, made when the first checkpoint is written.

        Args:
            folder: of all checkpoints.
            keep: newest ones that stay.
            keep_best: those with the highest scores that stay, too.
            layout: what must be equal in a trainer that loads one: `layout_of`.
        """
        self._folder = folder
        self._keep, self._keep_best = keep, keep_best
        self._layout = dict(layout)
        for partial in folder.glob(f"{_HIDDEN}*"):
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def newest_step(self) -> int:
        """Step of the newest complete checkpoint; -1 for none."""
        return max(self._steps(), default=-1)

    def save(self, state: TrainerState, write: Callable[[Path], None], *, score: float | None = None) -> None:
        """Write a checkpoint, unless the same one is there; then drop those that are too old and not good enough.

        Args:
            state: of the trainer.
            write: puts every rank's file into the folder that it is given, durably.
            score: of a held-out evaluation of these weights, higher is better; None: there was none.

        Raises:
            Unavailable: the disk refuses.
        """
        if self._is_there(state):
            if score is not None and score != self._score(state.step):
                self._add_score(state.step, score)
        else:
            with whole(self._path(state.step)) as partial:
                write(partial)
                files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
                record = {"format": FORMAT, "layout": self._layout, "files": files, "score": score}
                write_text(partial / STATE_FILE, json.dumps(record | {"state": asdict(state)}, indent=1))
        self._prune(state.step)

    def read(self, step: int) -> tuple[TrainerState, Path]:
        """Return a checkpoint's state and folder, once all of its files are there.

        Raises:
            NotFound: there is none of that step.
            WrongState: another layout, or damaged.
        """
        folder = self._path(step)
        if step not in self._steps():
            there = ", ".join(map(str, sorted(self._steps()))) or "none"
            raise NotFound(f"no checkpoint of step {step} in {self._folder}; there are: {there}")
        try:
            record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        except ValueError:
            raise WrongState(f"{folder / STATE_FILE} is damaged; restore another checkpoint") from None
        if record["format"] != FORMAT:
            raise WrongState(
                f"{folder} has format {record['format']}, this version of the trainer reads {FORMAT}; go on with the "
                f"version that wrote it, or begin a new run from an exported model"
            )
        for key, mine in self._layout.items():
            if record["layout"].get(key) != mine:
                raise WrongState(
                    f"{folder} was written with {key} = {record['layout'].get(key)}, the trainer runs with {mine}; "
                    f"start it as it was, or begin a new run from an exported model"
                )
        for name, size in record["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise WrongState(f"{path} should have {size} bytes; the checkpoint is damaged: restore another one")
        return _state(record["state"]), folder

    def _is_there(self, state: TrainerState) -> bool:
        """Whether this very state was saved; one of the same step from a lost future is another one."""
        with suppress(NotFound, WrongState):
            saved, _ = self.read(state.step)
            return saved.lineage == state.lineage and saved.policy_version == state.policy_version
        return False

    def _prune(self, step: int) -> None:
        past = sorted(s for s in self._steps() if s <= step)  # a later one was written before an older was restored
        ranked = sorted((score, s) for s in past if (score := self._score(s)) is not None)  # of equals the newer wins
        best = [s for _, s in ranked[max(len(ranked) - self._keep_best, 0) :]]
        for gone in set(self._steps()) - {*past[-self._keep :], *best}:
            self._remove(self._path(gone))

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint; one that a crash leaves half removed must not look like one."""
        hidden = folder.with_name(f"{_HIDDEN}{folder.name}-{os.getpid()}")
        with suppress(OSError):  # it stays, and is tried again after the next one
            folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _score(self, step: int) -> float | None:
        """Return the score that a checkpoint was saved with, if any."""
        try:
            score = json.loads((self._path(step) / STATE_FILE).read_text(encoding="utf-8"))["score"]
        except (OSError, ValueError, KeyError):  # damaged, or of an older version
            return None
        return float(score) if score is not None and math.isfinite(score) else None

    def _add_score(self, step: int, score: float) -> None:
        path = self._path(step) / STATE_FILE
        fresh = path.with_name(f"{path.name}.new")
        write_text(fresh, json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"score": score}, indent=1))
        fresh.replace(path)
        sync(path.parent)

    def _steps(self) -> list[int]:
        names = [path.parent.name.removeprefix(_PREFIX) for path in self._folder.glob(f"{_PREFIX}*/{STATE_FILE}")]
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step:06d}"


def _state(fields: dict[str, Any]) -> TrainerState:
    """Return the state that was written as JSON."""
    answer = fields.pop("answer")
    # Older checkpoints have the key `memory`.
    algorithm = fields.pop("memory") if "memory" in fields else fields.pop("algorithm_state")
    scores = RunningMoments(**algorithm.pop("scores"))
    return TrainerState(
        **fields,
        answer=StepAnswer(**answer) if answer else None,
        algorithm_state=AlgorithmState(**algorithm, scores=scores),
    )


class whole:
    """Gives a hidden folder to fill, and puts it in the place of `target` at the end; nothing happens on an error.

    Raises:
        Unavailable: the disk refuses.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = target.with_name(f"{_HIDDEN}{target.name}-{os.getpid()}")

    def __enter__(self) -> Path:
        for left in self._target.parent.glob(f"{_HIDDEN}{self._target.name}-*"):  # by a process that died
            shutil.rmtree(left, ignore_errors=True)
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise _refused(self._partial, error) from None
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None:
                self._replace()
        except OSError as failure:
            raise _refused(self._target, failure) from None
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _replace(self) -> None:
        sync(self._partial)
        if self._target.exists():
            _exchange(self._partial, self._target)  # the old one is then removed as the partial one
        else:
            self._partial.rename(self._target)
        sync(self._target.parent)


def _exchange(first: Path, second: Path) -> None:
    """Exchange two folders in one step, so that no crash leaves neither. Needs Linux, as the services do."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def rank_file(model: str, rank: int | None) -> str:
    """Return the name of the file of a rank's part of `policy` or `critic`; None: a pattern for those of all ranks."""
    return f"{model}-{'*' if rank is None else format(rank, '03d')}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write tensors, durably.

    Raises:
        Unavailable: the disk refuses.
    """
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
        sync(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _refused(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a text file, durably."""
    try:
        path.write_text(text, encoding="utf-8")
        sync(path)
    except OSError as error:
        raise _refused(path, error) from None


def write_model(model: Any, state: dict[str, Tensor], folder: Path, *, source: Path) -> None:
    """Write a Hugging Face folder, durably: weights, config, and the tokenizer's files of `source`.

    Raises:
        Unavailable: the disk refuses.
    """
    try:
        model.save_pretrained(folder, state_dict=state)
        for path in source.iterdir():
            wanted = path.suffix in _COMPANIONS and not path.name.endswith(".index.json")
            if path.is_file() and wanted and path.name != "config.json":
                shutil.copyfile(path, folder / path.name)
        for path in folder.iterdir():
            sync(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _refused(folder, error) from None


def write_adapter(folder: Path, settings: str, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter as PEFT keeps it, durably.

    Raises:
        Unavailable: the disk refuses.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _refused(folder, error) from None
    write_text(folder / "adapter_config.json", settings)
    write_tensors(folder / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
    sync(folder)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, error: Exception) -> Unavailable:
    return Unavailable(f"{path} cannot be written ({error}); nothing was changed: make room, then try again")
