"""Makes the calls on a gateway, and holds the rules that every turn must keep."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from fourfold.bounds import MAX_NUMBER
from fourfold.errors import FourfoldError, Overloaded, WrongState
from fourfold.rpc.channel import translate_errors
from fourfold.rpc.codec import read_floats, read_ints
from fourfold_tools.conformance.calls import PatientStub, unary
from fourfold_tools.conformance.checks import Skipped, Violation

SERVICE: Final = "fourfold.agent.v1.AgentService"
ABANDONED: Final = "CONFORMANCE"
"""Reason with which sessions are given up."""
FEW_TOKENS: Final = 6
_MOST_CHUNKS: Final = 10_000
QUESTION: Final = "3 * 4 ="


@dataclass(slots=True)
class Sampled:
    """One sample of a turn."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Policy version of each token."""
    text: str = ""
    finish: int = pb.FINISH_REASON_UNSPECIFIED
    message: pb.Message | None = None
    prompt_token_count: int = 0
    chunk_count: int = 0


@dataclass(kw_only=True)
class GatewayProbe:
    """Calls one gateway, and keeps values that several checks need."""

    channel: grpc.aio.Channel
    peer: str
    seconds: float
    """Time limit of a call."""
    tokenizer_sha256: bytes = b""
    """Of the run's tokenizer; empty: not given."""
    agent: bool = False
    """Whether the caller is an agent, with a token on a public port."""
    http: str = ""
    """Base URL of the HTTP API, without a slash at its end; empty: not checked."""
    token: str = ""
    """Bearer token for HTTP; empty: none."""
    authority: Path = Path()
    """File with the CA's certificate, for https."""
    info: pb.GetInfoResponse = field(default_factory=pb.GetInfoResponse)
    no_template: str = ""
    """Why conversations cannot be rendered; empty: they can."""

    @cached_property
    def stub(self) -> Any:
        """The calls themselves, which keep the caller's limit of calls per second."""
        return PatientStub(AgentServiceStub(self.channel), streams=("Generate", "WatchSession"))

    async def call(self, request: Any) -> Any:
        """Make a unary call, named by its request."""
        name = request.DESCRIPTOR.name.removesuffix("Request")
        return await unary(getattr(self.stub, name), request, peer=self.peer, seconds=self.seconds)

    async def get_info(self) -> pb.GetInfoResponse:
        """Ask for model, limits and run."""
        info: pb.GetInfoResponse = await self.call(pb.GetInfoRequest())
        return info

    async def encode(self, text: str = QUESTION) -> list[int]:
        """Return the token ids of a text."""
        response: pb.TokenizeResponse = await self.call(pb.TokenizeRequest(text=text))
        return list(response.token_ids)

    async def template(self, messages: Sequence[pb.Message]) -> pb.ApplyChatTemplateResponse:
        """Render messages; raise Skipped where the model has no chat template."""
        if self.no_template:
            raise Skipped(self.no_template)
        request = pb.ApplyChatTemplateRequest(chat=pb.Chat(messages=messages))
        try:
            rendered: pb.ApplyChatTemplateResponse = await self.call(request)
        except WrongState as error:
            self.no_template = f"the model has no chat template: {error.message[:200]}"
            raise Skipped(self.no_template) from None
        return rendered

    # -- turns --------------------------------------------------------------------------------------------------------

    def request(
        self,
        session_id: str = "",
        *,
        messages: Sequence[pb.Message] = (),
        ids: Sequence[int] = (),
        text: str = "",
        count: int | None = None,
        flush: float | None = None,
        request_id: str = "",
        **params: Any,
    ) -> pb.GenerateRequest:
        """Return a request; `params` are sampling parameters. Without a prompt it is the question as a text."""
        made = pb.GenerateRequest(
            session_id=session_id,
            request_id=request_id,
            sampling_params=pb.SamplingParams(**{"max_tokens": FEW_TOKENS, **params}),
            sample_count=count,
        )
        if messages:
            made.chat.messages.extend(messages)
        elif ids:
            made.token_ids.ids.extend(ids)
        else:
            made.text = text or QUESTION
        if flush is not None:
            made.flush_interval.FromNanoseconds(int(flush * 1e9))
        return made

    async def turn(self, request: pb.GenerateRequest) -> list[Sampled]:
        """Sample a turn, and check every chunk; raise Violation for one that breaks a rule."""
        count = request.sample_count if request.HasField("sample_count") else 1
        samples = [Sampled() for _ in range(count)]
        with translate_errors(peer=self.peer, name="Generate", timeout=self.seconds):
            async for response in self.stub.Generate(request, timeout=self.seconds):
                if not response.chunks:
                    raise Violation("a response of Generate has no chunks; it must have at least one")
                for chunk in response.chunks:
                    self._add(request, samples, chunk)
        for index, sample in enumerate(samples):
            if not sample.finish:
                raise Violation(f"the stream ended before sample {index} was finished")
            self._check_end(request, index, sample)
        return samples

    async def one(self, request: pb.GenerateRequest) -> Sampled:
        """Sample a turn of one sample."""
        (sample,) = await self.turn(request)
        return sample

    def _add(self, request: pb.GenerateRequest, samples: list[Sampled], chunk: pb.TurnChunk) -> None:
        index, size = chunk.sample_index, len(chunk.token_ids)
        if not 0 <= index < len(samples):
            raise Violation(f"sample {index} was not requested; there are {len(samples)}")
        sample, where = samples[index], f"sample {index}"
        if sample.finish:
            raise Violation(f"{where} continues after its finish_reason")
        if size % 4 or len(chunk.logprobs) != size:
            raise Violation(
                f"{where} has {size} bytes of token_ids and {len(chunk.logprobs)} of logprobs; 4 for a token"
            )
        ids, logprobs = read_ints(chunk.token_ids), read_floats(chunk.logprobs)
        if not all(0 <= i < self.info.vocabulary_size for i in ids.tolist()):
            raise Violation(f"{where} has a token outside the vocabulary [0, {self.info.vocabulary_size})")
        if size and not (logprobs.max() <= 0 and logprobs.min() > -np.inf):
            raise Violation(f"{where} has log-probabilities that are NaN, -inf or above 0")
        if size and not 0 <= chunk.policy_version <= MAX_NUMBER:
            raise Violation(f"{where} has tokens of policy_version {chunk.policy_version}")
        if sample.versions and size and chunk.policy_version < sample.versions[-1]:
            raise Violation(f"{where} has tokens of policy_version {chunk.policy_version} after {sample.versions[-1]}")
        if not chunk.finish_reason and (chunk.HasField("message") or chunk.prompt_token_count):
            raise Violation(f"{where} has message or prompt_token_count before its last chunk")
        if sample.chunk_count > _MOST_CHUNKS or len(sample.ids) > request.sampling_params.max_tokens:
            raise Violation(
                f"{where} has more tokens than max_tokens = {request.sampling_params.max_tokens}, or goes on"
            )
        sample.ids += ids.tolist()
        sample.logprobs += logprobs.tolist()
        sample.versions += [chunk.policy_version] * (size // 4)
        sample.text += chunk.text
        sample.finish, sample.chunk_count = chunk.finish_reason, sample.chunk_count + 1
        sample.message = chunk.message if chunk.HasField("message") else None
        sample.prompt_token_count = chunk.prompt_token_count

    def _check_end(self, request: pb.GenerateRequest, index: int, sample: Sampled) -> None:
        """Check a finished sample."""
        where, kind = f"sample {index}", request.WhichOneof("prompt")
        if not sample.ids:
            raise Violation(f"{where} has no tokens")
        if len(sample.ids) > request.sampling_params.max_tokens:
            raise Violation(
                f"{where} has {len(sample.ids)} tokens, and max_tokens is {request.sampling_params.max_tokens}"
            )
        if (kind == "chat") != (sample.message is not None):
            raise Violation(
                f"{where} of a prompt of {kind} has {'a' if sample.message else 'no'} message; chat alone has"
            )
        if (kind == "token_ids") != (sample.prompt_token_count == 0):
            raise Violation(f"{where} of a prompt of {kind} has prompt_token_count = {sample.prompt_token_count}")
        if sample.message is not None:
            if sample.message.role != "assistant":
                raise Violation(
                    f"the message of a turn has the role {sample.message.role[:40]!r}; it is the assistant's"
                )
            plain = not (sample.message.tool_calls or self.info.separates_reasoning)
            if plain and sample.message.content != sample.text:
                raise Violation(
                    f"{where} has the text {sample.text[:60]!r} in its chunks and {sample.message.content[:60]!r} in "
                    f"its message"
                )

    # -- sessions -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, session_id: str = "", **fields: Any) -> AsyncIterator[pb.OpenSessionResponse]:
        """Open a session; abandon it at the end if it is still open. Raise Skipped if the quota is used up."""
        name = session_id or f"conformance-{uuid.uuid4().hex}"
        try:
            response: pb.OpenSessionResponse = await self.call(pb.OpenSessionRequest(session_id=name, **fields))
        except Overloaded as error:
            if error.reason == "TOO_MANY_SESSIONS" and not await self.sessions_left():
                raise Skipped("the check needs one more session than the quota of the caller allows") from None
            raise
        try:
            yield response
        finally:
            with suppress(FourfoldError):
                await self.give_up(name)

    async def sessions_left(self) -> float:
        """Return how many sessions the caller may open now."""
        quota: pb.GetQuotaResponse = await self.call(pb.GetQuotaRequest())
        return max(quota.max_open_sessions - quota.open_session_count, 0) if quota.max_open_sessions else math.inf

    async def give_up(self, session_id: str) -> pb.Session:
        """Abandon a session."""
        return await self.close(session_id, abandon_reason=ABANDONED)

    async def close(self, session_id: str, **outcome: Any) -> pb.Session:
        """Close a session; wait for the end of a turn that was cancelled just now."""
        request = pb.CloseSessionRequest(session_id=session_id, **outcome)
        end = asyncio.get_running_loop().time() + self.seconds
        while True:
            try:
                response: pb.CloseSessionResponse = await self.call(request)
                return response.session
            except WrongState as error:
                if error.reason != "TURN_RUNNING" or asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.05)

    async def export(self, session_id: str) -> pb.ExportSessionResponse:
        """Return the content of a session."""
        exported: pb.ExportSessionResponse = await self.call(pb.ExportSessionRequest(session_id=session_id))
        return exported

    async def drop(self, request: pb.GenerateRequest) -> None:
        """Make a Generate call that is to fail; raise its AioRpcError, or Violation if it sampled something first."""
        got = 0
        try:
            async for response in self.stub.Generate(request, timeout=self.seconds):
                got += len(response.chunks)
        except grpc.aio.AioRpcError:
            if got:
                raise Violation(f"it sent {got} chunks before the error") from None
            raise


def user(text: str = QUESTION) -> pb.Message:
    """Return a message of the user."""
    return pb.Message(role="user", content=text)
