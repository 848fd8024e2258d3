"""Scores the texts with Fourfold, in this process or through a service, as the coordinator does.

    python -m fourfold_bench.reward_model.ours SETTINGS MODEL FOLDER backend
    python -m fourfold_bench.reward_model.ours SETTINGS HOST:PORT FOLDER grpc

A round sends all texts at once, in calls of --samples-per-call. It includes their encoding and, with a service, gRPC.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold.config.reward import RewardModelConfig
from fourfold.errors import Internal
from fourfold.host.process_tree import die_with_parent
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_bench.reward_model import turns
from fourfold_bench.reward_model.benchmark import RewardModelSettings, prompt_and_completion

_TIMEOUT_SECONDS: Final = 120.0
Texts = Sequence[tuple[str, str]]
ScoreCall = Callable[[int, Texts], Awaitable[list[float]]]


def reward_model_table(settings: RewardModelSettings, model: str) -> dict[str, Any]:
    """Return `reward.model` of a recipe."""
    return {
        "source": model,
        "device": "cuda" if settings.on_gpu else "cpu",
        "dtype": settings.dtype,
        "tokens_per_batch": settings.tokens_per_batch,
        "chat": False,
    }


async def score_all(settings: RewardModelSettings, texts: Texts, call: ScoreCall) -> dict[str, Any]:
    """Score the texts of a round; return its seconds and the scores, in order."""
    size = settings.samples_per_call
    began = time.perf_counter()
    parts = await asyncio.gather(*(call(first, texts[first : first + size]) for first in range(0, len(texts), size)))
    return {"seconds": time.perf_counter() - began, "scores": [score for part in parts for score in part]}


async def serve_backend(settings: RewardModelSettings, model: str, folder: Path) -> None:
    """Answer with a RewardModelBackend of this process."""
    from fourfold_reward.job import Job
    from fourfold_reward.models.backend import RewardModelBackend

    backend = RewardModelBackend(RewardModelConfig(**reward_model_table(settings, model)))
    await backend.start()

    async def call(first: int, texts: Texts) -> list[float]:
        jobs = [
            Job(
                sample_id=str(index),
                prompt=prompt,
                completion=completion,
                answer="",
                metadata_json="",
                size_bytes=len(prompt) + len(completion),
            )
            for index, (prompt, completion) in enumerate(texts, first)
        ]
        outcomes = await backend.score(jobs, timeout=_TIMEOUT_SECONDS)
        return [_score(outcome.score, outcome.message) for outcome in outcomes]

    passes = backend.thread.kind
    await _serve(settings, folder, "backend", call, {"passes": passes})
    await backend.close()


async def serve_grpc(settings: RewardModelSettings, target: str, folder: Path) -> None:
    """Answer with calls of a service."""
    async with AsyncRewardClient(target) as client:

        async def call(first: int, texts: Texts) -> list[float]:
            items = [
                pb.ScoreItem(
                    experience=Experience(sample_id=str(index)), prompt_text=prompt, completion_text=completion
                )
                for index, (prompt, completion) in enumerate(texts, first)
            ]
            scores = await client.score(items, timeout=_TIMEOUT_SECONDS)
            return [
                _score(score.score if score.WhichOneof("outcome") == "score" else None, score.error.message)
                for score in scores
            ]

        await _serve(settings, folder, "grpc", call, {})


async def _serve(
    settings: RewardModelSettings, folder: Path, name: str, call: ScoreCall, facts: dict[str, Any]
) -> None:
    texts = [prompt_and_completion(ids) for ids in settings.texts()]
    loop = asyncio.get_running_loop()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        done = asyncio.run_coroutine_threadsafe(score_all(settings, texts, call), loop)
        return done.result(_TIMEOUT_SECONDS + 10.0) | facts

    await asyncio.to_thread(turns.serve, folder, name, answer)


def _score(score: float | None, message: str) -> float:
    if score is None:
        raise Internal(f"a sample was not scored: {message}")
    return score


if __name__ == "__main__":
    die_with_parent()
    given, place, files = RewardModelSettings.read(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    asyncio.run({"backend": serve_backend, "grpc": serve_grpc}[sys.argv[4]](given, place, files))
