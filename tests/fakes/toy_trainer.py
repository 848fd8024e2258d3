"""Provides a fake trainer service whose only weight is one integer; its fields switch faults on."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from fourfold.config import Config
from fourfold.contract import CONTRACT_VERSION
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import AlreadyExists, InvalidInput, NotFound, StaleEpoch, Unavailable, WrongState
from fourfold.rpc.codec import pack_floats
from fourfold.sample import Sample
from fourfold.sample.wire import decode
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from tests.fakes.toy import (
    MANIFEST,
    VOCABULARY,
    Context,
    Member,
    Services,
    send,
    toy_logprobs,
    weights_digest,
    weights_sums,
)


class FakeTrainer(Member, trainer_grpc.TrainerServiceServicer, weight_grpc.TrainerWeightServiceServicer):
    """A trainer whose only weight is one integer. `checkpoints` can be shared with its successor."""

    role = Role.ROLE_TRAINER

    def __init__(
        self, member_id: str, config: Config, *, checkpoints: dict[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(member_id, config)
        self.checkpoints: dict[int, tuple[int, int]] = {} if checkpoints is None else checkpoints
        self.scores: dict[int, float | None] = {}  # held-out score of every checkpoint, as sent by the coordinator
        self.exports: list[tuple[str, str]] = []  # folders, and what was exported: "policy", "ema" or "critic"
        self.weights = self.step = self.version = 0
        self.epoch = 0
        self.closed = False
        self.groups: list[tuple[str, int]] = []  # backend and number of receivers of each group of the epoch
        self.backends, self.device_uuids, self.reachable = ["shm", "gloo"], list[bytes](), list[bytes]()
        self.skipped_sums: dict[int, bool] = {}  # whether sums were left out, by version
        self.refuses_aborts = False  # refuses every abort
        self.on_send: Callable[[], Any] | None = None  # awaited before each answer to SendWeights
        self.on_probe: Callable[[], Any] | None = None  # awaited before each answer to ComputeLogprobs
        self.batches: dict[int, list[str]] = {}  # sample ids of every trained step
        self.trained: list[str] = []  # sample ids that the current weights were trained on
        self.lost_answers = 0  # number of TrainStep calls to carry out and then answer with UNAVAILABLE
        self.on_train: Callable[[int], Any] | None = None  # awaited with the step before each TrainStep
        self.on_saved: Callable[[int], Any] | None = (
            None  # awaited with the step after each checkpoint, before the answer
        )
        self.mismatch: Callable[[int], float] = lambda lag: 0.01  # the metric of a step, by the largest lag of a sample
        self.on_batch: Callable[[list[Sample]], Any] = lambda samples: None
        self.loaded: list[int] = []
        self.held = set[int]()  # steps whose streams have not ended
        self.contract_version = CONTRACT_VERSION
        self.reference_steps: list[int] = []  # steps whose reference was asked for
        self._answer = trainer.TrainStepResponse()
        self._bytes = b""

    def next_weights(self) -> int:
        """Return the weights after a step that learns."""
        return self.weights + 1

    def services(self) -> Services:
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
            last_step=self._answer if self._answer.step == self.step > 0 else None,
        )

    async def GetStatus(self, request: trainer.GetStatusRequest, context: Context) -> trainer.GetStatusResponse:
        return trainer.GetStatusResponse(status=self.status(), contract_version=self.contract_version)

    async def WatchStatus(
        self, request: trainer.WatchStatusRequest, context: Context
    ) -> AsyncIterator[trainer.WatchStatusResponse]:
        yield trainer.WatchStatusResponse(status=self.status())

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        messages = list[trainer.TrainStepRequest]()
        try:
            async for message in request_iterator:
                self.held.add(message.step)
                messages.append(message)
        finally:
            self.held -= {message.step for message in messages}
        step = messages[0].step
        body = b"".join(e.SerializeToString(deterministic=True) for m in messages for e in m.experiences)
        if messages[0].HasField("begin") and not messages[-1].begin:
            raise InvalidInput("the caller died")
        if self.on_train is not None:
            await self.on_train(step)
        if step == self.step and step > 0:
            if body != self._bytes:
                raise AlreadyExists(f"step {step} was trained with other bytes")
            return self._answer
        if step != self.step + 1:
            raise WrongState(f"step {self.step} is done; {step} cannot be next")
        samples = [decode(e, vocabulary_size=VOCABULARY, max_tokens=64) for m in messages for e in m.experiences]
        if any(s.score is None for s in samples) and not self.config.algorithm.loss.measures_distance:
            raise WrongState("a sample without a score")
        self.on_batch(samples)
        groups: dict[str, set[float]] = {}
        for s in samples:
            if s.loss_mask.any():
                groups.setdefault(s.group_id, set()).add(s.score or 0.0)
        # Rows, selected answers and teachers teach by a sample alone; scores, by the differences in their group.
        alone = self.config.algorithm.advantage.kind in ("constant", "distillation")
        learned = any(len(scores) > 1 or alone for scores in groups.values())
        self.step, self._bytes, version = step, body, self.version
        self.weights = self.next_weights() if learned else self.weights
        self.version += learned
        self.batches[step] = [s.sample_id for s in samples]
        self.trained += self.batches[step]
        self._answer = trainer.TrainStepResponse(
            step=step,
            policy_version=self.version,
            skipped_reason="" if learned else "NO_ADVANTAGE" if groups else "NO_ACTION_TOKENS",
            # The real trainer reports these metrics of the batch, too.
            metrics={"train/samples_per_step": float(len(samples)), "mismatch/ess": 0.9}
            | {"mismatch/logprob_diff_mean": self.mismatch(version - min(s.oldest_version for s in samples))}
            | {"reward/mean": float(np.mean([s.score or 0.0 for s in samples]))},
        )
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer is lost")
        return self._answer

    def margins(self, samples: list[Sample]) -> list[float]:
        """Return by how much each pair, or labelled answer, gained on the reference as the data asks for."""
        signs, found = {True: 1, False: -1}, dict[str, float]()
        for one in (s for s in samples if s.score is not None):
            gain = toy_logprobs(self.weights, one.token_ids) - one.reference_logprobs
            gained = signs[(one.score or 0) > 0] * float(gain[one.loss_mask].sum())
            found[one.group_id] = found.get(one.group_id, 0.0) + gained
        return list(found.values())

    async def ComputeLogprobs(
        self, request: trainer.ComputeLogprobsRequest, context: Context
    ) -> trainer.ComputeLogprobsResponse:
        self.journal.append(f"{self.member_id} probe")
        if request.reference_of_step:
            self.reference_steps.append(request.reference_of_step)
            if self.step:
                raise WrongState("the first weights are gone")
        if self.on_probe is not None:
            await self.on_probe()
        if request.losses_of_step:
            margins = self.margins([decode(e, vocabulary_size=VOCABULARY, max_tokens=64) for e in request.experiences])
            losses = np.logaddexp(0.0, [-margin for margin in margins])
            return trainer.ComputeLogprobsResponse(
                unit_losses=losses, unit_margins=margins, policy_version=self.version
            )
        rows = [toy_logprobs(self.weights, np.frombuffer(e.token_ids, "<i4")) for e in request.experiences]
        return trainer.ComputeLogprobsResponse(logprobs=[pack_floats(r) for r in rows], policy_version=self.version)

    async def SaveCheckpoint(
        self, request: trainer.SaveCheckpointRequest, context: Context
    ) -> trainer.SaveCheckpointResponse:
        self.checkpoints.setdefault(self.step, (self.weights, self.version))
        self.scores[self.step] = request.score if request.HasField("score") else None
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

    async def _never(self, request: Any, context: Context) -> Any:
        raise AssertionError("the coordinator trains whole steps")

    ForwardBackward = OptimStep = DiscardGradient = _never

    async def ExportModel(self, request: trainer.ExportModelRequest, context: Context) -> trainer.ExportModelResponse:
        self.exports.append((request.name, "critic" if request.critic else "ema" if request.ema else "policy"))
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
            backends=self.backends,
            device_uuids=self.device_uuids,
            reachable_device_uuids=self.reachable,
        )

    async def MakeOffer(self, request: weight.MakeOfferRequest, context: Context) -> weight.MakeOfferResponse:
        if request.group == 0 and request.epoch <= self.epoch:
            raise StaleEpoch(f"epoch {self.epoch} was seen")
        if request.group and (request.epoch != self.epoch or request.group != len(self.groups)):
            raise StaleEpoch(f"epoch {self.epoch} has {len(self.groups)} groups")
        self.epoch, self.closed = request.epoch, False
        self.groups = [*(self.groups if request.group else []), (request.backend, request.receiver_count)]
        return weight.MakeOfferResponse(offers=[f"offer of group {request.group}".encode()])

    async def OpenWeights(self, request: weight.OpenWeightsRequest, context: Context) -> weight.OpenWeightsResponse:
        self._check(request.epoch)
        return weight.OpenWeightsResponse()

    async def SendWeights(self, request: weight.SendWeightsRequest, context: Context) -> weight.SendWeightsResponse:
        self.journal.append(f"{self.member_id} send")
        self._check(request.epoch)
        if request.policy_version != self.version:
            raise WrongState(f"version {self.version} is the present one")
        self.skipped_sums[request.policy_version] = request.skip_sums
        send(request.epoch, request.policy_version, self.weights)
        if self.on_send is not None:
            await self.on_send()
        return weight.SendWeightsResponse(
            weights_digest=weights_digest(self.weights, request.policy_version, skip_sums=request.skip_sums),
            sent_bytes=8,
            sums=b"" if request.skip_sums else weights_sums(self.weights),
        )

    async def AbortWeights(self, request: weight.AbortWeightsRequest, context: Context) -> weight.AbortWeightsResponse:
        self.journal.append(f"{self.member_id} abort")
        if self.refuses_aborts:
            raise Unavailable("not now")
        if request.epoch == self.epoch:
            self.closed = True
        self._check(request.epoch, closed=True)
        return weight.AbortWeightsResponse()

    def _check(self, epoch: int, *, closed: bool = False) -> None:
        if epoch != self.epoch or (self.closed and not closed):
            raise StaleEpoch(f"epoch {self.epoch} is open")
