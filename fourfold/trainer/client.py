"""Clients of the trainer: training and checkpoints, and its side of a weight update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import grpc

from fourfold import lookup
from fourfold.channel import call, errors, stream
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold.types.v1.experience_pb2 import Experience
from fourfold.wire import Float32Array, Sample, chunks


class TrainerClient:
    """Calls `TrainerService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.TrainerServiceStub(channel)
        self.peer = peer

    async def get_status(self, *, timeout: float) -> pb.TrainerStatus:
        """Step, version, phase and limits."""
        request = pb.GetStatusRequest()
        response = await call(self._stub.GetStatus, request, timeout=timeout, peer=self.peer, name="GetStatus")
        return response.status

    async def watch_status(self, *, timeout: float | None = None) -> AsyncGenerator[pb.TrainerStatus, None]:
        """The present status at once, then every change."""
        request = pb.WatchStatusRequest()
        watch = stream(self._stub.WatchStatus, request, timeout=timeout, peer=self.peer, name="WatchStatus")
        async with aclosing(watch) as responses:
            async for response in responses:
                yield response.status

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
            with errors(peer=self.peer, name="TrainStep", timeout=timeout):
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
                return await running
        finally:
            running.cancel()

    async def compute_logprobs(self, samples: Sequence[Sample], *, timeout: float) -> list[Float32Array]:
        """Return one float32 [n] per sample, in order; the first value of each is NaN, the others are finite."""
        method, request = self._stub.ComputeLogprobs, pb.ComputeLogprobsRequest
        return await lookup.compute_logprobs(method, request, samples, timeout=timeout, peer=self.peer)

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
        return response.step

    async def load_checkpoint(self, step: int, *, timeout: float) -> pb.TrainerStatus:
        """Restore the checkpoint of `step`; NotFound when there is none."""
        request = pb.LoadCheckpointRequest(step=step)
        response = await call(
            self._stub.LoadCheckpoint, request, timeout=timeout, peer=self.peer, name="LoadCheckpoint"
        )
        return response.status

    async def export_model(self, name: str, *, ema: bool = False, timeout: float) -> str:
        """Write the weights as a Hugging Face folder; returns its absolute path on the trainer's machine.

        Args:
            name: of the folder, inside of the trainer's run folder.
            ema: write the moving average of the weights instead; WrongState when the recipe keeps none.
            timeout: seconds.
        """
        request = pb.ExportModelRequest(name=name, ema=ema)
        response = await call(self._stub.ExportModel, request, timeout=timeout, peer=self.peer, name="ExportModel")
        return response.path

    async def raise_policy_version(self, policy_version: int, *, timeout: float) -> int:
        """Raise the version of the present weights to at least `policy_version`; returns what it is now."""
        request = pb.RaisePolicyVersionRequest(policy_version=policy_version)
        response = await call(
            self._stub.RaisePolicyVersion, request, timeout=timeout, peer=self.peer, name="RaisePolicyVersion"
        )
        return response.policy_version


class TrainerWeightClient:
    """Calls `TrainerWeightService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = weight_grpc.TrainerWeightServiceStub(channel)
        self.peer = peer

    async def get_manifest(self, *, timeout: float) -> weight.GetManifestResponse:
        """Layout of the weights, host and backends."""
        request = weight.GetManifestRequest()
        return await call(self._stub.GetManifest, request, timeout=timeout, peer=self.peer, name="GetManifest")

    async def make_offer(self, *, epoch: int, backend: str, receiver_count: int, timeout: float) -> list[bytes]:
        """Start an epoch; returns one opaque offer per trainer rank. Never log them."""
        request = weight.MakeOfferRequest(epoch=epoch, backend=backend, receiver_count=receiver_count)
        response = await call(self._stub.MakeOffer, request, timeout=timeout, peer=self.peer, name="MakeOffer")
        return list(response.offers)

    async def open(self, *, epoch: int, timeout: float) -> None:
        """Join the receivers of the epoch."""
        request = weight.OpenWeightsRequest(epoch=epoch)
        await call(self._stub.OpenWeights, request, timeout=timeout, peer=self.peer, name="OpenWeights")

    async def send(self, *, epoch: int, policy_version: int, timeout: float) -> weight.SendWeightsResponse:
        """Send the present weights; returns their digest and size."""
        request = weight.SendWeightsRequest(epoch=epoch, policy_version=policy_version)
        return await call(self._stub.SendWeights, request, timeout=timeout, peer=self.peer, name="SendWeights")

    async def abort(self, *, epoch: int, timeout: float) -> None:
        """Abort what is under way and close the epoch."""
        request = weight.AbortWeightsRequest(epoch=epoch)
        await call(self._stub.AbortWeights, request, timeout=timeout, peer=self.peer, name="AbortWeights")
