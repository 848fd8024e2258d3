"""Implements RolloutService: sampling for the coordinator and for agents, on the internal and on the public port.

Generate --> Admission --> lease on the weights --> RequestCoalescer --> engine
   ^                                                                       |
   '--- response <--- unbounded queue <--- CallOutputs <-------------------'
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any, Final

import grpc

from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import DeadlinePassed, InvalidInput, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from fourfold.rpc.codec import pack_floats
from fourfold.rpc.limits import Quotas
from fourfold.security import principal
from fourfold_rollout.engine import EngineSample, ParsedText, RolloutEngine, TextWork
from fourfold_rollout.generate.admission import Admission, GenerateCall, GenerateLimits, parse, parse_score
from fourfold_rollout.generate.call_spans import CallSpans
from fourfold_rollout.generate.coalesce import RequestCoalescer
from fourfold_rollout.generate.outputs import CallOutputs, ReleasedLogprobs
from fourfold_rollout.load import LoadMeter
from fourfold_rollout.update.controller import WeightController

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

# Responses and errors leave this long before the caller's deadline.
_MARGIN_SECONDS: Final = 0.05
_DRAIN_SECONDS: Final = 1.0
_DRAIN_STEP_SECONDS: Final = 0.05
_LOAD_PERIOD_SECONDS: Final = 1.0
_LOAD_PERIODS: Final = (0.01, 60.0)
# A report costs the event loop about as much as a sampled token.
_SHORTEST_AGENT_PERIOD: Final = 0.1
# The greatest size of one response, about. Above it, a second message costs next to nothing.
_RESPONSE_BYTES: Final = 1 << 18
_BY_AN_UPDATE: Final = ("INTERRUPTED", "UPDATE_GIVEN_UP")
_MAX_TEXT_BYTES: Final = 1 << 20
_RETRY_METADATA: Final = "grpc-previous-rpc-attempts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    tokenizer_sha256: bytes
    limits: GenerateLimits


class RolloutServicer(RolloutServiceServicer):
    """Samples from one engine. The proto documents the methods."""

    def __init__(
        self,
        model: ServedModel,
        engine: RolloutEngine,
        weights: WeightController,
        quotas: Quotas,
        text: TextWork | None = None,
    ) -> None:
        """Without `text`, completions are not parsed and grammars are refused."""
        self._model = model
        self._engine = engine
        self._weights = weights
        self._text = text
        self._admission = Admission(model.limits, quotas)
        self._coalescer = RequestCoalescer(engine)
        self.meter = LoadMeter(engine)
        self.waiting_samples = 0  # admitted, and not in the engine yet
        self._draining = False

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        limits = self._model.limits
        return pb.GetInfoResponse(
            model=self._model.name,
            tokenizer_sha256=self._model.tokenizer_sha256,
            max_context_tokens=limits.max_context_tokens,
            policy_version=self._weights.policy_version,
            vocabulary_size=limits.vocabulary_size,
            max_concurrent_samples=limits.max_samples(principal.current()),
            contract_version=CONTRACT_VERSION,
            tool_parser=self._text.tool_parser if self._text else "",
            reasoning_parser=self._text.reasoning_parser if self._text else "",
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if self._draining:
            raise _draining()
        call = parse(request, self._model.limits, principal.current())
        is_retry = any(key == _RETRY_METADATA for key, _ in context.invocation_metadata() or ())
        await self._check_grammar(call, _time_left(context))
        async with self._admission.enter(call, is_retry=is_retry):
            # Unbounded, so that a client that reads slowly delays neither other calls nor a weight update.
            chunks: asyncio.Queue[pb.SampleChunk | None] = asyncio.Queue()
            work = asyncio.get_running_loop().create_task(self._sample(call, chunks, _time_left(context)))
            work.add_done_callback(lambda _: chunks.put_nowait(None))
            try:
                while ready := await _take_ready(chunks):
                    yield pb.GenerateResponse(chunks=ready)
                await work  # raises the error of the call, if any
            finally:
                if not work.done():
                    work.cancel()
                    await asyncio.wait({work})
                if not work.cancelled():
                    work.exception()  # retrieved, or asyncio would log it where the caller has left

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        if self._draining:
            raise _draining()
        call = parse_score(request, self._model.limits, principal.current())
        deadline = asyncio.get_running_loop().time() + _time_left(context)
        async with self._admission.enter(call, is_retry=False):
            return await self._score(call.prompt_token_ids, deadline)

    async def ParseCompletion(self, request: pb.ParseCompletionRequest, context: Context) -> pb.ParseCompletionResponse:
        size = max(len(request.text.encode()), len(request.tools_json.encode()))
        if size > _MAX_TEXT_BYTES:
            raise InvalidInput(f"text or tools_json has {size} bytes; each may have {_MAX_TEXT_BYTES}")
        if request.tools_json and not (self._text and self._text.tool_parser):
            raise WrongState(
                "the request has tools and this service has no parser of tool calls; set rollout.tool_parser",
                reason="NO_TOOL_PARSER",
            )
        parsed = ParsedText(content=request.text)
        if self._text is not None:
            async with _limited(_time_left(context)):
                parsed = await self._text.parse(request.text, request.tools_json)
        calls = [pb.ParsedToolCall(name=name, arguments_json=arguments) for name, arguments in parsed.tool_calls]
        return pb.ParseCompletionResponse(content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls)

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:
        period = _LOAD_PERIOD_SECONDS
        if request.HasField("period"):
            period = request.period.ToNanoseconds() / 1e9
            low, high = _LOAD_PERIODS
            low = _SHORTEST_AGENT_PERIOD if principal.current().is_agent else low
            if not low <= period <= high:
                raise InvalidInput(f"period is {period} s; it must be in [{low}, {high:g}] s, or unset for 1 s")
        while True:
            updating = self._weights.updating or self._weights.joining
            load = self.meter.read(updating=updating)
            yield pb.WatchLoadResponse(
                running_sample_count=load.running_samples,
                sampled_token_count=load.sampled_tokens,
                updating_weights=updating,
                policy_version=self._weights.policy_version,
                kv_cache_token_count=self._model.limits.kv_cache_tokens,
                free_kv_cache_token_count=load.free_kv_cache_tokens,
                token_rate=load.token_rate,
            )
            await asyncio.sleep(period)

    async def drain(self) -> None:
        """Refuse new calls; give running samples a second to finish, then end them with the tokens that they have."""
        self._draining = True
        self._weights.refuse(_draining())  # also ends the calls that wait for an update or a sleep to end
        empty = await self._admission.wait_empty(_DRAIN_SECONDS)
        self._weights.token_hold.drop()  # no release can come in time
        while not empty:
            await self._engine.interrupt()
            empty = await self._admission.wait_empty(_DRAIN_STEP_SECONDS)

    async def _score(self, token_ids: list[int], deadline: float) -> pb.ScoreTokensResponse:
        """Compute log-probabilities of tokens, again if an update came between."""
        loop = asyncio.get_running_loop()
        while True:
            left = deadline - loop.time()
            async with self._weights.serving(left) as lease, _limited(left):
                lease.mark_in_flight()
                try:
                    values = await self._engine.prompt_logprobs(token_ids, first=False)
                    if self._weights.is_current(lease):
                        released = ReleasedLogprobs()
                        released.pass_through(self._weights.token_hold, lease.version, values)
                        logprobs = await released.logprobs
                        return pb.ScoreTokensResponse(logprobs=pack_floats(logprobs), policy_version=lease.version)
                except Unavailable as error:
                    if error.reason not in _BY_AN_UPDATE:
                        raise

    async def _check_grammar(self, call: GenerateCall, timeout: float) -> None:
        """Check that the engine can sample under the grammar of a call, if it has one."""
        if call.grammar is None:
            return
        obstacle = self._engine.description.grammar_obstacle or ("" if self._text else "it has no grammar compiler")
        if obstacle:
            raise WrongState(f"this engine samples under no grammar: {obstacle}", reason="NOT_SUPPORTED")
        if not call.stop_token_ids:
            raise InvalidInput(
                "a grammar needs a token that ends its text, and the model has no end-of-sequence token; set "
                "sampling_params.stop_token_ids"
            )
        assert self._text is not None
        async with _limited(timeout):
            await self._text.check_grammar(call.grammar, call.stop_token_ids, call.grammar_prefix)

    async def _sample(self, call: GenerateCall, chunks: asyncio.Queue[pb.SampleChunk | None], timeout: float) -> None:
        """Draw the samples of a call; return when the engine is done with all of them."""
        spans = CallSpans(call, self._model.name)

        def emit(chunk: pb.SampleChunk) -> None:
            spans.add(chunk)
            chunks.put_nowait(chunk)

        with closing(spans), ExitStack() as waiting:
            self.waiting_samples += call.sample_count
            waiting.callback(self._end_wait, call.sample_count)
            async with self._weights.serving(timeout) as lease:
                version = lease.version
                if version < call.min_policy_version:
                    raise WrongState(
                        f"the served policy_version is {version}, older than min_policy_version "
                        f"{call.min_policy_version}; wait until it is published here, or use another replica",
                        reason="POLICY_TOO_OLD",
                    )
                outputs = CallOutputs(call.sample_count, self._weights.token_hold, emit)
                samples: Sequence[EngineSample] = ()
                try:
                    submitted = call.samples(lease.cache_salt, outputs)
                    samples = await self._coalescer.submit(submitted, at_once=call.interactive)
                    lease.mark_in_flight()
                    waiting.close()
                    spans.begin_generate()
                    if call.flush_seconds is not None and not call.at_once:
                        outputs.flush_every(call.flush_seconds, samples)
                    await outputs.complete()
                finally:
                    if not outputs.done:
                        outputs.close()
                        await asyncio.shield(self._engine.abandon(samples))

    def _end_wait(self, sample_count: int) -> None:
        self.waiting_samples -= sample_count


async def _take_ready(chunks: asyncio.Queue[pb.SampleChunk | None]) -> list[pb.SampleChunk]:
    """Wait for a chunk; return it and the queued ones after it, up to `_RESPONSE_BYTES`. Empty after the last chunk."""
    chunk = await chunks.get()
    ready: list[pb.SampleChunk] = []
    size = 0
    while chunk is not None:
        ready.append(chunk)
        size += len(chunk.token_ids) + len(chunk.logprobs)
        if size > _RESPONSE_BYTES or chunks.empty():
            return ready
        chunk = chunks.get_nowait()
    chunks.put_nowait(None)
    return ready


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    """Run a block for at most `seconds` seconds. Raises DeadlinePassed."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlinePassed(
            f"the call did not end within the {seconds:.3g} s that its deadline left; give it more time"
        ) from None


def _draining() -> Unavailable:
    return Unavailable("this replica is draining; use another one", reason="DRAINING")


def _time_left(context: Context) -> float:
    left = context.time_remaining()
    if left is None:
        raise InvalidInput("called without a deadline; pass a timeout with the call", reason="NO_DEADLINE")
    if left <= _MARGIN_SECONDS:
        raise DeadlinePassed(f"only {left:.3f} s are left of the deadline; give the call more time")
    return left - _MARGIN_SECONDS
