"""A rollout service that keeps the contract, with a table of logits for a model. Tests break it in one way each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fourfold.errors import AlreadyExists, FourfoldError, InvalidInput, Overloaded, WrongState
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.rpc.status import to_status

Context = grpc.aio.ServicerContext[Any, Any]
VOCABULARY: Final = 40
CONTEXT: Final = 96
SAMPLES: Final = 4
_LONG: Final = 16
_TOKEN_SECONDS: Final = 0.02


async def abort(context: Context, error: FourfoldError, *, details: bool = True) -> None:
    """End a call with an error."""
    code = grpc.StatusCode[error.code]
    trailing = (("grpc-status-details-bin", to_status(error).SerializeToString()),) if details else ()
    await context.abort(code, error.message, trailing)


class ToyRollout(pb_grpc.RolloutServiceServicer):
    """Samples from the table; the next token depends on the last one alone."""

    serving = health_pb2.HealthCheckResponse.SERVING
    details = True
    retry_after: float | None = 0.1
    tool_parser = ""
    vocabulary, context, samples, sha256 = VOCABULARY, CONTEXT, SAMPLES, b"h" * 32

    def __init__(self) -> None:
        self.table = np.random.default_rng(1).normal(size=(self.vocabulary, self.vocabulary)) * 1.5
        self.live: set[str] = set()
        self.running = self.sampled = self.version = 0
        self.calls = 0
        self.tasks: set[asyncio.Task[None]] = set()

    # -- what variants replace ----------------------------------------------------------------------------------------

    def info(self) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            model="toy",
            tokenizer_sha256=self.sha256,
            max_context_tokens=self.context,
            policy_version=self.version,
            vocabulary_size=self.vocabulary,
            max_concurrent_samples=self.samples,
            contract_version="1.4",
            tool_parser=self.tool_parser,
        )

    def seed(self, request: pb.GenerateRequest, index: int) -> int:
        params = request.sampling_params
        return params.seed + index if params.HasField("seed") else secrets.randbelow(2**53)

    def distribution(self, last: int, params: pb.SamplingParams) -> Any:
        """Return the log-probability of each token; -inf where it is impossible."""
        logits = self.table[last].copy()
        temperature = params.temperature if params.HasField("temperature") else 1.0
        if params.HasField("top_k"):
            logits[logits < np.sort(logits)[-min(params.top_k, self.vocabulary)]] = -np.inf
        logits = logits / (temperature or 1.0)
        logits -= np.log(np.exp(logits).sum())
        if params.HasField("top_p") and params.top_p < 1:
            order = np.argsort(-logits)
            before = np.cumsum(np.exp(logits[order])) - np.exp(logits[order])
            logits[order[before >= params.top_p]] = -np.inf
            logits -= np.log(np.exp(logits).sum())
        return logits

    def reported(self, last: int, token: int, params: pb.SamplingParams, logprob: float) -> float:
        return min(logprob, 0.0)

    def draw(self, logprobs: Any, rng: np.random.Generator, params: pb.SamplingParams) -> int:
        if params.HasField("temperature") and params.temperature == 0:
            return int(np.argmax(logprobs))
        return int(rng.choice(self.vocabulary, p=np.exp(logprobs)))

    def most_tokens(self, request: pb.GenerateRequest) -> int:
        room, params = self.context - len(request.prompt_token_ids), request.sampling_params
        return min(room, params.max_tokens) if params.HasField("max_tokens") else room

    def is_whole(self, request: pb.GenerateRequest) -> bool:
        """Return whether a sample is sent once."""
        return not request.HasField("flush_interval")

    def changed(self, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Sequence[pb.SampleChunk]:
        """Return what is sent in place of a chunk."""
        return [chunk]

    def fault(self, request: pb.GenerateRequest) -> FourfoldError | None:
        """Return how a request is refused."""
        params, info = request.sampling_params, self.info()
        ids = [*request.prompt_token_ids, *params.stop_token_ids]
        ranges: tuple[tuple[Any, str, bool], ...] = (
            (params, "temperature", params.temperature == 0 or 0.0099 <= params.temperature <= 2),
            (params, "top_p", 0 < params.top_p <= 1),
            (params, "top_k", params.top_k >= 1),
            (params, "max_tokens", params.max_tokens >= 1),
            (params, "seed", 0 <= params.seed < 2**53),
            (request, "sample_count", 1 <= request.sample_count <= info.max_concurrent_samples),
            (request, "min_policy_version", request.min_policy_version >= 0),
            (request, "flush_interval", 0 <= request.flush_interval.ToNanoseconds() <= 10**10),
        )
        bad = next((name for where, name, good in ranges if where.HasField(name) and not good), "")
        if bad or not re.fullmatch("[A-Za-z0-9_-]{1,128}", request.request_id) or request.grammar_prefix_count:
            return InvalidInput(f"{bad or 'the request'} is malformed")
        if not 1 <= len(request.prompt_token_ids) < info.max_context_tokens or len(params.stop_token_ids) > 64:
            return InvalidInput("the prompt is empty or too long, or there are too many stop tokens")
        if not all(0 <= i < self.vocabulary for i in ids):
            return InvalidInput("outside of the vocabulary")
        if params.HasField("grammar"):
            return WrongState("no grammars here", reason="NOT_SUPPORTED")
        if request.min_policy_version > self.version:
            return WrongState("not yet", reason="POLICY_TOO_OLD")
        return self.no_room(request)

    def no_room(self, request: pb.GenerateRequest) -> FourfoldError | None:
        if request.request_id in self.live:
            return AlreadyExists("it is live")
        if self.running + (request.sample_count or 1) > self.samples:
            return Overloaded("full", reason="TOO_MANY_SAMPLES", retry_after=self.retry_after)
        return None

    def free(self, request: pb.GenerateRequest) -> None:
        """Note the end of a call."""
        self.live.discard(request.request_id)
        self.running -= request.sample_count or 1

    # -- calls --------------------------------------------------------------------------------------------------------

    async def check_deadline(self, context: Context) -> None:
        if context.time_remaining() is None:
            await abort(context, InvalidInput("no deadline", reason="NO_DEADLINE"), details=self.details)

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        await self.check_deadline(context)
        self.calls += 1
        return self.info()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        await self.check_deadline(context)
        if (error := self.fault(request)) is not None:
            await abort(context, error, details=self.details)
        self.live.add(request.request_id)
        self.running += request.sample_count or 1
        try:
            samples = [self.sample(request, index) for index in range(request.sample_count or 1)]
            for step in range(max(map(len, samples))):
                if request.sampling_params.max_tokens > _LONG:
                    await asyncio.sleep(_TOKEN_SECONDS)
                chunks = [sample[step] for sample in samples if step < len(sample)]
                self.sampled += sum(len(chunk.token_ids) // 4 for chunk in chunks)
                if self.is_whole(request):
                    continue
                if sent := [part for chunk in chunks for part in self.changed(request, chunk)]:
                    yield pb.GenerateResponse(chunks=sent)
            if self.is_whole(request):
                whole = [part for sample in samples for part in self.changed(request, _join(sample))]
                if whole:
                    yield pb.GenerateResponse(chunks=whole)
        finally:
            self.free(request)

    def sample(self, request: pb.GenerateRequest, index: int) -> list[pb.SampleChunk]:
        """Return a sample as one chunk for each token."""
        params, last = request.sampling_params, request.prompt_token_ids[-1]
        rng = np.random.default_rng(self.seed(request, index))
        chunks = list[pb.SampleChunk]()
        for number in range(1, self.most_tokens(request) + 1):
            logprobs = self.distribution(last, params)
            token = self.draw(logprobs, rng, params)
            value = self.reported(last, token, params, float(logprobs[token]))
            chunk = pb.SampleChunk(
                sample_index=index,
                token_ids=pack_ints([token]),
                logprobs=pack_floats([value]),
                policy_version=self.version,
            )
            chunks.append(chunk)
            last = token
            if token in params.stop_token_ids:
                chunk.finish_reason = pb.FINISH_REASON_STOP
                break
            if number == self.most_tokens(request):
                chunk.finish_reason = pb.FINISH_REASON_LENGTH
        return chunks

    def score(self, tokens: Sequence[int]) -> list[float]:
        rows = [self.distribution(last, pb.SamplingParams())[token] for last, token in itertools.pairwise(tokens)]
        return [math.nan, *map(float, rows)]

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        await self.check_deadline(context)
        ids = list(request.token_ids)
        if not 2 <= len(ids) < self.context or not all(0 <= i < self.vocabulary for i in ids):
            await abort(context, InvalidInput("malformed"), details=self.details)
        return pb.ScoreTokensResponse(logprobs=pack_floats(self.score(ids)), policy_version=self.version)

    async def ParseCompletion(self, request: pb.ParseCompletionRequest, context: Context) -> pb.ParseCompletionResponse:
        if len(request.text) > 1 << 20:
            await abort(context, InvalidInput("too long"), details=self.details)
        if request.tools_json and not self.tool_parser:
            await abort(context, WrongState("no parser", reason="NO_TOOL_PARSER"), details=self.details)
        try:
            json.loads(request.tools_json or "[]")
        except ValueError:
            await abort(context, InvalidInput("tools"), details=self.details)
        return self.parsed(request.text)

    def parsed(self, text: str) -> pb.ParseCompletionResponse:
        return pb.ParseCompletionResponse(content=text)

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:
        period = request.period.ToNanoseconds() / 1e9 if request.HasField("period") else 1.0
        if not self.is_period(period):
            await abort(context, InvalidInput("period"), details=self.details)
        while True:
            yield self.load()
            await asyncio.sleep(period)

    def is_period(self, seconds: float) -> bool:
        return 0.01 <= seconds <= 60

    def load(self) -> pb.WatchLoadResponse:
        return pb.WatchLoadResponse(
            running_sample_count=self.running, sampled_token_count=self.sampled, policy_version=self.version
        )


def _join(chunks: Sequence[pb.SampleChunk]) -> pb.SampleChunk:
    """Return the chunks of a sample as one."""
    joined = pb.SampleChunk()
    joined.CopyFrom(chunks[-1])
    joined.token_ids = b"".join(chunk.token_ids for chunk in chunks)
    joined.logprobs = b"".join(chunk.logprobs for chunk in chunks)
    return joined


@contextlib.asynccontextmanager
async def served(service: ToyRollout) -> AsyncIterator[str]:
    """Run a service, and yield its address."""
    server = grpc.aio.server()
    pb_grpc.add_RolloutServiceServicer_to_server(service, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    await checks.set("fourfold.rollout.v1.RolloutService", service.serving)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for task in service.tasks:
            task.cancel()
        await server.stop(0)


@contextlib.asynccontextmanager
async def serving(service: ToyRollout) -> AsyncIterator[grpc.aio.Channel]:
    """Run a service, and yield a channel to it."""
    options = [("grpc.enable_retries", 0)]
    async with served(service) as target, grpc.aio.insecure_channel(target, options=options) as channel:
        yield channel
