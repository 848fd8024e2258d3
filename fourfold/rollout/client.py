"""Clients of a rollout service: sampling, for anybody, and weight updates, for the coordinator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from fourfold.channel import call, stream
from fourfold.errors import InvalidInput
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from fourfold.wire import Float32Array, Int32Array, VersionSpan, floats, pack_ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished sample of a Generate call, without its prompt."""

    sample_index: int
    token_ids: Int32Array  # [n]; n may be 0 when the engine gave the request up
    logprobs: Float32Array  # [n], natural log, at most 0
    version_spans: tuple[VersionSpan, ...]  # tile the n tokens
    finish_reason: pb.FinishReason.ValueType


class RolloutClient:
    """Calls `RolloutService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.RolloutServiceStub(channel)
        self.peer = peer

    async def get_info(self, *, timeout: float) -> pb.GetInfoResponse:
        """Model, limits and policy version."""
        return await call(self._stub.GetInfo, pb.GetInfoRequest(), timeout=timeout, peer=self.peer, name="GetInfo")

    async def generate(self, request: pb.GenerateRequest, *, timeout: float) -> AsyncGenerator[pb.SampleChunk, None]:
        """Sample and stream. Use it inside `contextlib.aclosing`: leaving early then aborts the samples at once."""
        responses = stream(self._stub.Generate, request, timeout=timeout, peer=self.peer, name="Generate")
        async with aclosing(responses):
            async for response in responses:
                for chunk in response.chunks:
                    yield chunk

    async def complete(self, request: pb.GenerateRequest, *, timeout: float) -> list[Completion]:
        """Sample and return the whole completions, in order of their sample index.

        Cancelling aborts the samples in the engine.

        Raises:
            InvalidInput: the service's answer does not add up.
            FourfoldError: what the service raised.
        """
        count = request.sample_count if request.HasField("sample_count") else 1
        who = f"{self.peer}, {request.request_id}"
        parts = [_Parts(index=index, who=who) for index in range(count)]
        async with aclosing(self.generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                index = chunk.sample_index
                if not 0 <= index < count:
                    raise InvalidInput(f"{who}: sample_index is {index}; {count} samples were asked for")
                parts[index].add(chunk)
        return [part.join() for part in parts]

    def watch_load(
        self, *, period: float = 1.0, timeout: float | None = None
    ) -> AsyncGenerator[pb.WatchLoadResponse, None]:
        """Load reports, the present one at once, then one every `period` seconds."""
        duration = Duration()
        duration.FromNanoseconds(int(period * 1e9))
        request = pb.WatchLoadRequest(period=duration)
        return stream(self._stub.WatchLoad, request, timeout=timeout, peer=self.peer, name="WatchLoad")


@dataclass(slots=True, kw_only=True)
class _Parts:
    """Chunks of one sample as they come."""

    index: int
    who: str
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens)
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED

    def add(self, chunk: pb.SampleChunk) -> None:
        if self.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            raise InvalidInput(f"{self.who}: sample {self.index} goes on after its finish_reason")
        # Every access copies the bytes out of the message.
        ids, logprobs, version = chunk.token_ids, chunk.logprobs, chunk.policy_version
        size = len(ids)
        if size % 4 or len(logprobs) != size:
            raise InvalidInput(
                f"{self.who}: sample {self.index} has {size} bytes of token_ids and {len(logprobs)} of "
                f"logprobs; both must be 4 bytes a token"
            )
        self.finish_reason = chunk.finish_reason
        if not size:
            return
        if version < 0:
            raise InvalidInput(f"{self.who}: sample {self.index} has policy_version {version}")
        self.token_ids.append(ids)
        self.logprobs.append(logprobs)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + size // 4)
        else:
            self.spans.append((version, size // 4))

    def join(self) -> Completion:
        if self.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            raise InvalidInput(f"{self.who}: the stream ended before sample {self.index} was finished")
        ids, logprobs = b"".join(self.token_ids), b"".join(self.logprobs)
        return Completion(
            sample_index=self.index,
            token_ids=np.frombuffer(ids, "<i4").astype(np.int32, copy=False),
            logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32, copy=False),
            version_spans=tuple(VersionSpan(policy_version=v, token_count=n) for v, n in self.spans),
            finish_reason=self.finish_reason,
        )


class RolloutControlClient:
    """Calls `RolloutControlService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = control_grpc.RolloutControlServiceStub(channel)
        self.peer = peer

    async def describe(self, *, timeout: float) -> control.DescribeEngineResponse:
        """Model, host, devices, backends and state of the engine."""
        request = control.DescribeEngineRequest()
        return await call(self._stub.DescribeEngine, request, timeout=timeout, peer=self.peer, name="DescribeEngine")

    async def open(
        self,
        *,
        epoch: int,
        backend: str,
        manifest: bytes,
        offers: Sequence[bytes],
        receiver_count: int,
        first_receiver_index: int,
        timeout: float,
    ) -> control.OpenWeightsResponse:
        """Join one epoch; nothing is paused."""
        request = control.OpenWeightsRequest(
            epoch=epoch,
            backend=backend,
            manifest=manifest,
            offers=offers,
            receiver_count=receiver_count,
            first_receiver_index=first_receiver_index,
        )
        return await call(self._stub.OpenWeights, request, timeout=timeout, peer=self.peer, name="OpenWeights")

    async def begin(
        self, *, epoch: int, policy_version: int, pause_mode: control.PauseMode.ValueType, timeout: float
    ) -> None:
        """Pause the engine for an update."""
        request = control.BeginWeightsRequest(epoch=epoch, policy_version=policy_version, pause_mode=pause_mode)
        await call(self._stub.BeginWeights, request, timeout=timeout, peer=self.peer, name="BeginWeights")

    async def receive(self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float) -> bytes:
        """Receive and apply the weights; returns their digest (32 bytes)."""
        request = control.ReceiveWeightsRequest(epoch=epoch, policy_version=policy_version, skip_sums=skip_sums)
        response = await call(
            self._stub.ReceiveWeights, request, timeout=timeout, peer=self.peer, name="ReceiveWeights"
        )
        return response.weights_digest

    async def commit(self, *, epoch: int, policy_version: int, hold: bool = False, timeout: float) -> float:
        """Serve the version and resume; with `hold`, keep its tokens back until `release`.

        Returns the seconds for which nothing was sampled.
        """
        request = control.CommitWeightsRequest(epoch=epoch, policy_version=policy_version, hold=hold)
        response = await call(self._stub.CommitWeights, request, timeout=timeout, peer=self.peer, name="CommitWeights")
        return response.pause_seconds

    async def release(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Give out the tokens that a commit with hold kept back."""
        request = control.ReleaseWeightsRequest(epoch=epoch, policy_version=policy_version)
        await call(self._stub.ReleaseWeights, request, timeout=timeout, peer=self.peer, name="ReleaseWeights")

    async def abort(self, *, epoch: int, timeout: float) -> control.WeightState.ValueType:
        """Give the update up; returns what the engine holds, CLEAN or DIRTY."""
        request = control.AbortWeightsRequest(epoch=epoch)
        response = await call(self._stub.AbortWeights, request, timeout=timeout, peer=self.peer, name="AbortWeights")
        return response.weight_state

    async def probe(self, token_ids: Sequence[int] | Int32Array, *, timeout: float) -> Float32Array:
        """Log-probabilities of the n given tokens under the loaded weights: float32 [n], the first NaN."""
        request = control.ProbeLogprobsRequest(token_ids=pack_ints(token_ids))
        response = await call(self._stub.ProbeLogprobs, request, timeout=timeout, peer=self.peer, name="ProbeLogprobs")
        return floats(response.logprobs, len(token_ids), f"probe of {self.peer}", "logprobs")

    async def sums(self, *, epoch: int, timeout: float) -> bytes:
        """Sums of every tensor that was received last, 16 bytes each; empty when they were skipped."""
        request = control.GetWeightSumsRequest(epoch=epoch)
        response = await call(self._stub.GetWeightSums, request, timeout=timeout, peer=self.peer, name="GetWeightSums")
        return response.sums

    async def sleep(self, *, level: int, timeout: float) -> None:
        """Free the engine's GPU memory; level 1 keeps the weights in the host's memory, 2 drops them."""
        request = control.SleepEngineRequest(level=level)
        await call(self._stub.SleepEngine, request, timeout=timeout, peer=self.peer, name="SleepEngine")

    async def wake(self, *tags: str, timeout: float) -> None:
        """Take memory again: "weights", "kv_cache"; none: everything."""
        request = control.WakeEngineRequest(tags=tags)
        await call(self._stub.WakeEngine, request, timeout=timeout, peer=self.peer, name="WakeEngine")
