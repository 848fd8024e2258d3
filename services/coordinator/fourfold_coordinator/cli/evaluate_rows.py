"""`fourfold eval` of a run of rows: its held-out sets are measured by its trainer, with the weights of a checkpoint."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.process import Supervisor
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.trainer.client import AsyncTrainerClient

from ..launch.exports import check_exportable, trainer_of
from ..launch.run_names import LEDGER_FILE
from ..routing.replica import Replica
from ..rows.open_rows import OpenRows, open_rows
from ..rows.reference_file import ReferenceFile
from ..state.ledger import read_value
from ..training.evaluation.row_evaluator import Attach, RowEvaluator
from ..training.prepared_reference import file_key
from .run import local_gpus

T = TypeVar("T")


def evaluate_rows(config: Config, run_dir: Path, step: int, supervisor: Supervisor) -> dict[str, Any]:
    """Return what evaluation.json has of a run of rows; see `training/evaluation/standalone.py`.

    Args:
        config: recipe of the run, perhaps with other held-out sets. The trainer has that of the run.
        run_dir: folder of the run, which is not in progress.
        step: of a checkpoint.
        supervisor: starts the trainer, which is stopped at the end.

    Raises:
        ConfigError: the run is in progress, a set cannot be read, or its reference is not known.
        FourfoldError: the trainer cannot load the checkpoint, or failed.
    """
    began = time.monotonic()
    check_exportable(config, run_dir, step)
    folder = model_folder.resolve(config.model.source, config.data.chat_template)
    rows = open_rows(config, Tokenizer.load(folder, date=config.data.date))
    references = _references(config, run_dir, rows)
    gpus = local_gpus(config).get("trainer-0", ())
    print(f"Starting the trainer with the checkpoint of step {step} ...", flush=True)
    with trainer_of(config, run_dir, gpus, supervisor) as target:
        found = asyncio.run(_measure(config, target, step, rows, references))
    return {**found, "seconds": round(time.monotonic() - began, 3)}


def _references(config: Config, run_dir: Path, rows: OpenRows) -> dict[str, Attach]:
    """Return what attaches the log-probabilities that the run computed before its first step, by held-out set."""
    if not config.prepares_reference:
        return {}
    found = dict[str, Attach]()
    for each in rows.held_out:
        try:
            path = read_value(run_dir / LEDGER_FILE, file_key(each.name, served=config.needs_reference))
        except sqlite3.Error as error:
            raise ConfigError(
                f"{run_dir / LEDGER_FILE}: cannot be read ({error}); restore the file from a copy"
            ) from None
        if not path:
            raise ConfigError(
                f"{each.name}: the run has no reference log-probabilities of this set, which algorithm.loss.kind = "
                f"`{config.algorithm.loss.kind}` compares with; a run computes those of the sets of its recipe before "
                f"its first step: name the set there, and start a new run"
            )
        found[each.name] = ReferenceFile(Path(path), served=config.needs_reference).attach
    return found


class _Session:
    """The trainer that was started for the evaluation, as the evaluator calls it."""

    def __init__(self, trainer: AsyncTrainerClient) -> None:
        self._replica: Any = SimpleNamespace(trainer=trainer)

    async def call(self, name: str, work: Callable[[Replica], Awaitable[T]]) -> T:
        return await work(self._replica)


async def _measure(
    config: Config, target: str, step: int, rows: OpenRows, references: Mapping[str, Attach]
) -> dict[str, Any]:
    async with AsyncTrainerClient(target, certs=config.security.directory) as trainer:
        await trainer.load_checkpoint(step, timeout=config.trainer.step_timeout_seconds)
        evaluator = RowEvaluator(rows.held_out, _Session(trainer), config, references)
        found = await evaluator.run(step=step, version=0, engine=None, on_progress=lambda _done, _count: None)
    assert found is not None, "there is a held-out set"
    row = found.row
    return {
        "seed": config.seed,
        "success": config.evaluation.success,
        "scorers": [],
        "lm_eval": {},
        "score": row.score,
        "half_width": row.half_width,
        "interval": row.bounds,
        "sets": [asdict(each) for each in row.sets],
        "unscored": [],
    }
