"""Back to the last checkpoint: trainer, ledger, data position, versions and files in agreement.

The same steps serve a resumed run, whose processes are all new, and a run whose trainer died
and came back. What was trained after the checkpoint went into weights that are lost: those
samples are DROPPED, their prompts are issued again, and versions go on above every version that
was ever published.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config
from fourfold.errors import NotFound, WrongState
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..routing.trainer_session import TrainerSession
from ..state.disk_wait import DiskWriter
from ..state.ledger import Ledger, StepRow

log = logging.getLogger("fourfold.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where the run goes on."""

    step: int
    """Steps done."""
    data_position: int
    """Prompts drawn."""


async def restore(
    config: Config, folder: Path, ledger: Ledger, session: TrainerSession, disk: DiskWriter
) -> ResumePoint:
    """Bring trainer, ledger and files back to the last checkpoint.

    Args:
        config: of the run.
        folder: of the run.
        ledger: of the run.
        session: connected to the trainer.
        disk: makes the writes.

    Raises:
        WrongState: there is no checkpoint and the trainer is not at its start.
        NotFound: the trainer does not have the checkpoint.
    """
    status = await session.call("GetStatus", lambda r: r.trainer.get_status(timeout=10.0))
    point = newest_checkpoint(ledger, status)
    if point.step > 0:
        status = await _load(config, session, point.step)
    if status.step != point.step:
        raise WrongState(
            f"the trainer is at step {status.step} and the run has no checkpoint after step {point.step} to go back "
            f"to; start the trainer anew"
        )
    session.policy_version = status.policy_version
    dropped = await disk.write(ledger.restore, point.step)
    if point.step > 0:
        await disk.write(
            ledger.commit_checkpoint,
            step=point.step,
            data_position=point.data_position,
            policy_version=status.policy_version,
        )
    await disk.write_in_thread(rewrite_metrics, folder / "metrics.jsonl", ledger.steps())
    await disk.write_in_thread(truncate_after, folder / "samples.jsonl", point.step)
    highest = ledger.highest_version()
    if highest > 0:
        await session.raise_policy_version(highest + 1)
    if point.step or highest:
        log.warning(
            "going on after step %d with policy version %d; %d later samples are dropped",
            point.step, session.policy_version, dropped,
        )  # fmt: skip
    return point


def newest_checkpoint(ledger: Ledger, status: pb.TrainerStatus) -> ResumePoint:
    """Return the newest checkpoint that both sides have.

    The coordinator may have died after the trainer had written one and before the ledger knew: the ledger has that
    step's row, and with it all that is needed.
    """
    row = ledger.last_checkpoint()
    newest = ResumePoint(step=0, data_position=0)
    if row is not None:
        newest = ResumePoint(step=row.step, data_position=row.data_position)
    for step in ledger.steps():
        if step.step == status.checkpoint_step > newest.step and step.metrics:
            newest = ResumePoint(step=step.step, data_position=step.data_position)
    return newest


async def _load(config: Config, session: TrainerSession, step: int) -> pb.TrainerStatus:
    try:
        return await session.call(
            "LoadCheckpoint",
            lambda r: r.trainer.load_checkpoint(step, timeout=config.trainer.step_timeout_seconds),
        )
    except NotFound as error:
        raise NotFound(
            f"the ledger's last checkpoint is that of step {step}, and the trainer does not have it: {error}; start "
            f"the trainer with the run's folder (--run-dir), or start a new run"
        ) from None


def rewrite_metrics(path: Path, steps: Sequence[StepRow]) -> None:
    """Write metrics.jsonl as the ledger has it: one line per step done."""
    lines = (json.dumps({"step": row.step, **row.metrics}) + "\n" for row in steps if row.metrics)
    _replace(path, lines)


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines of later steps, and a last line that was not finished, from a JSONL file."""
    if path.exists():
        _replace(path, _kept(path, step))


def _kept(path: Path, step: int) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                number = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a kill
            if number <= step and line.endswith("\n"):
                yield line


def _replace(path: Path, lines: Iterator[str]) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
