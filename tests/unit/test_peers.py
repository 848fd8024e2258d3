"""What sampling a prompt asks of a replica: its tokens as they are expected by then, and its prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fourfold import config as configuration
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.wire import VersionSpan
from fourfold_coordinator.choice import Demand, prefix_keys
from fourfold_coordinator.peers import Peers
from fourfold_coordinator.prompts import Prompt

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
PROMPT = Prompt(
    index=0, text="?", token_ids=np.arange(90, dtype=np.int32), answer="", metadata_json="{}", group_key="0"
)


class Router:
    """Answers every call with completions of a length, and keeps what was asked."""

    def __init__(self) -> None:
        self.demands: list[Demand] = []
        self.length = 0

    async def call(self, role: int, work: Any, *, demand: Demand, budget: Any, version: int) -> list[Completion]:
        self.demands.append(demand)
        return [
            Completion(
                sample_index=index,
                token_ids=np.zeros(self.length, np.int32),
                logprobs=np.zeros(self.length, np.float32),
                version_spans=(VersionSpan(policy_version=0, token_count=self.length),),
                finish_reason=rollout.FINISH_REASON_STOP,
            )
            for index in range(demand.samples)
        ]


class Decoder:
    def decode(self, token_ids: Any, /) -> str:
        return ""


async def test_a_call_says_what_it_will_take() -> None:
    config = configuration.load(RECIPE)
    router: Any = Router()
    peers = Peers(config, router, Decoder())
    for samples, length in ((4, 3), (2, 9), (1, 1)):
        router.length = length
        names = [f"s{index}" for index in range(samples)]
        await peers.generate(PROMPT, group_id="g", sample_ids=names, seed=1, version=0, budget=peers.budget())
    longest = min(config.sampling.max_new_tokens, config.model.max_context_tokens - 90)
    assert [(d.samples, d.tokens) for d in router.demands] == [
        (4, 4 * (90 + longest)),  # nothing is known yet
        (2, 2 * (90 + 3)),
        (1, 90 + 5),  # four of 3 and two of 9
    ]
    assert {d.prefix for d in router.demands} == {prefix_keys(PROMPT.token_ids)}
