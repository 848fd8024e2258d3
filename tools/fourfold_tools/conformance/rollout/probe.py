"""Makes the calls on a rollout service, and holds the rules that every sample must keep."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import grpc
import numpy as np

from fourfold.errors import Internal, WrongState
from fourfold.rollout.client import AsyncRolloutClient, Completion
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fourfold.rpc.channel import translate_errors
from fourfold_tools.conformance.calls import collect, unary
from fourfold_tools.conformance.checks import Skipped, Violation

SERVICE: Final = "fourfold.rollout.v1.RolloutService"
FEW_TOKENS: Final = 8
"""Tokens of a sample, where their number does not matter."""
_LONG_TOKENS: Final = 4096
_POLL_SECONDS: Final = 0.05
LIVE_SECONDS: Final = 5.0
_ATTEMPTS: Final = 5
_PROMPT_TOKENS: Final = 12


@dataclass(kw_only=True)
class RolloutProbe:
    """Calls one service, and keeps values that several checks need."""

    channel: grpc.aio.Channel
    peer: str
    seconds: float
    """Time limit of a call."""
    tokenizer_sha256: bytes = b""
    """Of the run's tokenizer; empty: not given."""
    tolerance: float = 0.1
    """Largest mean difference, in nats, between log-probabilities of sampling and of scoring."""
    agent: bool = False
    """Whether the caller is an agent, with a token on a public port."""
    info: pb.GetInfoResponse = field(default_factory=pb.GetInfoResponse)
    cannot_score: str = ""
    """Why ScoreTokens is not offered; empty: it is."""

    @cached_property
    def stub(self) -> Any:
        """The calls themselves."""
        return RolloutServiceStub(self.channel)

    @cached_property
    def client(self) -> AsyncRolloutClient:
        """Checks every chunk: see `fourfold.rollout.stream_check`."""
        return AsyncRolloutClient(self.channel, peer=self.peer, timeout=self.seconds)

    async def get_info(self) -> pb.GetInfoResponse:
        """Ask for model and limits."""
        info: pb.GetInfoResponse = await unary(
            self.stub.GetInfo, pb.GetInfoRequest(), peer=self.peer, seconds=self.seconds
        )
        return info

    def prompt(self, number: int = 0, size: int = 0) -> list[int]:
        """Return a prompt of tokens from the middle of the vocabulary, where few are special."""
        size = size or max(1, min(_PROMPT_TOKENS, self.info.max_context_tokens // 4))
        low, high = self.info.vocabulary_size // 10, max(self.info.vocabulary_size // 2, 1)
        tokens: list[int] = np.random.default_rng(number).integers(low, max(high, low + 1), size).tolist()
        return tokens

    def request(
        self,
        *,
        prompt: Sequence[int] | None = None,
        count: int | None = None,
        flush: float | None = None,
        request_id: str = "",
        min_policy_version: int | None = None,
        **params: Any,
    ) -> pb.GenerateRequest:
        """Return a request with a new id; `params` are sampling parameters."""
        made = pb.GenerateRequest(
            request_id=request_id or f"conformance-{uuid.uuid4().hex}",
            prompt_token_ids=self.prompt() if prompt is None else prompt,
            sampling_params=pb.SamplingParams(**{"max_tokens": FEW_TOKENS, **params}),
            sample_count=count,
            min_policy_version=min_policy_version,
        )
        if flush is not None:
            made.flush_interval.FromNanoseconds(int(flush * 1e9))
        return made

    @property
    def most_samples(self) -> int:
        """Largest sample_count of a call."""
        return min(self.info.max_concurrent_samples or 256, 256)

    async def sample(self, request: pb.GenerateRequest) -> list[Completion]:
        """Sample, and check each sample; raise Violation or PeerFault."""
        samples = await self.client.complete(request)
        for sample in samples:
            self.check_sample(request, sample)
        return samples

    async def tokens(self, **fields: Any) -> tuple[int, ...]:
        """Return the tokens of one sample."""
        (sample,) = await self.sample(self.request(**fields))
        return tuple(sample.token_ids.tolist())

    def check_sample(self, request: pb.GenerateRequest, sample: Completion) -> None:
        """Check the rules about whole samples; `StreamCheck` has the rules of chunks."""
        where, params, count = f"sample {sample.sample_index}", request.sampling_params, len(sample.token_ids)
        if sample.finish_reason == pb.FINISH_REASON_ABORTED:
            raise Violation(f"{where} was aborted; run the checks while the service neither drains nor updates")
        if sample.finish_reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
            raise Violation(f"{where} has finish_reason {sample.finish_reason}; it must be STOP or LENGTH")
        if not count:
            raise Violation(f"{where} has no tokens; a sample that is not aborted has at least one")
        bad = [i for i in sample.token_ids.tolist() if not 0 <= i < self.info.vocabulary_size]
        if bad:
            raise Violation(f"{where} has token {bad[0]}, outside the vocabulary [0, {self.info.vocabulary_size})")
        room = self.info.max_context_tokens - len(request.prompt_token_ids)
        most = min(room, params.max_tokens) if params.HasField("max_tokens") else room
        if count > most:
            raise Violation(f"{where} has {count} tokens, and the context has room for {most}")
        if sample.finish_reason == pb.FINISH_REASON_LENGTH and count < most:
            raise Violation(f"{where} ended with LENGTH after {count} of {most} tokens")
        stops = set(params.stop_token_ids)
        if stops & set(sample.token_ids[:-1].tolist()):
            raise Violation(f"{where} goes on after a token of stop_token_ids")
        if sample.finish_reason == pb.FINISH_REASON_LENGTH and count < room and int(sample.token_ids[-1]) in stops:
            raise Violation(f"{where} ends with a token of stop_token_ids, and its finish_reason is not STOP")
        if sample.constrained.any() and not params.HasField("grammar"):
            raise Violation(f"{where} has tokens in constrained_mask, and the request has no grammar")

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray[Any, Any], int]:
        """Compute log-probabilities; raise Skipped if the service does not offer it."""
        if self.cannot_score:
            raise Skipped(self.cannot_score)
        try:
            return await self.client.score_tokens(token_ids)
        except WrongState as error:
            self.cannot_score = f"the service scores no tokens: {error.message[:200]}"
        except Internal as error:
            if error.reason != "UNIMPLEMENTED":
                raise
            self.cannot_score = "the service has no ScoreTokens"
        raise Skipped(self.cannot_score)

    async def refused(self, request: Any) -> None:
        """Make a Generate call that is to fail; raise its AioRpcError, or Violation if it sampled something first."""
        got = 0
        try:
            async for response in self.stub.Generate(request, timeout=self.seconds):
                got += len(response.chunks)
        except grpc.aio.AioRpcError:
            if got:
                raise Violation(f"it sent {got} chunks before the error; nothing may be sampled") from None
            raise

    @asynccontextmanager
    async def live(self, **fields: Any) -> AsyncIterator[tuple[pb.GenerateRequest, Any]]:
        """Hold a call whose samples run: request and call. Raise Skipped if the samples end too fast."""
        room = self.info.max_context_tokens - len(self.prompt())
        for attempt in range(_ATTEMPTS):
            request = self.request(flush=0.0, max_tokens=min(room, _LONG_TOKENS), seed=attempt, **fields)
            call = self.stub.Generate(request, timeout=self.seconds)
            try:
                with translate_errors(peer=self.peer, name="Generate", timeout=self.seconds):
                    first = await _first(call, self.seconds)
                if first is not None and not any(chunk.finish_reason for chunk in first.chunks):
                    yield request, call
                    return
            finally:
                call.cancel()
        raise Skipped(f"{_ATTEMPTS} long samples ended with their first message")

    async def load(self) -> pb.WatchLoadResponse:
        """Return the present load."""
        call = self.stub.WatchLoad(pb.WatchLoadRequest(), timeout=self.seconds)
        try:
            async for report in call:
                loaded: pb.WatchLoadResponse = report
                return loaded
        finally:
            call.cancel()
        raise Violation("WatchLoad ended without a report; the present load must come at once")

    async def idle(self, least: int = 0) -> bool:
        """Wait until at most `least` samples run; return false after some seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + LIVE_SECONDS
        while loop.time() < end:
            if (await self.load()).running_sample_count <= least:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def becomes_free(self, request_id: str) -> bool:
        """Return whether an id can be used again within some seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + LIVE_SECONDS
        while loop.time() < end:
            try:
                await collect(self.stub.Generate(self.request(request_id=request_id), timeout=self.seconds))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    raise Violation(f"an id that was used before is refused with {error.code().name}") from None
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return True
        return False


async def _first(call: Any, seconds: float) -> pb.GenerateResponse | None:
    """Return the first message of a call; None if it has none."""
    async with asyncio.timeout(seconds):
        async for response in call:
            first: pb.GenerateResponse = response
            return first
    return None
