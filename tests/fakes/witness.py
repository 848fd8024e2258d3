"""Toy services that witness a run: they know which weights sampled each token, whatever the coordinator says of it.

Weights are unique numbers, also over restores. The engine writes the number of its weights into the log-probability of
each token, exactly. The trainer keeps the history of its weights, and so finds for each token how many steps ago its
weights were current, or that they are of a history that was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fourfold.config import Config
from fourfold.errors import Unavailable, WrongState
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.sample import Sample
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from tests.fakes.flaky_network import FlakyLink
from tests.fakes.toy import END, Context, Member
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_scorers import FakeReward
from tests.fakes.toy_trainer import FakeTrainer

_UNIT: Final = 1024.0  # a power of two: a float32 holds the quotient exactly
_DIGITS: Final = 15  # id of the token `0`
OnCall = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class History:
    """How a trainer came to its weights."""

    lineage: tuple[int, ...] = (0,)  # the weights of each version, first to last
    names: tuple[tuple[int, int], ...] = ((0, 0),)  # version and weights


@dataclass(slots=True)
class World:
    """What the services of one run share, over all their processes."""

    on_call: OnCall
    max_lag: int = 0  # of the recipe of the coordinator that runs
    weights: int = 0  # the number that was given last
    histories: dict[int, History] = field(default_factory=dict)  # of the checkpoints, by step
    violations: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)  # samples by steps since their oldest weights
    mixed: int = 0  # samples with tokens of several versions
    steps: int = 0  # trained, also those that were lost

    def violate(self, invariant: str, example: str) -> None:
        self.violations[invariant] += 1
        self.examples.setdefault(invariant, example)


def watch_calls(member: Member, names: tuple[str, ...], on_call: OnCall) -> None:
    """Await `on_call` with the name of a call before it is carried out, and with `name:done` before its response."""

    def watched(name: str, method: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            await on_call(name)
            response = await method(request, context)
            await on_call(f"{name}:done")
            return response

        return call

    for name in names:
        setattr(member, name, watched(name, getattr(member, name)))


class Linked(Member):
    """A member that the coordinator reaches over a link with faults."""

    link: FlakyLink | None = None

    async def start(self) -> None:
        await super().start()
        self.link = FlakyLink(self.target)
        self.target = await self.link.start()

    async def kill(self) -> None:
        if self.link is not None:
            self.link.close()
        await super().kill()


class WitnessRollout(Linked, FakeRollout):
    """Samples two to seven tokens in two parts, each with the weights of its time."""

    def __init__(self, member_id: str, config: Config, world: World) -> None:
        super().__init__(member_id, config)
        self.world = world
        names = ("BeginWeights", "ReceiveWeights", "CommitWeights", "ReleaseWeights", "ProbeLogprobs", "DescribeEngine")
        watch_calls(self, names, world.on_call)

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        info = await super().GetInfo(request, context)
        info.max_concurrent_samples = 64
        return info

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        await self.world.on_call("Generate")
        chance = random.Random(request.sampling_params.seed)
        await asyncio.sleep(chance.choice([0.001, 0.002, 0.005, 0.03]))
        if request.min_policy_version > self.version:
            raise WrongState(f"version {self.version} is served")
        count = min(chance.randint(1, 4), request.sampling_params.max_tokens)
        last = count >= request.sampling_params.max_tokens
        yield await self._sample(request, chance, count, rollout.FINISH_REASON_LENGTH if last else 0)
        if not last:
            await asyncio.sleep(chance.choice([0.0, 0.002, 0.02]))
            await self.world.on_call("Generate:done")
            rest = request.sampling_params.max_tokens - count
            yield await self._sample(request, chance, min(chance.randint(1, 3), rest), rollout.FINISH_REASON_STOP)

    async def _sample(
        self, request: rollout.GenerateRequest, chance: random.Random, count: int, finish: Any
    ) -> rollout.GenerateResponse:
        while self.state == control.WEIGHT_STATE_UPDATING:
            await asyncio.sleep(0.001)  # paused, as in a real engine
        if self.state != control.WEIGHT_STATE_CLEAN:
            raise Unavailable("weights are being replaced")
        logprobs = pack_floats(np.full(count, -self.weights / _UNIT, np.float32))
        chunks = []
        for index in range(request.sample_count):
            ids = [_DIGITS + chance.randrange(10) for _ in range(count)]
            ids[-1] = END if finish == rollout.FINISH_REASON_STOP else ids[-1]
            chunks.append(
                rollout.SampleChunk(
                    sample_index=index,
                    token_ids=pack_ints(ids),
                    logprobs=logprobs,
                    policy_version=self.version,
                    finish_reason=finish,
                )
            )
        return rollout.GenerateResponse(chunks=chunks)


class WitnessReward(Linked, FakeReward):
    """Scores by the sample's text; with `monotonous`, every fourth prompt has equal scores."""

    def __init__(self, member_id: str, config: Config, world: World, *, monotonous: bool = False) -> None:
        super().__init__(member_id, config)
        self.monotonous = monotonous
        self.outcome = self._outcome
        watch_calls(self, ("Score",), world.on_call)

    def _outcome(self, item: reward.ScoreItem) -> reward.SampleScore:
        name = item.experience.sample_id
        if self.monotonous and name.startswith("p") and int(name[1:8]) % 4 == 0:
            return reward.SampleScore(score=1.0)
        return reward.SampleScore(score=float(sum(map(ord, item.completion_text)) % 2))

    async def GetInfo(self, request: reward.GetInfoRequest, context: Context) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name="toy@1", max_sample_count=64, tokenizer_sha256=self.tokenizer_sha256)


