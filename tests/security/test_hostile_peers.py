"""Impossible responses of rollout, trainer and reference: each is retried and reported, and the run continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import numpy as np
import pytest

from fourfold.config import Config
from fourfold.errors import DeadlinePassed, FourfoldError, PeerFault
from fourfold.reference.v1 import reference_service_pb2 as reference
from fourfold.rollout import load
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.load import EngineLoad
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from tests.conftest import Serve
from tests.contract import conftest
from tests.fakes.clock import FakeClock
from tests.fakes.servicers import Rollout
from tests.fakes.stage import Stage
from tests.fakes.toy import Context
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_scorers import FakeReference
from tests.fakes.toy_trainer import FakeTrainer

make_stage = conftest.make_stage


def kinds(stage: Stage, peer: str) -> set[str]:
    return {row["kind"] for row in stage.report()["faults"] if row["peer"] == peer}


def future(chunk: rollout.SampleChunk) -> None:
    chunk.policy_version += 1000


def outside(chunk: rollout.SampleChunk) -> None:
    chunk.token_ids = b"\xff\xff\xff\x7f" + chunk.token_ids[4:]


def not_finite(chunk: rollout.SampleChunk) -> None:
    chunk.logprobs = pack_floats(np.full(len(chunk.logprobs) // 4, np.nan, np.float32))


def endless(chunk: rollout.SampleChunk) -> None:
    chunk.token_ids, chunk.logprobs = chunk.token_ids * 50, chunk.logprobs * 50


def repeated(chunk: rollout.SampleChunk) -> None:
    chunk.sample_index = 0


IMPOSSIBLE: Final[dict[str, Callable[[rollout.SampleChunk], None]]] = {
    "BAD_VERSION": future,
    "BAD_SAMPLE": outside,
    "NOT_FINITE": not_finite,
    "TOO_MANY_TOKENS": endless,
    "WRONG_SAMPLE": repeated,
}


class LyingRollout(FakeRollout):
    """A rollout service that breaks the contract in every second call of a group, each time in another way."""

    def __init__(self, member_id: str, config: Config) -> None:
        super().__init__(member_id, config)
        self.left = [*IMPOSSIBLE.values()]

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        bad = self.left and request.request_id.startswith("p") and len(self.requests) % 2 == 0
        spoil = self.left.pop() if bad else None
        async for response in super().Generate(request, context):
            if spoil is not None:
                spoil(response.chunks[0])
            yield response


async def test_impossible_samples_are_sampled_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, retry={"infrastructure": 50}, evaluation={"every_steps": 100})
    lying = LyingRollout("rollout-0", stage.config)
    stage.rollouts = [lying]
    await stage.complete()
    assert kinds(stage, "rollout-0") == set(IMPOSSIBLE) and not lying.left and stage.report()["dropped"] == {}


async def test_an_engine_that_claims_a_huge_version_is_left_out_and_moves_no_version(
    make_stage: Callable[..., Stage],
) -> None:
    class Claiming(FakeRollout):
        async def DescribeEngine(
            self, request: control.DescribeEngineRequest, context: Context
        ) -> control.DescribeEngineResponse:
            about = await super().DescribeEngine(request, context)
            about.policy_version = 1 << 52
            return about

    stage = make_stage(steps=2, rollout={"replicas": 2})
    stage.rollouts[1] = Claiming("rollout-1", stage.config)
    await stage.complete()
    assert stage.trainer.version < 10 and "BAD_VERSION" in kinds(stage, "rollout-1")


# Answers to the steps from the second on, and their faults.
WRONG_ANSWERS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"step": 1}, "WRONG_STEP"),
    ({"policy_version": 2**63 - 1}, "BAD_VERSION"),
    ({"policy_version": 12}, "BAD_VERSION"),
    ({"policy_version": 0}, "BAD_VERSION"),
    ({"skipped_reason": "no \x1b[31mreason"}, "BAD_RESPONSE"),
    ({"metrics": {"\x1b[2J": 1.0}}, "BAD_RESPONSE"),
]


async def test_an_impossible_answer_to_a_step_is_retried(make_stage: Callable[..., Stage]) -> None:
    lied: set[int] = set()

    class Lying(FakeTrainer):
        async def TrainStep(
            self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
        ) -> trainer.TrainStepResponse:
            answer = await super().TrainStep(request_iterator, context)
            if answer.step < 2 or answer.step in lied:
                return answer
            lied.add(answer.step)
            fields: dict[str, Any] = {"step": answer.step, "policy_version": answer.policy_version}
            return trainer.TrainStepResponse(**fields | WRONG_ANSWERS[answer.step - 2][0])

    stage = make_stage(steps=1 + len(WRONG_ANSWERS))
    stage.trainer = Lying("trainer-0", stage.config)
    await stage.complete()
    counts = {row["kind"]: row["count"] for row in stage.report()["faults"] if row["peer"] == "trainer-0"}
    assert counts == Counter(kind for _, kind in WRONG_ANSWERS)


async def test_an_impossible_answer_of_a_reference_is_retried(make_stage: Callable[..., Stage]) -> None:
    class Lying(FakeReference):
        lies = 3

        async def ComputeLogprobs(
            self, request: reference.ComputeLogprobsRequest, context: Context
        ) -> reference.ComputeLogprobsResponse:
            answer = await super().ComputeLogprobs(request, context)
            self.lies -= 1
            match self.lies:
                case 2:
                    del answer.logprobs[0]
                case 1:
                    answer.logprobs[0] = answer.logprobs[0][:-4]
                case 0:
                    answer.logprobs[0] = pack_floats(np.full(len(answer.logprobs[0]) // 4, 1e30, np.float32))
            return answer

    stage = make_stage(steps=1, algorithm={"kl": {"coef": 0.1}})
    stage.others.append(Lying("reference-0", stage.config))
    await stage.complete()
    assert kinds(stage, "reference-0") == {"WRONG_COUNT", "WRONG_LENGTH", "NOT_FINITE"}


async def test_a_flood_of_load_reports_is_ended(serve: Serve, clock: FakeClock) -> None:
    sent = 0

    class Flood(Rollout):
        async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[rollout.WatchLoadResponse]:
            nonlocal sent
            while True:
                sent += 1
                yield rollout.WatchLoadResponse(policy_version=1)

    client = AsyncRolloutClient(await serve(Flood().servicer()), peer="rollout-0")
    taken: list[rollout.WatchLoadResponse] = []

    class Counting(EngineLoad):
        def take(self, report: rollout.WatchLoadResponse, now: float) -> None:
            taken.append(report)

    task = asyncio.create_task(load.watch_load(client, Counting(), clock))
    async with asyncio.timeout(10):
        while not clock.slept:  # the client has closed the stream and pauses before the next one
            await asyncio.sleep(0.01)
    task.cancel()
    assert len(taken) == 21 and clock.slept == [1.0]


@pytest.mark.parametrize("late", [False, True])
async def test_a_deadline_status_before_the_deadline_is_a_fault_of_the_peer(serve: Serve, late: bool) -> None:
    class Early(Rollout):
        async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
            if late:
                await asyncio.sleep(30)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
            raise AssertionError

    client = AsyncRolloutClient(await serve(Early().servicer()), peer="rollout-0")
    with pytest.raises(FourfoldError) as error:
        await client.get_info(timeout=0.3 if late else 20)
    assert isinstance(error.value, DeadlinePassed if late else PeerFault)
