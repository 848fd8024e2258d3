"""A reward service that registers at a coordinator as the contract wants. Tests break it in one way each."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import grpc

from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2_grpc import MembershipServiceStub
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc


class ToyService(reward_grpc.RewardServiceServicer):
    async def GetInfo(self, request: reward.GetInfoRequest, context: Any) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(name="toy@1")

    async def Score(self, request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
        return reward.ScoreResponse(
            scores=[reward.SampleScore(sample_id=item.experience.sample_id, score=1) for item in request.items]
        )


class ToyMember:
    """A launcher whose service runs in this process."""

    role: pb.Role.ValueType = pb.ROLE_REWARD
    hash = b""
    factor = 1.0
    """Of the pause between two renewals."""
    pause = 0.2
    """Pause after an error, in seconds."""
    first_ttl_only = False
    registers_again = True
    keeps_old_token = False
    heeds_drain = True
    ends = True
    deregisters = True
    incarnations = True
    new_incarnation_each_time = False
    new_name = False
    timeout: float | None = 2.0
    exits_on_outage = False
    heeds_refusal = True
    drain_code, refusal_code = 0, 1

    def __init__(self) -> None:
        self.coordinator = ""
        self.incarnation = uuid.uuid4().hex
        self.starts = self.code = 0
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def target(self, port: int) -> str:
        return f"127.0.0.1:{port}"

    def dialled(self) -> set[str]:
        return {self.coordinator}

    async def start(self) -> None:
        self.starts += 1
        if self.incarnations:
            self.incarnation = uuid.uuid4().hex
        self._stop.clear()
        self.code = self.drain_code
        self._task = asyncio.create_task(self._run())

    async def terminate(self) -> None:
        self._stop.set()

    async def exit_code(self) -> int | None:
        if self._task is not None and not self._task.done():
            return None
        return self.code

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        server = grpc.aio.server()
        reward_grpc.add_RewardServiceServicer_to_server(ToyService(), server)
        self._target = self.target(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        options = [("grpc.enable_retries", 0), ("grpc.max_reconnect_backoff_ms", 300)]
        try:
            async with grpc.aio.insecure_channel(self.coordinator, options=options) as channel:
                stub: Any = MembershipServiceStub(channel)
                token = await self._member(stub)
                if self.deregisters and token:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await stub.Deregister(pb.DeregisterRequest(lease_token=token), timeout=2)
                if not self.ends:
                    await asyncio.sleep(1000)
        finally:
            await server.stop(0)

    def _request(self) -> pb.RegisterRequest:
        return pb.RegisterRequest(
            member_id=f"toy-{self.starts}" if self.new_name else "toy-0",
            incarnation=uuid.uuid4().hex if self.new_incarnation_each_time else self.incarnation,
            role=self.role,
            target=self._target,
            tokenizer_sha256=self.hash,
        )

    async def _member(self, stub: Any) -> bytes:
        """Register and renew until the service is to end; return the lease."""
        token, ttl, first = b"", 0.0, 0.0
        while not self._stop.is_set():
            try:
                if not token:
                    response = await stub.Register(self._request(), timeout=self.timeout)
                    token, first = response.lease_token, response.ttl.ToNanoseconds() / 1e9
                    ttl = first
                else:
                    response = await stub.KeepAlive(pb.KeepAliveRequest(lease_token=token), timeout=self.timeout)
                    ttl = response.ttl.ToNanoseconds() / 1e9
                    if response.drain_requested and self.heeds_drain:
                        break
                wait = (first if self.first_ttl_only else ttl) / 3 * self.factor
            except grpc.aio.AioRpcError as error:
                if self.exits_on_outage and error.code() is grpc.StatusCode.UNAVAILABLE:
                    break
                wait = self.pause
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION and self.heeds_refusal:
                    self.code = self.refusal_code
                    return b""
                if error.code() is grpc.StatusCode.NOT_FOUND and not self.keeps_old_token:
                    if not self.registers_again:
                        await self._stop.wait()
                    token, wait = b"", 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stop.wait()
        return token