class WitnessTrainer(Linked, FakeTrainer):
    """Checks each batch against the history of its weights. As the real one, it ends a step whose caller is gone."""

    def __init__(
        self, member_id: str, config: Config, world: World, *, checkpoints: dict[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(member_id, config, checkpoints=checkpoints)
        self.world = world
        self.lineage, self.names = [0], {0: 0}
        self.prompts: dict[int, tuple[int, str]] = {}  # step and group that trained a prompt, by position
        self.working = self.renumbers = False
        self._max_lag = 0
        self.on_batch = self._check_batch
        self.on_train = lambda step: asyncio.sleep(0.02)
        calls = ("SaveCheckpoint", "LoadCheckpoint", "RaisePolicyVersion", "SendWeights", "ComputeLogprobs")
        watch_calls(self, calls, world.on_call)

    def status(self) -> trainer.TrainerStatus:
        status = super().status()
        if self.working:
            status.phase = trainer.TRAINER_PHASE_TRAINING
        return status

    def next_weights(self) -> int:
        self.world.weights += 1
        self.lineage.append(self.world.weights)
        self.names[self.version + 1] = self.world.weights
        return self.world.weights

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        messages = [message async for message in request_iterator]
        await self.world.on_call("TrainStep")

        async def replay() -> AsyncIterator[trainer.TrainStepRequest]:
            for message in messages:
                yield message

        if self.working:
            raise Unavailable("a step is trained")
        self.working, self._max_lag = True, self.world.max_lag
        step = asyncio.ensure_future(super().TrainStep(replay(), context))
        step.add_done_callback(lambda _: setattr(self, "working", False))
        response = await asyncio.shield(step)
        self.renumbers = False
        await self.world.on_call("TrainStep:done")
        return response

    def _check_batch(self, samples: list[Sample]) -> None:
        self.world.steps += 1
        seen = {name for names in self.batches.values() for name in names}
        for sample in samples:
            group = (self.step + 1, sample.group_id)
            if sample.sample_id in seen or self.prompts.setdefault(int(sample.sample_id[1:8]), group) != group:
                self.world.violate("trained twice", f"{sample.sample_id} in step {self.step + 1}")
            seen.add(sample.sample_id)
            self._check_tokens(sample)

    def _check_tokens(self, sample: Sample) -> None:
        """Check versions and ages of a sample's tokens."""
        used = -sample.behavior_logprobs[sample.action_mask] * _UNIT
        claimed = np.repeat(
            [span.policy_version for span in sample.version_spans], [span.token_count for span in sample.version_spans]
        )[sample.action_mask]
        pairs = sorted(set(zip(claimed.tolist(), used.astype(int).tolist(), strict=True)))
        now = f"{sample.sample_id} in step {self.step + 1}, (version, weights) {pairs}, of {self.version}"
        self.world.mixed += len(pairs) > 1
        places = {weights: place for place, weights in enumerate(self.lineage)}
        if any(weights not in places for _, weights in pairs):
            self.world.violate("trained on tokens of lost weights", now)
            return
        if any(self.names.get(version) != weights for version, weights in pairs):
            self.world.violate("wrong version of a token", f"{now}, versions {sorted(self.names.items())[-8:]}")
        age = len(self.lineage) - 1 - min(places[weights] for _, weights in pairs)
        self.world.lags[age] += 1
        if max(age, self.version - min(version for version, _ in pairs)) > self._max_lag:
            self.world.violate("trained while stale", f"{now}, max_policy_lag {self._max_lag}")

    async def SaveCheckpoint(
        self, request: trainer.SaveCheckpointRequest, context: Context
    ) -> trainer.SaveCheckpointResponse:
        for step in [step for step in self.checkpoints if step >= self.step]:
            del self.checkpoints[step]  # of another history
        self.world.histories[self.step] = History(tuple(self.lineage), tuple(self.names.items()))
        return await super().SaveCheckpoint(request, context)

    async def LoadCheckpoint(
        self, request: trainer.LoadCheckpointRequest, context: Context
    ) -> trainer.LoadCheckpointResponse:
        response = await super().LoadCheckpoint(request, context)
        history = self.world.histories[request.step]
        self.lineage, self.names = list(history.lineage), dict(history.names)
        self.prompts = {position: group for position, group in self.prompts.items() if group[0] <= request.step}
        self.renumbers = True
        return response

    async def RaisePolicyVersion(
        self, request: trainer.RaisePolicyVersionRequest, context: Context
    ) -> trainer.RaisePolicyVersionResponse:
        raised = request.policy_version - self.version
        if raised > 0 and (self.renumbers or self.step == 0):
            # A restore: all versions move, so that ages stay what they were.
            self.names = {version + raised: weights for version, weights in self.names.items()}
            self.renumbers = False
        elif raised > 0:
            self.names[request.policy_version] = self.weights
        return await super().RaisePolicyVersion(request, context)

    def successor(self) -> WitnessTrainer:
        """Return a new process in place of this one: it has the checkpoints."""
        fresh = WitnessTrainer(self.member_id, self.config, self.world, checkpoints=self.checkpoints)
        last = max(self.checkpoints, default=0)
        fresh.batches = {step: names for step, names in self.batches.items() if step <= last}
        fresh.prompts = {position: group for position, group in self.prompts.items() if group[0] <= last}
        return fresh
