"""A small HTTP client for the checks: one request for each connection, JSON and server-sent events, TLS by our CA."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.security.material import server_name
from fourfold.security.principal import Principal
from fourfold_tools.conformance.calls import LONGEST_PAUSE, MOST_PAUSES
from fourfold_tools.conformance.checks import Violation

_MAX_BODY_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its whole body."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON; raise Violation if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise Violation(f"the body of a response with status {self.status} is not JSON") from None

    def events(self) -> list[str]:
        """Return the data of server-sent events."""
        found = list[str]()
        text = self.body.decode("utf-8", "replace").replace("\r\n", "\n")  # both are ends of a line
        for block in text.split("\n\n"):
            lines = [line.removeprefix("data:").strip() for line in block.split("\n") if line.startswith("data:")]
            if lines:
                found.append("\n".join(lines))
        return found


class HttpClient:
    """Calls the HTTP API of one gateway."""

    def __init__(self, url: str, *, seconds: float, authority: Path) -> None:
        """Check the URL.

        Args:
            url: base URL.
            seconds: time limit of a request.
            authority: file with the CA's certificate, for https.

        Raises:
            ConfigError: the URL is malformed, or the certificate cannot be read.
        """
        wrong = ConfigError(f"--http {url!r:.120}: give a URL such as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # of an open bracket, or of a port above 65535
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._seconds = seconds
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._context = ssl.create_default_context(cafile=str(authority))
            except OSError as error:
                raise ConfigError(f"--http {url}: https needs --certs with ca.pem: {error}") from None

    async def request(
        self, verb: str, path: str, body: Any = None, *, key: str = "", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Make a request; a body that is not bytes is sent as JSON. A response with Retry-After is waited for.

        Raises:
            Unavailable: the API cannot be reached, or does not speak HTTP.
            DeadlinePassed: it did not answer in time.
        """
        for _ in range(MOST_PAUSES):
            response = await asyncio.to_thread(self._request, verb, path, body, key, dict(headers or {}))
            delay = response.headers.get("retry-after", "")
            if response.status != HTTPStatus.TOO_MANY_REQUESTS or not delay.isdecimal() or int(delay) > LONGEST_PAUSE:
                break
            await asyncio.sleep(int(delay))
        return response

    def _request(self, verb: str, path: str, body: Any, key: str, headers: dict[str, str]) -> Response:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            headers = {"content-type": "application/json", **headers}
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection = _Connection(self._host, self._port, timeout=self._seconds)
        connection.context = self._context
        # The timeout of a socket is that of one read; a server could send a byte for each of them.
        late = threading.Event()
        watchdog = threading.Timer(self._seconds, connection.cut, (late,))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request(verb, self._prefix + path, data, headers)
            response = connection.getresponse()
            content = response.read(_MAX_BODY_BYTES)
            if late.is_set():
                raise TimeoutError
            return Response(response.status, {k.lower(): v for k, v in response.getheaders()}, content)
        except TimeoutError:
            raise DeadlinePassed(f"{verb} {path} had no answer in {self._seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                raise DeadlinePassed(f"{verb} {path} took longer than {self._seconds:g} s") from None
            raise Unavailable(f"{verb} {path} at {self._host}:{self._port}: {error}") from None
        finally:
            watchdog.cancel()
            connection.close()


class _Connection(http.client.HTTPConnection):
    """Expects the name of a gateway in the certificate, whatever address it dials."""

    context: ssl.SSLContext | None = None

    def cut(self, late: threading.Event) -> None:
        """End the connection, and with it a read in another thread."""
        late.set()
        with suppress(OSError, AttributeError):  # it may be closed, or not yet open
            self.sock.shutdown(socket.SHUT_RDWR)

    def connect(self) -> None:
        super().connect()
        if self.context is not None:
            plain: socket.socket = self.sock
            self.sock = self.context.wrap_socket(plain, server_hostname=server_name(Principal("gateway")))
