"""Clients of a gateway: tasks, sessions and turns for agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1 import agent_service_pb2_grpc as pb_grpc
from fourfold.errors import Overloaded, Unavailable, WrongState
from fourfold.rpc.client import AsyncClient, SyncClient, blocking, blocking_stream

_WAIT_MARGIN_SECONDS = 15.0


class AsyncAgentClient(AsyncClient):
    """Attempts tasks through a gateway, with asyncio.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's.
    """

    _role = "gateway"
    _caller_role = "environment"

    @cached_property
    def _stub(self) -> Any:
        return pb_grpc.AgentServiceStub(self._open())

    async def get_info(self, *, timeout: float | None = None) -> pb.GetInfoResponse:
        """Return model, limits, contract version and run."""
        info: pb.GetInfoResponse = await self._call(self._stub.GetInfo, pb.GetInfoRequest(), timeout)
        check = self._check(info)
        check.contract(info.contract_version)
        check.model(info)
        return info

    async def get_quota(self, *, timeout: float | None = None) -> pb.GetQuotaResponse:
        """Return the limits of this caller, and what is in use."""
        quota: pb.GetQuotaResponse = await self._call(self._stub.GetQuota, pb.GetQuotaRequest(), timeout)
        return quota

    async def next_task(self, *, wait: float = 10.0, timeout: float | None = None) -> pb.Task | None:
        """Lease a task; wait for it up to `wait` seconds, 0 to 60. None: none came in time."""
        request = pb.NextTaskRequest()
        request.wait.FromNanoseconds(int(wait * 1e9))
        limit = wait + _WAIT_MARGIN_SECONDS if timeout is None else timeout
        response: pb.NextTaskResponse = await self._call(self._stub.NextTask, request, limit)
        return response.task if response.HasField("task") else None

    async def tasks(self) -> AsyncGenerator[pb.Task, None]:
        """Lease tasks one after the other; end when the run has trained its last step.

        While the gateway names a time to try again, because the run starts or is overloaded, wait that long. Other
        errors are raised.
        """
        while True:
            try:
                task = await self.next_task()
            except WrongState as error:
                if error.reason != "RUN_ENDED":
                    raise
                return
            except (Overloaded, Unavailable) as error:
                if error.retry_after is None:
                    raise
                await asyncio.sleep(error.retry_after)
                continue
            if task is not None:
                yield task

    async def open_session(
        self,
        session_id: str,
        *,
        task_id: str = "",
        own_group: pb.OwnGroup | None = None,
        timeout: float | None = None,
    ) -> pb.OpenSessionResponse:
        """Open a session for a leased task, for a group of one's own, or, without both, only to export it."""
        request = pb.OpenSessionRequest(session_id=session_id, own_group=own_group)
        if task_id:
            request.task_id = task_id
        response: pb.OpenSessionResponse = await self._call(self._stub.OpenSession, request, timeout)
        return response

    async def generate(
        self, request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[pb.TurnChunk, None]:
        """Sample one turn and yield its chunks. Closing the generator aborts the turn."""
        async with aclosing(self._stream(self._stub.Generate, request, self._seconds(timeout))) as responses:
            async for response in responses:
                for chunk in response.chunks:
                    yield chunk

    async def chat(
        self,
        session_id: str,
        messages: Sequence[pb.Message],
        *,
        tools: Sequence[pb.Tool] = (),
        sampling_params: pb.SamplingParams | None = None,
        request_id: str = "",
        timeout: float | None = None,
    ) -> pb.Message:
        """Sample one turn of a conversation; return the assistant's message, to be sent back unchanged."""
        request = pb.GenerateRequest(
            session_id=session_id,
            request_id=request_id,
            chat=pb.Chat(messages=messages, tools=tools),
            sampling_params=sampling_params,
        )
        message = None
        async with aclosing(self.generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                if chunk.HasField("message"):
                    message = chunk.message
        if message is None:
            raise self._check(pb.GenerateResponse()).fault("the turn ended without a message", "UNFINISHED")
        return message

    async def close_session(
        self,
        session_id: str,
        *,
        reward: float | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        truncated: bool = False,
        metrics: Mapping[str, float] | None = None,
        timeout: float | None = None,
    ) -> pb.Session:
        """End a session with a reward; without one, the run's reward service scores it."""
        request = pb.CloseSessionRequest(session_id=session_id, truncated=truncated, metrics=metrics)
        if reward is None:
            request.score = True
        else:
            request.reward = reward
        for index, value in (turn_rewards or {}).items():
            request.turn_rewards.add(turn_index=index, reward=value)
        return await self._close(request, timeout)

    async def abandon_session(self, session_id: str, reason: str, *, timeout: float | None = None) -> pb.Session:
        """Give a session up; `reason` is UPPER_SNAKE_CASE. Nothing of it is trained on."""
        return await self._close(pb.CloseSessionRequest(session_id=session_id, abandon_reason=reason), timeout)

    async def _close(self, request: pb.CloseSessionRequest, timeout: float | None) -> pb.Session:
        response: pb.CloseSessionResponse = await self._call(self._stub.CloseSession, request, timeout)
        return response.session

    async def export_session(self, session_id: str, *, timeout: float | None = None) -> pb.ExportSessionResponse:
        """Return the segments and turns of a session."""
        request = pb.ExportSessionRequest(session_id=session_id)
        response: pb.ExportSessionResponse = await self._call(self._stub.ExportSession, request, timeout)
        return response

    async def watch_session(self, session_id: str, *, timeout: float | None = None) -> AsyncGenerator[pb.Session, None]:
        """Yield the session now and after every change, until it is settled. Default timeout: none."""
        request = pb.WatchSessionRequest(session_id=session_id)
        async with aclosing(self._stream(self._stub.WatchSession, request, timeout)) as responses:
            async for response in responses:
                yield response.session


class AgentClient(SyncClient[AsyncAgentClient]):
    """Attempts tasks through a gateway; each method blocks. For asyncio, use AsyncAgentClient."""

    _async_type = AsyncAgentClient
    get_info = blocking(AsyncAgentClient.get_info)
    get_quota = blocking(AsyncAgentClient.get_quota)
    next_task = blocking(AsyncAgentClient.next_task)
    tasks = blocking_stream(AsyncAgentClient.tasks)
    open_session = blocking(AsyncAgentClient.open_session)
    generate = blocking_stream(AsyncAgentClient.generate)
    chat = blocking(AsyncAgentClient.chat)
    close_session = blocking(AsyncAgentClient.close_session)
    abandon_session = blocking(AsyncAgentClient.abandon_session)
    export_session = blocking(AsyncAgentClient.export_session)
    watch_session = blocking_stream(AsyncAgentClient.watch_session)
