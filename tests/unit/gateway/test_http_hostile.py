"""Hostile clients of the HTTP port get a clear error, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fourfold.config import SecurityConfig
from fourfold.config.agents import GatewayConfig
from fourfold.errors import ConfigError
from fourfold.rpc.limits import Quotas
from fourfold.security.access import Security
from fourfold.security.principal import CallerLimits, Principal
from fourfold_gateway.api import Caller
from fourfold_gateway.http.server import HttpServer, serve_http
from fourfold_tools import certs
from tests.fakes.agent_api import FakeAgentApi

JSON = {"content-type": "application/json"}
GOOD = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


@asynccontextmanager
async def served(*, api: FakeAgentApi | None = None, **config: Any) -> AsyncIterator[HttpServer]:
    limits = GatewayConfig(**{"max_body_mib": 1, "body_seconds": 0.5, **config})
    server = await serve_http(api or FakeAgentApi(), limits, None)
    try:
        yield server
        async with httpx.AsyncClient() as client:  # others are served still
            good = await client.post(server.url + "/v1/chat/completions", content=GOOD, headers=JSON, timeout=20)
            assert good.status_code == 200
    finally:
        await server.stop(1.0)


async def exchange(server: HttpServer, *pieces: bytes, pause: float = 0.0) -> tuple[int, str]:
    """Send pieces of bytes, with a pause before each; return status and text of the response."""
    host, port = server.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            await asyncio.sleep(pause)
            writer.write(piece)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(65_536), 20)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", f"content-length: {size}", *headers, "", ""]
    if not any(header.startswith("content-type") for header in headers):
        lines.insert(1, "content-type: application/json")
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "send an object"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', "NaN"),
        (b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}', "too large a number"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"seed": ' + b"9" * 4000 + b"}", "seed is"),
        (b'{"messages": ' + b"[" * 100_000, "too deeply"),
        (b'{"messages": ' + b'{"a":' * 100_000, "too deeply"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"messages": {"role": "user"}}', "send an array"),
    ],
)
async def test_a_bad_body_is_refused(body: bytes, text: str) -> None:
    async with served() as server:
        status, answer = await exchange(server, post(body))
    assert status == 400
    assert text in json.loads(answer)["error"]["message"]


async def test_a_schema_that_nests_deeply_is_refused() -> None:
    schema = b'{"a":' * 900 + b"1" + b"}" * 900
    form = b'{"type": "json_schema", "json_schema": {"schema": ' + schema + b"}}"
    async with served() as server:
        body = b'{"messages": [{"role": "user", "content": "x"}], "response_format": ' + form + b"}"
        status, _ = await exchange(server, post(body))
    assert status in (200, 400)


async def test_a_body_of_very_many_values_is_refused() -> None:
    async with served() as server:
        status, answer = await exchange(server, post(b'{"a":[' + b"1," * 510_000 + b"1]}"))
    assert (status, "500000 values" in answer) == (413, True)


@pytest.mark.parametrize("headers", [(), ("expect: 100-continue",)])
async def test_a_giant_body_is_refused(headers: tuple[str, ...]) -> None:
    async with served() as server:
        assert (await exchange(server, post(b"", *headers, length=1 << 40)))[0] == 413
        if not headers:
            assert (await exchange(server, post(b" " * (3 << 20))))[0] == 413


async def test_a_body_whose_prompt_cannot_fit_the_context_is_not_read() -> None:
    async with served(api=FakeAgentApi(max_context_tokens=4608), max_body_mib=8) as server:
        status, answer = await exchange(server, post(b"", length=7 << 20))
        assert (status, "at most 884736 are allowed: shorten the prompt" in answer) == (413, True)
        assert (await exchange(server, post(GOOD + b" " * 800_000, "connection: close")))[0] == 200


async def test_chunked_compressed_and_foreign_bodies_are_refused() -> None:
    async with served() as server:
        head = post(b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
        assert (await exchange(server, head, b"1\r\n \r\n" * 100_000))[0] == 411
        assert (await exchange(server, post(GOOD, "content-encoding: gzip")))[0] == 415
        for kind in ("text/xml", "text/plain", ""):
            assert (await exchange(server, post(GOOD, f"content-type: {kind}")))[0] == 415
        untyped = post(GOOD).replace(b"content-type: application/json\r\n", b"")
        assert (await exchange(server, untyped))[0] == 415


async def test_slow_headers_and_slow_bodies_end_after_the_time() -> None:
    async with served() as server:
        assert (await exchange(server, b"POST /v1/messages HTTP/1.1\r\nhost:"))[0] == 408
        assert (await exchange(server, b""))[0] == 408
        assert (await exchange(server, post(b"{", length=100)))[0] == 408


async def test_half_open_requests_on_a_used_connection_end_too() -> None:
    async with served() as server:
        host, port = server.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert b"200" in await reader.readline()
        writer.write(b"GET /v1/mod")
        rest = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert b" 408 " in rest


@pytest.mark.parametrize("flood", [b"x-a: b\r\n" * 20_000, b"x-a: " + b"b" * 200_000, b"\x00\x01", b"x" * 100_000])
async def test_header_floods_and_noise_are_refused(flood: bytes) -> None:
    async with served() as server:
        status, answer = await exchange(server, b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n" + flood, b"\r\n\r\n")
    assert status == 400
    assert "not valid HTTP" in answer


async def test_connections_beyond_the_limit_get_503() -> None:
    async with served(max_connections=3, body_seconds=5) as server:
        host, port = server.address.rsplit(":", 1)
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        await asyncio.sleep(0.1)
        status, answer = await exchange(server, b"")
        assert (status, "too many connections" in answer) == (503, True)
        for _, writer in held:
            writer.close()
            await writer.wait_closed()


async def test_a_client_that_still_sends_gets_the_answer_and_no_reset() -> None:
    late = post(GOOD)
    unread = post(b"", length=400_000).replace(b"/v1/chat", b"/v2/chat")
    async with served(max_connections=3, body_seconds=5) as server:
        assert (await exchange(server, unread, *[b" " * 100_000] * 4, pause=0.05))[0] == 404
        host, port = server.address.rsplit(":", 1)
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        assert (await exchange(server, late[:20], late[20:90], late[90:], pause=0.1))[0] == 503
        for _, writer in held:
            writer.close()
            await writer.wait_closed()


async def test_a_refused_client_that_does_not_end_is_cut_after_its_time() -> None:
    async with served(max_connections=1, body_seconds=5) as server:
        host, port = server.address.rsplit(":", 1)
        _, held = await asyncio.open_connection(host, int(port))
        reader, writer = await asyncio.open_connection(host, int(port))
        assert b" 503 " in await asyncio.wait_for(reader.read(), 20)
        with pytest.raises(OSError):
            async with asyncio.timeout(20):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.1)
        writer.close()
        held.close()


class LimitedApi(FakeAgentApi):
    """Lets each caller have two calls in flight."""

    quotas = Quotas(lambda _: CallerLimits(concurrent_calls=2))

    def admit(self, caller: Caller) -> AbstractContextManager[None]:
        return self.quotas.call(caller.principal)


async def test_slow_bodies_count_for_the_limits_of_their_caller() -> None:
    async with served(api=LimitedApi()) as server:
        slow = [asyncio.create_task(exchange(server, post(b"{", length=100))) for _ in range(2)]
        await asyncio.sleep(0.2)
        status, answer = await exchange(server, post(GOOD, "connection: close"))
        assert (status, json.loads(answer)["error"]["code"]) == (429, "too_many_calls")
        assert [status for status, _ in await asyncio.gather(*slow)] == [408, 408]


PAGE = "https://evil.example"
CLOSE = "/v1/sessions/s1/close"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", CLOSE, {"host": "evil.example:8000"}, 421),
        ("GET", "/v1/models", {"host": "127.0.0.1.evil.example", "origin": "http://127.0.0.1.evil.example"}, 421),
        ("POST", CLOSE, {"origin": PAGE}, 403),
        ("POST", CLOSE, {"origin": "null", "sec-fetch-site": "cross-site"}, 403),
        ("POST", CLOSE, {"origin": "http://127.0.0.1:1"}, 403),
        ("POST", CLOSE, {"sec-fetch-site": "same-site"}, 403),
        ("POST", CLOSE, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ("GET", "/v1/sessions/s1", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", "/v1/models", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ("POST", CLOSE, {"sec-fetch-site": "none"}, 200),
        ("POST", CLOSE, {"host": "localhost.:8000"}, 200),
        ("POST", CLOSE, {"host": "LOCALHOST", "sec-fetch-mode": "cors"}, 200),
        ("POST", CLOSE, {"host": "agents.example", "origin": "https://agents.example"}, 200),
        ("POST", CLOSE, {"host": "agents.example", "origin": PAGE}, 403),
    ],
)
async def test_a_web_page_of_another_site_cannot_use_the_port(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    api = FakeAgentApi()
    server = await serve_http(api, GatewayConfig(), None, ["Agents.example"])
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            outcome = {"reward": 1.0} if method == "POST" else None
            answer = await client.request(method, path, headers=headers, json=outcome)
            assert answer.status_code == status, answer.text
            assert len(api.closed) == (status == 200 and method == "POST")
            own = {"origin": server.url, "sec-fetch-site": "same-origin"}
            assert (await client.post("/v1/chat/completions", content=GOOD, headers=JSON | own)).status_code == 200
    finally:
        await server.stop(1.0)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /v1/chat/completions", 405), ("GET /v2/models", 404), ("GET /sessions/../v1/models", 404),
     ("DELETE /v1/sessions/s1", 405), ("POST /sessions/s1/v1/tasks/next", 404)],
)  # fmt: skip
async def test_unknown_paths_and_verbs_are_refused(request_line: str, status: int) -> None:
    async with served() as server:
        assert (await exchange(server, f"{request_line} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()))[0] == status


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [("sec-fetch-site: cross-site", "sec-fetch-site: none", 403), (f"origin: {PAGE}", "origin: http://localhost", 403),
     ("content-type: text/plain", "content-type: application/json", 415)],
)  # fmt: skip
async def test_each_of_two_equal_headers_counts(first: str, last: str, status: int) -> None:
    async with served() as server:
        assert (await exchange(server, post(GOOD, first, last, "connection: close")))[0] == status


async def test_beyond_loopback_http_needs_tls() -> None:
    with pytest.raises(ConfigError, match="loopback only"):
        await serve_http(FakeAgentApi(), GatewayConfig(http_listen="0.0.0.0:0"), None)


async def test_a_port_in_use_is_named() -> None:
    async with served() as server:
        with pytest.raises(ConfigError, match=r"^gateway\.http_listen = .*: port \d+ is in use by another process"):
            await serve_http(FakeAgentApi(), GatewayConfig(http_listen=server.address), None)


async def test_tls_uses_the_certificates_of_the_run_and_follows_their_renewal(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    certs.make(folder)
    security = Security.load(SecurityConfig(directory=str(folder)), Principal("gateway", "gateway-0"))
    assert security is not None
    server = await serve_http(FakeAgentApi(), GatewayConfig(http_listen="0.0.0.0:0"), security)
    port = int(server.address.rsplit(":", 1)[1])
    assert server.url_by("gateway.internal") == f"https://gateway.internal:{port}", (
        "0.0.0.0 is no address to connect to"
    )
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    seen = set[bytes]()
    try:
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            seen.add(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: gateway.internal\r\nconnection: close\r\n\r\n")
            assert b"toy" in await reader.read()
            writer.close()
            certs.renew(folder, ["gateway-0"])
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{port}/v1/models")
    finally:
        await server.stop(1.0)
    assert len(seen) == 2
