"""Stores checkpoints on disk, each complete or absent, and removes old ones; `export` has model folders.

checkpoints/step-000012/
    trainer.json            step, policy version, last answer, held-out score, layout, names and sizes of all files
    policy-000.safetensors  rank 0's share of the policy: weights, optimizer, random state (see shards.py)
    policy-001.safetensors  ...
    critic-000.safetensors  the same for the critic, if there is one

Every function that writes raises Unavailable when the disk refuses.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fourfold.algorithm.state import AlgorithmState, RunningMoments
from fourfold.config import Config
from fourfold.errors import NotFound, Unavailable, WrongState
from fourfold.weights.manifest import Manifest
from fourfold_trainer.checkpoint.tensor_files import TensorFileWriter

FORMAT: Final = 3
STATE_FILE: Final = "trainer.json"
_PREFIX: Final = "step-"
_HIDDEN: Final = ".partial-"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """The answer of a step, kept for a caller that repeats the call."""

    step: int
    policy_version: int
    skipped_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The state for a restart, besides weights and optimizer."""

    step: int = 0
    policy_version: int = 0
    skipped_step_count: int = 0
    batch_sha256: str = ""
    """Digest of the last step's batch, hexadecimal."""
    lineage: str = ""
    """Digest over the batches of all steps so far, hexadecimal; differs for two states of the same step number."""
    answer: StepAnswer | None = None
    """Answer of the last step."""
    algorithm_state: AlgorithmState = field(default_factory=AlgorithmState)


def layout_of(config: Config, manifest: Manifest) -> dict[str, object]:
    """Return the properties that a trainer must share with a checkpoint that it loads, besides the format.

    They do not depend on the number of ranks or the ZeRO stage. Where engines get adapters, the weights are not among
    them, so that such a run and one that sends merged weights read each other's checkpoints: `zero/lora.py` compares
    layers, rank and base of both.
    """
    layout: dict[str, object] = {"dtype": config.model.dtype}
    if manifest.adapter is None:
        shapes = sorted((spec.name, list(spec.shape)) for spec in manifest.tensors)
        layout["weights"] = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    return layout


