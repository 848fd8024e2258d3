"""A gateway for tests: leases tasks, samples what a test's policy says, and remembers sessions."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from fourfold import errors
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1 import agent_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from tests.conftest import Servicer

Context = grpc.aio.ServicerContext[Any, Any]
Policy = Callable[[pb.GenerateRequest], str | pb.Message]


class FakeGateway(pb_grpc.AgentServiceServicer):
    """An AgentService whose token ids are the code points of the text."""

    def __init__(self, policy: Policy, *, context: int = 4096, http_url: str = "") -> None:
        self.policy, self.context, self.http_url = policy, context, http_url
        self.tasks: deque[pb.Task] = deque()
        self.opened: dict[str, pb.OpenSessionRequest] = {}
        self.closed: dict[str, pb.CloseSessionRequest] = {}
        self.turns: list[pb.GenerateRequest] = []
        self.sampled: dict[tuple[str, str], pb.GenerateResponse] = {}
        self.failures: Counter[str] = Counter()  # by method: how many of the next calls fail
        self.busy = self.most_busy = 0
        self.sample_seconds = 0.0
        self._changed = asyncio.Condition()

    def add(self, count: int = 1, **fields: Any) -> None:
        for _ in range(count):
            number = len(self.opened) + len(self.tasks)
            fields.setdefault("time_left", Duration(seconds=60))
            self.tasks.append(pb.Task(**{"task_id": f"task-{number}", "group_id": "g", "group_size": 8, **fields}))

    async def wait(self, count: int = 1) -> list[pb.CloseSessionRequest]:
        """Return the outcomes in order when `count` sessions are closed."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: len(self.closed) >= count)
        return list(self.closed.values())

    def _fail(self, method: str) -> None:
        if self.failures[method]:
            self.failures[method] -= 1
            raise errors.Unavailable(f"{method} fails as the test asked")

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(
            contract_version="1.0", model="toy", max_context_tokens=self.context, training=True, http_url=self.http_url
        )

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        self._fail("NextTask")
        if not self.tasks:
            await asyncio.sleep(0.05)
            return pb.NextTaskResponse()
        return pb.NextTaskResponse(task=self.tasks.popleft())

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        self.opened[request.session_id] = request
        self._fail("OpenSession")
        return pb.OpenSessionResponse(session_key="secret-key")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        key = (request.session_id, request.request_id)
        if key not in self.sampled:
            self.turns.append(request)
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
            try:
                await asyncio.sleep(self.sample_seconds)
            finally:
                self.busy -= 1
            self.sampled[key] = self._sample(request)
        self._fail("Generate")
        yield self.sampled[key]

    def _sample(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        reply = self.policy(request)
        message = pb.Message(role="assistant", content=reply) if isinstance(reply, str) else reply
        limit = request.sampling_params.max_tokens
        ids = list(map(ord, message.content))[: limit or None]
        cut = len(ids) < len(message.content)
        reason = pb.FINISH_REASON_LENGTH if cut else pb.FINISH_REASON_STOP
        chunk = pb.TurnChunk(
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-1.0] * len(ids)),
            text=message.content[: len(ids)],
            finish_reason=pb.FINISH_REASON_TOOL_CALLS if message.tool_calls else reason,
        )
        if request.WhichOneof("prompt") == "chat":
            chunk.message.CopyFrom(message)
            chunk.prompt_token_count = sum(len(m.content) for m in request.chat.messages)
            if chunk.prompt_token_count > self.context:
                raise errors.InvalidInput("the prompt is longer than the context")
        return pb.GenerateResponse(chunks=[chunk])

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        self._fail("CloseSession")
        async with self._changed:
            self.closed[request.session_id] = request
            self._changed.notify_all()
        return pb.CloseSessionResponse(session=pb.Session(session_id=request.session_id))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=map(ord, request.text))

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        text = "".join(f"<{m.role}>{m.content}" for m in request.chat.messages) + "<assistant>"
        return pb.ApplyChatTemplateResponse(text=text, token_ids=map(ord, text))

    async def _never(self, request: Any, context: Context) -> Any:
        raise AssertionError("the environment service never calls this")

    Detokenize = GetQuota = ScoreTokens = ExportSession = _never
    WatchSession: Any = _never

    def servicer(self) -> Servicer:
        return pb.DESCRIPTOR.services_by_name["AgentService"], pb_grpc.add_AgentServiceServicer_to_server, self


def text_of(turn: pb.GenerateRequest) -> str:
    """Return the prompt of a turn with token ids as text."""
    return "".join(map(chr, turn.token_ids.ids))
