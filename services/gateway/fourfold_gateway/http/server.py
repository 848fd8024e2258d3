"""Listens for HTTP: connections and their limits, TLS, start and stop.

uvicorn parses requests (h11). Its own limits leave gaps that are closed here: headers that never end, clients that
open many connections, and those that still send when they are refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from fourfold.address import is_wildcard
from fourfold.config.agents import GatewayConfig
from fourfold.errors import ConfigError, FourfoldError, Unavailable
from fourfold.rpc.channel import is_loopback, join_target, split_target
from fourfold.rpc.connection_limit import MAX_PER_ADDRESS
from fourfold.rpc.server import explain_bind
from fourfold.security.access import Security
from fourfold_gateway.api import AgentApi
from fourfold_gateway.http.app import GatewayApp
from fourfold_gateway.http.errors import RequestError, encode, error_body, error_headers, status_of

log = logging.getLogger("fourfold.gateway.http")

_MAX_HEADER_BYTES: Final = 32 * 1024
_KEEP_ALIVE_SECONDS: Final = 75
_BACKLOG: Final = 1024
# h11 spends about 10 us on each event. The first bytes are parsed separately, so that a body of tiny chunks is noticed
# before 256 KiB of them are parsed in one turn of the event loop.
_FIRST_BYTES: Final = 8 * 1024
_LINGER_SECONDS: Final = 1.0
_MAX_LINGERING: Final = 256


class Lingering:
    """Limits the connections of a server that wait for their clients to close; further ones close at once."""

    def __init__(self) -> None:
        self._count = 0

    def enter(self) -> bool:
        """Count one connection; False when there are too many."""
        if self._count >= _MAX_LINGERING:
            return False
        self._count += 1
        return True

    def leave(self) -> None:
        """Stop counting a connection."""
        self._count -= 1


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` first waits until the client has closed its side, at most for a second.

    A kernel resets a connection that is closed while the client sends, and the client may then lose the answer that it
    has not read. So `close` sends the end of the stream and reads the client's bytes until the client closes. Protocols
    must ignore bytes that come while `is_closing()`. With TLS, which has no half-closed streams, the client sees the
    end later.
    """

    def __init__(self, inner: asyncio.Transport, lingering: Lingering, client_is_done: Callable[[], bool]) -> None:
        """Wrap a transport; `close` does not wait for a client that has sent all of its request."""
        super().__init__()
        self._inner, self._lingering, self._client_is_done = inner, lingering, client_is_done
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close after the buffered bytes, and after the client's end."""
        if self.is_closing():
            return
        if self._client_is_done() or not self._lingering.enter():
            self._inner.close()
            return
        self._timer = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._inner.close)
        self._inner.resume_reading()
        if self._inner.can_write_eof():
            self._inner.write_eof()

    def lost(self) -> None:
        """Note that the connection has ended and its protocol knows it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._lingering.leave()

    def is_closing(self) -> bool:
        return self._timer is not None or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._timer is None:
            self._inner.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)


class _Connection(H11Protocol):
    """One connection."""

    gateway: HttpServer
    _half_open: asyncio.TimerHandle | None = None
    _refused = False  # later bytes of the client are ignored
    _host = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self.gateway.lingering, self._has_request))
        if not self.gateway.admit(self):
            error = Unavailable("the gateway has too many connections; use fewer, or try again", retry_after=1.0)
            self._refuse(error)
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        assert isinstance(self.transport, LingeringTransport)
        self.transport.lost()
        self._unwatch()
        self._unset_keepalive_if_required()
        self.gateway.release(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; ignore them once the connection is refused, or closes."""
        head, rest = data[:_FIRST_BYTES], data[_FIRST_BYTES:]
        for part in (head, rest) if rest else (head,):
            if self._refused or self.transport.is_closing():
                return
            super().data_received(part)
            if self.headers is not None and self.conn.their_state is h11.SEND_BODY:
                # The application answers 411.
                self._refused = any(name == b"transfer-encoding" for name, _ in self.headers)
        if self.conn.their_state is h11.IDLE:
            self._watch()
        else:
            self._unwatch()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, or headers that are too long."""
        self._refuse(
            RequestError(f"the request is not valid HTTP, or its headers have more than {_MAX_HEADER_BYTES} bytes")
        )

    def _has_request(self) -> bool:
        """Whether the client has sent a whole request, and thus sends no more after the answer."""
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR)

    def _watch(self) -> None:
        """Close the connection unless its headers are complete in time."""
        if self._half_open is None and self.timeout_keep_alive_task is None:
            self._half_open = self.loop.call_later(self.gateway.body_seconds, self._expire)

    def _unwatch(self) -> None:
        if self._half_open is not None:
            self._half_open.cancel()
            self._half_open = None

    def _expire(self) -> None:
        self._half_open = None
        seconds = self.gateway.body_seconds
        self._refuse(RequestError(f"the headers did not arrive within {seconds:g} s; send them faster", status=408))

    def _refuse(self, error: FourfoldError) -> None:
        """Answer without a parsed request, and close."""
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = encode(error_body(error, "openai"))
            lines = [b"HTTP/1.1 %d -" % status_of(error), b"content-type: application/json"]
            lines += [b"content-length: %d" % len(body), b"connection: close"]
            lines += [name + b": " + value for name, value in error_headers(error)]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()


class HttpServer:
    """The HTTP port of a gateway."""

    def __init__(
        self, api: AgentApi, config: GatewayConfig, security: Security | None, names: Collection[str] = ()
    ) -> None:
        """Make a server that does not listen yet; see `serve_http`."""
        self._host, self._port = split_target(config.http_listen)
        if security is None and not is_loopback(self._host):
            raise ConfigError(
                f"gateway.http_listen = {config.http_listen!r}: without TLS the gateway listens on loopback only; use "
                f"127.0.0.1, or make certificates with `fourfold certs DIR` and set security.directory"
            )
        self.body_seconds = float(config.body_seconds)
        self._security = security
        self._max_connections = config.max_connections
        self.lingering = Lingering()
        self._admitted = dict[_Connection, str]()
        self._by_host = Counter[str]()
        self._state = ServerState()
        app = GatewayApp(
            api,
            max_body_bytes=config.max_body_mib << 20,
            body_seconds=self.body_seconds,
            names=names if security is None else None,
        )
        self._uvicorn = Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # uvicorn would log a line for every malformed request
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """Address that clients connect to, as "host:port"; after `start`."""
        return join_target(self._host, self._port)

    @property
    def url(self) -> str:
        """Base URL of the HTTP API, such as "http://127.0.0.1:8000"; after `start`."""
        return self.url_by(self._host)

    def url_by(self, host: str) -> str:
        """Return the base URL for other machines; it contains `host` if the server listens on every address."""
        address = join_target(host if is_wildcard(self._host) else self._host, self._port)
        return f"{'http' if self._security is None else 'https'}://{address}"

    async def start(self) -> str:
        """Listen on the current event loop, and return `address`; raise ConfigError if that is not possible."""
        self._uvicorn.load()
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if self._security is not None:
            options = {"ssl": _server_context(self._security), "ssl_handshake_timeout": self.body_seconds}
        try:
            self._server = await loop.create_server(
                self._connection, self._host, self._port, backlog=_BACKLOG, **options
            )
        except OSError as error:
            reason = explain_bind(error, self._port)
            raise ConfigError(f"gateway.http_listen = {self.address!r}: {reason}") from None
        self._port = self._server.sockets[0].getsockname()[1]
        log.info("HTTP started url=%s", self.url)
        return self.address

    async def stop(self, grace_seconds: float = 10.0) -> None:
        """Refuse new connections, end idle ones, and cancel requests that still run after `grace_seconds`.

        Idempotent.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = set(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()

    def admit(self, connection: _Connection) -> bool:
        """Count a connection; False when there are too many in all, or too many of one remote address."""
        host = connection.client[0] if connection.client else ""
        remote = not is_loopback(host)
        if len(self._admitted) >= self._max_connections or (remote and self._by_host[host] >= MAX_PER_ADDRESS):
            return False
        self._admitted[connection] = host
        self._by_host[host] += 1
        return True

    def release(self, connection: _Connection) -> None:
        """Forget a connection that ended."""
        host = self._admitted.pop(connection, None)
        if host is not None:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def _connection(self) -> _Connection:
        connection = _Connection(config=self._uvicorn, server_state=self._state, app_state={})
        connection.gateway = self
        return connection


async def serve_http(
    api: AgentApi, config: GatewayConfig, security: Security | None, names: Collection[str] = ()
) -> HttpServer:
    """Start the HTTP API of a gateway on the current event loop.

    Args:
        api: the operations of the gateway.
        config: address and limits.
        security: certificates for TLS; None: plain text on loopback.
        names: further names that requests on loopback may give this machine.

    Raises:
        ConfigError: the address needs TLS, or is not available.
    """
    server = HttpServer(api, config, security, names)
    await server.start()
    return server


def _server_context(security: Security) -> ssl.SSLContext:
    """Return a context that uses the current certificate for each handshake."""
    used = security.material
    inner = _load(used.certificate + used.key)

    def refresh(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal used, inner
        material = security.material
        if material is not used:
            used, inner = material, _load(material.certificate + material.key)
        connection.context = inner

    outer = _load(used.certificate + used.key)
    outer.sni_callback = refresh  # OpenSSL calls it without a server name, too
    return outer


def _load(pem: bytes) -> ssl.SSLContext:
    """Return a server's context. OpenSSL reads files only, and a key must not be written to a disk."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
