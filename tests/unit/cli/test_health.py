"""`fourfold health` against a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from fourfold.cli.main import main
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.rpc.server import Server

RECIPE = str(Path(__file__).parents[3] / "recipes/quickstart.toml")


async def test_a_service_is_live_before_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(
        pb.DESCRIPTOR.services_by_name["MembershipService"],
        pb_grpc.add_MembershipServiceServicer_to_server,
        cast(Any, pb_grpc.MembershipServiceServicer)(),
    )
    target = await server.start()
    words = ["health", "coordinator", RECIPE, target]
    try:
        assert await asyncio.to_thread(main, [*words, "--live"]) == 0
        assert await asyncio.to_thread(main, words) == 1
        assert f"coordinator at {target} is NOT_SERVING" in capsys.readouterr().err
        server.set_ready(True)
        async with asyncio.timeout(5):  # the server tells its health in a task of its own
            while await asyncio.to_thread(main, words):
                await asyncio.sleep(0.05)
    finally:
        await server.stop(0.1)
    assert await asyncio.to_thread(main, words) == 1
