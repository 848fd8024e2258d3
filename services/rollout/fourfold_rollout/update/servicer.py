"""Implements RolloutControlService: checks weight-update requests; `update/controller.py` does the work."""

from __future__ import annotations

from typing import Any, Final

import grpc
import numpy as np

from fourfold.address import LOOPBACK
from fourfold.bounds import MAX_RECEIVERS, check_number
from fourfold.errors import InvalidInput
from fourfold.rollout.v1 import rollout_control_service_pb2 as pb
from fourfold.rollout.v1.rollout_control_service_pb2_grpc import RolloutControlServiceServicer
from fourfold.rpc.codec import pack_floats
from fourfold_rollout.engine import EpochTerms, FeedTerms, RolloutEngine
from fourfold_rollout.pause.controller import PauseMode
from fourfold_rollout.update.controller import WeightController

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_MANIFEST_BYTES: Final = 8 << 20
_MAX_OFFER_BYTES: Final = 4 << 10
_MAX_OFFERS: Final = 4096
_PROBE_TOKENS: Final = (2, 4096)
_DIGEST_BYTES: Final = 32
# The engine's worker stops waiting this long before the caller does, so that its error arrives in time.
_MARGIN_SECONDS: Final = 0.2
_LEAST_SECONDS: Final = 0.05
_PAUSE_MODES: Final = {
    pb.PAUSE_MODE_WAIT: PauseMode.WAIT,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
    pb.PAUSE_MODE_KEEP: PauseMode.KEEP,
    pb.PAUSE_MODE_RECOMPUTE: PauseMode.RECOMPUTE,
}


