"""The endpoints of AgentService in JSON: tasks, sessions, quota. With them an agent needs only the `openai` package."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.text import clean
from fourfold_gateway.api import AgentApi, Caller
from fourfold_gateway.http.errors import RequestError

M = TypeVar("M", bound=Message)


def _request(body: dict[str, Any], request: M) -> M:
    """Fill a message from its JSON form; raise RequestError for an unknown or wrong field."""
    try:
        ParseDict(body, request, max_recursion_depth=20)
    except ParseError as error:
        raise RequestError(f"{clean(str(error), 300)}; send the JSON form of {type(request).__name__}") from None
    return request


def _json(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


async def next_task(api: AgentApi, caller: Caller, body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Lease a task; return {} when none came in time."""
    return _json(await api.next_task(caller, _request(body, pb.NextTaskRequest())))


async def open_session(api: AgentApi, caller: Caller, body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Open a session for a task or a group of the agent's own."""
    return _json(await api.open_session(caller, _request(body, pb.OpenSessionRequest())))


async def close_session(api: AgentApi, caller: Caller, body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """End the session of the URL with a reward, a wish for a score, or a reason to abandon it."""
    request = _request(body, pb.CloseSessionRequest())
    if request.session_id not in ("", session_id):
        raise RequestError("session_id is not the session of the URL; leave it out", param="session_id")
    request.session_id = session_id
    return _json(await api.close_session(caller, request))


async def export_session(api: AgentApi, caller: Caller, body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Return everything that the session of the URL holds."""
    return _json(await api.export_session(caller, pb.ExportSessionRequest(session_id=session_id)))


async def get_quota(api: AgentApi, caller: Caller, body: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Return the limits of the caller."""
    return _json(await api.get_quota(caller))
