"""The operations of the gateway, by the messages of `fourfold.agent.v1`: gRPC and HTTP both call them.

    gRPC AgentService --> servicer.py --+
                                        +--> AgentApi (core.py) --> sessions, engines, coordinator
    HTTP /v1/...      --> http/       --+

Both authenticate the caller and convert messages and errors; everything else is here once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.security.principal import Principal


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of an operation."""

    principal: Principal
    session_id: str = ""
    """The only session that the caller may use, when it has a session's key; empty: all sessions of the principal."""


class AgentApi(Protocol):
    """What a gateway does. The proto documents requests, responses and errors; errors are `FourfoldError`s."""

    def check_key(self, key: str, method: str) -> Caller:
        """Return the caller with a bearer token or a session's key, if it may call a method of AgentService.

        Args:
            key: The word after `Bearer`; empty on a loopback port without TLS, where every caller is `LOCAL_AGENT`.
            method: Name of the method, such as "Generate".

        Raises:
            Unauthenticated: the key is missing, unknown or expired.
            PermissionDenied: it does not allow the method.
        """
        ...

    def admit(self, caller: Caller) -> AbstractContextManager[None]:
        """Count a call over HTTP while the block runs; over gRPC the interceptor counts it.

        Raises:
            Overloaded: the caller has too many calls in flight, or made too many in the last second.
        """
        ...

    async def get_info(self, caller: Caller) -> pb.GetInfoResponse: ...
    async def get_quota(self, caller: Caller) -> pb.GetQuotaResponse: ...
    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse: ...
    async def detokenize(self, caller: Caller, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse: ...
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, perhaps a part of a character; none for a special token."""
        ...

    def is_neutral(self, variables: Mapping[str, Any]) -> bool:
        """Return whether variables for the chat template leave its text as it is."""
        ...

    async def apply_chat_template(
        self, caller: Caller, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse: ...
    async def next_task(self, caller: Caller, request: pb.NextTaskRequest) -> pb.NextTaskResponse: ...
    async def open_session(self, caller: Caller, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse: ...
    def generate(self, caller: Caller, request: pb.GenerateRequest, *, timeout: float) -> AsyncIterator[pb.TurnChunk]:
        """Sample one turn. Closing the iterator aborts it. `timeout` is in seconds; DeadlinePassed after it."""
        ...

    async def score_tokens(self, caller: Caller, request: pb.ScoreTokensRequest) -> pb.ScoreTokensResponse: ...
    async def close_session(self, caller: Caller, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse: ...
    async def export_session(self, caller: Caller, request: pb.ExportSessionRequest) -> pb.ExportSessionResponse: ...
    def watch_session(self, caller: Caller, request: pb.WatchSessionRequest) -> AsyncIterator[pb.Session]:
        """Yield the session at once and after every change, until its trajectory is settled."""
        ...
