"""Clients of a rollout service: sampling, for anybody, and weight updates, for the coordinator."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from fourfold.arrays import Float32Array, Int32Array, VersionSpan
from fourfold.rollout.stream_check import StreamCheck, sample_count
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from fourfold.rpc.channel import call, stream
from fourfold.rpc.codec import pack_ints
from fourfold.rpc.responses import (
    MAX_DEVICES,
    MAX_ENGINE_VERSION,
    check_devices,
    check_digest,
    check_model,
    check_sums,
    check_version,
    require,
    unpack_rows,
)
from fourfold.types.v1.experience_pb2 import Experience


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished sample of a Generate call, without its prompt."""

    sample_index: int
    token_ids: Int32Array  # [n]; n may be 0 when the engine gave the request up
    logprobs: Float32Array  # [n], natural log, at most 0
    version_spans: tuple[VersionSpan, ...]  # tile the n tokens
    finish_reason: pb.FinishReason.ValueType


class AsyncRolloutClient:
    """Calls `RolloutService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.RolloutServiceStub(channel)
        self.peer = peer

    async def get_info(self, *, timeout: float) -> pb.GetInfoResponse:
        """Model, limits and policy version."""
        info = await call(self._stub.GetInfo, pb.GetInfoRequest(), timeout=timeout, peer=self.peer, name="GetInfo")
        check_model(info, peer=self.peer)
        check_version(info.policy_version, peer=self.peer, name="GetInfo")
        rule = f"max_concurrent_samples is {info.max_concurrent_samples}; it must be at least 0"
        require(info.max_concurrent_samples >= 0, rule, peer=self.peer, name="GetInfo")
        return info

    async def generate(self, request: pb.GenerateRequest, *, timeout: float) -> AsyncGenerator[pb.SampleChunk, None]:
        """Sample and stream. Use it inside `contextlib.aclosing`: leaving early then aborts the samples at once.

        Every chunk was checked: its sample was asked for and is not finished, it has tokens or ends the sample, its
        log-probabilities are finite and at most 0, its version is not below the one that was asked for or that of the
        chunk before. No sample has more than max_tokens. The stream ends when all samples have.

        Raises:
            PeerFault: a response that cannot be, or the stream ended before its samples.
            FourfoldError: what the service raised.
        """
        progress = StreamCheck(request, peer=self.peer)
        responses = stream(self._stub.Generate, request, timeout=timeout, peer=self.peer, name="Generate")
        async with aclosing(responses):
            async for response in responses:
                progress.check_size(response)
                for chunk in response.chunks:
                    progress.add(chunk)
                    yield chunk
        progress.check_end()

    async def complete(self, request: pb.GenerateRequest, *, timeout: float) -> list[Completion]:
        """Sample and return the whole completions, in order of their sample index.

        Cancelling aborts the samples in the engine.

        Raises:
            PeerFault: the service's answer does not add up.
            FourfoldError: what the service raised.
        """
        parts = [_Parts(index=index) for index in range(sample_count(request))]
        async with aclosing(self.generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                parts[chunk.sample_index].add(chunk)
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
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens)
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED

    def add(self, chunk: pb.SampleChunk) -> None:
        # Every access copies the bytes out of the message.
        ids, version = chunk.token_ids, chunk.policy_version
        self.finish_reason = chunk.finish_reason
        if not ids:
            return
        self.token_ids.append(ids)
        self.logprobs.append(chunk.logprobs)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + len(ids) // 4)
        else:
            self.spans.append((version, len(ids) // 4))

    def join(self) -> Completion:
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
        about = await call(self._stub.DescribeEngine, request, timeout=timeout, peer=self.peer, name="DescribeEngine")
        check_version(about.policy_version, peer=self.peer, name="DescribeEngine", largest=MAX_ENGINE_VERSION)
        check_devices(about.device_uuids, peer=self.peer, name="DescribeEngine")
        rule = f"worker_count is {about.worker_count}; it must be 1 to {MAX_DEVICES}"
        require(1 <= about.worker_count <= MAX_DEVICES, rule, peer=self.peer, name="DescribeEngine")
        return about

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
        check_digest(response.weights_digest, peer=self.peer, name="ReceiveWeights")
        return response.weights_digest

    async def commit(self, *, epoch: int, policy_version: int, hold: bool = False, timeout: float) -> float:
        """Serve the version and resume; with `hold`, keep its tokens back until `release`.

        Returns the seconds for which nothing was sampled.
        """
        request = control.CommitWeightsRequest(epoch=epoch, policy_version=policy_version, hold=hold)
        response = await call(self._stub.CommitWeights, request, timeout=timeout, peer=self.peer, name="CommitWeights")
        rule = f"pause_seconds is {response.pause_seconds}; it must be finite and at least 0"
        require(0 <= response.pause_seconds < math.inf, rule, peer=self.peer, name="CommitWeights")
        return response.pause_seconds

    async def release(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Give out the tokens that a commit with hold kept back."""
        request = control.ReleaseWeightsRequest(epoch=epoch, policy_version=policy_version)
        await call(self._stub.ReleaseWeights, request, timeout=timeout, peer=self.peer, name="ReleaseWeights")

    async def abort(self, *, epoch: int, timeout: float) -> control.WeightState.ValueType:
        """Give the update up; returns what the engine holds, CLEAN or DIRTY."""
        request = control.AbortWeightsRequest(epoch=epoch)
        response = await call(self._stub.AbortWeights, request, timeout=timeout, peer=self.peer, name="AbortWeights")
        rule = f"weight_state is {response.weight_state}; after an abort it must be CLEAN or DIRTY"
        known = (control.WEIGHT_STATE_CLEAN, control.WEIGHT_STATE_DIRTY)
        require(response.weight_state in known, rule, peer=self.peer, name="AbortWeights")
        return response.weight_state

    async def probe(self, token_ids: Sequence[int] | Int32Array, *, timeout: float) -> Float32Array:
        """Log-probabilities of the n given tokens under the loaded weights: float32 [n], the first NaN."""
        request = control.ProbeLogprobsRequest(token_ids=pack_ints(token_ids))
        response = await call(self._stub.ProbeLogprobs, request, timeout=timeout, peer=self.peer, name="ProbeLogprobs")
        asked = [Experience(sample_id="probe", token_ids=request.token_ids)]
        (row,) = unpack_rows([response.logprobs], asked, peer=self.peer, name="ProbeLogprobs")
        return row

    async def sums(self, *, epoch: int, timeout: float) -> bytes:
        """Sums of every tensor that was received last, 16 bytes each; empty when they were skipped."""
        request = control.GetWeightSumsRequest(epoch=epoch)
        response = await call(self._stub.GetWeightSums, request, timeout=timeout, peer=self.peer, name="GetWeightSums")
        check_sums(response.sums, peer=self.peer, name="GetWeightSums")
        return response.sums

    async def sleep(self, *, level: int, timeout: float) -> None:
        """Free the engine's GPU memory; level 1 keeps the weights in the host's memory, 2 drops them."""
        request = control.SleepEngineRequest(level=level)
        await call(self._stub.SleepEngine, request, timeout=timeout, peer=self.peer, name="SleepEngine")

    async def wake(self, *tags: str, timeout: float) -> None:
        """Take memory again: "weights", "kv_cache"; none: everything."""
        request = control.WakeEngineRequest(tags=tags)
        await call(self._stub.WakeEngine, request, timeout=timeout, peer=self.peer, name="WakeEngine")
