"""Measures the HTTP form of the gateway without engines: latency at a fixed rate, and CPU per request.

    python -m fourfold_bench.gateway_http tests.fakes.agent_api:FakeAgentApi --rate 200 --seconds 20

The server runs in this process, the clients in a child process, so that the CPU time of the first is that of HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import resource
import statistics
import sys
import time
from typing import Any

BODY = json.dumps({
    "model": "m", "messages": [{"role": "user", "content": "What is 2 + 2? " * 20}], "max_tokens": 64, "logprobs": False
}).encode()  # fmt: skip


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
    writer.write(head + BODY)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    length = next(int(line[16:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    await reader.readexactly(length)


async def _client(port: int, rate: float, seconds: float) -> dict[str, float]:
    """Send requests at their times (open loop); return the latencies in milliseconds, from the planned time on."""
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(32)]
    latencies, begin = list[float](), time.perf_counter()

    async def send(due: float) -> None:
        stream = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        await _request(*stream)
        latencies.append((time.perf_counter() - due) * 1000)
        idle.append(stream)

    async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            group.create_task(send(due))
    cuts = statistics.quantiles(latencies, n=100)
    return {"requests": len(latencies), "p50_ms": cuts[49], "p95_ms": cuts[94], "p99_ms": cuts[98]}


async def _serve(api: Any, rate: float, seconds: float) -> dict[str, float]:
    from fourfold.config.agents import GatewayConfig
    from fourfold_rollout.gateway.http.server import serve_http

    server = await serve_http(api, GatewayConfig(), None)
    port = server.address.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "fourfold_bench.gateway_http", "--client", port]
    command += ["--rate", str(rate), "--seconds", str(seconds)]
    before = resource.getrusage(resource.RUSAGE_SELF)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), seconds + 120)
    finally:
        if child.returncode is None:
            child.kill()
        await server.stop(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, float] = json.loads(output)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**result, "cpu_ms_per_request": cpu * 1000 / result["requests"]}


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("api", nargs="?", default="", help="MODULE:CLASS of an AgentApi without arguments")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        result = asyncio.run(_client(arguments.client, arguments.rate, arguments.seconds))
    else:
        module, _, name = arguments.api.partition(":")
        api = getattr(importlib.import_module(module), name)()
        result = asyncio.run(_serve(api, arguments.rate, arguments.seconds))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
