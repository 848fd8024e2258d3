"""A gateway without sessions, engines and a coordinator: answers with what a test puts in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import FourfoldError, PermissionDenied, Unauthenticated, WrongState
from fourfold.security.principal import LOCAL_AGENT
from fourfold_gateway.api import Caller

SESSION_KEY = "key-of-a-session"
STOP, LENGTH, TOOL_CALLS = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TOOL_CALLS


@dataclass
class FakeAgentApi:
    """Implements `AgentApi`. The words of `text` are tokens: id 10, 11 ..., log-probability -0.5, version 3."""

    text: tuple[str, ...] = ("Hello", " w\u00f6rld")
    finish: pb.FinishReason.ValueType = STOP
    tool_calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    reasoning: str = ""
    separates_reasoning: bool = False
    max_context_tokens: int = 0
    error: FourfoldError | None = None
    error_after: int = 0  # chunks before the error
    hang_after: int | None = None  # chunks, after which no further one comes
    part_bytes: dict[int, bytes] = field(default_factory=dict)  # of tokens that are a part of a character
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)
    closed: list[pb.CloseSessionRequest] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def check_key(self, key: str, method: str) -> Caller:
        if key == SESSION_KEY:
            return Caller(LOCAL_AGENT, "s1")
        if key == "no-generate" and method == "Generate":
            raise PermissionDenied("the token does not allow Generate")
        if key == "wrong":
            raise Unauthenticated("the token is unknown; use another one")
        return Caller(LOCAL_AGENT)

    def admit(self, caller: Caller) -> AbstractContextManager[None]:
        return nullcontext()

    async def get_info(self, caller: Caller) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            model="toy", separates_reasoning=self.separates_reasoning, max_context_tokens=self.max_context_tokens
        )

    async def get_quota(self, caller: Caller) -> pb.GetQuotaResponse:
        return pb.GetQuotaResponse(max_open_sessions=7, max_calls_per_second=2.5)

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        raise AssertionError

    async def detokenize(self, caller: Caller, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(self.text[i - 10] for i in request.token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return self.part_bytes.get(token_id, b"")

    def is_neutral(self, variables: Mapping[str, Any]) -> bool:
        return variables == {"enable_thinking": True}

    async def apply_chat_template(
        self, caller: Caller, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse:
        return pb.ApplyChatTemplateResponse(text="?", token_ids=range(len(request.chat.messages)))

    async def next_task(self, caller: Caller, request: pb.NextTaskRequest) -> pb.NextTaskResponse:
        if self.error:
            raise self.error
        return pb.NextTaskResponse(task=pb.Task(task_id="t1", messages=[pb.Message(role="user", content="2+2?")]))

    async def open_session(self, caller: Caller, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        session = pb.Session(session_id=request.session_id, state=pb.SESSION_STATE_OPEN, task_id=request.task_id)
        return pb.OpenSessionResponse(session=session, session_key=SESSION_KEY)

    async def generate(
        self, caller: Caller, request: pb.GenerateRequest, *, timeout: float
    ) -> AsyncIterator[pb.TurnChunk]:
        self.requests.append(request)
        self.callers.append(caller)
        sent = 0
        try:
            for index in range(request.sample_count):
                for number, word in enumerate(self.text):
                    if self.error and sent == self.error_after:
                        raise self.error
                    if sent == self.hang_after:
                        await asyncio.Event().wait()
                    sent += 1
                    yield self._chunk(request, index, number, word)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.set()
            raise

    def _chunk(self, request: pb.GenerateRequest, index: int, number: int, word: str) -> pb.TurnChunk:
        chunk = pb.TurnChunk(
            sample_index=index,
            token_ids=np.array([10 + number], "<i4").tobytes(),
            logprobs=np.array([-0.5], "<f4").tobytes(),
            policy_version=3,
            text=word,
        )
        if number == len(self.text) - 1:
            chunk.finish_reason, chunk.prompt_token_count = self.finish, 5
            if request.WhichOneof("prompt") == "chat":
                calls = [pb.ToolCall(id=f"c{i}", name=n, arguments_json=a) for i, (n, a) in enumerate(self.tool_calls)]
                content = "" if calls else "".join(self.text).removeprefix(f"<think>{self.reasoning}</think>")
                message = pb.Message(role="assistant", content=content, reasoning=self.reasoning, tool_calls=calls)
                chunk.message.CopyFrom(message)
        return chunk

    async def score_tokens(self, caller: Caller, request: pb.ScoreTokensRequest) -> pb.ScoreTokensResponse:
        raise AssertionError

    async def close_session(self, caller: Caller, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        if request.session_id != "s1":
            raise WrongState(f"session {request.session_id!r} expired")
        self.closed.append(request)
        return pb.CloseSessionResponse(session=pb.Session(session_id="s1", state=pb.SESSION_STATE_CLOSED))

    async def export_session(self, caller: Caller, request: pb.ExportSessionRequest) -> pb.ExportSessionResponse:
        return pb.ExportSessionResponse(session=pb.Session(session_id=request.session_id, turn_count=0))

    async def watch_session(self, caller: Caller, request: pb.WatchSessionRequest) -> AsyncIterator[pb.Session]:
        raise AssertionError
        yield
