"""Starts all services of the contract on one real server, with fast fake engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.message import Message

from fourfold.coordinator.v1 import membership_service_pb2 as membership_pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as membership_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.host.clock import SystemClock
from fourfold.reference.v1 import reference_service_pb2 as reference_pb
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.v1 import reward_service_pb2 as reward_pb
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout_pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.sample.wire import encode
from fourfold.trainer.v1 import trainer_service_pb2 as trainer_pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight_pb
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import Registry
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_reward import loader
from fourfold_reward.pool import WorkerPool
from fourfold_reward.reference.model import SampleRows
from fourfold_reward.reference.servicer import ReferenceServicer
from fourfold_reward.servicer import RewardServicer
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.update.controller import WeightController
from fourfold_rollout.update.servicer import RolloutControlServicer
from fourfold_trainer.service.servicer import TrainerServicer
from fourfold_trainer.service.state import TrainerCore
from fourfold_trainer.service.weight_servicer import TrainerWeightServicer
from tests.conftest import Serve
from tests.fakes.engine import CONTEXT, STOP_TOKEN, VOCABULARY
from tests.fakes.engine import FakeEngine as FakeSampler
from tests.fakes.rollout import NO_QUOTAS
from tests.fakes.trainer_engine import FakeEngine as FakeTrainerEngine
from tests.fakes.trainer_engine import group_of
from tests.fakes.trainer_service import config
from tests.security.fuzz import Good

SHA256: Final = b"t" * 32
SERVICES: Final = (
    "fourfold.rollout.v1.RolloutService",
    "fourfold.rollout.v1.RolloutControlService",
    "fourfold.reward.v1.RewardService",
    "fourfold.reference.v1.ReferenceService",
    "fourfold.trainer.v1.TrainerService",
    "fourfold.trainer.v1.TrainerWeightService",
    "fourfold.coordinator.v1.MembershipService",
    "fourfold.coordinator.v1.RunService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
)
HINTS: Final[Mapping[str, Sequence[Any]]] = {
    "sample_id": ("a", "b", "c"),
    "group_id": ("g",),
    "request_id": ("r1", "r2", "r3"),
    "member_id": ("rollout-0", "rollout-1", "trainer-0"),
    "incarnation": ("a" * 32, "b" * 32),
    "target": ("127.0.0.1:5000", "127.0.0.1:5001"),
    "tokenizer_sha256": (SHA256,),
    "backend": ("shm", "gloo"),
    "name": ("model", "export"),
    "service": ("", *SERVICES),
    "token_ids": (pack_ints([1, 2, 3]), pack_ints([4, 5])),
    "epoch": (1, 2, 3, 4, 5),
    "tags": ("weights", "kv_cache"),
    "temperature": (1.0, 0.5),
    "symbol": SERVICES,
} | dict.fromkeys(
    ("policy_version", "step", "part", "group", "level", "receiver_count", "first_receiver_index", "role"), (0, 1, 2, 3)
)


def _generate(pick: random.Random) -> list[Message]:
    params = rollout_pb.SamplingParams(max_tokens=pick.randrange(1, 5), seed=pick.randrange(9))
    prompt, name = [1, 2, 3][: pick.randrange(1, 4)], f"r{pick.randrange(50)}"
    count = pick.randrange(1, 3)
    return [
        rollout_pb.GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, sample_count=count)
    ]


def _score(pick: random.Random) -> list[Message]:
    samples = group_of([0, 1, 0, 1][: pick.randrange(1, 5)])
    items = [reward_pb.ScoreItem(experience=encode(one), completion_text=pick.choice("abc")) for one in samples]
    return [reward_pb.ScoreRequest(items=items)]


def _register(pick: random.Random) -> list[Message]:
    return [
        membership_pb.RegisterRequest(
            member_id=f"rollout-{pick.randrange(8)}",
            incarnation=pick.choice("abc") * 32,
            role=membership_pb.ROLE_ROLLOUT,
            target=f"127.0.0.1:{5000 + pick.randrange(8)}",
            tokenizer_sha256=SHA256,
        )
    ]


def _lookup(module: Any) -> Good:
    return lambda pick: [module.ComputeLogprobsRequest(experiences=[encode(one) for one in group_of([1, 0])])]


class Live:
    """Generates calls that fit the state of trainer and engine, so that the random calls meet every state."""

    def __init__(self, core: TrainerCore, trainer: Trainer, weights: WeightController) -> None:
        self.core, self.trainer, self.weights = core, trainer, weights

    def step(self, pick: random.Random) -> list[Message]:
        samples = [encode(one) for one in group_of([0, 1, 0, 1][: pick.randrange(1, 5)], seed=pick.randrange(5))]
        step, cut = self.core.status().state.step + pick.choice((0, 1, 1, 1)), pick.randrange(len(samples) + 1)
        begins = pick.choice([(None, None), (False, True), (False, True), (False, None), (True, None)])
        parts = zip((samples[:cut], samples[cut:]), begins, strict=True)
        return [trainer_pb.TrainStepRequest(step=step, experiences=part, begin=begin) for part, begin in parts]

    def part(self, pick: random.Random) -> list[Message]:
        if pick.random() < 0.5:  # TrainStep is refused while a gradient waits
            return [trainer_pb.ForwardBackwardRequest()]
        (sample,) = group_of([1], seed=pick.randrange(5))
        weights = np.zeros(len(sample.token_ids), np.float32)
        weights[1:] = pick.uniform(-1, 1)
        one = trainer_pb.WeightedSample(experience=encode(sample), loss_weights=pack_floats(weights))
        status = self.core.status()
        return [
            trainer_pb.ForwardBackwardRequest(
                step=status.state.step + 1, part=status.gradient.part_count + pick.randrange(2), samples=[one]
            )
        ]

    def optim(self, pick: random.Random) -> list[Message]:
        return [trainer_pb.OptimStepRequest(step=self.core.status().state.step + pick.randrange(2))]

    def load(self, pick: random.Random) -> list[Message]:
        return [trainer_pb.LoadCheckpointRequest(step=self.core.status().checkpoint_step)]

    def raised(self, pick: random.Random) -> list[Message]:
        return [trainer_pb.RaisePolicyVersionRequest(policy_version=pick.randrange(100))]

    def offer(self, pick: random.Random) -> list[Message]:
        group = pick.randrange(2)
        epoch = self.trainer.epoch + (group == 0)
        return [weight_pb.MakeOfferRequest(epoch=epoch, backend="shm", receiver_count=1, group=group)]

    def send_open(self, pick: random.Random) -> list[Message]:
        return [weight_pb.OpenWeightsRequest(epoch=self.trainer.epoch)]

    def sent(self, pick: random.Random) -> list[Message]:
        version = self.core.status().state.policy_version
        return [weight_pb.SendWeightsRequest(epoch=self.trainer.epoch, policy_version=version)]

    def aborted(self, pick: random.Random) -> list[Message]:
        return [weight_pb.AbortWeightsRequest(epoch=self.trainer.epoch)]

    def _epoch(self) -> int:
        return max(self.weights._epochs.last, 0)

    def _version(self) -> int:
        return self.weights._update.version if self.weights.updating else self.weights.policy_version + 1

    def open(self, pick: random.Random) -> list[Message]:
        more: dict[str, Any] = {"receiver_count": 1, "first_receiver_index": 0, "offers": [b"o"], "manifest": b"m"}
        return [control_pb.OpenWeightsRequest(epoch=self._epoch() + 1, backend="shm", **more)]

    def begin(self, pick: random.Random) -> list[Message]:
        mode = pick.choice([mode for mode in control_pb.PauseMode.values() if mode])
        return [control_pb.BeginWeightsRequest(epoch=self._epoch(), policy_version=self._version(), pause_mode=mode)]

    def receive(self, pick: random.Random) -> list[Message]:
        return [control_pb.ReceiveWeightsRequest(epoch=self._epoch(), policy_version=self._version())]

    def commit(self, pick: random.Random) -> list[Message]:
        hold = pick.random() < 0.5
        return [control_pb.CommitWeightsRequest(epoch=self._epoch(), policy_version=self._version(), hold=hold)]

    def release(self, pick: random.Random) -> list[Message]:
        return [control_pb.ReleaseWeightsRequest(epoch=self._epoch(), policy_version=self._version())]

    def abort(self, pick: random.Random) -> list[Message]:
        return [control_pb.AbortWeightsRequest(epoch=self._epoch())]

    def sums(self, pick: random.Random) -> list[Message]:
        return [control_pb.GetWeightSumsRequest(epoch=self._epoch())]

    def probe(self, pick: random.Random) -> list[Message]:
        return [control_pb.ProbeLogprobsRequest(token_ids=pack_ints([1, 2, 3]))]

    def good(self) -> dict[str, Good]:
        """Return functions that make acceptable messages, by "Service.Method"."""
        trainer, weight, control = "TrainerService", "TrainerWeightService", "RolloutControlService"
        return {
            "RolloutService.Generate": _generate,
            "RewardService.Score": _score,
            "MembershipService.Register": _register,
            "ReferenceService.ComputeLogprobs": _lookup(reference_pb),
            f"{trainer}.ComputeLogprobs": _lookup(trainer_pb),
            f"{trainer}.TrainStep": self.step,
            f"{trainer}.ForwardBackward": self.part,
            f"{trainer}.OptimStep": self.optim,
            f"{trainer}.LoadCheckpoint": self.load,
            f"{trainer}.RaisePolicyVersion": self.raised,
            f"{weight}.MakeOffer": self.offer,
            f"{weight}.OpenWeights": self.send_open,
            f"{weight}.SendWeights": self.sent,
            f"{weight}.AbortWeights": self.aborted,
            f"{control}.OpenWeights": self.open,
            f"{control}.BeginWeights": self.begin,
            f"{control}.ReceiveWeights": self.receive,
            f"{control}.CommitWeights": self.commit,
            f"{control}.ReleaseWeights": self.release,
            f"{control}.AbortWeights": self.abort,
            f"{control}.GetWeightSums": self.sums,
            f"{control}.ProbeLogprobs": self.probe,
        }


class Sampler(FakeSampler):
    """An engine that samples without ticks and drops finished samples."""

    async def sample(self) -> None:
        """Give every running sample tokens until cancelled."""
        while True:
            with suppress(AssertionError):  # the engine sleeps
                self.tick()
            self.samples = self.running
            self.log.clear()
            self.batches.clear()
            await asyncio.sleep(0.002)


class Trainer(FakeTrainerEngine):
    """A fake trainer that keeps no record of its calls."""

    def _enter(self, what: str) -> None:
        super()._enter(what)
        for kept in (self.order, self.shares, self.settings, self.weighted, self.optim_steps):
            kept.clear()
        self.aborted.clear()


class Reference:
    """A reference model with constant results."""

    vocabulary_size = VOCABULARY
    ids_below = VOCABULARY
    tokens_per_batch = 64

    def logprobs(self, token_ids: Sequence[Any], temperatures: Sequence[float], **_: Any) -> list[Any]:
        return [SampleRows.of(len(ids)) for ids in token_ids]


class System:
    """All services, and the errors in them."""

    def __init__(self, channel: grpc.aio.Channel, live: Live, fatal: list[str]) -> None:
        self.channel, self.live, self.fatal = channel, live, fatal
        self.unhandled: list[str] = []


@asynccontextmanager
async def serve_all(serve: Serve, tmp_path: Path) -> AsyncIterator[System]:
    """Serve all services on one server."""
    engine, trainer, fatal = Sampler(kv_cache_tokens=100), Trainer(), list[str]()
    limits = GenerateLimits(
        max_context_tokens=CONTEXT, vocabulary_size=VOCABULARY, max_concurrent_samples=8,
        kv_cache_tokens=engine.description.kv_cache_tokens, stop_token_ids=(STOP_TOKEN,),
    )  # fmt: skip
    weights = WeightController(engine, update_timeout=0.5)
    model = ServedModel(name="tiny", tokenizer_sha256=SHA256, limits=limits)
    rollout = RolloutServicer(model, engine, weights, NO_QUOTAS)
    control = RolloutControlServicer(engine, weights, model_sha256=SHA256, host_id="here", update_timeout=0.5)
    core = TrainerCore(config(), run_dir=tmp_path, make_engine=lambda: trainer, fatal=fatal.append)
    registry = Registry(clock=SystemClock(), tokenizer_sha256=SHA256)
    board = RunBoard(name="fuzz", step_count=4, clock=SystemClock())
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return float(len(sample.completion))\n")
    function = loader.find("mine.py:reward", directory=tmp_path)
    pool = WorkerPool(verifier=function, options={}, processes=1, timeout_seconds=1.0, on_failure=fatal.append)
    reward = RewardServicer(pool)
    reference = ReferenceServicer(name="tiny", max_context_tokens=CONTEXT, on_failure=fatal.append)
    reference.set_ready(Reference(), tokenizer_sha256=SHA256)  # type: ignore[arg-type]
    added = [
        (rollout_pb, "RolloutService", rollout_grpc, rollout),
        (control_pb, "RolloutControlService", control_grpc, control),
        (trainer_pb, "TrainerService", trainer_grpc, TrainerServicer(core, tokenizer_sha256=SHA256)),
        (weight_pb, "TrainerWeightService", weight_grpc, TrainerWeightServicer(core)),
        (membership_pb, "MembershipService", membership_grpc, MembershipServicer(registry)),
        (run_pb, "RunService", run_grpc, RunServicer(board)),
        (reward_pb, "RewardService", reward_grpc, reward),
        (reference_pb, "ReferenceService", reference_grpc, reference),
    ]
    channel = await serve(
        *(
            (module.DESCRIPTOR.services_by_name[name], getattr(stubs, f"add_{name}Servicer_to_server"), servicer)
            for module, name, stubs, servicer in added
        )
    )
    await core.start()
    await pool.start()
    reward.set_ready()
    made = System(channel, Live(core, trainer, weights), fatal)
    asyncio.get_running_loop().set_exception_handler(lambda _, about: made.unhandled.append(str(about)))
    tasks = [asyncio.create_task(engine.sample()), asyncio.create_task(_expire(registry))]
    yield made
    for task in tasks:
        task.cancel()
    await reference.close()
    await pool.close()
    await weights.close()
    await core.stop()


async def _expire(registry: Registry) -> None:
    while True:
        registry.expire()
        await asyncio.sleep(1)
