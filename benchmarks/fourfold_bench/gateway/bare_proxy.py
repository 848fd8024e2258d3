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

_SERVICE: Final = "fourfold.rollout.v1.RolloutService"
_TIMEOUT_SECONDS: Final = 60.0


async def _serve(engine: str) -> None:
    channel = grpc.aio.insecure_channel(engine, options=[("grpc.enable_http_proxy", 0)])
    call: Any = channel.unary_stream(f"/{_SERVICE}/Generate")  # without serializers: messages stay bytes

    async def generate(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        async for response in call(request, timeout=_TIMEOUT_SECONDS):
            yield response

    server = grpc.aio.server()
    handlers: Any = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"READY 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve(sys.argv[1]))
