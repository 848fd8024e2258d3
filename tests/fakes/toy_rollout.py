"""A rollout service with an integer for weights. Faults are switched on by fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import StaleEpoch, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.tracing import spans
from tests.fakes.toy import (
    END,
    MANIFEST,
    START,
    VOCABULARY,
    Context,
    Member,
    Services,
    receive,
    send,
    toy_answer,
    toy_logprobs,
    weights_digest,
    weights_sums,
)


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
        self.on_generate: Callable[[], Any] | None = None  # awaited before the first response of each call
        # Awaited when the first token of each sample of a call was sent; the result tells whether they end with it.
        self.on_partial: Callable[[], Any] | None = None
        # Awaited with the request and the index before the last response of each sample.
        self.on_finish: Callable[[rollout.GenerateRequest, int], Any] | None = None
        self.wrong_digests = 0  # number of further updates that return a wrong digest
        self.ignores_updates = False  # acknowledges updates and computes with the old weights
        self.refuses = ""  # reason for which the model can never take the weights
        self.dies_in = ""  # the call, such as CommitWeights, in which it dies
        self.refuses_aborts = False
        self.on_begin: Callable[[], Any] | None = None  # awaited before each response to BeginWeights
        self.on_held: Callable[[], Any] | None = None  # awaited before each probe of weights whose tokens are held back
        self.commits: list[int] = []  # versions that were served
        self.begun: list[int] = []  # versions of every update that was begun
        self.pause_modes: list[int] = []
        self.pause_seconds = 0.0001  # in the response to every commit
        self.places: list[tuple[bytes, int, int]] = []  # offer, receivers and first index, of every epoch
        self.fed: list[int] = []  # receivers of every feed
        self.feeds_nothing = False
        self.backends, self.device_uuids = ["shm", "gloo"], list[bytes]()
        self.held = False
        self.aborts = self.opened = 0
        self.asleep: set[str] = set()  # tags of the freed memory
        self.sleeps: list[int] = []  # level of every sleep
        self.busy_sleeps = 0  # number of further sleeps that are refused, as if samples were running
        self.on_sleep: Callable[[], Any] | None = None  # awaited before each sleep, also if its caller has left
        self.on_wake: Callable[[], Any] | None = None  # awaited before each response to WakeEngine
        self.on_describe: Callable[[], Any] | None = None  # awaited before each response to DescribeEngine
        self._turn = asyncio.Lock()
        self._steps: set[asyncio.Task[None]] = set()
        self._pending: int | None = None
        self._received = False
        self._sums = b""

    def services(self) -> Services:
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
        lagging = self.config.asynchrony.max_policy_lag > 0
        while self.held or (lagging and self.state == control.WEIGHT_STATE_UPDATING):
            await asyncio.sleep(0.001)  # it holds its tokens back, or is paused, as a real engine
        if self.state != control.WEIGHT_STATE_CLEAN or self.asleep:
            raise Unavailable("weights are being replaced")
        if request.min_policy_version > self.version:
            raise WrongState(f"version {self.version} is served")
        answers = self._answers(request)
        if self.on_partial is not None:
            yield _response((index, ids[:1], logprobs[:1], self.version, 0) for index, ids, logprobs in answers)
            if await self.on_partial():
                yield _response((index, [], [], self.version, rollout.FINISH_REASON_ABORTED) for index, _, _ in answers)
                return
            answers = [(index, ids[1:], logprobs[1:]) for index, ids, logprobs in answers]
        for index, ids, logprobs in answers:
            if self.on_finish is not None:
                await self.on_finish(request, index)
            spans.current().end(index)
            yield _response([(index, ids, logprobs, self.version, rollout.FINISH_REASON_STOP)])

    def _answers(self, request: rollout.GenerateRequest) -> list[tuple[int, list[int], list[float]]]:
        """Return index, ids and log-probabilities of each sample; those of a sample that continues are the rest."""
        prompt = list(request.prompt_token_ids)
        done = len(prompt) - 1 - max((i for i, token in enumerate(prompt) if token == START), default=len(prompt) - 1)
        library = Library.from_file(str(Path(self.config.model.source) / "tokenizer.json"))
        text = library.decode([i for i in prompt[: len(prompt) - done] if i < START])
        answers = []
        for index in range(request.sample_count):
            seed = request.sampling_params.seed + index if request.sampling_params.temperature else 0  # 0: greedy
            answer, logprob = toy_answer(text, seed, self.weights)
            ids = [*self._encode(answer), END]
            rest = (ids[done:] or [END])[: request.sampling_params.max_tokens or None]
            answers.append((index, rest, [logprob / len(ids)] * len(rest)))
        return answers

    def _encode(self, text: str) -> list[int]:
        library = Library.from_file(str(Path(self.config.model.source) / "tokenizer.json"))
        return list(library.encode(text).ids)

    async def ScoreTokens(self, request: rollout.ScoreTokensRequest, context: Context) -> rollout.ScoreTokensResponse:
        logprobs = toy_logprobs(self.weights, np.array(request.token_ids))
        return rollout.ScoreTokensResponse(logprobs=pack_floats(logprobs), policy_version=self.version)

    async def ParseCompletion(
        self, request: rollout.ParseCompletionRequest, context: Context
    ) -> rollout.ParseCompletionResponse:
        raise WrongState("a toy parses no completions")

    async def WatchLoad(
        self, request: rollout.WatchLoadRequest, context: Context
    ) -> AsyncIterator[rollout.WatchLoadResponse]:
        yield rollout.WatchLoadResponse(policy_version=self.version)

    async def DescribeEngine(
        self, request: control.DescribeEngineRequest, context: Context
    ) -> control.DescribeEngineResponse:
        if self.on_describe is not None:
            await self.on_describe()
        return control.DescribeEngineResponse(
            model_sha256=bytes(32),
            host_id=self.host_id,
            backends=self.backends,
            device_uuids=self.device_uuids,
            policy_version=self.version,
            weight_state=self.state,
            worker_count=max(len(self.device_uuids), 1),
            device_type="cuda" if self.device_uuids else "cpu",
            sleeping=bool(self.asleep),
        )

    async def OpenWeights(self, request: control.OpenWeightsRequest, context: Context) -> control.OpenWeightsResponse:
        if request.epoch <= self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} was seen")
        self.opened += 1
        if self.refuses:
            raise WrongState("the engine's model refuses norm.weight (64,)", reason=self.refuses)
        if request.manifest != MANIFEST:
            raise WrongState("another model")
        if self.held:
            self.held, self.state, self._pending = False, control.WEIGHT_STATE_DIRTY, None
        elif self.state == control.WEIGHT_STATE_UPDATING:
            self.state = control.WEIGHT_STATE_CLEAN
        self.epoch, self.backend = request.epoch, request.backend
        self.places.append((request.offers[0], request.receiver_count, request.first_receiver_index))
        return control.OpenWeightsResponse(reload_tensor_count=1)

    async def BeginWeights(
        self, request: control.BeginWeightsRequest, context: Context
    ) -> control.BeginWeightsResponse:
        self._check(request.epoch)
        self.begun.append(request.policy_version)
        if self.state == control.WEIGHT_STATE_CLEAN and request.policy_version <= self.version:
            raise WrongState(f"version {self.version} is served")
        async with self._turn:
            if "weights" in self.asleep:
                raise WrongState("there is no memory for weights")
        await self._enter("BeginWeights")
        self.pause_modes.append(request.pause_mode)
        self.state = control.WEIGHT_STATE_UPDATING
        if self.on_begin is not None:
            await self.on_begin()
        return control.BeginWeightsResponse()

    async def ReceiveWeights(
        self, request: control.ReceiveWeightsRequest, context: Context
    ) -> control.ReceiveWeightsResponse:
        self._check(request.epoch)
        await self._enter("ReceiveWeights")
        self._pending = await receive(request.epoch, request.policy_version)
        self._received = True
        digest = weights_digest(self._pending, request.policy_version, skip_sums=request.skip_sums)
        self._sums = b"" if request.skip_sums else weights_sums(self._pending)
        if self.wrong_digests:
            self.wrong_digests -= 1
            digest, self._sums = bytes(32), bytes(16)
        return control.ReceiveWeightsResponse(weights_digest=digest)

    async def CommitWeights(
        self, request: control.CommitWeightsRequest, context: Context
    ) -> control.CommitWeightsResponse:
        self._check(request.epoch)
        await self._enter("CommitWeights")
        self.weights = self._loaded()
        self.version, self._pending, self.held = request.policy_version, None, True
        assert request.hold, "the coordinator gives nothing out before the probe"
        return control.CommitWeightsResponse(pause_seconds=self.pause_seconds)

    async def ReleaseWeights(
        self, request: control.ReleaseWeightsRequest, context: Context
    ) -> control.ReleaseWeightsResponse:
        self._check(request.epoch)
        await self._enter("ReleaseWeights")
        self.state, self.held, self._received = control.WEIGHT_STATE_CLEAN, False, False
        self.commits.append(request.policy_version)
        return control.ReleaseWeightsResponse()

    async def GetWeightSums(
        self, request: control.GetWeightSumsRequest, context: Context
    ) -> control.GetWeightSumsResponse:
        self._check(request.epoch)
        return control.GetWeightSumsResponse(sums=self._sums)

    async def FeedWeights(self, request: control.FeedWeightsRequest, context: Context) -> control.FeedWeightsResponse:
        await self._enter("FeedWeights")
        if self.feeds_nothing or request.policy_version != self.version:
            raise WrongState(f"version {request.policy_version} is not held")
        send(request.epoch, request.policy_version, self.weights)
        self.fed.append(request.receiver_count)
        self._sums = weights_sums(self.weights)
        return control.FeedWeightsResponse(offers=[b"offer of a peer"])

    async def AbortWeights(
        self, request: control.AbortWeightsRequest, context: Context
    ) -> control.AbortWeightsResponse:
        self.journal.append(f"{self.member_id} abort")
        if self.refuses_aborts:
            raise Unavailable("not now")
        self._check(request.epoch)
        self.aborts += 1
        if self.state == control.WEIGHT_STATE_UPDATING:
            self.state = control.WEIGHT_STATE_DIRTY if self._received else control.WEIGHT_STATE_CLEAN
        self.held, self._received, self._pending = False, False, None
        return control.AbortWeightsResponse(weight_state=self.state)

    async def ProbeLogprobs(
        self, request: control.ProbeLogprobsRequest, context: Context
    ) -> control.ProbeLogprobsResponse:
        self.journal.append(f"{self.member_id} probe")
        if self.asleep:
            raise WrongState("the engine sleeps")
        if self.held and self.on_held is not None:
            await self.on_held()
        ids = np.frombuffer(request.token_ids, "<i4")
        return control.ProbeLogprobsResponse(logprobs=pack_floats(toy_logprobs(self._loaded(), ids) - 0.01))

    async def _enter(self, call: str) -> None:
        self.journal.append(f"{self.member_id} {call.removesuffix('Weights').lower()}")
        if self.dies_in == call:
            asyncio.get_running_loop().create_task(self.kill())
            await asyncio.sleep(30)

    async def SleepEngine(self, request: control.SleepEngineRequest, context: Context) -> control.SleepEngineResponse:
        await self._enter("SleepEngine")
        step = asyncio.create_task(self._fall_asleep(request.level))
        self._steps.add(step)
        step.add_done_callback(self._steps.discard)
        await asyncio.shield(step)  # a step goes on to its end when the caller is gone
        return control.SleepEngineResponse()

    async def _fall_asleep(self, level: int) -> None:
        async with self._turn:
            if self.on_sleep is not None:
                await self.on_sleep()
            if self.busy_sleeps:
                self.busy_sleeps -= 1
                raise WrongState("1 calls still have samples in the engine")
            if self.asleep == {"weights"} or self.asleep == {"kv_cache"}:
                raise WrongState("it sleeps in part; wake it first")
            self.asleep, self.state = {"weights", "kv_cache"}, control.WEIGHT_STATE_DIRTY
            self.weights = 0  # lost, if level is 2
            self.sleeps.append(level)

    async def WakeEngine(self, request: control.WakeEngineRequest, context: Context) -> control.WakeEngineResponse:
        await self._enter(f"WakeEngine {','.join(request.tags)}".rstrip())
        async with self._turn:
            if self.on_wake is not None:
                await self.on_wake()
            self.asleep -= set(request.tags or self.asleep)
        return control.WakeEngineResponse()

    def _loaded(self) -> int:
        return self.weights if self._pending is None or self.ignores_updates else self._pending

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} is open")


def _response(
    chunks: Iterable[tuple[int, list[int], list[float], int, Any]],
) -> rollout.GenerateResponse:
    return rollout.GenerateResponse(
        chunks=[
            rollout.SampleChunk(
                sample_index=index,
                token_ids=pack_ints(ids),
                logprobs=pack_floats(np.array(logprobs, np.float32)),
                policy_version=version,
                finish_reason=reason,
            )
            for index, ids, logprobs, version, reason in chunks
        ]
    )
