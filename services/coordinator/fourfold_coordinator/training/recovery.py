"""Finds where a run continues when its coordinator or its trainer is a new process.

    trainer is the process that the ledger knows --> take_over: at the ledger's last step, or at the step in flight
      | no, or at another step
      '--> restore: trainer, ledger, data position, policy version and files go back to the last checkpoint

A coordinator that takes over loses no trained step. Samples that only the dead coordinator had in memory are DROPPED,
and their prompts are issued again.

A restore serves a resumed run, whose processes are all new, and a run whose trainer died and came back. The steps after
the checkpoint went into weights that are lost: their samples are DROPPED and their prompts are issued again.

In both cases READY and leased groups are kept, unless lost weights sampled them. The policy version continues above
every version that was published. Kept samples are renumbered with it, so that their lag stays what it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fourfold.bounds import MAX_NUMBER
from fourfold.config.schema import Config
from fourfold.errors import NotFound, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, utc_text
from fourfold.host.disk import append_lines
from fourfold.sample import VersionSpan
from fourfold.trainer.v1 import trainer_service_pb2 as pb

from ..data.prompts import group_seed, own_prompt
from ..launch.run_names import METRICS_FILE
from ..routing.replica import INFO_SECONDS
from ..state.experiences import StoredTrajectory
from ..state.files import replace_file
from ..state.ledger import COORDINATOR_RESTARTED, TRAINER_RESTORED, Ledger, StepRow
from ..state.run_position import RunPosition
from ..state.sample_tokens import TOKENS_FILE, to_token_lines
from ..state.samples import SAMPLES_FILE, SampleGroup, Trajectory, to_lines
from ..state.timeline import TIMELINE_FILE
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")

# Key in the ledger: incarnation of the trainer process whose weights come from the ledger's steps.
TRAINER_KEY: Final = "trainer_incarnation"
_RECIPE_KEY: Final = "experiences_recipe_sha256"
# Key in the ledger: [[version, raised version], ...], in order, of the restores. Stored samples keep their numbers.
_RAISES_KEY: Final = "version_raises"
# Tables and keys of a recipe that decide nothing about a sample.
_NOT_OF_SAMPLES: Final = {"name", "steps", "checkpoint", "evaluation", "metrics", "retry", "asynchrony", "gateway"}


async def take_over(context: RunContext) -> RunPosition | None:
    """Continue with the weights that the trainer has; return None when they do not come from the ledger's steps.

    A step that the trainer has done, and whose response the dead coordinator did not record, is acknowledged.
    """
    ledger, session, disk = context.ledger, context.session, context.disk
    if ledger.get(TRAINER_KEY) != session.incarnation:
        return None
    status = await session.wait_until_idle()
    step, result = ledger.last_step(), status.last_step
    groups = await _load_groups(context, newest=status.policy_version)
    leased, batch = ledger.leased(), list[SampleGroup]()
    if status.step == result.step == step + 1 and leased:
        step += 1
        batch = [group for group in groups if _names([group]) <= set(leased.values())]
        await disk.write(
            ledger.acknowledge,
            step,
            policy_version=result.policy_version,
            skipped_reason=result.skipped_reason,
            data_position=ledger.next_position(),
        )
        context.router.traces.trained(list(leased), result)
    # A step of rows that the trainer has done is sent again: it has the same bytes, and so the same response.
    sent_again = 0 if context.config.needs_engines else 1
    if not step <= status.step <= step + sent_again or status.policy_version < ledger.highest_version():
        return None
    session.policy_version = status.policy_version
    groups = [group for group in groups if group not in batch]
    dropped = await disk.write(_restore_ledger, context, step, COORDINATOR_RESTARTED, groups)
    await _record_missing_metrics(context, result)
    await _rewrite_files(context, step)
    await disk.write_in_thread(_append_missing, context, step, batch)
    log.warning(
        "took over: step=%d policy_version=%d dropped_samples=%d kept_samples=%d",
        step, status.policy_version, dropped, sum(len(group.samples) for group in groups),
    )  # fmt: skip
    return _position(context, step, groups, trainer_kept=True)


async def restore(context: RunContext) -> RunPosition:
    """Bring trainer, ledger and files back to the last checkpoint."""
    ledger, session, disk = context.ledger, context.session, context.disk
    status = await session.call("GetStatus", lambda r: r.trainer.get_status(timeout=INFO_SECONDS))
    step, data_position = newest_checkpoint(ledger, status)
    if step > 0:
        status = await _load_checkpoint(context, step)
    if status.step != step:
        raise WrongState(
            f"the trainer is at step {status.step}, and the run has no checkpoint after step {step} to go back "
            f"to; restart the trainer"
        )
    session.policy_version = status.policy_version
    # A checkpoint has the number that its weights had before an earlier restore to it.
    version = _raised(context, status.policy_version)
    groups = await _load_groups(context, newest=version)
    dropped = await disk.write(_restore_ledger, context, step, TRAINER_RESTORED, groups)
    await _record_missing_metrics(context, status.last_step)
    if step > 0:  # `newest_checkpoint` may return a checkpoint that the ledger never committed
        await disk.write(
            ledger.commit_checkpoint, step=step, data_position=data_position, policy_version=status.policy_version
        )
    await _rewrite_files(context, step)
    highest = ledger.highest_version()
    if highest > 0:
        # An engine may still hold lost weights of that version, so its number is not reused.
        groups = await _renumber(context, groups, version, highest + 1)
        await session.raise_policy_version(highest + 1)
    if step or highest:
        log.warning(
            "restored: step=%d policy_version=%d dropped_samples=%d kept_samples=%d",
            step, session.policy_version, dropped, sum(len(group.samples) for group in groups),
        )  # fmt: skip
    await disk.write(ledger.put, {TRAINER_KEY: session.incarnation})
    return _position(context, step, groups)


async def _record_missing_metrics(context: RunContext, result: pb.TrainStepResponse) -> None:
    """Record the trainer's metrics of the last step if coordinator or trainer died before they were reported."""
    last = next(reversed(context.ledger.steps()), None)
    if last is not None and not last.metrics and result.step == last.step:
        texts = {"end_time": utc_text(SYSTEM_CLOCK.now()), "diagnosis": ""}
        metrics: dict[str, Any] = {**finite(result.metrics), **texts, "alarms": []}
        await context.disk.write(context.ledger.record_metrics, last.step, metrics, seconds=0.0)


