"""Finds the weights of a run to evaluate: its exported model folders, and its checkpoints that may be exported.

runs/demo/model                    the last weights, after `steps` of report.json
runs/demo/model-step-40            exported by checkpoint.export_every_steps, or by `export_checkpoint`
runs/demo/checkpoints/step-000060  a checkpoint: the trainer alone reads it
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.hardware import gpu_environment
from fourfold.host.process import Command, Supervisor
from fourfold.host.program import resume_command
from fourfold.model import runs
from fourfold.model.runs import Weights
from fourfold.trainer.client import TrainerClient

from ..state.ledger import read_evals
from .fleet import READY_SECONDS
from .run_folder import is_locked, locked
from .run_names import CONFIG_FILE, COORDINATOR_LOCK, LEDGER_FILE, RUN_LOCK, STEP_FOLDER

_TRAINER: Final = "trainer-0"


def find_weights(run_dir: Path, wanted: str) -> Weights:
    """Return the weights of a step, or the `last` or the `best` ones that the run has on disk.

    The best weights have the highest held-out score of the run's evaluations; of equal scores, the newer weights.

    Raises:
        ConfigError: there are none, or none of that step.
    """
    if not runs.all_weights(run_dir):
        raise ConfigError(f"{run_dir} has neither an exported model nor a checkpoint; {way_to_export(run_dir)}")
    return runs.find_weights(run_dir, wanted, scores=_scores(run_dir), what=f"--checkpoint {wanted}")


def _scores(run_dir: Path) -> dict[int, float]:
    try:
        return {row.step: row.score for row in read_evals(run_dir / LEDGER_FILE)}
    except sqlite3.Error:
        return {}


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
    timeout = config.trainer.step_timeout_seconds
    with (
        trainer_of(config, run_dir, gpus, supervisor) as target,
        TrainerClient(target, certs=config.security.directory) as trainer,
    ):
        trainer.load_checkpoint(step, timeout=timeout)
        return Path(trainer.export_model(f"{STEP_FOLDER}{step}", timeout=timeout))


@contextmanager
def trainer_of(config: Config, run_dir: Path, gpus: Sequence[str], supervisor: Supervisor) -> Iterator[str]:
    """Run the trainer of a run alone; yield its HOST:PORT. Arguments and errors are those of `export_checkpoint`."""
    argv = [sys.executable, "-m", "fourfold", "serve", "trainer", str(run_dir / CONFIG_FILE)]
    argv += ["--member-id", _TRAINER, "--run-dir", str(run_dir)]
    with locked(run_dir / RUN_LOCK, "`fourfold eval`"):  # so that the run is neither continued nor deleted
        supervisor.start(Command(name=_TRAINER, argv=tuple(argv), env=gpu_environment(gpus)))
        try:
            yield supervisor.wait_ready([_TRAINER], timeout_seconds=READY_SECONDS)[_TRAINER]
        finally:
            supervisor.stop()
