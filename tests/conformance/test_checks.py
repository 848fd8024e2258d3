"""What a check's exception means, and HTTP responses that never end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, Unavailable
from fourfold_tools.conformance.checks import Checks, Finding, Skipped, Violation
from fourfold_tools.conformance.gateway.http_client import HttpClient, Response


def raising(error: BaseException) -> Callable[[None], Awaitable[None]]:
    async def check_it(probe: None) -> None:
        """A rule."""
        raise error

    return check_it


async def outcome(error: BaseException) -> list[Finding]:
    checks = Checks[None]()
    checks.add(raising(error))

    @checks.add
    async def check_next(probe: None) -> None:
        """Another rule."""

    return list(await checks.run(None))


RPC = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "oh\x1b[31m")


@pytest.mark.parametrize(
    ("error", "status", "text", "following"),
    [
        (Violation("bad\x1b[31m"), "broken", "bad", "ok"),
        (Skipped("why\n"), "skipped", "why", "ok"),
        (Unavailable("gone"), "broken", "UNAVAILABLE: gone", "not run"),
        (DeadlinePassed("late"), "broken", "DEADLINE_PASSED: late", "not run"),
        (FourfoldError("odd", reason="ODD"), "broken", "ODD: odd", "ok"),
        (RPC, "broken", "INTERNAL: the service: oh", "ok"),
        (KeyError("choices"), "broken", "a response could not be read", "ok"),
        (TimeoutError(), "broken", "did not come in time", "ok"),
    ],
)
async def test_every_exception_of_a_check_is_a_finding(
    error: BaseException, status: str, text: str, following: str
) -> None:
    first, second = await outcome(error)
    assert (first.status, second.status) == (status, following)
    assert text in first.text and first.text.isprintable()


async def test_wrong_usage_is_no_finding() -> None:
    with pytest.raises(ConfigError):
        await outcome(ConfigError("--http"))


@pytest.fixture
def dripping() -> Iterator[str]:
    """Serve a response whose body comes byte by byte, without an end."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while not stop.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join()


async def test_a_body_without_an_end_ends_at_the_deadline(dripping: str) -> None:
    client = HttpClient(dripping, seconds=0.3, authority=Path())
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await client.request("GET", "/v1/models")
    assert time.monotonic() - began < 20, "it must not read to the end of the body"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_server_sent_events_may_end_their_lines_in_two_ways(end: str) -> None:
    lines = ["event: message", 'data: {"a": "b\u2028c"}', "", "data: [DONE]", "", ""]
    assert Response(200, {}, end.join(lines).encode()).events() == ['{"a": "b\u2028c"}', "[DONE]"]
