"""Calls a gateway as an agent: tasks, sessions, turns. Retries calls that may be repeated."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1 import agent_service_pb2_grpc as pb_grpc
from fourfold.bounds import MAX_TRAJECTORY_METRICS
from fourfold.errors import DeadlinePassed, FourfoldError, Overloaded, PeerFault, Unavailable
from fourfold.rpc.channel import call, stream

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
# Repeated with the same ids, these calls have the result of the first.
_RETRIED: Final = (Unavailable, DeadlinePassed, Overloaded, PeerFault)
_FIRST_PAUSE_SECONDS: Final = 0.2
_MAX_PAUSE_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 30.0
_WAIT_SECONDS: Final = 10
# CloseSession refuses other names of metrics, and more of them.
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_./-]")
_MAX_NAME: Final = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn."""

    token_ids: tuple[int, ...]
    text: str
    message: pb.Message
    """The assistant's message, to be sent back unchanged."""
    truncated: bool
    prompt_tokens: int
    """0 for a prompt of token ids."""


class AgentGateway(Protocol):
    """The gateway's methods for the runner; `Gateway` implements them over gRPC."""

    peer: str

    async def get_info(self) -> pb.GetInfoResponse: ...

    async def next_task(self) -> pb.Task | None: ...

    async def open(self, request: pb.OpenSessionRequest, *, until: float) -> pb.OpenSessionResponse: ...

    async def generate(self, request: pb.GenerateRequest, *, until: float) -> Turn: ...

    async def close_session(self, request: pb.CloseSessionRequest, *, until: float) -> pb.CloseSessionResponse: ...

    async def tokenize(self, text: str, *, until: float) -> tuple[int, ...]: ...

    async def render(self, chat: pb.Chat, *, until: float) -> str: ...


