"""Agents in processes that a test may kill at any time; each writes a journal of what the gateway gave it.

    python -m tests.support.agent_process      starts a process for each line of JSON on stdin, and prints its pid

The modules are imported once, and each agent is a fork. An agent leases tasks of a gateway and attempts each in a
session of several turns: by token ids, by messages, or by messages over HTTP. A line of the journal is written before
and after each call that changes something, so that it has what an agent knew when it was killed. An agent that gets a
journal with unfinished sessions goes on with them, and repeats the last call of each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration

from fourfold.agent.client import AsyncAgentClient
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import DeadlinePassed, NotFound, Overloaded, Unavailable, WrongState
from fourfold.host.process_tree import die_with_parent
from fourfold.rpc.channel import open_channel
from fourfold.rpc.codec import read_floats, read_ints

T = TypeVar("T")
Json = dict[str, Any]

KINDS: Final = ("ids", "chat", "http")
_TRANSIENT: Final = (Unavailable, Overloaded, DeadlinePassed)
_CALL_SECONDS: Final = 20.0
_TRIES: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """What one agent process does. All fields are JSON values."""

    target: str
    """AgentService."""
    http: str
    """host:port of the HTTP API."""
    journal: str
    width: int = 1
    """Sessions at a time."""
    idle_seconds: float = 600.0
    """Idle time after which the sessions expire."""
    turns: int = 4
    """Most turns of a session; the least is 2."""
    edit_share: float = 0.15
    """Share of the turns whose history is edited, so that they open a segment."""
    first_id: int = 40
    """Observations by ids are of this id and the 50 after it."""


@dataclass(slots=True)
class Record:
    """One session, as a journal has it."""

    task: Json
    session: str
    turns: list[Json] = field(default_factory=list)
    end: str = ""  # closing, closed or gone; empty: it goes on

    @property
    def kind(self) -> str:
        return KINDS[random.Random(self.session).randrange(len(KINDS))]

    @property
    def segment_count(self) -> int:
        """Number of segments that the session must have."""
        return 1 + [turn["edited"] for turn in self.turns].count(True)


def read(path: Path) -> list[Record]:
    """Return the sessions of a journal; a line that the kill has cut is left out."""
    found: dict[str, Record] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            continue
        entry = json.loads(line)
        if entry["event"] == "open":
            found[entry["session"]] = Record(entry["task"], entry["session"])
        elif entry["event"] == "turn":
            found[entry["session"]].turns.append(entry)
        else:
            found[entry["session"]].end = entry["event"]
    return list(found.values())


class Gone(Exception):
    """The session has ended without its agent."""


class Agent:
    """One process."""

    def __init__(self, plan: AgentPlan) -> None:
        self._plan = plan
        self._client = AsyncAgentClient(open_channel(plan.target, None), peer="gateway")
        self._journal = os.open(plan.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._random = random.Random(os.getpid())
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Finish the sessions of the journal, then attempt tasks until the process is killed."""
        unfinished = asyncio.Queue[Record]()
        for record in read(Path(self._plan.journal)):
            if record.end in ("", "closing"):
                unfinished.put_nowait(record)
        await asyncio.gather(*(self._work(unfinished) for _ in range(self._plan.width)))

    async def _work(self, unfinished: asyncio.Queue[Record]) -> None:
        while True:
            record = None if unfinished.empty() else unfinished.get_nowait()
            if record is None:
                task = await self._repeat(lambda: self._client.next_task(wait=5.0, timeout=_CALL_SECONDS))
                if task is None:
                    continue
                name = f"s-{os.getpid()}-{next(self._numbers)}-{task.task_id}"
                known = {"id": task.task_id, "sample_index": task.sample_index, "text": _question(task)}
                record = Record(known, name)
                self._write("open", record, task=known)
            try:
                await self._attempt(record)
            except Gone:
                self._write("gone", record)

    async def _attempt(self, record: Record) -> None:
        plan, choice = self._plan, random.Random(record.session)
        await self._repeat(lambda: self._open(record))
        chat = [{"role": "user", "content": record.task["text"]}]
        ids = [choice.randrange(plan.first_id, plan.first_id + 50) for _ in range(5)]
        for number in range(choice.randrange(2, plan.turns + 1)):
            edited = number > 0 and choice.random() < plan.edit_share
            words = [choice.randrange(plan.first_id, plan.first_id + 50) for _ in range(4)]
            if edited:
                chat, ids = [{"role": "user", "content": f"Shorter {number}: {words}"}], [words[0] + 51, *words]
            if number < len(record.turns):
                turn = record.turns[number]
            else:
                turn = await self._turn(record, number, chat, ids)
                turn |= {"edited": edited, "prompt": ids if record.kind == "ids" else None}
                record.turns.append(turn)
                self._write("turn", record, **turn)
            chat = [*chat, turn["message"], {"role": "user", "content": f"And {words[0]}?"}]
            ids = [*ids, *turn["ids"], *words[:2]]
        self._write("closing", record)
        reward = float(record.task["sample_index"] % 2)
        close = self._client.close_session
        await self._repeat(lambda: close(record.session, reward=reward, metrics={"turns": len(record.turns)}))
        self._write("closed", record)

    async def _open(self, record: Record) -> None:
        request = pb.OpenSessionRequest(session_id=record.session, task_id=record.task["id"])
        request.idle_timeout.FromNanoseconds(int(self._plan.idle_seconds * 1e9))
        await self._client._call(self._client._stub.OpenSession, request, _CALL_SECONDS)

    async def _turn(self, record: Record, number: int, chat: list[Json], ids: list[int]) -> Json:
        if record.kind == "http":
            return await self._repeat(lambda: self._post(record, number, chat))
        request = pb.GenerateRequest(session_id=record.session, request_id=f"turn-{number}")
        if number % 2:
            request.flush_interval.CopyFrom(Duration(nanos=1_000_000))
        if record.kind == "ids":
            request.token_ids.ids[:] = ids
        else:
            request.chat.messages.extend(pb.Message(**message) for message in chat)
        return await self._repeat(lambda: self._generate(request))

    async def _generate(self, request: pb.GenerateRequest) -> Json:
        ids, logprobs, versions = list[int](), list[float](), list[int]()
        message: Json = {}
        async for chunk in self._client.generate(request, timeout=_CALL_SECONDS):
            new = read_ints(chunk.token_ids).tolist()
            ids += new
            logprobs += read_floats(chunk.logprobs).tolist()
            versions += [chunk.policy_version] * len(new)
            if chunk.HasField("message"):
                message = {"role": "assistant", "content": chunk.message.content}
        return {"ids": ids, "logprobs": logprobs, "versions": versions, "message": message}

    async def _post(self, record: Record, number: int, chat: list[Json]) -> Json:
        """Sample a turn over HTTP."""
        body = json.dumps({"model": "m", "messages": chat, "return_token_ids": True, "logprobs": True}).encode()
        head = [f"POST /sessions/{record.session}/v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "connection: close"]
        head += ["content-type: application/json", f"content-length: {len(body)}"]
        head += [f"idempotency-key: turn-{number}", "", ""]
        host, _, port = self._plan.http.rpartition(":")
        try:
            async with asyncio.timeout(_CALL_SECONDS):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write("\r\n".join(head).encode() + body)
                    answer, _, content = (await reader.read()).partition(b"\r\n\r\n")
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"the gateway does not answer: {error!r}") from None
        status = int(answer.split(b" ", 2)[1]) if answer else 503
        if status in (429, 500, 503, 504):
            raise Unavailable(f"status {status}: {content[:200]!r}")
        value = json.loads(content)
        if status != 200:
            reason = value["error"]["code"].upper()
            raise (NotFound if status == 404 else WrongState)(value["error"]["message"], reason=reason)
        return _of_choice(value["choices"][0])

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call until it succeeds; raise Gone when its session or its task has ended."""
        for _ in range(_TRIES):
            try:
                return await call()
            except _TRANSIENT as error:
                await asyncio.sleep(min(error.retry_after or 0.1, 0.5) * self._random.uniform(0.5, 1.5))
            except NotFound:
                raise Gone from None
            except WrongState as error:
                if error.reason != "SESSION_NOT_OPEN":
                    raise
                raise Gone from None
        raise TimeoutError("the call failed too often")

    def _write(self, event: str, record: Record, **more: Any) -> None:
        line = json.dumps({"event": event, "session": record.session, **more}) + "\n"
        os.write(self._journal, line.encode())


def _question(task: pb.Task) -> str:
    return task.messages[-1].content if task.messages else task.text


def _of_choice(choice: Json) -> Json:
    given = choice["fourfold"]
    words = choice["logprobs"]["content"]
    assert [np.float32(word["logprob"]) for word in words] == [np.float32(value) for value in given["logprobs"]]
    versions = [span["policy_version"] for span in given["policy_versions"] for _ in range(span["token_count"])]
    message = {"role": "assistant", "content": choice["message"]["content"]}
    return {"ids": given["token_ids"], "logprobs": given["logprobs"], "versions": versions, "message": message}


def _be_agent(plan: AgentPlan, parent: int) -> None:
    """Run in a fork until the process is killed; a failure is written to the journal's neighbour."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(parent)
    try:
        asyncio.run(_run(plan))
    except BaseException as error:  # the test reads it
        import traceback

        text = "".join(traceback.format_exception(error))
        Path(plan.journal).with_suffix(".failure").write_text(text)
    finally:
        os._exit(1)


async def _run(plan: AgentPlan) -> None:
    await Agent(plan).run()


def main() -> None:
    """Fork an agent for each line of stdin; end, with all agents, when it is closed."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the agents
    parent = os.getpid()
    for line in sys.stdin:
        if not (pid := os.fork()):
            _be_agent(AgentPlan(**json.loads(line)), parent)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