def _position(
    context: RunContext, step: int, groups: Sequence[SampleGroup], *, trainer_kept: bool = False
) -> RunPosition:
    own, kept = context.config.agents.source == "groups", {group.position for group in groups}
    return RunPosition(
        step=step,
        next_position=context.ledger.next_position() if context.config.needs_engines else context.ledger.rows_taken(),
        # The agents decide whether they bring lost groups of their own again.
        open_positions=tuple(sorted({*(() if own else context.ledger.open_positions()), *kept})),
        groups=tuple(groups),
        trainer_kept=trainer_kept,
    )


def _names(groups: Sequence[SampleGroup]) -> set[str]:
    return {sample.group_id for group in groups for sample in group.samples}


def _restore_ledger(context: RunContext, step: int, reason: str, groups: Sequence[SampleGroup]) -> int:
    """Go back to the end of a step and keep these groups; return the number of samples that this dropped."""
    context.router.traces.restore(_names(groups), reason)
    # One transaction: if a kill left only the new recipe's digest, samples of the old recipe would be trained on.
    with context.ledger.together():
        context.ledger.put({_RECIPE_KEY: _recipe_sha256(context.config)})
        return context.ledger.restore(step, reason, keep=_names(groups))


# -- READY groups -------------------------------------------------------------------------------------------------


async def _load_groups(context: RunContext, *, newest: int) -> list[SampleGroup]:
    """Return the groups that are READY or leased, without those that versions above `newest` sampled.

    Groups of another recipe are left out, too.
    """
    if context.ledger.get(_RECIPE_KEY) != _recipe_sha256(context.config):
        return []
    stored = await context.experiences.load(
        vocabulary_size=MAX_NUMBER, max_tokens=context.config.model.max_context_tokens
    )
    groups = [await _to_group(context, position, samples) for position, samples in stored]
    for raised_from, raised_to in _raises(context):
        groups = [_with_raised_versions(group, raised_from, raised_to) for group in groups]
    return [g for g in groups if all(v.policy_version <= newest for s in g.segments for v in s.version_spans)]


async def _to_group(context: RunContext, position: int, stored: Sequence[StoredTrajectory]) -> SampleGroup:
    task = stored[0][1].task
    if context.config.agents.source == "groups" and task is not None:
        prompt = own_prompt(task.text, answer=task.answer, metadata_json=task.metadata_json)
    else:
        prompt = context.prompts.at(position)
    trajectories = await context.service_calls.with_completions(
        [
            Trajectory(
                prompt=prompt,
                segments=record.segments,
                completion="",
                dropped=row.dropped,
                abstained=record.abstained,
                task=record.task,
                metrics=record.metrics,
            )
            for row, record in stored
        ]
    )
    # Missing attempts of agents have no record, so the place in the list is not the index of a sample.
    size, indices = context.config.batch.group_size, [int(row.sample_id.rpartition("-")[2]) for row, _ in stored]
    return SampleGroup(
        position=position,
        seed=group_seed(context.config.seed, position, prompt),
        trajectories=tuple(t for t, index in zip(trajectories, indices, strict=True) if index < size),
        baseline=next((t for t, index in zip(trajectories, indices, strict=True) if index >= size), None),
    )