class Gateway:
    """One gateway. `until` is the time of the event loop after which a call is not repeated."""

    def __init__(self, channel: grpc.aio.Channel, peer: str, *, incarnation: str = "") -> None:
        """Take an open channel, which the caller closes, and the name of the gateway for messages.

        `incarnation` is ours as a member of the run; empty: we are none.
        """
        self._incarnation = incarnation
        self.move(channel, peer)

    def move(self, channel: grpc.aio.Channel, peer: str) -> None:
        """Call the gateway at another address from now on: its sessions survive a restart, its port need not."""
        self.peer = peer
        self._stub: pb_grpc.AgentServiceAsyncStub = pb_grpc.AgentServiceStub(channel)

    async def get_info(self) -> pb.GetInfoResponse:
        """Return the description of the gateway."""
        response = await call(self._stub.GetInfo, pb.GetInfoRequest(), timeout=_CALL_SECONDS, peer=self.peer)
        if response.max_context_tokens < 2:
            raise PeerFault(
                self.peer, "MALFORMED_RESPONSE", f"GetInfo: max_context_tokens = {response.max_context_tokens}"
            )
        return response

    async def next_task(self) -> pb.Task | None:
        """Lease a task; None if there is none now. A task of a lost response is leased again by the run."""
        request = pb.NextTaskRequest(wait=Duration(seconds=_WAIT_SECONDS), incarnation=self._incarnation)
        response = await call(self._stub.NextTask, request, timeout=_WAIT_SECONDS + _CALL_SECONDS, peer=self.peer)
        if not response.HasField("task"):
            return None
        if not response.task.task_id or not (response.task.messages or response.task.text):
            raise PeerFault(self.peer, "MALFORMED_RESPONSE", "NextTask: the task has no id or no problem")
        return response.task

    async def open(self, request: pb.OpenSessionRequest, *, until: float) -> pb.OpenSessionResponse:
        """Open a session."""
        return await self._unary(lambda stub: stub.OpenSession, request, until)

    async def close_session(self, request: pb.CloseSessionRequest, *, until: float) -> pb.CloseSessionResponse:
        """End a session."""
        return await self._unary(lambda stub: stub.CloseSession, request, until)

    async def tokenize(self, text: str, *, until: float) -> tuple[int, ...]:
        """Return the token ids of a text, without special tokens of the tokenizer's own."""
        response = await self._unary(lambda stub: stub.Tokenize, pb.TokenizeRequest(text=text), until)
        return tuple(response.token_ids)

    async def render(self, chat: pb.Chat, *, until: float) -> str:
        """Return messages as the text of the chat template."""
        request = pb.ApplyChatTemplateRequest(chat=chat)
        return (await self._unary(lambda stub: stub.ApplyChatTemplate, request, until)).text

    async def generate(self, request: pb.GenerateRequest, *, until: float) -> Turn:
        """Sample one turn; repeated calls with its request_id get the same turn."""
        return await _retry(lambda seconds: self._generate(request, seconds), self.peer, until, per_call=None)

    async def _generate(self, request: pb.GenerateRequest, seconds: float) -> Turn:
        ids: list[int] = []
        text: list[str] = []
        async for response in stream(self._stub.Generate, request, timeout=seconds, peer=self.peer):
            for chunk in response.chunks:
                if chunk.sample_index or len(chunk.token_ids) % 4:
                    raise PeerFault(
                        self.peer, "MALFORMED_RESPONSE", "Generate: a chunk of another sample, or a part of one"
                    )
                ids += np.frombuffer(chunk.token_ids, "<i4").tolist()
                text.append(chunk.text)
                if chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    return Turn(
                        token_ids=tuple(ids),
                        text="".join(text),
                        message=chunk.message
                        if chunk.HasField("message")
                        else pb.Message(role="assistant", content="".join(text)),
                        truncated=chunk.finish_reason == pb.FINISH_REASON_LENGTH,
                        prompt_tokens=chunk.prompt_token_count,
                    )
        raise PeerFault(self.peer, "MALFORMED_RESPONSE", "Generate: the stream ended before the turn did")

    async def _unary(
        self,
        method_of: Callable[[pb_grpc.AgentServiceAsyncStub], Callable[..., Awaitable[Result]]],
        request: ProtoMessage,
        until: float,
    ) -> Result:
        def attempt(seconds: float) -> Awaitable[Result]:
            method = method_of(self._stub)  # of the present address
            return call(method, request, timeout=seconds, peer=self.peer)  # type: ignore[type-var]

        return await _retry(attempt, self.peer, until, per_call=_CALL_SECONDS)


async def _retry(
    attempt: Callable[[float], Awaitable[Result]], peer: str, until: float, *, per_call: float | None
) -> Result:
    """Repeat a call until it succeeds, its error is final, or the event loop's time `until` is reached."""
    loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE_SECONDS
    while True:
        left = until - loop.time()
        if left <= 0:
            raise DeadlinePassed(f"{peer}: the episode's time is over")
        try:
            return await attempt(left if per_call is None else min(left, per_call))
        except _RETRIED as error:
            wait = max(error.retry_after or 0.0, pause * random.uniform(0.5, 1.5))
            if loop.time() + wait >= until:
                raise
            _log.debug("call repeated: peer=%s cause=%s", peer, error)
            await asyncio.sleep(wait)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def session_url(info: pb.GetInfoResponse, session_id: str) -> str:
    """Return the HTTP address of a session. Raises FourfoldError: the gateway serves no HTTP."""
    if not info.http_url.startswith(("http://", "https://")):
        raise FourfoldError("the gateway serves no HTTP, which this environment needs; set gateway.http_listen")
    return f"{info.http_url.rstrip('/')}/sessions/{session_id}/v1"


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return at most as many metrics as a session takes, with characters of names that it takes."""
    return {
        _NOT_IN_NAMES.sub("_", name)[:_MAX_NAME]: value for name, value in list(values.items())[:MAX_TRAJECTORY_METRICS]
    }
