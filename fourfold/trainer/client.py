"""Clients of a trainer: training and checkpoints for any caller, and weight updates for the coordinator."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import grpc
import numpy as np
from numpy.typing import ArrayLike

from fourfold.arrays import Float32Array
from fourfold.contract import has_minor
from fourfold.rpc.channel import translate_errors
from fourfold.rpc.client import AsyncClient, SyncClient, blocking, blocking_stream
from fourfold.rpc.codec import Buffer, chunks, encode_stream, pack_floats, read_floats
from fourfold.rpc.logprobs import compute_logprobs
from fourfold.rpc.responses import ResponseCheck, clean_response
from fourfold.sample import Sample
from fourfold.sample.wire import encode, encode_parts, from_samples, from_token_ids
from fourfold.text import clean, is_metric_name, is_reason
from fourfold.tracing import propagation
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.types.v1.experience_pb2 import Experience

# The proto allows 4 MiB per request that also asks for entropies or values: the response is larger then.
_FORWARD_BYTES: Final = 2 << 20
_MAX_METRICS: Final = 1000
_TRAIN_STEP: Final = f"/{pb.DESCRIPTOR.services_by_name['TrainerService'].full_name}/TrainStep"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardOutput:
    """Results of a forward pass: float32 [n] per sample of n tokens; the first value of each is NaN."""

    logprobs: list[Float32Array] = field(default_factory=list)
    """Natural log-probability of each token."""
    entropies: list[Float32Array] = field(default_factory=list)
    """Entropy in nats of the distribution of each token; empty unless requested."""
    values: list[Float32Array] = field(default_factory=list)
    """Value of the critic before each token; empty unless requested."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardOutput:
    """Results of a forward and backward pass."""

    loss: float
    """Sum over the tokens of loss weight * log-probability."""
    logprobs: list[Float32Array]
    """float32 [n] per sample, NaN where the loss weight is 0."""