class CheckpointStore:
    """The checkpoints of one run. One thread uses it, except `newest_step`."""

    def __init__(self, folder: Path, *, keep: int, keep_best: int = 0, layout: Mapping[str, object]) -> None:
        """Remove partial files of a crash from `folder`, which the first checkpoint creates.

        Args:
            keep: number of newest checkpoints to keep.
            keep_best: number of checkpoints with the highest scores to keep besides.
            layout: of this trainer, from `layout_of`.
        """
        self._folder = folder
        self._keep, self._keep_best = keep, keep_best
        self._layout = dict(layout)
        remove_partial(folder)

    @property
    def folders(self) -> list[str]:
        """Return the names of the folders of all complete checkpoints."""
        return [self._path(step).name for step in self._steps()]

    @property
    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; -1 for none."""
        return max(self._steps(), default=-1)

    def save(
        self,
        state: TrainerState,
        write: Callable[[Path], None],
        *,
        commit: Callable[[Path, Path], None] = lambda _partial, _target: None,
        score: float | None = None,
        extra: bool = False,
    ) -> None:
        """Write a checkpoint, unless it exists; then remove those that are neither recent nor good enough.

        Args:
            write: writes every rank's file into the given folder, durably.
            commit: makes the first folder the second one on other machines; called when the first one is complete.
            score: of a held-out evaluation of these weights, higher is better; None without an evaluation.
            extra: remove no other checkpoint, because the coordinator does not know this one and may need an older one.
        """
        if self._is_there(state):
            if score is not None and score != self._score(state.step):
                self._write_score(state.step, score)
        else:
            with atomic_folder(self._path(state.step)) as partial:
                write(partial)
                # This file is written last and lists all others with their sizes, so that `read` detects a torn copy.
                files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
                record = {"format": FORMAT, "layout": self._layout, "files": files, "score": score}
                write_text(partial / STATE_FILE, json.dumps(record | {"state": asdict(state)}, indent=1))
                commit(partial, self._path(state.step))
        if not extra:
            self._prune(state.step)

    def read(self, step: int) -> tuple[TrainerState, Path]:
        """Return a checkpoint's state and folder, after checking that all of its files exist.

        Raises:
            NotFound: there is no checkpoint of that step.
            WrongState: it has another layout, or is damaged.
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
            if (written := record["layout"].get(key, mine)) != mine:
                raise WrongState(
                    f"{folder} was written with {key} = {written}, the trainer runs with {mine}; "
                    f"start it as it was, or begin a new run from an exported model"
                )
        for name, size in record["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                raise WrongState(f"{path} should have {size} bytes; the checkpoint is damaged: restore another one")
        return _state(record["state"]), folder

    def _is_there(self, state: TrainerState) -> bool:
        """Return whether this state was saved. After a restore, the same step may have been trained differently."""
        with suppress(NotFound, WrongState):
            saved, _ = self.read(state.step)
            return saved.lineage == state.lineage and saved.policy_version == state.policy_version
        return False

    def _prune(self, step: int) -> None:
        # A later checkpoint was written before an older one was restored, and belongs to another history.
        past = sorted(s for s in self._steps() if s <= step)
        ranked = sorted((score, s) for s in past if (score := self._score(s)) is not None)  # of equals the newer wins
        best = [s for _, s in ranked[max(len(ranked) - self._keep_best, 0) :]]
        for gone in set(self._steps()) - {*past[-self._keep :], *best}:
            remove(self._path(gone))

    def _score(self, step: int) -> float | None:
        """Return the score of a checkpoint; None if it is missing or unreadable."""
        try:
            score = json.loads((self._path(step) / STATE_FILE).read_text(encoding="utf-8"))["score"]
        except (OSError, ValueError, KeyError):  # damaged, or written by an older version
            return None
        return float(score) if score is not None and math.isfinite(score) else None

    def _write_score(self, step: int, score: float) -> None:
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


def remove(folder: Path) -> None:
    """Remove a checkpoint. Rename it first, so that a crash leaves no partial checkpoint under its name."""
    hidden = folder.with_name(f"{_HIDDEN}{folder.name}-{os.getpid()}")
    with suppress(OSError):  # the folder remains, and the next attempt may succeed
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_partial(folder: Path) -> None:
    """Remove partial files of a crash from a folder of checkpoints."""
    for partial in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(partial, ignore_errors=True)


def _state(fields: dict[str, Any]) -> TrainerState:
    """Return the state that `asdict` turned into JSON."""
    answer = fields.pop("answer")
    algorithm = fields.pop("algorithm_state")
    scores = RunningMoments(**algorithm.pop("scores"))
    return TrainerState(
        **fields,
        answer=StepAnswer(**answer) if answer else None,
        algorithm_state=AlgorithmState(**algorithm, scores=scores),
    )


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, then replace `target` by it; an error leaves `target` unchanged."""
    partial = target.with_name(f"{_HIDDEN}{target.name}-{os.getpid()}")
    for left in target.parent.glob(f"{_HIDDEN}{target.name}-*"):  # left by a process that died
        shutil.rmtree(left, ignore_errors=True)
    with writing(partial):
        partial.mkdir(parents=True)
    try:
        yield partial
        put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, target: Path) -> None:
    """Give a folder its final name, durably; an older folder of that name then is `partial`."""
    with writing(target):
        # Flush the folder before the rename: a crash of the machine could otherwise keep the name of an empty one.
        sync(partial)
        if target.exists():
            _exchange(partial, target)
        else:
            partial.rename(target)
        sync(target.parent)


def _exchange(first: Path, second: Path) -> None:
    """Exchange two folders atomically, so that a crash leaves one of them in each place. Needs Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, durably. Its tensors are contiguous; they are copied from their device in parts."""
    with writing(path):
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        file = TensorFileWriter(path, specs, metadata=metadata)
        try:
            for name, tensor in tensors.items():
                file.write(name, tensor)
        except BaseException:
            file.abandon()
            raise
        file.close()


def write_text(path: Path, text: str) -> None:
    """Write a text file, durably."""
    with writing(path):
        path.write_text(text, encoding="utf-8")
        sync(path)


def write_adapter(folder: Path, settings: str, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter in PEFT's format, durably."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise the errors of a disk that refuses as Unavailable."""
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be written ({error}); nothing was changed: make room, then try again"
        ) from None
