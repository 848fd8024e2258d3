"""Checks the reward functions of a recipe before a process is started; see `fourfold.plan.preflight`.

Each function is loaded as the service loads it, in its sandbox, and scores the reference answers of some rows. So a
function that cannot be imported, raises, or does not recognize a correct answer is found before a model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fourfold.config import Config, RewardConfig
from fourfold.errors import ConfigError
from fourfold.plan.preflight import ExampleRow, Preflight
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.backends import make_backend
from fourfold_reward.code.verifier import CODE_TESTS
from fourfold_reward.columns import parse_metadata, take_answer
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.text_rules import FORMAT

_KINDS: Final = ("function", "command")
"""Backends that start quickly. A model takes as long as a service to start; servers and judges may not run yet."""

_OF_FORM: Final = (FORMAT, CODE_TESTS)
"""Verifiers for which a reference answer is no completion: they are loaded, and not tried."""

_START_SECONDS: Final = 30.0


def check_rewards(preflight: Preflight) -> None:
    """Load and try the functions and programs of the recipe.

    Raises ConfigError: the launcher would start one that cannot be loaded, or raises for every reference answer.
    """
    config = preflight.config
    if not config.needs_scorer:
        return
    zeros = list[str]()
    scores = list[float]()
    for table in config.reward:
        if table.kind not in _KINDS:
            continue
        try:
            found = _check(table, preflight)
        except ConfigError as error:
            if table.replicas:
                raise
            # A service that the user starts may have its code on another machine.
            preflight.note("reward", f"{table.title} could not be tried on this machine: {error.message}")
            continue
        scores += found
        if found and not any(found):
            answer = next(row.answer for row in preflight.examples if table.name in row.scorers)
            zeros.append(
                f"{table.title} gives 0 to the reference answer of each of {len(found)} rows, such as {answer[:60]!r}: "
                f"a model that answers so learns nothing. The function may expect another form"
            )
    # If another function recognizes the answers, a function that gives them 0 may be a penalty or a check of the form.
    preflight.warnings += [] if any(scores) else zeros


def _check(table: RewardConfig, preflight: Preflight) -> list[float]:
    """Try a table; return the scores of the reference answers, 1 where it abstains; none if it fails for some."""
    rows = [row for row in preflight.examples if table.name in row.scorers and table.function not in _OF_FORM]
    outcomes = asyncio.run(_try(preflight.config, table, rows))
    if not outcomes:
        return []
    errors = [outcome for outcome in outcomes if outcome.error_reason]
    if len(errors) == len(rows):
        failure = (
            f"reward.{table.kind} = {table.title!r} fails for every reference answer that it was tried with. Row "
            f"{rows[0].index}: {errors[0].message}"
        )
        if table.replicas:
            raise ConfigError(failure)
        preflight.warnings.append(failure)  # the service of the user may have other code
        return []
    texts = [_text(outcome) for outcome in outcomes]
    preflight.note("reward", f"{table.title}: the reference answers of {len(rows)} rows score {', '.join(texts)}.")
    if errors:
        row, error = next((r, o) for r, o in zip(rows, outcomes, strict=True) if o.error_reason)
        preflight.warnings.append(
            f"{table.title} fails for the reference answer of row {row.index}: {error.message}; such samples are "
            f"{'dropped' if table.on_error == 'drop' else 'handled by reward.on_error'}"
        )
        return []
    return [1.0 if outcome.score is None else outcome.score for outcome in outcomes]


def _text(outcome: Outcome) -> str:
    if outcome.error_reason:
        return "an error"
    return "abstained" if outcome.score is None else f"{outcome.score:g}"


async def _try(config: Config, table: RewardConfig, rows: Sequence[ExampleRow]) -> list[Outcome]:
    """Start the backend of a table, score the reference answers of rows, and end it."""
    failures: list[str] = []
    one = table.model_copy(update={"processes": 1})
    options = ServeOptions(role="reward", recipe=Path(), config=config, member_id="check", listen="127.0.0.1:0")
    backend = make_backend(options, one, on_failure=failures.append)
    try:
        await backend.start()
        jobs = [] if backend.reads.tokens else [_job(row) for row in rows]  # answers have no tokens
        # One worker process scores them one after the other.
        limit = table.timeout_seconds * len(jobs) + _START_SECONDS
        outcomes = await backend.score(jobs, timeout=limit) if jobs else []
        if failures:
            raise ConfigError(f"reward.{table.kind} = {table.title!r} cannot be tried: {failures[0]}")
        return outcomes
    finally:
        await backend.close()


def _job(row: ExampleRow) -> Job:
    return Job(
        sample_id=f"row {row.index}",
        prompt=row.prompt,
        completion=_completion(row),
        answer=row.answer,
        metadata_json=row.metadata_json,
        messages_json=row.messages_json,
        size_bytes=len(row.prompt) + len(row.answer) + len(row.metadata_json),
    )


def _completion(row: ExampleRow) -> str:
    """Return a text that should score: the reference answer, or the first of several texts."""
    value = take_answer(parse_metadata(row.metadata_json), row.answer)
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else row.answer
