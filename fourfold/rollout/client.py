"""Clients of a rollout service: sampling for any caller, and weight updates for the coordinator."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property

from fourfold.arrays import Float32Array, Int32Array
from fourfold.rollout.stream_check import StreamCheck, sample_count
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_control_service_pb2_grpc as control_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from fourfold.rpc.client import AsyncClient, SyncClient, blocking, blocking_stream
from fourfold.rpc.codec import pack_ints
from fourfold.rpc.responses import MAX_DEVICES, MAX_ENGINE_VERSION
from fourfold.sample.sampled import CHUNK_FIELDS, SampledColumns, SampledTokens, TokenDraft, read_columns
from fourfold.types.v1.experience_pb2 import Experience


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(SampledTokens):
    """One sample of a prompt, without the prompt; finished, unless `finish_reason` is UNSPECIFIED or ABORTED.

    Its n tokens may be 0 when the engine aborted the request.
    """

    sample_index: int
    finish_reason: pb.FinishReason.ValueType


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionChunk(SampledColumns):
    """The next tokens of one sample in progress: those since its last chunk."""

    sample_index: int
    policy_version: int  # of the weights that sampled these tokens; a chunk never spans two versions
    finish_reason: pb.FinishReason.ValueType  # FINISH_REASON_UNSPECIFIED before the last chunk of the sample


class CompletionDraft(TokenDraft):
    """The chunks of one sample as they come, with the reason of the last one."""

    __slots__ = ("finish_reason", "index")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED  # of the last chunk

    def add(self, chunk: pb.SampleChunk) -> None:
        """Append a chunk that `AsyncRolloutClient.generate` has yielded."""
        self.finish_reason = chunk.finish_reason
        self.append(chunk, len(chunk.token_ids) // 4)

    def join(self) -> Completion:
        """Return the tokens so far."""
        return Completion(sample_index=self.index, finish_reason=self.finish_reason, **self.fields())


class AsyncRolloutClient(AsyncClient):
    """Samples from a rollout service, with asyncio.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's.
    """

    _role = "rollout"

    @cached_property
    def _stub(self) -> pb_grpc.RolloutServiceAsyncStub:
        return pb_grpc.RolloutServiceStub(self._open())

    async def get_info(self, *, timeout: float | None = None) -> pb.GetInfoResponse:
        """Return model, tokenizer hash, limits and policy version."""
        info = await self._call(self._stub.GetInfo, pb.GetInfoRequest(), timeout)
        check = self._check(info)
        check.contract(info.contract_version)
        check.model(info)
        check.version(info.policy_version)
        check.not_negative(info, "max_concurrent_samples")
        return info

    async def sample(
        self,
        prompt_token_ids: Sequence[int] | Int32Array,
        params: pb.SamplingParams | None = None,
        *,
        sample_count: int = 1,
        min_policy_version: int = 0,
        grammar_prefix_count: int = 0,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Sample whole completions of one prompt. Cancelling aborts them in the engine.

        Args:
            prompt_token_ids: int [n], at least one token.
            params: temperature, max_tokens and so on; default: temperature 1, up to the context length.
            sample_count: 1 to 256.
            min_policy_version: refuse when the service has older weights.
            grammar_prefix_count: number of last prompt tokens that were sampled under `params.grammar`.
            timeout: seconds for all samples together.

        Returns:
            One completion per sample, in order of the sample index.

        Raises:
            InvalidInput: The prompt or a parameter is out of range.
            WrongState: The service has weights older than `min_policy_version`.
            Overloaded: Too much is in flight; try again after `retry_after` seconds.
            FourfoldError: Any other error of the service or of the connection.
        """
        request = _request(prompt_token_ids, params, sample_count, min_policy_version, grammar_prefix_count)
        return await self.complete(request, timeout=timeout)

    async def stream(
        self,
        prompt_token_ids: Sequence[int] | Int32Array,
        params: pb.SamplingParams | None = None,
        *,
        sample_count: int = 1,
        min_policy_version: int = 0,
        grammar_prefix_count: int = 0,
        flush_seconds: float = 0.05,
        timeout: float | None = None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Sample and yield the tokens as they come. Closing the generator aborts the samples.

        Arguments and errors as of `sample`. `flush_seconds`, 0 to 10, is the longest time that tokens wait in the
        service to be sent together.
        """
        request = _request(prompt_token_ids, params, sample_count, min_policy_version, grammar_prefix_count)
        request.flush_interval.FromNanoseconds(int(flush_seconds * 1e9))
        async with aclosing(self.generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                yield CompletionChunk(
                    sample_index=chunk.sample_index,
                    policy_version=chunk.policy_version,
                    finish_reason=chunk.finish_reason,
                    **read_columns({name: getattr(chunk, field) for name, field in CHUNK_FIELDS.items()}),
                )

    async def generate(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[pb.SampleChunk, None]:
        """Make a Generate call and yield its messages; `stream` with a request of one's own.

        Use it inside `contextlib.aclosing`: leaving early then aborts the samples at once. Each chunk was checked: its
        sample was requested and is not finished; it has tokens or a finish reason; its log-probabilities are finite and
        at most 0; its version is at least the requested one and that of the chunk before. No sample has more than
        max_tokens. The stream ends when all samples have.

        Raises:
            PeerFault: A response breaks one of these rules, or the stream ended before its samples.
            FourfoldError: as of `sample`.
        """
        progress = StreamCheck(request, peer=self.peer)
        async with aclosing(self._stream(self._stub.Generate, request, self._seconds(timeout))) as responses:
            async for response in responses:
                progress.check_size(response)
                for chunk in response.chunks:
                    progress.add(chunk)
                    yield chunk
        progress.check_end()

    async def complete(self, request: pb.GenerateRequest, *, timeout: float | None = None) -> list[Completion]:
        """Make a Generate call and join its chunks; `sample` with a request of one's own.

        Errors as of `generate`.
        """
        drafts = [CompletionDraft(index) for index in range(sample_count(request))]
        async with aclosing(self.generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                drafts[chunk.sample_index].add(chunk)
        return [draft.join() for draft in drafts]

    async def score_tokens(
        self, token_ids: Sequence[int] | Int32Array, *, timeout: float | None = None
    ) -> tuple[Float32Array, int]:
        """Compute the log-probability of each of n given tokens at temperature 1, n >= 2.

        Returns:
            float32 [n], the first NaN; and the policy version.
        """
        request = pb.ScoreTokensRequest(token_ids=token_ids)
        response = await self._call(self._stub.ScoreTokens, request, timeout)
        check = self._check(response)
        asked = [Experience(sample_id="tokens", token_ids=pack_ints(token_ids))]
        rows = check.rows([response.logprobs], asked)
        check.logprobs(rows, asked)
        check.version(response.policy_version)
        return rows[0], response.policy_version

    async def parse_completion(
        self, text: str, *, tools_json: str = "", timeout: float | None = None
    ) -> pb.ParseCompletionResponse:
        """Split a completion, with its special tokens, into content, reasoning and tool calls.

        `tools_json` is a JSON array as in OpenAI's chat completions; empty: no tools.
        """
        request = pb.ParseCompletionRequest(text=text, tools_json=tools_json)
        response = await self._call(self._stub.ParseCompletion, request, timeout)
        unnamed = any(not call.name for call in response.tool_calls)
        self._check(response).require(not unnamed, "a tool call has no name")
        return response

    def watch_load(
        self, *, period: float = 1.0, timeout: float | None = None
    ) -> AsyncGenerator[pb.WatchLoadResponse, None]:
        """Yield load reports: the present one at once, then one every `period` seconds. Default timeout: none."""
        request = pb.WatchLoadRequest()
        request.period.FromNanoseconds(int(period * 1e9))
        return self._stream(self._stub.WatchLoad, request, timeout)


class RolloutClient(SyncClient[AsyncRolloutClient]):
    """Samples from a rollout service; each method blocks. For asyncio, use AsyncRolloutClient."""

    _async_type = AsyncRolloutClient
    get_info = blocking(AsyncRolloutClient.get_info)
    sample = blocking(AsyncRolloutClient.sample)
    stream = blocking_stream(AsyncRolloutClient.stream)
    generate = blocking_stream(AsyncRolloutClient.generate)
    complete = blocking(AsyncRolloutClient.complete)
    score_tokens = blocking(AsyncRolloutClient.score_tokens)
    parse_completion = blocking(AsyncRolloutClient.parse_completion)
    watch_load = blocking_stream(AsyncRolloutClient.watch_load)


def _request(
    prompt: Sequence[int] | Int32Array,
    params: pb.SamplingParams | None,
    count: int,
    min_version: int,
    prefix_count: int,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt,
        sampling_params=params,
        sample_count=count,
        min_policy_version=min_version,
        grammar_prefix_count=prefix_count,
    )


class RolloutControlClient(AsyncClient):
    """Updates the weights of a rollout service, for the coordinator. All methods raise FourfoldError.

    Methods with an epoch raise StaleEpoch when it is not the open one. Timeouts are seconds.
    """

    _role = "rollout"

    @cached_property
    def _stub(self) -> control_grpc.RolloutControlServiceAsyncStub:
        return control_grpc.RolloutControlServiceStub(self._open())

    async def describe(self, *, timeout: float) -> control.DescribeEngineResponse:
        """Return model, host, devices, backends and state of the engine."""
        about = await self._call(self._stub.DescribeEngine, control.DescribeEngineRequest(), timeout)
        check = self._check(about)
        check.version(about.policy_version, MAX_ENGINE_VERSION)
        check.devices(about.device_uuids)
        rule = f"worker_count is {about.worker_count}; it must be 1 to {MAX_DEVICES}"
        check.require(1 <= about.worker_count <= MAX_DEVICES, rule)
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
        host: str = "",
        interface: str = "",
        timeout: float,
    ) -> control.OpenWeightsResponse:
        """Join one epoch. Running requests go on. The engine listens on `interface`, or at `host`, where needed."""
        request = control.OpenWeightsRequest(
            epoch=epoch,
            backend=backend,
            manifest=manifest,
            offers=offers,
            receiver_count=receiver_count,
            first_receiver_index=first_receiver_index,
            host=host,
            interface=interface,
        )
        return await self._call(self._stub.OpenWeights, request, timeout)

    async def begin(
        self, *, epoch: int, policy_version: int, pause_mode: control.PauseMode.ValueType, timeout: float
    ) -> None:
        """Pause the engine for an update."""
        request = control.BeginWeightsRequest(epoch=epoch, policy_version=policy_version, pause_mode=pause_mode)
        await self._call(self._stub.BeginWeights, request, timeout)

    async def receive(self, *, epoch: int, policy_version: int, skip_sums: bool = False, timeout: float) -> bytes:
        """Receive and apply the weights; return their digest (32 bytes)."""
        request = control.ReceiveWeightsRequest(epoch=epoch, policy_version=policy_version, skip_sums=skip_sums)
        response = await self._call(self._stub.ReceiveWeights, request, timeout)
        self._check(response).digest(response.weights_digest)
        return response.weights_digest

    async def commit(self, *, epoch: int, policy_version: int, hold: bool = False, timeout: float) -> float:
        """Serve the version and resume; with `hold`, keep its tokens back until `release`.

        Returns:
            Seconds during which the engine sampled nothing.
        """
        request = control.CommitWeightsRequest(epoch=epoch, policy_version=policy_version, hold=hold)
        response = await self._call(self._stub.CommitWeights, request, timeout)
        rule = f"pause_seconds is {response.pause_seconds}; it must be finite and at least 0"
        self._check(response).require(0 <= response.pause_seconds < math.inf, rule)
        return response.pause_seconds

    async def release(self, *, epoch: int, policy_version: int, timeout: float) -> None:
        """Send out the tokens that a commit with hold kept back."""
        request = control.ReleaseWeightsRequest(epoch=epoch, policy_version=policy_version)
        await self._call(self._stub.ReleaseWeights, request, timeout)

    async def abort(self, *, epoch: int, timeout: float) -> control.WeightState.ValueType:
        """Abort the update; return the state of the engine's weights, CLEAN or DIRTY."""
        response = await self._call(self._stub.AbortWeights, control.AbortWeightsRequest(epoch=epoch), timeout)
        rule = f"weight_state is {response.weight_state}; after an abort it must be CLEAN or DIRTY"
        known = (control.WEIGHT_STATE_CLEAN, control.WEIGHT_STATE_DIRTY)
        self._check(response).require(response.weight_state in known, rule)
        return response.weight_state

    async def probe(self, token_ids: Sequence[int] | Int32Array, *, timeout: float) -> Float32Array:
        """Return the log-probabilities of the n given tokens under the loaded weights: float32 [n], the first NaN."""
        request = control.ProbeLogprobsRequest(token_ids=pack_ints(token_ids))
        response = await self._call(self._stub.ProbeLogprobs, request, timeout)
        asked = [Experience(sample_id="probe", token_ids=request.token_ids)]
        (row,) = self._check(response).rows([response.logprobs], asked)
        return row

    async def sums(self, *, epoch: int, timeout: float) -> bytes:
        """Return the sums of every tensor received last, 16 bytes each; empty when they were skipped."""
        response = await self._call(self._stub.GetWeightSums, control.GetWeightSumsRequest(epoch=epoch), timeout)
        self._check(response).sums(response.sums)
        return response.sums

    async def feed(
        self,
        *,
        epoch: int,
        policy_version: int,
        receiver_count: int,
        host: str = "",
        interface: str = "",
        timeout: float,
    ) -> list[bytes]:
        """Let the engine send its weights to late engines, in the background and at most for `timeout`.

        Returns:
            The offers for the late engines. Never log them.
        """
        request = control.FeedWeightsRequest(
            epoch=epoch, policy_version=policy_version, receiver_count=receiver_count, host=host, interface=interface
        )
        response = await self._call(self._stub.FeedWeights, request, timeout)
        self._check(response).offers(response.offers)
        return list(response.offers)

    async def sleep(self, *, level: int, timeout: float) -> None:
        """Free the engine's GPU memory; level 1 keeps the weights in host memory, 2 drops them."""
        await self._call(self._stub.SleepEngine, control.SleepEngineRequest(level=level), timeout)

    async def wake(self, *tags: str, timeout: float) -> None:
        """Allocate the memory again: "weights", "kv_cache"; without tags, all of it."""
        await self._call(self._stub.WakeEngine, control.WakeEngineRequest(tags=tags), timeout)
