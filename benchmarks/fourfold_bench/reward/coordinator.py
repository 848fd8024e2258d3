"""The part of a coordinator that scores: registry, router, scorers and mixing, without a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import grpc
import numpy as np

from fourfold.config import from_tables
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rpc.channel import open_channel
from fourfold.sample import Sample, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.rewards.scorers import ScorerTable
from fourfold_coordinator.rewards.scoring import Scoring
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import RetryBudget
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.state.samples import Trajectory

_WAIT_SECONDS: Final = 60.0
_PROMPT_TOKENS, _COMPLETION_TOKENS = 80, 160


class ScoringCoordinator:
    """Scores trajectories as the coordinator of a run does, with the service at one address."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Score trajectories in one call."""
        return await self._scoring.score(trajectories, RetryBudget(infrastructure=2, data=1))


@asynccontextmanager
async def coordinator_of(target: str, *, batch: int) -> AsyncIterator[ScoringCoordinator]:
    """Run the scoring part of a coordinator, whose only scorer is the service at `target`."""
    config = from_tables(
        {
            "name": "bench-reward",
            "steps": 1,
            "model": {"source": "none"},
            "data": {"train": {"path": "none.jsonl"}},
            "sampling": {"max_new_tokens": _COMPLETION_TOKENS},
            "batch": {"prompts_per_step": max(batch // 8, 1), "group_size": 8},
            "reward": {"target": target},
        },
        source="the benchmark's recipe",
    )

    def channel(member: Member) -> grpc.aio.Channel:
        return open_channel(member.target, None)

    registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=b"")
    router = Router(registry, open_channel=channel, wait_seconds=_WAIT_SECONDS)
    table = ScorerTable(config, registry, router)
    scoring = Scoring(config, router, table, run=config.name)

    async def save(_state: str) -> None:
        return

    table.restore("", save)
    running = asyncio.create_task(router.run())
    try:
        yield ScoringCoordinator(scoring)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def trajectories_of(texts: Sequence[tuple[str, str]]) -> list[Trajectory]:
    """Return trajectories of one group with these prompts and completions, as they are before they are scored."""
    count = _PROMPT_TOKENS + _COMPLETION_TOKENS
    mask = np.arange(count) >= _PROMPT_TOKENS
    logprobs = np.where(mask, np.float32(-1), np.float32(np.nan)).astype(np.float32)
    spans = (
        VersionSpan(policy_version=-1, token_count=_PROMPT_TOKENS),
        VersionSpan(policy_version=0, token_count=_COMPLETION_TOKENS),
    )
    ids = np.arange(count, dtype=np.int32)
    made = []
    for number, (prompt, completion) in enumerate(texts):
        sample = Sample(
            sample_id=f"s{number}",
            group_id="g",
            token_ids=ids,
            behavior_logprobs=logprobs,
            action_mask=mask,
            loss_mask=mask,
            version_spans=spans,
            temperature=1.0,
        )
        row = Prompt(
            index=number, text=prompt, token_ids=ids[:_PROMPT_TOKENS], answer="42", metadata_json="{}", group_key=""
        )
        made.append(Trajectory(prompt=row, segments=(sample,), completion=completion))
    return made
