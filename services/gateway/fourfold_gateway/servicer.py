"""Serves AgentService over gRPC: converts callers and streams; `core.py` does the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import AgentServiceServicer
from fourfold.errors import DeadlinePassed, InvalidInput
from fourfold.security import principal
from fourfold.security.principal import LOCAL, LOCAL_AGENT
from fourfold_gateway.api import AgentApi, Caller

Context = grpc.aio.ServicerContext[Any, Any]
# Responses and errors leave this long before the caller's deadline.
_MARGIN_SECONDS: Final = 0.05


class AgentServicer(AgentServiceServicer):
    """The gRPC form of the gateway. The proto documents the methods."""

    def __init__(self, api: AgentApi) -> None:
        self._api = api

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return await self._api.get_info(_caller())

    async def GetQuota(self, request: pb.GetQuotaRequest, context: Context) -> pb.GetQuotaResponse:
        return await self._api.get_quota(_caller())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return await self._api.tokenize(_caller(), request)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        return await self._api.detokenize(_caller(), request)

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        return await self._api.apply_chat_template(_caller(), request)

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        return await self._api.next_task(_caller(), request)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        return await self._api.open_session(_caller(), request)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        left = context.time_remaining()
        if left is None:
            raise InvalidInput("Generate was called without a deadline; pass a timeout", reason="NO_DEADLINE")
        if left <= _MARGIN_SECONDS:
            raise DeadlinePassed(f"only {left:.3f} s are left of the deadline; give the call more time")
        chunks: Any = self._api.generate(_caller(), request, timeout=left - _MARGIN_SECONDS)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield pb.GenerateResponse(chunks=[chunk])

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        return await self._api.score_tokens(_caller(), request)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        return await self._api.close_session(_caller(), request)

    async def ExportSession(self, request: pb.ExportSessionRequest, context: Context) -> pb.ExportSessionResponse:
        return await self._api.export_session(_caller(), request)

    async def WatchSession(
        self, request: pb.WatchSessionRequest, context: Context
    ) -> AsyncIterator[pb.WatchSessionResponse]:
        async for session in self._api.watch_session(_caller(), request):
            yield pb.WatchSessionResponse(session=session)


def _caller() -> Caller:
    found = principal.current()
    # Without TLS, programs of this machine have the same identity over gRPC and HTTP.
    return Caller(LOCAL_AGENT if found == LOCAL else found)