class RolloutControlServicer(RolloutControlServiceServicer):
    """Controls the weights and the sleep of one engine. The proto documents the methods."""

    def __init__(
        self,
        engine: RolloutEngine,
        weights: WeightController,
        *,
        model_sha256: bytes,
        host_id: str,
        update_timeout: float,
    ) -> None:
        self._engine, self._weights = engine, weights
        self._model_sha256, self._host_id = model_sha256, host_id
        self._update_timeout = update_timeout

    async def DescribeEngine(self, request: pb.DescribeEngineRequest, context: Context) -> pb.DescribeEngineResponse:
        engine = self._engine.description
        phase, seconds = self._weights.phase
        return pb.DescribeEngineResponse(
            model_sha256=self._model_sha256,
            host_id=self._host_id,
            device_uuids=engine.device_uuids,
            backends=engine.backends,
            policy_version=self._weights.policy_version,
            weight_state=self._weight_state(),
            worker_count=engine.worker_count,
            device_type=engine.device_type,
            engine_version=engine.version,
            update_phase=phase,
            update_phase_seconds=seconds,
            sleeping=self._weights.sleeping,
        )

    async def OpenWeights(self, request: pb.OpenWeightsRequest, context: Context) -> pb.OpenWeightsResponse:
        _check_open(request, self._engine)
        terms = EpochTerms(
            epoch=request.epoch,
            backend=request.backend,
            manifest=request.manifest,
            offers=tuple(request.offers),
            receiver_count=request.receiver_count,
            first_receiver_index=request.first_receiver_index,
            host=request.host or LOOPBACK,
            interface=request.interface,
        )
        report = await self._weights.open(terms, timeout=self._timeout(context))
        return pb.OpenWeightsResponse(
            direct_tensor_count=report.direct_tensor_count,
            reload_tensor_count=report.reload_tensor_count,
            reload_reason=report.reload_reason,
        )

    async def BeginWeights(self, request: pb.BeginWeightsRequest, context: Context) -> pb.BeginWeightsResponse:
        mode = _PAUSE_MODES.get(request.pause_mode)
        if mode is None:
            names = ", ".join(pb.PauseMode.Name(known) for known in _PAUSE_MODES)
            raise InvalidInput(f"pause_mode is {request.pause_mode}; it must be one of {names}")
        timeout = self._timeout(context)
        await self._weights.begin(
            epoch=request.epoch, policy_version=request.policy_version, mode=mode, timeout=timeout
        )
        return pb.BeginWeightsResponse()

    async def ReceiveWeights(self, request: pb.ReceiveWeightsRequest, context: Context) -> pb.ReceiveWeightsResponse:
        digest = await self._weights.receive(
            epoch=request.epoch,
            policy_version=request.policy_version,
            skip_sums=request.skip_sums,
            timeout=self._timeout(context),
        )
        if len(digest) != _DIGEST_BYTES:
            raise RuntimeError(f"the engine's digest has {len(digest)} bytes, not {_DIGEST_BYTES}")
        return pb.ReceiveWeightsResponse(weights_digest=digest)

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Context) -> pb.CommitWeightsResponse:
        seconds = await self._weights.commit(
            epoch=request.epoch,
            policy_version=request.policy_version,
            hold=request.hold,
            timeout=self._timeout(context),
        )
        return pb.CommitWeightsResponse(pause_seconds=seconds)

    async def ReleaseWeights(self, request: pb.ReleaseWeightsRequest, context: Context) -> pb.ReleaseWeightsResponse:
        await self._weights.release(
            epoch=request.epoch, policy_version=request.policy_version, timeout=self._timeout(context)
        )
        return pb.ReleaseWeightsResponse()

    async def AbortWeights(self, request: pb.AbortWeightsRequest, context: Context) -> pb.AbortWeightsResponse:
        await self._weights.abort(epoch=request.epoch, timeout=self._timeout(context))
        return pb.AbortWeightsResponse(weight_state=self._weight_state())

    async def ProbeLogprobs(self, request: pb.ProbeLogprobsRequest, context: Context) -> pb.ProbeLogprobsResponse:
        ids = self._probe_ids(request.token_ids)
        logprobs = await self._weights.probe(ids, timeout=self._timeout(context))
        return pb.ProbeLogprobsResponse(logprobs=pack_floats(np.asarray(logprobs, np.float32)))

    async def GetWeightSums(self, request: pb.GetWeightSumsRequest, context: Context) -> pb.GetWeightSumsResponse:
        sums = await self._weights.sums(epoch=request.epoch, timeout=self._timeout(context))
        return pb.GetWeightSumsResponse(sums=sums)

    async def FeedWeights(self, request: pb.FeedWeightsRequest, context: Context) -> pb.FeedWeightsResponse:
        terms = FeedTerms(
            epoch=check_number(request.epoch, "epoch"),
            policy_version=check_number(request.policy_version, "policy_version"),
            receiver_count=check_number(request.receiver_count, "receiver_count", least=1, most=MAX_RECEIVERS),
            host=request.host or LOOPBACK,
            interface=request.interface,
        )
        return pb.FeedWeightsResponse(offers=await self._weights.feed(terms, timeout=self._timeout(context)))

    async def SleepEngine(self, request: pb.SleepEngineRequest, context: Context) -> pb.SleepEngineResponse:
        await self._weights.sleep(request.level, timeout=self._timeout(context))
        return pb.SleepEngineResponse()

    async def WakeEngine(self, request: pb.WakeEngineRequest, context: Context) -> pb.WakeEngineResponse:
        await self._weights.wake(tuple(request.tags), timeout=self._timeout(context))
        return pb.WakeEngineResponse()

    def _weight_state(self) -> pb.WeightState.ValueType:
        if self._weights.updating:
            return pb.WEIGHT_STATE_UPDATING
        return pb.WEIGHT_STATE_DIRTY if self._weights.dirty else pb.WEIGHT_STATE_CLEAN

    def _probe_ids(self, data: bytes) -> list[int]:
        engine = self._engine.description
        if len(data) % 4:
            raise InvalidInput(f"token_ids has {len(data)} bytes; int32 needs a multiple of 4")
        ids: list[int] = np.frombuffer(data, "<i4").tolist()
        low, high = _PROBE_TOKENS
        high = min(high, engine.max_context_tokens - 1)  # vLLM samples at least one token after a prompt
        if not low <= len(ids) <= high:
            raise InvalidInput(f"token_ids has {len(ids)} tokens; a probe of this engine must have {low} to {high}")
        bad = next((i for i in ids if not 0 <= i < engine.vocabulary_size), None)
        if bad is not None:
            raise InvalidInput(f"token_ids holds {bad}, which is outside the vocabulary [0, {engine.vocabulary_size})")
        return ids

    def _timeout(self, context: Context) -> float:
        """Return the seconds until the caller's deadline, less a margin; at most the duration of an update."""
        left = context.time_remaining()
        if left is None:
            raise InvalidInput("called without a deadline; pass a timeout with the call", reason="NO_DEADLINE")
        return max(_LEAST_SECONDS, min(left - _MARGIN_SECONDS, self._update_timeout))


def _check_open(request: pb.OpenWeightsRequest, engine: RolloutEngine) -> None:
    """Check lengths and ranges before the workers parse the bytes."""
    backends = engine.description.backends
    check_number(request.epoch, "epoch")
    check_number(request.receiver_count, "receiver_count", least=1, most=MAX_RECEIVERS)
    if request.backend not in backends:
        raise InvalidInput(f"backend is {request.backend[:40]!r}; this engine can use {', '.join(backends)}")
    if not 0 < len(request.manifest) <= _MAX_MANIFEST_BYTES:
        raise InvalidInput(f"manifest has {len(request.manifest)} bytes; it must have 1 to {_MAX_MANIFEST_BYTES}")
    if not 0 < len(request.offers) <= _MAX_OFFERS:
        raise InvalidInput(f"{len(request.offers)} offers; there must be 1 to {_MAX_OFFERS}, one of each trainer rank")
    longest = max(len(offer) for offer in request.offers)
    if longest > _MAX_OFFER_BYTES:
        raise InvalidInput(f"an offer has {longest} bytes; at most {_MAX_OFFER_BYTES} are allowed")
    workers = engine.description.worker_count
    last = request.first_receiver_index + workers
    if request.first_receiver_index < 0 or last > request.receiver_count:
        raise InvalidInput(
            f"first_receiver_index {request.first_receiver_index} and {workers} workers do not fit into "
            f"receiver_count {request.receiver_count}"
        )
