"""Clients of the trainer: training and checkpoints, and its side of a weight update."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import grpc
import numpy as np
from numpy.typing import ArrayLike

from fourfold.arrays import Float32Array, Sample
from fourfold.rpc.channel import call, stream, translate_errors
from fourfold.rpc.codec import chunks, pack_floats, pack_ints
from fourfold.rpc.logprobs import compute_logprobs
from fourfold.rpc.responses import (
    check_devices,
    check_digest,
    check_model,
    check_offers,
    check_sums,
    check_version,
    clean_response,
    require,
    unpack_rows,
)
from fourfold.text import clean, is_metric_name, is_reason
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.types.v1.experience_pb2 import Experience

# The proto allows 4 MiB a request when more than log-probabilities is asked for.
_FORWARD_BYTES: Final = 2 << 20
_MAX_METRICS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardOutput:
    """What the present weights make of every token: float32 [n] per sample, the first value NaN."""

    logprobs: list[Float32Array] = field(default_factory=list)
    """Natural logarithms."""
    entropies: list[Float32Array] = field(default_factory=list)
    """Nats; empty unless asked for."""
    values: list[Float32Array] = field(default_factory=list)
    """Of the critic, before each token; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardOutput:
    """What a part of a gradient was made of."""

    loss: float
    """Sum of loss weight times log-probability."""
    logprobs: list[Float32Array]
    """float32 [n] per sample, NaN where the loss weight is 0."""