async def _renumber(context: RunContext, groups: Sequence[SampleGroup], version: int, raised: int) -> list[SampleGroup]:
    """Return groups under the numbers that they have after the trainer's `version` is called `raised`."""
    if raised <= version:
        return list(groups)
    await context.disk.write(context.ledger.put, {_RAISES_KEY: json.dumps([*_raises(context), [version, raised]])})
    return [_with_raised_versions(group, version, raised) for group in groups]


def _raises(context: RunContext) -> list[tuple[int, int]]:
    return [(old, new) for old, new in json.loads(context.ledger.get(_RAISES_KEY) or "[]")]


def _raised(context: RunContext, version: int) -> int:
    """Return the present number of the weights that were called `version` when they were sampled or saved."""
    for old, new in _raises(context):
        version = new if version == old else version
    return version


def _with_raised_versions(group: SampleGroup, version: int, raised: int) -> SampleGroup:
    """Return a group with the versions up to `version` moved up, so that `version` becomes `raised`."""

    def span(old: VersionSpan) -> VersionSpan:
        moves = 0 <= old.policy_version <= version
        return replace(old, policy_version=old.policy_version + raised - version) if moves else old

    def renumber(trajectory: Trajectory) -> Trajectory:
        return trajectory.map_segments(lambda s: replace(s, version_spans=tuple(map(span, s.version_spans))))

    baseline = None if group.baseline is None else renumber(group.baseline)
    return replace(group, trajectories=tuple(map(renumber, group.trajectories)), baseline=baseline)


def _recipe_sha256(config: Config) -> str:
    """Return a SHA-256 (hex) of what decides about a sample: READY samples of another recipe are not trained on."""
    recipe = config.model_dump(mode="json", exclude=_NOT_OF_SAMPLES)
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def newest_checkpoint(ledger: Ledger, status: pb.TrainerStatus) -> tuple[int, int]:
    """Return step and data position of the newest checkpoint that both the trainer and the ledger can restore.

    The trainer may have a checkpoint that the ledger never committed: the coordinator may have died between the two
    commits, and a trainer whose machine is about to leave saves one by itself. The ledger's row of that step has
    everything for a restore except the metrics, which the trainer has.
    """
    row = ledger.last_checkpoint()
    newest = (0, 0) if row is None else (row.step, row.data_position)
    for step in ledger.steps():
        if step.step == status.checkpoint_step > newest[0]:
            newest = (step.step, step.data_position)
    return newest


async def _load_checkpoint(context: RunContext, step: int) -> pb.TrainerStatus:
    timeout = context.config.trainer.step_timeout_seconds
    try:
        return await context.session.call("LoadCheckpoint", lambda r: r.trainer.load_checkpoint(step, timeout=timeout))
    except NotFound as error:
        raise NotFound(
            f"the ledger's last checkpoint is that of step {step}, and the trainer does not have it: {error}; start "
            f"the trainer with the run's folder (--run-dir), or start a new run"
        ) from None


async def _rewrite_files(context: RunContext, step: int) -> None:
    await context.disk.write_in_thread(rewrite_metrics, context.folder / METRICS_FILE, context.ledger.steps())
    for name in (SAMPLES_FILE, TOKENS_FILE, TIMELINE_FILE):
        await context.disk.write_in_thread(truncate_after, context.folder / name, step)


def append_samples(context: RunContext, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Append trajectories to samples.jsonl, and before that to tokens.jsonl. Slow: call it in a thread."""
    if context.config.metrics.tokens:
        append_lines(context.folder / TOKENS_FILE, to_token_lines(step, trajectories))
    append_lines(context.folder / SAMPLES_FILE, to_lines(step, trajectories), sync=True)


def _append_missing(context: RunContext, step: int, groups: Sequence[SampleGroup]) -> None:
    """Append the lines of a step that samples.jsonl lacks because the coordinator died during its training."""
    path, written = context.folder / SAMPLES_FILE, set[str]()
    if groups and path.exists():
        with path.open(encoding="utf-8") as lines:
            written = {json.loads(line).get("sample_id") for line in lines}
    missing = [t for group in groups for t in group.all_trajectories() if t.sample.sample_id not in written]
    if missing:
        append_samples(context, step, missing)


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics ordered by name; NaN and infinity, which JSON does not have, become None."""
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
