"""The HTTP server of the metrics endpoint: what it answers, and what hostile clients cannot do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold.service import metrics_server
from fourfold.service.exporter import OPEN_METRICS, TEXT
from fourfold.service.metrics_server import MAX_CONNECTIONS, DiscoveryFile, MetricsServer
from tests.support.scrape import http

BIG = b"x" * (32 << 20)


@pytest.fixture
async def target() -> AsyncIterator[str]:
    server = MetricsServer("127.0.0.1:0", page)
    yield await server.start()
    await server.stop()
    assert len(asyncio.all_tasks()) == 1, "no connection is left"


async def page(content_type: str) -> bytes:
    return b"open" if content_type == OPEN_METRICS else b"text"


async def silent(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and send nothing."""
    host, _, port = target.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /metrics HTTP/1.1", 200),
        ("GET /metrics?name=x HTTP/1.0", 200),
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("HEAD /metrics HTTP/1.1", 405),
        ("GET /metrics", 400),
        ("GET /metrics HTTP/2", 400),
        ("\x00\xff", 400),
        ("", 400),
    ],
)
async def test_one_page_is_there_and_only_for_get(target: str, request_line: str, status: int) -> None:
    code, head, body = await http(target, f"{request_line}\r\nHost: localhost:9\r\n\r\n")
    assert code == status
    assert f"Content-Length: {len(body)}" in head and "Connection: close" in head
    assert (body == "text") == (status == 200)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: evil.example", 421),
        ("X: y", 421),
        ("Host: 127.0.0.1\r\nOrigin: https://evil.example", 403),
        ("Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site", 403),
        ("HOST: metrics.example:443", 200),
        ("Host: 127.0.0.2:9100", 200),
        ("Host: [::1]:9100", 200),
        ("Host: 127.0.0.1.evil.example", 421),
    ],
)
async def test_a_web_page_of_another_site_cannot_read_the_page(headers: str, status: int) -> None:
    server = MetricsServer("127.0.0.1:0", page, names=["metrics.example"])
    code, _, body = await http(await server.start(), f"GET /metrics HTTP/1.1\r\n{headers}\r\n\r\n")
    await server.stop()
    assert (code, body == "text") == (status, status == 200)


async def test_the_client_chooses_the_format(target: str) -> None:
    for accept, content_type, body in (
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", OPEN_METRICS, "open"),
        ("text/plain", TEXT, "text"),
        ("application/json;version=\xff", TEXT, "text"),
    ):
        code, head, found = await http(target, f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nACCEPT: {accept}\r\n\r\n")
        assert (code, found) == (200, body) and f"Content-Type: {content_type}" in head


async def test_a_huge_header_is_refused(target: str) -> None:
    code, _, _ = await http(target, "GET /metrics HTTP/1.1\r\nX: " + "x" * 9000 + "\r\n\r\n")
    assert code == 431
    reader, writer = await silent(target)
    with pytest.raises(OSError):
        for _ in range(1000):  # never an end of the header
            writer.write(b"x" * 65536)
            await writer.drain()
        await reader.read()
        raise ConnectionResetError
    writer.close()
    assert (await http(target))[0] == 200


async def test_slow_clients_hold_a_few_connections_and_only_for_a_while(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.5)
    held = [await silent(target) for _ in range(MAX_CONNECTIONS)]
    held[0][1].write(b"GET /metrics HT")
    assert (await http(target))[0] == 503
    began = time.monotonic()
    assert [await reader.read() for reader, _ in held] == [b""] * MAX_CONNECTIONS
    assert time.monotonic() - began < 5
    assert (await http(target))[0] == 200
    for _, writer in held:
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.5)

    async def big(_content_type: str) -> bytes:
        return BIG

    server = MetricsServer("127.0.0.1:0", big)
    target = await server.start()
    _, writer = await silent(target)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(10):
        while not server._connections:
            await asyncio.sleep(0.01)
        while server._connections:
            await asyncio.sleep(0.01)
    writer.close()
    await server.stop()


async def test_hundreds_of_connections_leave_the_event_loop_free(target: str) -> None:
    clients = [await silent(target) for _ in range(300)]
    longest, before = 0.0, time.monotonic()
    for _ in range(100):
        await asyncio.sleep(0.001)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert longest < 0.5
    for _, writer in clients[:MAX_CONNECTIONS]:
        writer.close()
        await writer.wait_closed()
    async with asyncio.timeout(5):
        while (await http(target))[0] != 200:
            await asyncio.sleep(0.05)
    for _, writer in clients:
        writer.close()


async def test_a_stop_ends_the_connections() -> None:
    server = MetricsServer("127.0.0.1:0", page)
    target = await server.start()
    reader, writer = await silent(target)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        await server.stop()
        await server.stop()
        assert await reader.read() == b""
    with pytest.raises(OSError):
        await silent(target)
    writer.close()


async def test_addresses_that_may_not_be_used_are_refused(unused_port: int) -> None:
    for listen in ("0.0.0.0:0", "10.0.0.1:9400", "example.com:1", "[::]:0"):
        with pytest.raises(ConfigError, match="has no authentication and listens on loopback only"):
            MetricsServer(listen, page)
    with socket.create_server(("127.0.0.1", unused_port)):
        with pytest.raises(ConfigError, match=r"cannot listen there .*; give each service a port of its own"):
            await MetricsServer(f"127.0.0.1:{unused_port}", page).start()


async def test_prometheus_finds_the_service_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "reward-0.json"
    server = MetricsServer("127.0.0.1:0", page, discovery=DiscoveryFile(path, {"run": "r", "member": "reward-0"}))
    target = await server.start()
    (group,) = json.loads(path.read_text())
    assert group["targets"] == [target]
    assert group["labels"] == {"run": "r", "member": "reward-0", "host": socket.gethostname()}
    await server.stop()
    assert list(path.parent.iterdir()) == []


async def test_a_file_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics").write_text("in the way")
    server = MetricsServer("127.0.0.1:0", page, discovery=DiscoveryFile(tmp_path / "metrics" / "a.json", {}))
    assert (await http(await server.start()))[0] == 200
    assert "no file for Prometheus' service discovery" in caplog.text
    await server.stop()