class AsyncTrainerClient(AsyncClient):
    """Drives a trainer, with asyncio. A step is one `train_step`, or `forward_backward` calls and one `optim_step`.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's, which long calls should raise.
    """

    _role = "trainer"
    _contract = ""  # version of the contract in the last status

    @cached_property
    def _stub(self) -> pb_grpc.TrainerServiceAsyncStub:
        return pb_grpc.TrainerServiceStub(self._open())

    @property
    def _train_step(self) -> grpc.aio.StreamUnaryMultiCallable[bytes, pb.TrainStepResponse]:
        """TrainStep without the stub's serializer: a message object for each chunk would cost four copies of it."""
        return self._open().stream_unary(_TRAIN_STEP, response_deserializer=pb.TrainStepResponse.FromString)

    async def get_status(self, *, timeout: float | None = None) -> pb.TrainerStatus:
        """Return step, policy version, phase and limits."""
        response = await self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout)
        self._check(response).contract(response.contract_version)
        self._contract = response.contract_version
        return self._status(response)

    def _status(
        self, response: pb.GetStatusResponse | pb.WatchStatusResponse | pb.LoadCheckpointResponse
    ) -> pb.TrainerStatus:
        """Return the checked status of a response."""
        status, check = response.status, self._check(response)
        check.require(response.HasField("status"), "the response has no status")
        check.model(status)
        check.version(status.policy_version)
        _check_step(check, status.step)
        if status.HasField("last_step"):
            self._trained(status.last_step, status.step)
        return status

    async def watch_status(self, *, timeout: float | None = None) -> AsyncGenerator[pb.TrainerStatus, None]:
        """Yield the present status at once, then every change. Default timeout: none."""
        async with aclosing(self._stream(self._stub.WatchStatus, pb.WatchStatusRequest(), timeout)) as responses:
            async for response in responses:
                yield self._status(response)

    async def train_step(
        self, step: int, experiences: Iterable[Sample | Experience], *, timeout: float | None = None
    ) -> pb.TrainStepResponse:
        """Train one step with the loss of the recipe.

        Idempotent by step: after any failure the call may be repeated with the same experiences.

        Args:
            step: the last step of the trainer's status plus 1.
            experiences: scored samples; may be a generator, which is read while the batch is sent in chunks of 1 MiB.
            timeout: seconds.

        Raises:
            InvalidInput: A sample is malformed; the message names it. Nothing was trained.
            WrongState: The trainer is at another step.
            AlreadyExists: The step was trained with other experiences.
            FourfoldError: Any other error of the trainer or of the connection.
        """
        return await self._send_step(step, experiences, None, timeout)

    async def _send_step(
        self,
        step: int,
        experiences: Iterable[Sample | Experience],
        start: asyncio.Event | None,
        timeout: float | None,
    ) -> pb.TrainStepResponse:
        timeout = self._seconds(timeout)
        running = self._train_step(timeout=timeout, metadata=propagation.outgoing())
        try:
            with translate_errors(peer=self.peer, name="TrainStep", timeout=timeout):
                try:
                    items = map(_encoded, experiences)
                    # Without `begin`, a trainer would train the part that it has when this process dies: gRPC ends the
                    # stream of a dead caller before it cancels the call.
                    head = pb.TrainStepRequest(step=step, begin=False)
                    number = pb.TrainStepRequest.EXPERIENCES_FIELD_NUMBER
                    for chunk in encode_stream(head, number, items):  # the trainer refuses an empty batch
                        await running.write(chunk)
                    if start is not None:
                        running.add_done_callback(lambda _: start.set())  # a refusal ends the wait, too
                        await start.wait()
                    await running.write(pb.TrainStepRequest(step=step, begin=True).SerializeToString())
                    await running.done_writing()
                except asyncio.InvalidStateError:
                    pass  # The trainer answered before it read the whole batch; the response below holds its error.
                response: pb.TrainStepResponse | None = await running
        finally:
            running.cancel()
        return self._trained(clean_response(response, peer=self.peer, name="TrainStep"), step)

    def _trained(self, answer: pb.TrainStepResponse, step: int) -> pb.TrainStepResponse:
        """Return the checked response of a step. A metric may be NaN, where it could not be measured."""
        check = self._check_step_response(answer, step)
        check.require(len(answer.metrics) <= _MAX_METRICS, f"{len(answer.metrics)} metrics; at most {_MAX_METRICS}")
        for name in answer.metrics:
            check.require(is_metric_name(name), f"a metric is named {clean(name, 64)!r}")
        return answer

    def _check_step_response(self, response: pb.TrainStepResponse | pb.OptimStepResponse, step: int) -> ResponseCheck:
        """Check step, version and reason of the response to `step`; return the checks for the rest of it."""
        check, reason = self._check(response), response.skipped_reason
        _check_step(check, response.step, wanted=step)
        check.version(response.policy_version)
        rule = f"skipped_reason is {reason[:64]!r}; it must be UPPER_SNAKE_CASE or empty"
        check.require(not reason or is_reason(reason), rule)
        return check

    async def forward(
        self,
        token_ids: Sequence[ArrayLike],
        *,
        temperature: float = 1.0,
        entropies: bool = False,
        values: bool = False,
        timeout: float | None = None,
    ) -> ForwardOutput:
        """Compute log-probabilities under the present weights, and on request entropies and values.

        Args:
            token_ids: int [n] per sample; n is 2 to the context length.
            temperature: divides the logits; in (0, 2].
            entropies: also compute entropies.
            values: also compute the critic's values.
            timeout: seconds for all samples; a large batch takes several calls.

        Raises:
            InvalidInput: A sample is malformed (the message has its index), or the recipe has no critic.
        """
        left = self._countdown(timeout)
        found = ForwardOutput()
        for part in chunks(from_token_ids(token_ids, temperature), _FORWARD_BYTES):
            request = pb.ComputeLogprobsRequest(experiences=part, include_entropies=entropies, include_values=values)
            answer = await self._call(self._stub.ComputeLogprobs, request, left())
            check = self._check(answer)
            found.logprobs.extend(check.rows(answer.logprobs, part))
            if entropies:
                found.entropies.extend(check.rows(answer.entropies, part, "entropies"))
            if values:
                found.values.extend(check.rows(answer.values, part, "values"))
        return found

    async def forward_backward(
        self,
        token_ids: Sequence[ArrayLike],
        loss_weights: Sequence[ArrayLike],
        *,
        step: int,
        part: int = 1,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> ForwardBackwardOutput:
        """Add the gradient of `sum of loss weight * log-probability` to the gradient of the step.

        Any loss with known derivatives with respect to the log-probabilities can be trained: compute the derivatives
        from the result of `forward`, and pass them as weights. Idempotent by step and part: the call may be repeated.

        Args:
            token_ids: int [n] per sample.
            loss_weights: float [n] per sample, finite, the first 0. The loss is minimised: a negative weight makes its
                token more probable.
            step: the last step of the trainer's status plus 1.
            part: 1, 2, ... within the step; the gradients of the parts are added.
            temperature: divides the logits; in (0, 2].
            timeout: seconds.

        Raises:
            InvalidInput: A sample is malformed; the message has its index.
            WrongState: Another step or part is due.
            AlreadyExists: The part was already computed from other samples.
        """
        samples = [
            pb.WeightedSample(experience=experience, loss_weights=pack_floats(np.asarray(weights, np.float32)))
            for experience, weights in zip(from_token_ids(token_ids, temperature), loss_weights, strict=True)
        ]
        request = pb.ForwardBackwardRequest(step=step, part=part, samples=samples)
        answer = await self._call(self._stub.ForwardBackward, request, timeout)
        check = self._check(answer)
        check.version(answer.policy_version)
        rows = check.rows(answer.logprobs, [sample.experience for sample in samples])
        return ForwardBackwardOutput(loss=answer.loss, logprobs=rows)

    async def optim_step(
        self,
        step: int,
        *,
        learning_rate: float | None = None,
        max_grad_norm: float | None = None,
        timeout: float | None = None,
    ) -> pb.OptimStepResponse:
        """Clip the gradient of the parts of a step and run the optimizer once. Idempotent by step.

        Args:
            step: the step of the parts.
            learning_rate: at least 0; None: the recipe's value at this step.
            max_grad_norm: largest L2 norm of the gradient; 0: no clipping; None: the recipe's value.
            timeout: seconds.

        Raises:
            InvalidInput: A number is out of range.
            WrongState: Another step is due, or this one has no part yet.
            AlreadyExists: The step ended with other arguments.
        """
        request = pb.OptimStepRequest(step=step, learning_rate=learning_rate, max_grad_norm=max_grad_norm)
        answer = await self._call(self._stub.OptimStep, request, timeout)
        self._check_step_response(answer, step)
        return answer

    async def discard_gradient(self, *, timeout: float | None = None) -> int:
        """Drop the gradient of the parts since the last step; return the number of parts."""
        response = await self._call(self._stub.DiscardGradient, pb.DiscardGradientRequest(), timeout)
        self._check(response).not_negative(response, "part_count")
        return response.part_count

    async def compute_logprobs(self, samples: Sequence[Sample], *, timeout: float | None = None) -> list[Float32Array]:
        """Return one float32 [n] per sample, in order; the first value of each is NaN, the others are finite."""
        method, asked = self._stub.ComputeLogprobs, from_samples(samples)
        return await compute_logprobs(self, method, pb.ComputeLogprobsRequest, asked, timeout)

    async def compute_scores(self, samples: Sequence[Sample], *, timeout: float | None = None) -> list[float]:
        """Return the score of each sample, finite, in order, from the reward model that the recipe trains.

        Raises InvalidInput: the recipe trains none.
        """
        rows = await self._values(samples, [1] * len(samples), timeout)
        return [float(row[0]) for row in rows]

    async def compute_step_scores(
        self, samples: Sequence[Sample], *, timeout: float | None = None
    ) -> list[Float32Array]:
        """Return the score after every token, from the process reward model that the recipe trains.

        Returns:
            float32 [n] per sample, in order; the first value of each is NaN, the others are finite.

        Raises:
            InvalidInput: the recipe trains none.
        """
        return await self._values(samples, [len(sample.token_ids) for sample in samples], timeout)

    async def _values(
        self, samples: Sequence[Sample], counts: Sequence[int], timeout: float | None
    ) -> list[Float32Array]:
        """Return the values of each sample, float32, of which `counts` has the number; of several the first is NaN."""
        left, found = self._countdown(timeout), list[Float32Array]()
        for part in chunks(from_samples(samples), _FORWARD_BYTES):
            request = pb.ComputeLogprobsRequest(experiences=part, include_values=True)
            answer = await self._call(self._stub.ComputeLogprobs, request, left())
            check, sizes = self._check(answer), [4 * n for n in counts[len(found) : len(found) + len(part)]]
            right = list(map(len, answer.values)) == sizes
            each = "one score" if set(sizes) == {4} else "a score after each token"
            check.require(right, f"the answer has not {each} for each of {len(part)} samples", "WRONG_COUNT")
            rows = [read_floats(row) for row in answer.values]
            finite = all(np.isfinite(row[1:] if len(row) > 1 else row).all() for row in rows)
            check.require(finite, "a score is not finite", "NOT_FINITE")
            found += rows
        return found

    async def reference_logprobs(
        self, samples: Sequence[Sample], *, step: int, timeout: float | None = None
    ) -> list[Float32Array]:
        """Return the reference log-probabilities of the samples of a step, before the first step is trained.

        Args:
            samples: those that `train_step` will get, at most 8 MiB: whole pairs, if the loss reads pairs.
            step: their step.
            timeout: seconds.

        Returns:
            float32 [n] per sample, in order: the first value is NaN, the others are finite, and 0 outside the loss.

        Raises:
            InvalidInput: The loss has no reference, or a sample is malformed; the message names it.
            WrongState: A step was trained, and the weights are no longer those that training began with.
        """
        asked = [encode(sample) for sample in samples]
        request = pb.ComputeLogprobsRequest(experiences=asked, reference_of_step=step)
        answer = await self._call(self._stub.ComputeLogprobs, request, timeout)
        check = self._check(answer)
        rows = check.rows(answer.logprobs, asked)
        check.logprobs(rows, asked)
        return rows

    async def unit_losses(
        self, samples: Sequence[Sample], *, step: int, timeout: float | None = None
    ) -> tuple[list[float], list[float]]:
        """Return the loss and the margin of each pair or labelled answer under the current weights.

        Args:
            samples: as for `train_step`, at most 8 MiB, with reference log-probabilities if the loss reads them.
            step: the step that they would make, which decides the micro-batches.
            timeout: seconds.

        Returns:
            The losses, finite, in the order of the first sample of each unit; and the margins, above 0 where the model
            agrees with the data, or none for a loss that has no margin.

        Raises:
            InvalidInput: The recipe compares no answers, or a sample is malformed; the message names it.
        """
        request = pb.ComputeLogprobsRequest(experiences=[encode(sample) for sample in samples], losses_of_step=step)
        answer = await self._call(self._stub.ComputeLogprobs, request, timeout)
        losses, margins, check = list(answer.unit_losses), list(answer.unit_margins), self._check(answer)
        known = len({sample.group_id for sample in samples})
        right = len(losses) == known and len(margins) in (0, known)
        counted = f"{len(losses)} losses and {len(margins)} margins"
        check.require(right, f"the answer has {counted} for {known} pairs or labelled answers", "WRONG_COUNT")
        check.require(bool(np.isfinite(losses + margins).all()), "a loss or a margin is not finite", "NOT_FINITE")
        return losses, margins

    async def save_checkpoint(self, *, score: float | None = None, timeout: float | None = None) -> int:
        """Write a checkpoint of the present step; return the step once the checkpoint is durable.

        Args:
            score: mean score of a held-out evaluation of these weights; the best checkpoints are kept.
            timeout: seconds.
        """
        response = await self._call(self._stub.SaveCheckpoint, pb.SaveCheckpointRequest(score=score), timeout)
        _check_step(self._check(response), response.step)
        return response.step

    async def load_checkpoint(self, step: int, *, timeout: float | None = None) -> pb.TrainerStatus:
        """Restore the checkpoint of `step`; raise NotFound when there is none."""
        response = await self._call(self._stub.LoadCheckpoint, pb.LoadCheckpointRequest(step=step), timeout)
        status = self._status(response)
        _check_step(self._check(response), status.step, wanted=step)
        return status

    async def export_model(
        self, name: str, *, ema: bool = False, critic: bool = False, timeout: float | None = None
    ) -> str:
        """Write the weights as a Hugging Face folder; return its absolute path on the trainer's machine.

        Args:
            name: name of the folder inside the trainer's run folder.
            ema: write the moving average of the weights instead; raises WrongState when the recipe keeps none.
            critic: write the critic instead, a classifier with one label; raises WrongState when there is none.
            timeout: seconds.
        """
        response = await self._call(
            self._stub.ExportModel, pb.ExportModelRequest(name=name, ema=ema, critic=critic), timeout
        )
        self._check(response).require(bool(response.path), "the response has no path")
        return response.path

    async def raise_policy_version(self, policy_version: int, *, timeout: float | None = None) -> int:
        """Raise the version of the present weights to at least `policy_version`; return the version."""
        request = pb.RaisePolicyVersionRequest(policy_version=policy_version)
        response = await self._call(self._stub.RaisePolicyVersion, request, timeout)
        check = self._check(response)
        check.version(response.policy_version)
        rule = f"policy_version is {response.policy_version} after it was raised to {policy_version}"
        check.require(response.policy_version >= policy_version, rule, "BAD_VERSION")
        return response.policy_version


def _check_step(check: ResponseCheck, step: int, *, wanted: int | None = None) -> None:
    rule = f"the step is {step}; it must be at least 0" if wanted is None else f"answered step {step} for {wanted}"
    check.require(step >= 0 and wanted in (None, step), rule, "WRONG_STEP")


def _encoded(item: Sample | Experience) -> Sequence[Buffer]:
    return encode_parts(item) if isinstance(item, Sample) else [item.SerializeToString()]


async def train_step_ahead(
    client: AsyncTrainerClient, step: int, samples: Iterable[Sample], start: asyncio.Event, *, timeout: float
) -> pb.TrainStepResponse:
    """Send a step while the trainer works on the one before it, and train it when `start` is set.

    Arguments and errors are those of `AsyncTrainerClient.train_step`. Also raises WrongState if the step before is
    neither read nor trained, or has failed. The trainer must be one for which `takes_steps_ahead` is true.
    """
    return await client._send_step(step, samples, start, timeout)


def takes_steps_ahead(client: AsyncTrainerClient) -> bool:
    """Return whether the trainer knows `begin`, by the status that `client` got last.

    A trainer of an earlier contract begins a step when the stream ends, so also when its caller has died.
    """
    return has_minor(client._contract, 11)


class TrainerClient(SyncClient[AsyncTrainerClient]):
    """Drives a trainer; each method blocks. For asyncio, use AsyncTrainerClient."""

    _async_type = AsyncTrainerClient
    get_status = blocking(AsyncTrainerClient.get_status)
    watch_status = blocking_stream(AsyncTrainerClient.watch_status)
    train_step = blocking(AsyncTrainerClient.train_step)
    forward = blocking(AsyncTrainerClient.forward)
    forward_backward = blocking(AsyncTrainerClient.forward_backward)
    optim_step = blocking(AsyncTrainerClient.optim_step)
    discard_gradient = blocking(AsyncTrainerClient.discard_gradient)
    compute_logprobs = blocking(AsyncTrainerClient.compute_logprobs)
    compute_scores = blocking(AsyncTrainerClient.compute_scores)
    compute_step_scores = blocking(AsyncTrainerClient.compute_step_scores)
    reference_logprobs = blocking(AsyncTrainerClient.reference_logprobs)
    unit_losses = blocking(AsyncTrainerClient.unit_losses)
    save_checkpoint = blocking(AsyncTrainerClient.save_checkpoint)
    load_checkpoint = blocking(AsyncTrainerClient.load_checkpoint)
    export_model = blocking(AsyncTrainerClient.export_model)
    raise_policy_version = blocking(AsyncTrainerClient.raise_policy_version)


class TrainerWeightClient(AsyncClient):
    """Sends the trainer's weights, for the coordinator. All methods raise FourfoldError; timeouts are seconds."""

    _role = "trainer"

    @cached_property
    def _stub(self) -> weight_grpc.TrainerWeightServiceAsyncStub:
        return weight_grpc.TrainerWeightServiceStub(self._open())

    async def get_manifest(self, *, timeout: float) -> weight.GetManifestResponse:
        """Return the layout of the weights, the host and the backends."""
        found = await self._call(self._stub.GetManifest, weight.GetManifestRequest(), timeout)
        check = self._check(found)
        check.digest(found.manifest_sha256)
        same = hashlib.sha256(found.manifest).digest() == found.manifest_sha256
        check.require(same, "manifest_sha256 is not that of the manifest")
        check.devices(found.device_uuids)
        check.devices(found.reachable_device_uuids)
        return found

    async def make_offer(
        self,
        *,
        epoch: int,
        backend: str,
        receiver_count: int,
        group: int = 0,
        host: str = "",
        interface: str = "",
        timeout: float,
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it.

        The trainer listens on `interface`, or at `host`, where a backend needs that.

        Returns:
            One opaque offer per trainer rank, for the receivers of this group. Never log them.
        """
        request = weight.MakeOfferRequest(
            epoch=epoch, backend=backend, receiver_count=receiver_count, group=group, host=host, interface=interface
        )
        response = await self._call(self._stub.MakeOffer, request, timeout)
        self._check(response).offers(response.offers)
        return list(response.offers)

    async def open(self, *, epoch: int, timeout: float) -> None:
        """Join the receivers of the epoch."""
        await self._call(self._stub.OpenWeights, weight.OpenWeightsRequest(epoch=epoch), timeout)

    async def send(
        self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float
    ) -> weight.SendWeightsResponse:
        """Send the present weights; return their digest and size, and the sums of the tensors unless skipped."""
        request = weight.SendWeightsRequest(epoch=epoch, policy_version=policy_version, skip_sums=skip_sums)
        sent = await self._call(self._stub.SendWeights, request, timeout)
        check = self._check(sent)
        check.digest(sent.weights_digest)
        check.sums(sent.sums)
        check.not_negative(sent, "sent_bytes")
        return sent

    async def abort(self, *, epoch: int, timeout: float) -> None:
        """Abort the running transfer and close the epoch."""
        await self._call(self._stub.AbortWeights, weight.AbortWeightsRequest(epoch=epoch), timeout)
