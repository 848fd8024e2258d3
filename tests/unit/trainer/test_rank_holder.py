"""What a machine with ranks alone says when rank 0 is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold_trainer.ranks import holder
from fourfold_trainer.ranks.holder import RankHolder


class RankZero(pb_grpc.RankServiceServicer):
    """Answers the hello, and then nothing."""

    async def AttachRanks(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.AttachRanksResponse]:
        yield pb.AttachRanksResponse(hello=pb.RankZeroHello(host="here"))
        await asyncio.sleep(60)


async def test_a_rank_zero_that_vanishes_is_told_as_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    pb_grpc.add_RankServiceServicer_to_server(RankZero(), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    held = RankHolder.__new__(RankHolder)
    held._options, held._security = SimpleNamespace(member_id="trainer-0"), None  # type: ignore[assignment]
    held._stops_when_saved = held._attached = False

    async def carry(call: Any, _host: str) -> bool:
        await server.stop(0)
        await call.read()
        raise AssertionError("the stream has no second message")

    monkeypatch.setattr(held, "_carry", carry)
    monkeypatch.setattr(held, "_hello", lambda _secret: pb.RanksHello())
    monkeypatch.setattr(held, "_announce", lambda _host: None)
    monkeypatch.setattr(holder, "_ASK_SECONDS", 0.0)
    assert not await held._attach_once(target, b"secret")
    (record,) = caplog.records
    peer = f"rank 0 at {target}"
    text = f"connection to {peer} lost (was it killed?), waiting for a new one: {peer}, AttachRanks: "
    assert record.getMessage().startswith(text)
