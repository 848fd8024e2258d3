"""A fake reward service that breaks its contract in twenty ways and then answers correctly.

    coordinator <--TCP--> FaultyProxy: resets, closes or delays <--TCP--> generic gRPC server: any bytes as response

In step n it has the n-th fault of `FAULTS`, modulo 20.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from fourfold.config import Config
from fourfold.reward.v1 import reward_service_pb2 as pb
from tests.fakes.toy_scorers import FakeReward

Context = grpc.aio.ServicerContext[Any, Any]

BAD_CALLS: Final = 3
"""Number of bad responses per step."""
# gRPC itself sends a call up to four times if it fails with UNAVAILABLE.
_MANY_CALLS: Final = {"reset": 5, "close mid-stream": 5}
# Name of the fault -> kinds that the report may have for it.
FAULTS: Final[dict[str, set[str]]] = {
    "wrong count": {"WRONG_COUNT"},
    "wrong ids": {"WRONG_IDS"},
    "wrong order": {"WRONG_ORDER"},
    "nan": {"NOT_FINITE"},
    "inf": {"NOT_FINITE"},
    "no outcome": {"NO_OUTCOME"},
    "code 0": {"BAD_CODE"},
    "huge message": {"RESPONSE_TOO_LARGE"},
    "garbage bytes": {"MALFORMED_RESPONSE"},
    "hang": {"DEADLINE_PASSED"},
    "slow drip": {"DEADLINE_PASSED"},
    "reset": {"UNAVAILABLE"},
    "close mid-stream": {"UNAVAILABLE"},
    "die and restart": {"LEASE_ENDED"},
    "all errors": {"ALL_BROKEN"},
    "half errors": {"HALF_BROKEN"},
    "abstain": {"NO_IDEA"},
    "wrong deadline": {"WRONG_DEADLINE"},
    "20,000 components": {"BAD_COMPONENTS"},
    "control characters": {"BAD_COMPONENTS"},
}
STEPS: Final = 2 * len(FAULTS)
DRIPS: Final = 8
DRIP_SECONDS: Final = 0.12
RED: Final = "\x1b[31m\u202e\x07"


def good_score(completion: str) -> float:
    """Return the score of a correct response. It is never 0, so a 0 in a file is a bug of the coordinator."""
    return 0.5 + sum(map(ord, completion)) % 8 / 8


def check_scores(lines: Sequence[Mapping[str, Any]]) -> None:
    """Check samples.jsonl: each score is that of a correct response, and samples without one were dropped."""
    for line in lines:
        missing = line["dropped"] not in ("", "FILTERED")
        assert line["score"] == (None if missing else good_score(line["completion"])), line
        assert 0 < len(line["scorer"]) <= 200 or missing


def check_names(report: Mapping[str, Any], *, without: Collection[str] = ()) -> None:
    """Check that report.json names each fault: as a fault of the service, or as the reason of dropped samples."""
    named = {row["kind"] for row in report["faults"] if row["peer"] == "reward-0"} | set(report["dropped"])
    assert {fault: kinds for fault, kinds in FAULTS.items() if not kinds & named and fault not in without} == {}
    assert all(row["count"] > 0 and row["first"] for row in report["faults"])


class HostileReward(FakeReward):
    """Answers the first calls of each training step with a fault."""

    def __init__(self, member_id: str, config: Config, *, step: Callable[[], Awaitable[int]]) -> None:
        """Create the service; `step` returns the number of finished steps."""
        super().__init__(member_id, config)
        self.outcome = lambda item: pb.SampleScore(score=good_score(item.completion_text))
        self._step = step
        self.bad = Counter[tuple[int, str]]()
        """Number of bad responses by step and fault."""
        self._proxy = FaultyProxy()
        self._raw: grpc.aio.Server | None = None
        self._coordinator = ""
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port behind the proxy."""
        self._raw = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        self._raw.add_generic_rpc_handlers([_Handler(self)])
        port = self._raw.add_insecure_port("127.0.0.1:0")
        await self._raw.start()
        self.target = f"127.0.0.1:{await self._proxy.listen(port)}"

    async def join(self, coordinator: str) -> None:
        self._coordinator = coordinator
        await super().join(coordinator)

    async def kill(self) -> None:
        await self._leave_alone()
        await self._proxy.close()
        if self._raw is not None:
            await self._raw.stop(0)

    async def info(self, request: bytes, context: Context) -> bytes:
        """Answer GetInfo."""
        return pb.GetInfoResponse(name=f"hostile{RED}@1" + "x" * 100_000, max_sample_count=64).SerializeToString()

    async def score(self, data: bytes, context: Context) -> bytes:
        """Answer Score."""
        request = pb.ScoreRequest.FromString(data)
        answer = pb.ScoreResponse(scores=[self._score(item) for item in request.items])
        training = any(not item.experience.sample_id.startswith("eval") for item in request.items)
        step = await self._step()
        fault = list(FAULTS)[step % len(FAULTS)]
        calls = 1 if fault == "die and restart" else _MANY_CALLS.get(fault, BAD_CALLS)
        if not training or self.bad[step + 1, fault] >= calls:
            return answer.SerializeToString()
        self.bad[step + 1, fault] += 1
        return await self._misbehave(fault, answer, context)

    async def _misbehave(self, fault: str, answer: pb.ScoreResponse, context: Context) -> bytes:
        scores = answer.scores
        match fault:
            case "wrong count":
                del scores[0]
            case "wrong ids":
                scores[0].sample_id = "another-sample"
            case "wrong order":
                answer = pb.ScoreResponse(scores=list(reversed(scores)) if len(scores) > 1 else [scores[0], scores[0]])
            case "huge message":
                scores[0].error.CopyFrom(pb.SampleError(code=2, reason="RAISED", message="x" * (17 << 20)))
            case "garbage bytes":
                return b"\xff" * 64
            case "hang":
                await asyncio.sleep(60)
            case "slow drip" | "reset" | "close mid-stream":
                self._proxy.mode = fault
            case "die and restart":
                self._ending.add(asyncio.get_running_loop().create_task(self._restart()))
                await asyncio.sleep(60)
            case "wrong deadline":
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
            case _:
                for index, score in enumerate(scores):
                    _spoil(fault, index, score)
        return answer.SerializeToString()

    async def _restart(self) -> None:
        await self.kill()
        await self.start()
        await self.join(self._coordinator)


