"""Serves the page of the metrics endpoint over HTTP on loopback: GET /metrics, nothing else.

The page has no secrets, but no client is authenticated either, so the server listens on loopback only. Each connection
gets one response, within a few seconds, and few connections are open at a time: a client that is slow, hostile or one
of thousands takes a bounded share of the service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError
from fourfold.rpc.channel import is_loopback, join_target, split_target
from fourfold.security.web_pages import joined, refusal
from fourfold.service.exporter import OPEN_METRICS, TEXT

_log = logging.getLogger("fourfold.service.metrics_server")

MAX_CONNECTIONS: Final = 8
MAX_REQUEST_BYTES: Final = 8192
CONNECTION_SECONDS: Final = 5.0
_PATH: Final = re.compile(rb"/metrics(\?.*)?")
_END: Final = b"\r\n\r\n"


class MetricsServer:
    """An HTTP server with one page. Use it from one event loop."""

    def __init__(
        self,
        listen: str,
        page: Callable[[str], Awaitable[bytes]],
        *,
        discovery: DiscoveryFile | None = None,
        names: Collection[str] = (),
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            listen: "host:port" on loopback; port 0 selects a free port.
            page: returns the page in a content type, `TEXT` or `OPEN_METRICS`.
            discovery: file with the address, while the server listens.
            names: further names that requests may give this machine.

        Raises:
            ConfigError: the address is malformed, or not on loopback.
        """
        self._host, self._port = split_target(listen)
        if not is_loopback(self._host):
            raise ConfigError(
                f"metrics endpoint {listen!r}: it has no authentication and listens on loopback only; use "
                f"127.0.0.1, and scrape it from this machine or through a proxy (docs/monitoring.md)"
            )
        self._page, self._discovery, self._names = page, discovery, names
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen, and return the bound "host:port"; raise ConfigError if this machine cannot listen there."""
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"metrics endpoint {join_target(self._host, self._port)!r}: this machine cannot listen there "
                f"({error.strerror or error}); give each service a port of its own, or port 0 for any free one"
            ) from None
        target = join_target(self._host, self._server.sockets[0].getsockname()[1])
        _log.info("metrics endpoint started: http://%s/metrics", target)
        if self._discovery is not None:
            self._discovery.write(target)
        return target

    async def stop(self) -> None:
        """Close the port and all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            if self._discovery is not None:
                self._discovery.remove()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # Not a coroutine: asyncio would create a task for each connection before this method could refuse it.
    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.write(_response(HTTPStatus.SERVICE_UNAVAILABLE))
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # OSError: the client has left, or has passed the deadline; a TimeoutError is an OSError.
        try:
            with suppress(OSError):
                async with asyncio.timeout(CONNECTION_SECONDS):
                    writer.write(await self._respond(reader))
                    writer.close()
                    await writer.wait_closed()
        finally:
            writer.transport.abort()  # also drops data that a client has not read

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        """Return the response to the request of a connection."""
        try:
            head = await reader.readuntil(_END)
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError:
            return b""
        request, *fields = head.removesuffix(_END).split(b"\r\n")
        words = request.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if not _PATH.fullmatch(words[1]):
            return _response(HTTPStatus.NOT_FOUND)
        if words[0] != b"GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n")
        pairs = (field.partition(b":") for field in fields)
        headers = joined((name, value) for name, _, value in pairs)
        if refused := refusal("GET", headers, self._names):
            return _response(HTTPStatus(refused[0]), body=refused[1].encode())
        content_type = OPEN_METRICS if "application/openmetrics-text" in headers.get("accept", "") else TEXT
        return _response(HTTPStatus.OK, f"Content-Type: {content_type}\r\n", await self._page(content_type))


def _response(status: HTTPStatus, fields: str = "", body: bytes = b"") -> bytes:
    body = body or f"{status.phrase}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class DiscoveryFile:
    """A file that tells a Prometheus on this machine where a service is (`file_sd_configs`)."""

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        """Prepare; `labels` are added to every metric of the service."""
        self._path, self._labels = path, labels

    def write(self, target: str) -> None:
        """Write the file; a failure is only logged, because the service works without it."""
        group = {"targets": [target], "labels": {**self._labels, "host": socket.gethostname()}}
        partial = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps([group]) + "\n", encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            _log.warning("no file for Prometheus' service discovery: path=%s reason=%s", self._path, error)

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()
