"""A whole run's services with a toy engine each: real gRPC servers and real leases, arithmetic for a model.

The policy is one integer, its weights. It answers `a * b` rightly with a probability that grows
with it; a training step that finds something to learn adds 1. Faults are switched on by fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from fourfold.channel import open_channel
from fourfold.config import Config
from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import AlreadyExists, NotFound, StaleEpoch, Unavailable, WrongState
from fourfold.membership import Membership
from fourfold.reference.v1 import reference_service_pb2 as reference
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.server import Server
from fourfold.tokenizer import tokenizer_sha256
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.wire import Float32Array, Sample, decode, pack_floats, pack_ints

VOCABULARY = 258
END = 257
MANIFEST = b"one integer"
Context = grpc.aio.ServicerContext[Any, Any]


def write_model(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer and no weights to speak of."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    library.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|start|>"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "eos_token_id": END}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def write_data(path: Path, *, digits: int = 10) -> Path:
    """Every product of two digits, in both orders, as JSONL."""
    pairs = [(a, b) for a in range(digits) for b in range(digits)]
    rows = [{"question": f"{a} * {b} =", "answer": str(a * b), "expression": f"{a} * {b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(root: Path, **changes: Any) -> Config:
    """A recipe for the toy model; `changes` replace whole tables or fields of them."""
    recipe: dict[str, Any] = {
        "name": "toy",
        "seed": 3,
        "steps": 4,
        "model": {"source": str(write_model(root / "model-folder")), "max_context_tokens": 64},
        "data": {
            "train": {"path": str(write_data(root / "data.jsonl"))},
            "holdout": {"field": "expression", "unordered_numbers": True, "groups": 4},
        },
        "sampling": {"max_new_tokens": 8},
        "batch": {"prompts_per_step": 3, "group_size": 4, "tokens_per_micro_batch": 256},
        "evaluation": {"every_steps": 2, "samples_per_prompt": 2},
        "checkpoint": {"every_steps": 2},
        "retry": {"service_wait_seconds": 3.0},
        "weights": {"timeout_seconds": 5.0},
    }
    for key, value in changes.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(recipe)


def toy_logprobs(weights: int, token_ids: np.ndarray[Any, Any]) -> Float32Array:
    """What the policy thinks of some tokens: float32 [n], the first NaN."""
    values = -(1 + weights / 8) * (token_ids % 7 + 1) / 7
    values[0] = np.nan
    return values.astype(np.float32)


def toy_answer(prompt: str, seed: int, weights: int) -> tuple[str, float]:
    """A sampled answer and its log-probability."""
    found = re.findall(r"(\d+) \* (\d+)", prompt)
    product = int(found[-1][0]) * int(found[-1][1])
    right = 1 - 0.7 / (1 + weights)
    if random.Random(f"{prompt}/{seed}/{weights}").random() < right:
        return str(product), math.log(right)
    return str(product + 1), math.log(1 - right)


class Member(ABC):
    """A service that registers, and that can be killed."""

    role: ClassVar[Role.ValueType]

    def __init__(self, member_id: str, config: Config) -> None:
        self.member_id, self.config = member_id, config
        self.tokenizer_sha256 = tokenizer_sha256(Path(config.model.source))
        self.target = ""
        self._server = Server(listen="127.0.0.1:0", security=None)
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []

    @abstractmethod
    def services(self) -> list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]:
        """Descriptor and registration of each service."""

    async def start(self) -> None:
        """Listen."""
        for descriptor, register in self.services():
            self._server.add(descriptor, register, self)
        self.target = await self._server.start()
        self._server.set_ready(True)

    async def join(self, coordinator: str) -> None:
        """Register at a coordinator and keep the lease alive; call it again for another coordinator."""
        if not self.target:
            await self.start()
        await self._leave_alone()
        channel = open_channel(coordinator, None)
        self._channels.append(channel)
        membership = Membership(
            MembershipClient(channel, peer="coordinator"),
            member_id=self.member_id,
            role=self.role,
            target=self.target,
            tokenizer_sha256=self.tokenizer_sha256,
            on_drain=lambda: None,
        )
        self._tasks.append(asyncio.create_task(membership.run()))

    async def kill(self) -> None:
        """Vanish, as after SIGKILL: no goodbye, calls in flight are cut."""
        await self._leave_alone()
        await self._server.stop(0)

    async def _leave_alone(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
        for channel in self._channels:
            await channel.close()
        self._tasks, self._channels = [], []


class FakeRollout(Member, rollout_grpc.RolloutServiceServicer, control_grpc.RolloutControlServiceServicer):
    """An engine with an integer for weights."""

    role = Role.ROLE_ROLLOUT

    def __init__(self, member_id: str, config: Config, *, host_id: str = "here") -> None:
        super().__init__(member_id, config)
        self.host_id = host_id
        self.weights = self.version = 0
        self.state = control.WEIGHT_STATE_CLEAN
        self.epoch = 0
        self.backend = ""
        self.requests: list[rollout.GenerateRequest] = []
        self.on_generate: Callable[[], Any] | None = None
        """Awaited before the first answer of each call."""
        self.wrong_digests = 0
        """Updates that arrive damaged."""
        self.ignores_updates = False
        """Acknowledges updates and computes with the old weights."""
        self.forgets = False
        """Dies in the middle of a receive."""
        self.commits: list[int] = []
        self.aborts = 0
        self._pending: int | None = None

    def services(self) -> list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]:
        by_name = rollout.DESCRIPTOR.services_by_name, control.DESCRIPTOR.services_by_name
        return [
            (by_name[0]["RolloutService"], rollout_grpc.add_RolloutServiceServicer_to_server),
            (by_name[1]["RolloutControlService"], control_grpc.add_RolloutControlServiceServicer_to_server),
        ]

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        return rollout.GetInfoResponse(
            model="toy",
            tokenizer_sha256=self.tokenizer_sha256,
            max_context_tokens=64,
            policy_version=self.version,
            vocabulary_size=VOCABULARY,
            max_concurrent_samples=8,
        )

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        self.requests.append(request)
        if self.on_generate is not None:
            await self.on_generate()
        if self.state != control.WEIGHT_STATE_CLEAN:
            raise Unavailable("weights are being replaced")
        if request.min_policy_version > self.version:
            raise WrongState(f"version {self.version} is served")
        prompt = bytes(i for i in request.prompt_token_ids if i < 256)
        text = Library.from_file(str(Path(self.config.model.source) / "tokenizer.json")).decode(list(prompt))
        for index in range(request.sample_count):
            answer, logprob = toy_answer(text, request.sampling_params.seed + index, self.weights)
            ids = [*self._encode(answer), END]
            yield rollout.GenerateResponse(
                sample_index=index,
                token_ids=pack_ints(ids),
                logprobs=pack_floats(np.full(len(ids), logprob / len(ids), np.float32)),
                policy_version=self.version,
                finish_reason=rollout.FINISH_REASON_STOP,
            )

    def _encode(self, text: str) -> list[int]:
        library = Library.from_file(str(Path(self.config.model.source) / "tokenizer.json"))
        return list(library.encode(text).ids)

    async def WatchLoad(
        self, request: rollout.WatchLoadRequest, context: Context
    ) -> AsyncIterator[rollout.WatchLoadResponse]:
        yield rollout.WatchLoadResponse(policy_version=self.version)

    async def DescribeEngine(
        self, request: control.DescribeEngineRequest, context: Context
    ) -> control.DescribeEngineResponse:
        return control.DescribeEngineResponse(
            model_sha256=bytes(32),
            host_id=self.host_id,
            backends=["shm", "gloo"],
            policy_version=self.version,
            weight_state=self.state,
            worker_count=1,
            device_type="cpu",
        )

    async def OpenWeights(self, request: control.OpenWeightsRequest, context: Context) -> control.OpenWeightsResponse:
        if request.epoch <= self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} was seen")
        if request.manifest != MANIFEST:
            raise WrongState("another model")
        self.epoch, self.backend = request.epoch, request.backend
        return control.OpenWeightsResponse(reload_tensor_count=1)

    async def BeginWeights(
        self, request: control.BeginWeightsRequest, context: Context
    ) -> control.BeginWeightsResponse:
        self._check(request.epoch)
        if self.state == control.WEIGHT_STATE_CLEAN and request.policy_version <= self.version:
            raise WrongState(f"version {self.version} is served")
        self.state = control.WEIGHT_STATE_UPDATING
        return control.BeginWeightsResponse()

    async def ReceiveWeights(
        self, request: control.ReceiveWeightsRequest, context: Context
    ) -> control.ReceiveWeightsResponse:
        self._check(request.epoch)
        if self.forgets:
            asyncio.get_running_loop().create_task(self.kill())
            await asyncio.sleep(30)
        self._pending = await FakeTrainer.wire(request.epoch, request.policy_version)
        self.state = control.WEIGHT_STATE_DIRTY
        digest = weights_digest(self._pending)
        if self.wrong_digests:
            self.wrong_digests -= 1
            digest = bytes(32)
        return control.ReceiveWeightsResponse(weights_digest=digest)

    async def CommitWeights(
        self, request: control.CommitWeightsRequest, context: Context
    ) -> control.CommitWeightsResponse:
        self._check(request.epoch)
        self.weights = self._loaded()
        self.version, self.state, self._pending = request.policy_version, control.WEIGHT_STATE_CLEAN, None
        self.commits.append(request.policy_version)
        return control.CommitWeightsResponse()

    async def AbortWeights(
        self, request: control.AbortWeightsRequest, context: Context
    ) -> control.AbortWeightsResponse:
        self._check(request.epoch)
        self.aborts += 1
        if self.state == control.WEIGHT_STATE_UPDATING:
            self.state = control.WEIGHT_STATE_CLEAN
        return control.AbortWeightsResponse(weight_state=self.state)

    async def ProbeLogprobs(
        self, request: control.ProbeLogprobsRequest, context: Context
    ) -> control.ProbeLogprobsResponse:
        ids = np.frombuffer(request.token_ids, "<i4")
        return control.ProbeLogprobsResponse(logprobs=pack_floats(toy_logprobs(self._loaded(), ids) - 0.01))

    def _loaded(self) -> int:
        return self.weights if self._pending is None or self.ignores_updates else self._pending

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} is open")


class FakeTrainer(Member, trainer_grpc.TrainerServiceServicer, weight_grpc.TrainerWeightServiceServicer):
    """A trainer of one integer. `checkpoints` outlives it."""

    role = Role.ROLE_TRAINER
    _wires: ClassVar[dict[tuple[int, int], asyncio.Future[int]]] = {}  # by epoch and version

    def __init__(
        self, member_id: str, config: Config, *, checkpoints: dict[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(member_id, config)
        self.checkpoints: dict[int, tuple[int, int]] = {} if checkpoints is None else checkpoints
        self.weights = self.step = self.version = self.skipped = 0
        self.epoch = 0
        self.batches: dict[int, list[str]] = {}
        """Sample ids of every step that was trained, by step."""
        self.trained: list[str] = []
        """Sample ids in the present weights."""
        self.lost_answers = 0
        """TrainStep calls that are done and then answered UNAVAILABLE."""
        self.on_train: Callable[[int], Any] | None = None
        """Awaited with the step before each TrainStep."""
        self.on_saved: Callable[[int], Any] | None = None
        """Awaited with the step after each checkpoint, before the answer."""
        self.on_batch: Callable[[list[Sample]], Any] = lambda samples: None
        self.loaded: list[int] = []
        self._answer = trainer.TrainStepResponse()
        self._bytes = b""

    @classmethod
    async def wire(cls, epoch: int, version: int) -> int:
        """Wait for the weights of a version."""
        return await cls._wires.setdefault((epoch, version), asyncio.get_running_loop().create_future())

    def services(self) -> list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]:
        by_name = trainer.DESCRIPTOR.services_by_name, weight.DESCRIPTOR.services_by_name
        return [
            (by_name[0]["TrainerService"], trainer_grpc.add_TrainerServiceServicer_to_server),
            (by_name[1]["TrainerWeightService"], weight_grpc.add_TrainerWeightServiceServicer_to_server),
        ]

    def status(self) -> trainer.TrainerStatus:
        return trainer.TrainerStatus(
            step=self.step,
            policy_version=self.version,
            phase=trainer.TRAINER_PHASE_WAITING,
            checkpoint_step=max(self.checkpoints, default=-1),
            rank_count=1,
            tokenizer_sha256=self.tokenizer_sha256,
            vocabulary_size=VOCABULARY,
            max_context_tokens=64,
        )

    async def GetStatus(self, request: trainer.GetStatusRequest, context: Context) -> trainer.GetStatusResponse:
        return trainer.GetStatusResponse(status=self.status())

    async def WatchStatus(
        self, request: trainer.WatchStatusRequest, context: Context
    ) -> AsyncIterator[trainer.WatchStatusResponse]:
        yield trainer.WatchStatusResponse(status=self.status())

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        messages = [message async for message in request_iterator]
        step, body = messages[0].step, b"".join(m.SerializeToString(deterministic=True) for m in messages)
        if self.on_train is not None:
            await self.on_train(step)
        if step == self.step and step > 0:
            if body != self._bytes:
                raise AlreadyExists(f"step {step} was trained with other bytes")
            return self._answer
        if step != self.step + 1:
            raise WrongState(f"step {self.step} is done; {step} cannot be next")
        samples = [decode(e, vocabulary_size=VOCABULARY, max_tokens=64) for m in messages for e in m.experiences]
        if any(s.score is None for s in samples):
            raise WrongState("a sample without a score")
        self.on_batch(samples)
        groups: dict[str, set[float]] = {}
        for s in samples:
            groups.setdefault(s.group_id, set()).add(s.score or 0.0)
        learned = any(len(scores) > 1 for scores in groups.values())
        self.step, self._bytes = step, body
        self.weights += learned
        self.version += learned
        self.skipped += not learned
        self.batches[step] = [s.sample_id for s in samples]
        self.trained += self.batches[step]
        self._answer = trainer.TrainStepResponse(
            step=step,
            policy_version=self.version,
            skipped_reason="" if learned else "NO_ADVANTAGE",
            metrics={"train/trained_samples": float(len(samples)), "mismatch/logprob_diff_mean": 0.01},
        )
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer is lost")
        return self._answer

    async def ComputeLogprobs(
        self, request: trainer.ComputeLogprobsRequest, context: Context
    ) -> trainer.ComputeLogprobsResponse:
        rows = [toy_logprobs(self.weights, np.frombuffer(e.token_ids, "<i4")) for e in request.experiences]
        return trainer.ComputeLogprobsResponse(logprobs=[pack_floats(r) for r in rows], policy_version=self.version)

    async def SaveCheckpoint(
        self, request: trainer.SaveCheckpointRequest, context: Context
    ) -> trainer.SaveCheckpointResponse:
        self.checkpoints.setdefault(self.step, (self.weights, self.version))
        if self.on_saved is not None:
            await self.on_saved(self.step)
        return trainer.SaveCheckpointResponse(step=self.step)

    async def LoadCheckpoint(
        self, request: trainer.LoadCheckpointRequest, context: Context
    ) -> trainer.LoadCheckpointResponse:
        if request.step not in self.checkpoints:
            raise NotFound(f"no checkpoint of step {request.step}")
        self.loaded.append(request.step)
        self.step = request.step
        self.weights, self.version = self.checkpoints[request.step]
        for step in [step for step in self.batches if step > request.step]:
            del self.batches[step]
        return trainer.LoadCheckpointResponse(status=self.status())

    async def ExportModel(self, request: trainer.ExportModelRequest, context: Context) -> trainer.ExportModelResponse:
        return trainer.ExportModelResponse(path=f"/somewhere/{request.name}")

    async def RaisePolicyVersion(
        self, request: trainer.RaisePolicyVersionRequest, context: Context
    ) -> trainer.RaisePolicyVersionResponse:
        self.version = max(self.version, request.policy_version)
        return trainer.RaisePolicyVersionResponse(policy_version=self.version)

    async def GetManifest(self, request: weight.GetManifestRequest, context: Context) -> weight.GetManifestResponse:
        return weight.GetManifestResponse(
            manifest=MANIFEST,
            manifest_sha256=hashlib.sha256(MANIFEST).digest(),
            host_id="here",
            backends=["shm", "gloo"],
        )

    async def MakeOffer(self, request: weight.MakeOfferRequest, context: Context) -> weight.MakeOfferResponse:
        if request.epoch <= self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} was seen")
        self.epoch = request.epoch
        return weight.MakeOfferResponse(offers=[b"an offer"])

    async def OpenWeights(self, request: weight.OpenWeightsRequest, context: Context) -> weight.OpenWeightsResponse:
        self._check(request.epoch)
        return weight.OpenWeightsResponse()

    async def SendWeights(self, request: weight.SendWeightsRequest, context: Context) -> weight.SendWeightsResponse:
        self._check(request.epoch)
        if request.policy_version != self.version:
            raise WrongState(f"version {self.version} is the present one")
        key, fresh = (request.epoch, request.policy_version), asyncio.get_running_loop().create_future()
        wire = self._wires.setdefault(key, fresh)
        if not wire.done():
            wire.set_result(self.weights)
        return weight.SendWeightsResponse(weights_digest=weights_digest(self.weights), sent_bytes=8)

    async def AbortWeights(self, request: weight.AbortWeightsRequest, context: Context) -> weight.AbortWeightsResponse:
        self._check(request.epoch)
        return weight.AbortWeightsResponse()

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} is open")


class FakeReward(Member, reward_grpc.RewardServiceServicer):
    """1 for the right answer, 0 for another; `outcome` replaces that."""

    role = Role.ROLE_REWARD

    def __init__(self, member_id: str, config: Config) -> None:
        super().__init__(member_id, config)
        self.tokenizer_sha256 = b""
        self.outcome: Callable[[reward.ScoreItem], reward.SampleScore | None] = lambda item: None
        self.calls = 0

    def services(self) -> list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]:
        service = reward.DESCRIPTOR.services_by_name["RewardService"]
        return [(service, reward_grpc.add_RewardServiceServicer_to_server)]

    async def GetInfo(self, request: reward.GetInfoRequest, context: Context) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name="toy@1", max_sample_count=3)

    async def Score(self, request: reward.ScoreRequest, context: Context) -> reward.ScoreResponse:
        self.calls += 1
        return reward.ScoreResponse(scores=[self._score(item) for item in request.items])

    def _score(self, item: reward.ScoreItem) -> reward.SampleScore:
        special = self.outcome(item)
        if special is not None:
            special.sample_id = item.experience.sample_id
            return special
        right = float(item.completion_text == item.answer)
        return reward.SampleScore(sample_id=item.experience.sample_id, score=right)


class FakeReference(Member, reference_grpc.ReferenceServiceServicer):
    """The toy policy before training."""

    role = Role.ROLE_REFERENCE

    def services(self) -> list[tuple[Any, Callable[[Any, grpc.aio.Server], None]]]:
        service = reference.DESCRIPTOR.services_by_name["ReferenceService"]
        return [(service, reference_grpc.add_ReferenceServiceServicer_to_server)]

    async def GetInfo(self, request: reference.GetInfoRequest, context: Context) -> reference.GetInfoResponse:
        return reference.GetInfoResponse(model="toy", tokenizer_sha256=self.tokenizer_sha256)

    async def ComputeLogprobs(
        self, request: reference.ComputeLogprobsRequest, context: Context
    ) -> reference.ComputeLogprobsResponse:
        rows = [toy_logprobs(0, np.frombuffer(e.token_ids, "<i4")) for e in request.experiences]
        return reference.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows])


def weights_digest(weights: int) -> bytes:
    """Of the toy's weights."""
    return hashlib.sha256(str(weights).encode()).digest()