def _spoil(fault: str, index: int, score: pb.SampleScore) -> None:
    """Put a fault into one score."""
    match fault:
        case "nan":
            score.score = math.nan
        case "inf":
            score.score = math.inf
        case "no outcome":
            score.ClearField("outcome")
        case "code 0":
            score.error.CopyFrom(pb.SampleError(code=0, reason="RAISED"))
        case "all errors":
            score.error.CopyFrom(pb.SampleError(code=2, reason="ALL_BROKEN", message=f"KeyError{RED} (scorer.py:7)"))
        case "half errors" if index % 2:
            score.error.CopyFrom(pb.SampleError(code=2, reason="HALF_BROKEN", message="ValueError (scorer.py:9)"))
        case "abstain":
            score.abstain_reason = "NO_IDEA"
        case "20,000 components":
            score.components.update({f"c{number}": 1.0 for number in range(20_000)})
        case "control characters":
            score.components[f"{RED}part"] = 1.0


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, service: HostileReward) -> None:
        self._service = service

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = self._service.info if details.method.endswith("/GetInfo") else self._service.score
        return grpc.unary_unary_rpc_method_handler(method)


class FaultyProxy:
    """TCP proxy that can disturb one response of the server."""

    def __init__(self) -> None:
        self.mode = ""
        """Fault of the next bytes of the server: "reset", "close mid-stream", "slow drip"; empty: none."""
        self._port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, port: int) -> int:
        """Forward connections to the server at `port`; return the port of the proxy."""
        self._port = port
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
        up = asyncio.ensure_future(_forward(reader, ours))
        try:
            while data := await theirs.read(1 << 16):
                mode, self.mode = self.mode, ""
                match mode:
                    case "reset":
                        sock = writer.get_extra_info("socket")
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    case "close mid-stream":
                        writer.write(data[: len(data) // 2])
                        await writer.drain()
                        return
                    case "slow drip":
                        for _ in range(DRIPS):
                            writer.write(data[:1])
                            data = data[1:]
                            await asyncio.sleep(DRIP_SECONDS)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            up.cancel()
            for one in (writer, ours):
                one.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
