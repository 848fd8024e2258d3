"""Scorers that say `pure = true`, and requests that a reward service must take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fourfold.errors import Overloaded
from fourfold.reward.v1 import reward_service_pb2 as pb
from tests.conformance.test_variants import SHA256, Correct, broken, examine, informed
from tests.conformance.toy_rollout import abort


def pure(score: object = Correct.score, **fields: object) -> Correct:
    service = informed(pure=True, **fields)
    service.score = score  # type: ignore[method-assign, assignment]
    return service()


async def test_a_pure_scorer_passes_with_and_without_tokens() -> None:
    for fields in ({}, {"tokenizer_sha256": SHA256}):
        findings = await examine(pure(**fields))
        assert broken(findings) == set(), findings
        assert next(f.status for f in findings if f.name == "pure") == "ok"


async def test_a_scorer_that_is_not_pure_is_not_held_to_it() -> None:
    assert next(f.status for f in await examine(Correct()) if f.name == "pure") == "skipped"


async def test_a_pure_scorer_that_depends_on_ids_is_named() -> None:
    def of_the_trajectory(self: Correct, item: pb.ScoreItem) -> float:
        return float(item.experience.trajectory_id.endswith("7"))

    found = broken(await examine(pure(of_the_trajectory)))
    assert found == {"pure"}, found


async def test_a_pure_scorer_that_depends_on_other_items_is_named() -> None:
    def of_the_calls(self: Correct, item: pb.ScoreItem) -> float:
        return float(self.calls % 2)

    assert "pure" in broken(await examine(pure(of_the_calls)))


@pytest.mark.parametrize("delay", [0.1, None])
async def test_concurrent_calls_may_be_refused_with_a_retry_delay(delay: float | None) -> None:
    class Busy(Correct):
        running = 0

        async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
            if self.running > 3:
                await abort(context, Overloaded("busy", retry_after=delay))
            self.running += 1
            try:
                await asyncio.sleep(0.01)
                return await super().Score(request, context)
            finally:
                self.running -= 1

    assert ("concurrent_calls" in broken(await examine(Busy()))) is (delay is None)
