"""Finds where a run continues when its coordinator or its trainer is a new process.

    trainer is the process that the ledger knows --> take_over: at the ledger's last step, or at the step in flight
      | no, or at another step
      '--> restore: trainer, ledger, data position, policy version and files go back to the last checkpoint

A coordinator that takes over loses no trained step. It drops the samples that were in the memory of the dead
coordinator, and issues their prompts again.

A restore serves a resumed run, whose processes are all new, and a run whose trainer died and came back. The steps after
the checkpoint went into weights that are lost: their samples are DROPPED and their prompts are issued again. The groups
that were finished for the step after the checkpoint are kept: its weights sampled them, and no weights that remain have
seen them. The policy version continues above every version that was published.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fourfold.bounds import MAX_NUMBER
from fourfold.config import Config
from fourfold.errors import NotFound, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, utc_text
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..data.prompts import derive_seed
from ..routing.router import INFO_SECONDS
from ..routing.trainer_session import TrainerSession
from ..state.experiences import StoredSample
from ..state.files import DiskWriter, replace_file
from ..state.ledger import COORDINATOR_RESTARTED, Ledger, SampleState, StepRow
from ..state.samples import SampleGroup
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"
# Key in the ledger: incarnation of the trainer process whose weights come from the ledger's steps.
TRAINER_KEY: Final = "trainer_incarnation"
_RECIPE_KEY: Final = "experiences_recipe_sha256"
# Keys of a recipe that decide nothing about a sample.
_NOT_OF_SAMPLES: Final = frozenset({"name", "steps", "checkpoint", "evaluation", "metrics", "retry"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """Where a run continues."""

    step: int  # steps done
    prompts_drawn: int  # by the end of that step
    trainer_kept: bool = False  # the trainer kept its weights
    groups: Sequence[SampleGroup] = ()  # finished ones of the next step


async def take_over(folder: Path, ledger: Ledger, session: TrainerSession, disk: DiskWriter) -> RunPosition | None:
    """Continue with the weights that the trainer has; return None when they do not come from the ledger's steps.

    A step that the trainer has done, and whose response the dead coordinator did not record, is acknowledged.
    """
    if ledger.get(TRAINER_KEY) != session.incarnation:
        return None
    status = await session.wait_until_idle()
    step, result = ledger.last_step(), status.last_step
    if status.step == result.step == step + 1 and SampleState.LEASED in ledger.counts():
        step += 1
        await disk.write(
            ledger.acknowledge,
            step,
            policy_version=result.policy_version,
            skipped_reason=result.skipped_reason,
            data_position=ledger.prompts_drawn(step),
        )
    if status.step != step or status.policy_version < ledger.highest_version():
        return None
    session.policy_version = status.policy_version
    dropped = await disk.write(ledger.restore, step, COORDINATOR_RESTARTED)
    last = next(reversed(ledger.steps()), None)
    if last is not None and not last.metrics and result.step == step:  # it died before it had reported the step
        texts = {"end_time": utc_text(SYSTEM_CLOCK.now()), "diagnosis": ""}
        metrics: dict[str, Any] = {**finite(result.metrics), **texts, "alarms": []}
        await disk.write(ledger.record_metrics, step, metrics, seconds=0.0)
    await _rewrite_files(folder, ledger, step, disk)
    log.warning("took over: step=%d policy_version=%d dropped_samples=%d", step, status.policy_version, dropped)
    return RunPosition(step=step, prompts_drawn=last.data_position if last is not None else 0, trainer_kept=True)


async def restore(
    config: Config,
    folder: Path,
    ledger: Ledger,
    session: TrainerSession,
    disk: DiskWriter,
    *,
    recover: Callable[[int], Awaitable[Sequence[SampleGroup]]],
) -> RunPosition:
    """Bring trainer, ledger and files back to the last checkpoint.

    `recover` returns the finished groups of a step.
    """
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
    groups = await recover(step + 1)
    dropped = await disk.write(ledger.restore, step, keep={s.group_id for group in groups for s in group.samples})
    if step > 0:  # `newest_checkpoint` may have chosen one that the ledger never committed
        version = status.policy_version
        await disk.write(ledger.commit_checkpoint, step=step, data_position=data_position, policy_version=version)
    await _rewrite_files(folder, ledger, step, disk)
    highest = ledger.highest_version()
    if highest > 0:
        # An engine may still hold that version of the lost weights, so that its number is used up.
        await session.raise_policy_version(highest + 1)
    if step or highest:
        kept = sum(len(group.samples) for group in groups)
        log.warning(
            "restored: step=%d policy_version=%d dropped_samples=%d kept_samples=%d",
            step, session.policy_version, dropped, kept,
        )  # fmt: skip
    await disk.write(ledger.put, {TRAINER_KEY: session.incarnation})
    return RunPosition(step=step, prompts_drawn=data_position, groups=tuple(groups))


async def recover_groups(context: RunContext, step: int) -> list[SampleGroup]:
    """Return the groups of a step that were READY or leased, if the recipe that sampled them is that of this run."""
    config = context.config
    recipe = _recipe_sha256(config)
    if context.ledger.get(_RECIPE_KEY) != recipe:
        await context.disk.write(context.ledger.put, {_RECIPE_KEY: recipe})
        return []
    stored = await context.experiences.load(
        step, vocabulary_size=MAX_NUMBER, max_tokens=config.model.max_context_tokens
    )
    return [await _to_group(context, position, samples) for position, _, samples in stored]


async def _to_group(context: RunContext, position: int, stored: Sequence[StoredSample]) -> SampleGroup:
    prompt = context.prompts.at(position)
    texts = await context.service_calls.with_texts(prompt, [s.sample for s in stored])
    trajectories = [
        replace(trajectory, dropped=s.dropped, abstained=s.abstained)
        for trajectory, s in zip(texts, stored, strict=True)
    ]
    size = context.config.batch.group_size
    return SampleGroup(
        position=position,
        seed=derive_seed(context.config.seed, "train", position, prompt.index),
        trajectories=tuple(trajectories[:size]),
        baseline=next(iter(trajectories[size:]), None),
        recovered=True,
    )


def _recipe_sha256(config: Config) -> str:
    """Return a SHA-256 (hex) of what decides about a sample: READY samples of another recipe are not trained on."""
    recipe = {key: value for key, value in config.model_dump(mode="json").items() if key not in _NOT_OF_SAMPLES}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


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


async def _rewrite_files(folder: Path, ledger: Ledger, step: int, disk: DiskWriter) -> None:
    await disk.write_in_thread(rewrite_metrics, folder / METRICS_FILE, ledger.steps())
    await disk.write_in_thread(truncate_after, folder / SAMPLES_FILE, step)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics in order of their names, None for values that JSON does not have: NaN and infinity."""
    return {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}


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
