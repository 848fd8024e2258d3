"""A gateway with toy tasks: it leases products of two digits, and fails in every way that a client may repeat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1 import agent_service_pb2_grpc as pb_grpc
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import AlreadyExists, InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from fourfold.rpc.codec import pack_floats, pack_ints
from tests.conftest import Servicer
from tests.fakes.servicers import Context

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
RUN = "toy"


class AgentGateway(pb_grpc.AgentServiceServicer):
    """Gives `count` tasks once each. Every odd answer is wrong by one."""

    def __init__(self, count: int) -> None:
        self.tasks = {f"task-{i}": (i % 10, i // 10 % 10) for i in range(count)}
        self.rewards: dict[str, float] = {}  # by task
        self.abandoned: list[str] = []
        self.faults = Counter[str]()  # by kind
        self._waiting = list(self.tasks)
        self._sessions: dict[str, str] = {}  # task by session
        self._turns: dict[str, pb.GenerateRequest] = {}  # by session
        self._closed: dict[str, pb.CloseSessionRequest] = {}  # by session

    def servicer(self) -> Servicer:
        return pb.DESCRIPTOR.services_by_name["AgentService"], pb_grpc.add_AgentServiceServicer_to_server, self

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(contract_version=CONTRACT_VERSION, model="toy", training=True, run_name=RUN)

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        if self._fault("no task in time"):
            return pb.NextTaskResponse()
        if not self._waiting:
            raise WrongState("the run has ended", reason="RUN_ENDED")
        task_id = self._waiting.pop(0)
        a, b = self.tasks[task_id]
        message = pb.Message(role="user", content=f"{a} * {b} =")
        task = pb.Task(task_id=task_id, group_id=f"{a}x{b}", group_size=1, answer=str(a * b), messages=[message])
        task.time_left.CopyFrom(Duration(seconds=60))
        return pb.NextTaskResponse(task=task)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        if self._fault("overloaded"):
            raise Overloaded("too many sessions are open", retry_after=0.05)
        if not _ID.fullmatch(request.session_id) or request.WhichOneof("attempt") != "task_id":
            raise InvalidInput("a session of a task needs a session_id and a task_id")
        if self._sessions.setdefault(request.session_id, request.task_id) != request.task_id:
            raise AlreadyExists("the session belongs to another task")
        return pb.OpenSessionResponse(session=pb.Session(session_id=request.session_id, state=pb.SESSION_STATE_OPEN))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if not _ID.fullmatch(request.request_id):
            raise InvalidInput("a turn without a request_id cannot be repeated")
        task_id = self._task(request.session_id)
        if self._turns.setdefault(request.session_id, request) != request:
            raise InvalidInput("the toy has one turn in a session, and a repeated call must be equal")
        a, b = self.tasks[task_id]
        text = f"It is {a * b + a % 2}"
        yield pb.GenerateResponse(chunks=[_chunk(text[:3])])
        if self._fault("broken stream"):
            raise Unavailable("the engine died")
        yield pb.GenerateResponse(chunks=[_chunk(text[3:], done=True)])

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        task_id = self._task(request.session_id)
        if self._closed.setdefault(request.session_id, request) != request:
            raise AlreadyExists("the session was closed with another outcome")
        if request.WhichOneof("outcome") == "reward":
            self.rewards[task_id] = request.reward
        else:
            self.abandoned.append(task_id)
        if self._fault("lost response"):
            raise Unavailable("the response is lost")
        return pb.CloseSessionResponse(session=pb.Session(session_id=request.session_id, state=pb.SESSION_STATE_STORED))

    async def _never(self, request: Any, context: Context) -> Any:
        raise AssertionError("not called by an agent that plays tasks")

    GetQuota = Tokenize = Detokenize = ApplyChatTemplate = ScoreTokens = ExportSession = _never
    WatchSession: Any = _never

    def _task(self, session_id: str) -> str:
        if session_id not in self._sessions:
            raise NotFound(f"no session {session_id!r}")
        return self._sessions[session_id]

    def _fault(self, kind: str) -> bool:
        """Return whether this call fails: the first of each kind."""
        self.faults[kind] += 1
        return self.faults[kind] == 1


def _chunk(text: str, *, done: bool = False) -> pb.TurnChunk:
    return pb.TurnChunk(
        token_ids=pack_ints(list(text.encode())),
        logprobs=pack_floats(np.full(len(text), -0.5, np.float32)),
        text=text,
        finish_reason=pb.FINISH_REASON_STOP if done else pb.FINISH_REASON_UNSPECIFIED,
    )
