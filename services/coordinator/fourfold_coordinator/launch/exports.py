"""Finds the weights of a run to evaluate: its exported model folders, and its checkpoints that may be exported.

runs/demo/model                    the last weights, after `steps` of report.json
runs/demo/model-step-40            exported by checkpoint.export_every_steps, or by `export_checkpoint`
runs/demo/checkpoints/step-000060  a checkpoint: the trainer alone reads it
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.hardware import gpu_environment
from fourfold.host.process import Command, Supervisor
from fourfold.host.program import resume_command
from fourfold.trainer.client import TrainerClient

from ..state.ledger import read_evals
from .fleet import READY_SECONDS
from .run_folder import is_locked, locked
from .run_names import CONFIG_FILE, COORDINATOR_LOCK, LEDGER_FILE, MODEL_FOLDER, REPORT_FILE, RUN_LOCK, STEP_FOLDER

_CHECKPOINTS: Final = "checkpoints"
_TRAINER: Final = "trainer-0"


class Weights(NamedTuple):
    """Weights of a run."""

    step: int
    folder: Path | None  # folder of the exported model; None: a checkpoint that is not exported yet


def find_weights(run_dir: Path, wanted: str) -> Weights:
    """Return the weights of a step, or the `last` or the `best` ones that the run has on disk.

    The best weights have the highest held-out score of the run's evaluations; of equal scores, the newer weights.

    Raises:
        ConfigError: there are none, or none of that step.
    """
    known = all_weights(run_dir)
    if not known:
        raise ConfigError(f"{run_dir} has neither an exported model nor a checkpoint; {way_to_export(run_dir)}")
    if wanted == "last":
        return known[max(known)]
    if wanted == "best":
        scores = {step: score for step, score in _scores(run_dir).items() if step in known}
        if not scores:
            raise ConfigError(
                f"--checkpoint best: {run_dir} has no held-out score of the steps whose weights it has: "
                f"{_listed(list(known))}; give one of these steps"
            )
        return known[max(scores, key=lambda step: (scores[step], step))]
    if not wanted.isdecimal() or int(wanted) not in known:
        raise ConfigError(
            f"--checkpoint {wanted}: {run_dir} has the weights of {_listed(list(known))}; give one of these steps, "
            f"`best` or `last`"
        )
    return known[int(wanted)]


def all_weights(run_dir: Path) -> dict[int, Weights]:
    """Return the weights that a run has on disk, by step."""
    found = {step: Weights(step, None) for step, _ in _folders(run_dir / _CHECKPOINTS, "step-")}
    found |= {step: Weights(step, path) for step, path in _folders(run_dir, STEP_FOLDER)}
    try:
        last = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):  # not finished
        return found
    if (run_dir / MODEL_FOLDER).is_dir() and isinstance(last, int):
        found[last] = Weights(last, run_dir / MODEL_FOLDER)
    return found


def _folders(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix(prefix), path) for path in parent.glob(f"{prefix}*") if path.is_dir()]
    return [(int(number), path) for number, path in names if number.isdecimal()]


def _scores(run_dir: Path) -> dict[int, float]:
    try:
        return {row.step: row.score for row in read_evals(run_dir / LEDGER_FILE)}
    except sqlite3.Error:
        return {}


def _listed(steps: Sequence[int]) -> str:
    return "step " + ", ".join(map(str, sorted(steps)))


def way_to_export(run_dir: Path) -> str:
    """Return the instruction for a run that has not exported a model."""
    return "wait: it is in progress" if _in_progress(run_dir) else f"continue it: {resume_command(run_dir)}"


def _in_progress(run_dir: Path) -> bool:
    return is_locked(run_dir / RUN_LOCK) or is_locked(run_dir / COORDINATOR_LOCK)


def check_exportable(config: Config, run_dir: Path, step: int) -> None:
    """Check that a trainer of one machine may export a checkpoint of a run.

    Raises:
        ConfigError: the run is in progress, so that its own trainer may write, or has its trainer on several nodes.
    """
    if _in_progress(run_dir):
        raise ConfigError(
            f"{run_dir} is in progress and has not exported step {step}; stop it, or take weights that it exports "
            f"(checkpoint.export_every_steps, and its end)"
        )
    if config.placement.trainer_nodes > 1:
        raise ConfigError(
            f"step {step} of {run_dir} is not exported, and its trainer needs {config.placement.trainer_nodes} nodes; "
            f"take weights that the run exports (checkpoint.export_every_steps, and its end)"
        )


def export_checkpoint(config: Config, run_dir: Path, step: int, gpus: Sequence[str], supervisor: Supervisor) -> Path:
    """Export a checkpoint of a run to `model-step-N` in its folder with a trainer of its own; return that folder.

    Args:
        config: Recipe of the run, which `check_exportable` has passed.
        gpus: Ids of the trainer's GPUs.
        supervisor: Starts the trainer, which is stopped at the end.

    Raises:
        ConfigError: the run has been started meanwhile.
        FourfoldError: the trainer cannot load the checkpoint or write the folder.
    """
    argv = [sys.executable, "-m", "fourfold", "serve", "trainer", str(run_dir / CONFIG_FILE)]
    argv += ["--member-id", _TRAINER, "--run-dir", str(run_dir)]
    with locked(run_dir / RUN_LOCK, "`fourfold eval`"):  # so that the run is neither continued nor deleted
        supervisor.start(Command(name=_TRAINER, argv=tuple(argv), env=gpu_environment(gpus)))
        try:
            target = supervisor.wait_ready([_TRAINER], timeout_seconds=READY_SECONDS)[_TRAINER]
            timeout = config.trainer.step_timeout_seconds
            with TrainerClient(target, certs=config.security.directory) as trainer:
                trainer.load_checkpoint(step, timeout=timeout)
                return Path(trainer.export_model(f"{STEP_FOLDER}{step}", timeout=timeout))
        finally:
            supervisor.stop()