class AsyncTrainerClient:
    """Calls `TrainerService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.TrainerServiceStub(channel)
        self.peer = peer

    async def get_status(self, *, timeout: float) -> pb.TrainerStatus:
        """Step, version, phase and limits."""
        request = pb.GetStatusRequest()
        response = await call(self._stub.GetStatus, request, timeout=timeout, peer=self.peer, name="GetStatus")
        return self._status(response, "GetStatus")

    def _status(
        self, response: pb.GetStatusResponse | pb.WatchStatusResponse | pb.LoadCheckpointResponse, name: str
    ) -> pb.TrainerStatus:
        """Return the status in a response, checked."""
        status = response.status
        require(response.HasField("status"), "the response has no status", peer=self.peer, name=name)
        check_model(status, peer=self.peer, name=name)
        check_version(status.policy_version, peer=self.peer, name=name)
        self._check_step(status.step, name)
        return status

    def _check_step(self, step: int, name: str, *, wanted: int | None = None) -> None:
        rule = f"the step is {step}; it must be at least 0" if wanted is None else f"answered step {step} for {wanted}"
        require(step >= 0 and wanted in (None, step), rule, peer=self.peer, name=name, kind="WRONG_STEP")

    async def watch_status(self, *, timeout: float | None = None) -> AsyncGenerator[pb.TrainerStatus, None]:
        """The present status at once, then every change."""
        request = pb.WatchStatusRequest()
        watch = stream(self._stub.WatchStatus, request, timeout=timeout, peer=self.peer, name="WatchStatus")
        async with aclosing(watch) as responses:
            async for response in responses:
                yield self._status(response, "WatchStatus")

    async def train_step(self, step: int, experiences: Iterable[Experience], *, timeout: float) -> pb.TrainStepResponse:
        """Train one step; the batch travels in chunks of about 1 MiB and may be a generator.

        Idempotent by step, so it may be repeated with the same experiences after any failure.

        Raises:
            InvalidInput: names the sample that is malformed; nothing was trained.
            WrongState: the trainer is at another step.
            AlreadyExists: the step was trained with other experiences.
            FourfoldError: anything else that the trainer raised.
        """
        running = self._stub.TrainStep(timeout=timeout)
        try:
            with translate_errors(peer=self.peer, name="TrainStep", timeout=timeout):
                try:
                    sent = False
                    for chunk in chunks(experiences):
                        await running.write(pb.TrainStepRequest(step=step, experiences=chunk))
                        sent = True
                    if not sent:  # the trainer says what is wrong with an empty batch
                        await running.write(pb.TrainStepRequest(step=step))
                    await running.done_writing()
                except asyncio.InvalidStateError:
                    pass  # the trainer has answered before it read everything: the answer says why
                response: pb.TrainStepResponse | None = await running
        finally:
            running.cancel()
        return self._trained(clean_response(response, peer=self.peer, name="TrainStep"), step)

    def _trained(self, answer: pb.TrainStepResponse, step: int) -> pb.TrainStepResponse:
        """Return the answer to a step, checked. A metric may be NaN: it is one that could not be measured."""
        name = "TrainStep"
        self._check_step(answer.step, name, wanted=step)
        check_version(answer.policy_version, peer=self.peer, name=name)
        self._check_reason(answer.skipped_reason, name)
        rule = f"{len(answer.metrics)} metrics; at most {_MAX_METRICS}"
        require(len(answer.metrics) <= _MAX_METRICS, rule, peer=self.peer, name=name)
        wrong = next((key for key in answer.metrics if not is_metric_name(key)), "")
        known = not wrong and "" not in answer.metrics
        require(known, f"a metric is named {clean(wrong, 64)!r}", peer=self.peer, name=name)
        return answer

    def _check_reason(self, reason: str, name: str) -> None:
        rule = f"skipped_reason is {reason[:64]!r}; it must be UPPER_SNAKE_CASE or empty"
        require(not reason or is_reason(reason), rule, peer=self.peer, name=name)

    async def forward(
        self,
        token_ids: Sequence[ArrayLike],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
        values: bool = False,
        timeout: float,
    ) -> ForwardOutput:
        """Run the model, and the critic where values are asked for, over samples.

        Args:
            token_ids: int [n] of each sample, n from 2 to the context's length.
            temperature: divides the logits, in (0, 2].
            entropies: whether to compute them, too.
            values: the same.
            timeout: seconds for everything; large batches take several calls.

        Raises:
            InvalidInput: names the sample, counted from 0, and the rule; or there is no critic.
        """
        end = time.monotonic() + timeout
        found = ForwardOutput()
        for part in chunks(_experiences(token_ids, temperature), _FORWARD_BYTES):
            request = pb.ComputeLogprobsRequest(experiences=part, include_entropies=entropies, include_values=values)
            left = max(end - time.monotonic(), 0.001)
            answer = await call(
                self._stub.ComputeLogprobs, request, timeout=left, peer=self.peer, name="ComputeLogprobs"
            )
            found.logprobs.extend(self._rows(answer.logprobs, part, "logprobs"))
            if entropies:
                found.entropies.extend(self._rows(answer.entropies, part, "entropies"))
            if values:
                found.values.extend(self._rows(answer.values, part, "values"))
        return found

    def _rows(
        self, answers: Sequence[bytes], asked: Sequence[Experience], what: str, name: str = "ComputeLogprobs"
    ) -> list[Float32Array]:
        return unpack_rows(answers, asked, peer=self.peer, name=name, what=what)

    async def forward_backward(
        self,
        token_ids: Sequence[ArrayLike],
        loss_weights: Sequence[ArrayLike],
        *,
        step: int,
        part: int = 1,
        temperature: float = 1.0,
        timeout: float,
    ) -> ForwardBackwardOutput:
        """Add the gradient of `sum of loss weight * log-probability`, which is minimised, to that of the step.

        Any loss can be trained on whose derivatives by the log-probabilities you know: compute them from `forward`,
        and give them as weights. Idempotent by step and part, so it may be repeated after any failure.

        Args:
            token_ids: int [n] of each sample.
            loss_weights: float [n] of each sample, finite, the first 0; negative: the token becomes more probable.
            step: the trainer's status says the last one; this is that plus 1.
            part: 1, 2, ... within the step; the parts' gradients are added.
            temperature: divides the logits, in (0, 2].
            timeout: seconds.

        Raises:
            InvalidInput: names the sample, counted from 0, and the rule.
            WrongState: another step or part is due.
            AlreadyExists: the part was another call.
        """
        samples = [
            pb.WeightedSample(experience=experience, loss_weights=pack_floats(np.asarray(weights, np.float32)))
            for experience, weights in zip(_experiences(token_ids, temperature), loss_weights, strict=True)
        ]
        request = pb.ForwardBackwardRequest(step=step, part=part, samples=samples)
        answer = await call(
            self._stub.ForwardBackward, request, timeout=timeout, peer=self.peer, name="ForwardBackward"
        )
        asked = [sample.experience for sample in samples]
        check_version(answer.policy_version, peer=self.peer, name="ForwardBackward")
        rows = self._rows(answer.logprobs, asked, "logprobs", "ForwardBackward")
        return ForwardBackwardOutput(loss=answer.loss, logprobs=rows)

    async def optim_step(
        self, step: int, *, learning_rate: float | None = None, max_grad_norm: float | None = None, timeout: float
    ) -> pb.OptimStepResponse:
        """Clip the gradient of the step's parts, and make one optimizer step; idempotent by step.

        Args:
            step: of the parts.
            learning_rate: at least 0; None: the recipe's at this step.
            max_grad_norm: what a longer gradient is scaled down to; 0: none is; None: the recipe's.
            timeout: seconds.

        Raises:
            InvalidInput: a number is out of its range.
            WrongState: another step is due, or it has no part yet.
            AlreadyExists: the step was ended by another call.
        """
        request = pb.OptimStepRequest(step=step, learning_rate=learning_rate, max_grad_norm=max_grad_norm)
        answer = await call(self._stub.OptimStep, request, timeout=timeout, peer=self.peer, name="OptimStep")
        self._check_step(answer.step, "OptimStep", wanted=step)
        check_version(answer.policy_version, peer=self.peer, name="OptimStep")
        self._check_reason(answer.skipped_reason, "OptimStep")
        return answer

    async def discard_gradient(self, *, timeout: float) -> int:
        """Forget the gradient of the parts since the last step; returns their number."""
        request = pb.DiscardGradientRequest()
        response = await call(
            self._stub.DiscardGradient, request, timeout=timeout, peer=self.peer, name="DiscardGradient"
        )
        rule = f"part_count is {response.part_count}; it must be at least 0"
        require(response.part_count >= 0, rule, peer=self.peer, name="DiscardGradient")
        return response.part_count

    async def compute_logprobs(self, samples: Sequence[Sample], *, timeout: float) -> list[Float32Array]:
        """Return one float32 [n] per sample, in order; the first value of each is NaN, the others are finite."""
        method, request = self._stub.ComputeLogprobs, pb.ComputeLogprobsRequest
        return await compute_logprobs(method, request, samples, timeout=timeout, peer=self.peer)

    async def save_checkpoint(self, *, score: float | None = None, timeout: float) -> int:
        """Write a checkpoint of the present step; returns that step when it is durable.

        Args:
            score: mean score of a held-out evaluation of these weights; the best checkpoints stay.
            timeout: seconds.
        """
        request = pb.SaveCheckpointRequest(score=score)
        response = await call(
            self._stub.SaveCheckpoint, request, timeout=timeout, peer=self.peer, name="SaveCheckpoint"
        )
        self._check_step(response.step, "SaveCheckpoint")
        return response.step

    async def load_checkpoint(self, step: int, *, timeout: float) -> pb.TrainerStatus:
        """Restore the checkpoint of `step`; NotFound when there is none."""
        request = pb.LoadCheckpointRequest(step=step)
        response = await call(
            self._stub.LoadCheckpoint, request, timeout=timeout, peer=self.peer, name="LoadCheckpoint"
        )
        status = self._status(response, "LoadCheckpoint")
        self._check_step(status.step, "LoadCheckpoint", wanted=step)
        return status

    async def export_model(self, name: str, *, ema: bool = False, timeout: float) -> str:
        """Write the weights as a Hugging Face folder; returns its absolute path on the trainer's machine.

        Args:
            name: of the folder, inside of the trainer's run folder.
            ema: write the moving average of the weights instead; WrongState when the recipe keeps none.
            timeout: seconds.
        """
        request = pb.ExportModelRequest(name=name, ema=ema)
        response = await call(self._stub.ExportModel, request, timeout=timeout, peer=self.peer, name="ExportModel")
        require(bool(response.path), "the response has no path", peer=self.peer, name="ExportModel")
        return response.path

    async def raise_policy_version(self, policy_version: int, *, timeout: float) -> int:
        """Raise the version of the present weights to at least `policy_version`; returns what it is now."""
        request = pb.RaisePolicyVersionRequest(policy_version=policy_version)
        response = await call(
            self._stub.RaisePolicyVersion, request, timeout=timeout, peer=self.peer, name="RaisePolicyVersion"
        )
        check_version(response.policy_version, peer=self.peer, name="RaisePolicyVersion")
        rule = f"policy_version is {response.policy_version} after it was raised to {policy_version}"
        raised = response.policy_version >= policy_version
        require(raised, rule, peer=self.peer, name="RaisePolicyVersion", kind="BAD_VERSION")
        return response.policy_version


class TrainerWeightClient:
    """Calls `TrainerWeightService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = weight_grpc.TrainerWeightServiceStub(channel)
        self.peer = peer

    async def get_manifest(self, *, timeout: float) -> weight.GetManifestResponse:
        """Layout of the weights, host and backends."""
        request = weight.GetManifestRequest()
        found = await call(self._stub.GetManifest, request, timeout=timeout, peer=self.peer, name="GetManifest")
        check_digest(found.manifest_sha256, peer=self.peer, name="GetManifest")
        same = hashlib.sha256(found.manifest).digest() == found.manifest_sha256
        require(same, "manifest_sha256 is not that of the manifest", peer=self.peer, name="GetManifest")
        for uuids in (found.device_uuids, found.reachable_device_uuids):
            check_devices(uuids, peer=self.peer, name="GetManifest")
        return found

    async def make_offer(
        self, *, epoch: int, backend: str, receiver_count: int, group: int = 0, timeout: float
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it.

        Returns one opaque offer per trainer rank, for the receivers of this group. Never log them.
        """
        request = weight.MakeOfferRequest(epoch=epoch, backend=backend, receiver_count=receiver_count, group=group)
        response = await call(self._stub.MakeOffer, request, timeout=timeout, peer=self.peer, name="MakeOffer")
        check_offers(response.offers, peer=self.peer, name="MakeOffer")
        return list(response.offers)

    async def open(self, *, epoch: int, timeout: float) -> None:
        """Join the receivers of the epoch."""
        request = weight.OpenWeightsRequest(epoch=epoch)
        await call(self._stub.OpenWeights, request, timeout=timeout, peer=self.peer, name="OpenWeights")

    async def send(
        self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float
    ) -> weight.SendWeightsResponse:
        """Send the present weights; returns their digest and size, and the tensors' sums unless they are left out."""
        request = weight.SendWeightsRequest(epoch=epoch, policy_version=policy_version, skip_sums=skip_sums)
        sent = await call(self._stub.SendWeights, request, timeout=timeout, peer=self.peer, name="SendWeights")
        check_digest(sent.weights_digest, peer=self.peer, name="SendWeights")
        check_sums(sent.sums, peer=self.peer, name="SendWeights")
        rule = f"sent_bytes is {sent.sent_bytes}; it must be at least 0"
        require(sent.sent_bytes >= 0, rule, peer=self.peer, name="SendWeights")
        return sent

    async def abort(self, *, epoch: int, timeout: float) -> None:
        """Abort what is under way and close the epoch."""
        request = weight.AbortWeightsRequest(epoch=epoch)
        await call(self._stub.AbortWeights, request, timeout=timeout, peer=self.peer, name="AbortWeights")


def _experiences(token_ids: Sequence[ArrayLike], temperature: float) -> list[Experience]:
    """Return samples that are named by their place."""
    return [
        Experience(sample_id=str(i), token_ids=pack_ints(np.asarray(ids, np.int32)), temperature=temperature)
        for i, ids in enumerate(token_ids)
    ]
