"""Tests the calls for one prompt: their demand, their requests, and the budget of tries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import FourfoldError, Unavailable
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.load import TokenCounts
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.routing.replica import GivenUp
from fourfold_coordinator.routing.scheduling import Demand, prefix_keys
from fourfold_coordinator.state.sample_traces import SampleTraces
from fourfold_coordinator.training.service_calls import ServiceCalls

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
PROMPT = Prompt(
    index=0, text="?", token_ids=np.arange(90, dtype=np.int32), answer="", metadata_json="{}", group_key="0"
)


class Router:
    """Has one replica of each kind, notes what it is asked, and answers with completions of a length."""

    def __init__(self) -> None:
        self.demands: list[Demand] = []
        self.requests: list[rollout.GenerateRequest] = []
        self.timeouts: list[float] = []
        self.length = 2
        self.token = 5
        self.failures = 0
        self.clock, self.tokens, self.traces = SYSTEM_CLOCK, TokenCounts(), SampleTraces()
        self.replica = SimpleNamespace(
            member=SimpleNamespace(peer="rollout-0 at here", member_id="rollout-0"),
            vocabulary_size=9,
            rollout=self,
            reference=self,
        )

    async def call(self, role: int, work: Any, *, demand: Any, spend: Any, on_try: Any = nullcontext, **_: Any) -> Any:
        while True:
            self.demands.append(demand if isinstance(demand, Demand) else demand())
            try:
                async with on_try():
                    return await work(self.replica)
            except FourfoldError as error:
                spend(error)

    async def generate(self, request: rollout.GenerateRequest, *, timeout: float) -> AsyncIterator[rollout.SampleChunk]:
        self.requests.append(request)
        self.timeouts.append(timeout)
        if self.failures:
            self.failures -= 1
            raise Unavailable("gone")
        for index in range(request.sample_count):
            yield rollout.SampleChunk(
                sample_index=index,
                token_ids=pack_ints([self.token] * self.length),
                logprobs=pack_floats(np.full(self.length, -0.5, np.float32)),
                policy_version=3,
                finish_reason=rollout.FINISH_REASON_STOP,
            )

    async def compute_logprobs(self, samples: Any, *, timeout: float) -> list[Any]:
        self.timeouts.append(timeout)
        return [np.full(92, -0.25, np.float32) for _ in samples]


def decode(sequences: Sequence[Any]) -> list[str]:
    return [""] * len(sequences)


no_scoring: Any = SimpleNamespace(score=None)


async def test_a_call_says_what_it_will_take() -> None:
    config = configuration.load(RECIPE)
    router: Any = Router()
    service_calls = ServiceCalls(config, router, decode, no_scoring)
    for samples, length in ((4, 3), (2, 9), (1, 1)):
        router.length = length
        names = [f"s{index}" for index in range(samples)]
        await service_calls.generate(
            PROMPT, group_id="g", sample_ids=names, seed=1, version=0, budget=service_calls.budget()
        )
    longest = min(config.sampling.max_new_tokens, config.model.max_context_tokens - 90)
    assert [(d.samples, d.tokens) for d in router.demands] == [
        (4, 4 * (90 + longest)),  # nothing is known yet
        (2, 2 * (90 + 3)),
        (1, 90 + 5),  # four of 3 and two of 9
    ]
    assert {d.prefix for d in router.demands} == {prefix_keys(PROMPT.token_ids)}


def _config() -> Config:
    config = configuration.load(RECIPE)
    sampling = config.sampling.model_copy(update={"temperature": 0.5})
    trainer = config.trainer.model_copy(update={"step_timeout_seconds": 77.0})
    return config.model_copy(update={"sampling": sampling, "trainer": trainer})


async def _ask(router: Router, **more: Any) -> list[Any]:
    asked: Any = router
    service_calls = ServiceCalls(_config(), asked, decode, no_scoring)
    names = ["s0", "s1", "s2"]
    return await service_calls.generate(
        PROMPT, group_id="g", sample_ids=names, seed=40, version=3, budget=service_calls.budget(), **more
    )


async def test_every_try_is_a_request_with_an_id_of_its_own() -> None:
    router = Router()
    router.failures = 2
    entered: list[int] = []

    @asynccontextmanager
    async def on_try() -> AsyncIterator[None]:
        entered.append(len(router.requests))
        yield

    finished: list[str] = []
    samples = await _ask(router, on_try=on_try, on_finished=lambda sample: finished.append(sample.sample_id))
    assert [r.request_id for r in router.requests] == ["g-0", "g-1", "g-2"]
    assert entered == [0, 1, 2], "before each request"
    assert router.timeouts == [77.0] * 3
    for request in router.requests:
        assert list(request.prompt_token_ids) == list(range(90))
        assert (request.sample_count, request.min_policy_version) == (3, 3)
        assert (request.sampling_params.temperature, request.sampling_params.seed) == (0.5, 40)
    assert [s.sample_id for s in samples] == finished == ["s0", "s1", "s2"]
    assert {(s.group_id, s.temperature) for s in samples} == {("g", 0.5)}


async def test_a_greedy_answer_is_asked_for_at_0_and_counts_at_1() -> None:
    router = Router()
    samples = await _ask(router, greedy=True)
    assert [r.request_id for r in router.requests] == ["g-greedy-0"]
    assert router.requests[0].sampling_params.temperature == 0.0
    assert {(s.group_id, s.temperature) for s in samples} == {("g", 1.0)}


async def test_completions_that_cannot_be_are_refused() -> None:
    router = Router()
    router.token = 9
    with pytest.raises(GivenUp, match="rollout-0 at here: sampled ids outside"):
        await _ask(router)
    assert [r.request_id for r in router.requests[-4:]] == ["g-2", "g-3", "g-4", "g-5"], "its tries are used up"


async def test_a_reference_gives_each_sample_its_row_in_time() -> None:
    router = Router()
    samples = await _ask(router)
    asked: Any = router
    service_calls = ServiceCalls(_config(), asked, decode, no_scoring)
    rows = await service_calls.reference(samples, service_calls.budget())
    assert router.timeouts[-1] == 77.0
    assert len(rows) == 3 and all((row == -0.25).all() and len(row) == 92 for row in rows)
