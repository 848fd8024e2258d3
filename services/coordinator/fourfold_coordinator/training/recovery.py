"""Restores a run to its last checkpoint: trainer, ledger, data position, policy version and files.

The same steps serve a resumed run, whose processes are all new, and a run whose trainer died and came back. The steps
after the checkpoint went into weights that are lost: their samples are DROPPED and their prompts are issued again. The
policy version continues above every version that was published.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fourfold.config import Config
from fourfold.errors import NotFound, WrongState
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..routing.router import INFO_SECONDS
from ..routing.trainer_session import TrainerSession
from ..state.files import DiskWriter, replace_file
from ..state.ledger import Ledger, StepRow

log = logging.getLogger("fourfold.coordinator")

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"


async def restore(
    config: Config, folder: Path, ledger: Ledger, session: TrainerSession, disk: DiskWriter
) -> tuple[int, int]:
    """Bring trainer, ledger and files back to the last checkpoint; return its step and the prompts drawn by then."""
    status = await session.call("GetStatus", lambda r: r.trainer.get_status(timeout=INFO_SECONDS))
    step, data_position = newest_checkpoint(ledger, status)
    if step > 0:
        status = await _load(config, session, step)
    if status.step != step:
        raise WrongState(
            f"the trainer is at step {status.step}, and the run has no checkpoint after step {step} to go back "
            f"to; restart the trainer"
        )
    session.policy_version = status.policy_version
    dropped = await disk.write(ledger.restore, step)
    if step > 0:  # `newest_checkpoint` may have chosen one that the ledger never committed
        version = status.policy_version
        await disk.write(ledger.commit_checkpoint, step=step, data_position=data_position, policy_version=version)
    await disk.write_in_thread(rewrite_metrics, folder / METRICS_FILE, ledger.steps())
    await disk.write_in_thread(truncate_after, folder / SAMPLES_FILE, step)
    highest = ledger.highest_version()
    if highest > 0:
        # An engine may still hold that version of the lost weights, so that its number is used up.
        await session.raise_policy_version(highest + 1)
    if step or highest:
        log.warning("restored: step=%d policy_version=%d dropped_samples=%d", step, session.policy_version, dropped)
    return step, data_position


def newest_checkpoint(ledger: Ledger, status: pb.TrainerStatus) -> tuple[int, int]:
    """Return step and data position of the newest checkpoint that both the trainer and the ledger can restore.

    The coordinator may have died after the trainer saved a checkpoint and before the ledger committed it. The ledger
    then has the row of that step, and in the row everything that a restore needs.
    """
    row = ledger.last_checkpoint()
    newest = (0, 0) if row is None else (row.step, row.data_position)
    for step in ledger.steps():
        if step.step == status.checkpoint_step > newest[0] and step.metrics:
            newest = (step.step, step.data_position)
    return newest


async def _load(config: Config, session: TrainerSession, step: int) -> pb.TrainerStatus:
    timeout = config.trainer.step_timeout_seconds
    try:
        return await session.call("LoadCheckpoint", lambda r: r.trainer.load_checkpoint(step, timeout=timeout))
    except NotFound as error:
        raise NotFound(
            f"the ledger's last checkpoint is that of step {step}, and the trainer does not have it: {error}; start "
            f"the trainer with the run's folder (--run-dir), or start a new run"
        ) from None


def rewrite_metrics(path: Path, steps: Sequence[StepRow]) -> None:
    """Write metrics.jsonl from the ledger: one line per step done."""
    replace_file(path, (json.dumps({"step": row.step, **row.metrics}) + "\n" for row in steps if row.metrics))


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, and lines that a kill cut short, from a JSONL file; it may be missing."""
    if path.exists():
        replace_file(path, _lines_up_to(path, step))


def _lines_up_to(path: Path, step: int) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                number = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if number <= step and line.endswith("\n"):
                yield line
