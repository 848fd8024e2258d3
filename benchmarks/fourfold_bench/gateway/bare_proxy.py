"""Passes the Generate calls of a rollout service on, and does nothing else: the least that a gRPC gateway can add.

python -m fourfold_bench.gateway.bare_proxy ENGINE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1 import rollout_service_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
_TIMEOUT_SECONDS: Final = 60.0


class BareProxy(pb_grpc.RolloutServiceServicer):
    """Neither checks a call nor reads its messages; only `Generate` is implemented."""

    def __init__(self, engine: str) -> None:
        self._engine = pb_grpc.RolloutServiceStub(grpc.aio.insecure_channel(engine))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        async for response in self._engine.Generate(request, timeout=_TIMEOUT_SECONDS):
            yield response


async def _serve(engine: str) -> None:
    server = grpc.aio.server()
    pb_grpc.add_RolloutServiceServicer_to_server(BareProxy(engine), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"READY 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve(sys.argv[1]))
