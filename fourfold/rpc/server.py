"""Runs a gRPC server with Fourfold's limits, health, reflection, authorization, deadlines and error details.

Health: "" is SERVING as soon as the server listens; the full name of each service, while the service is ready. An
internal server uses plain text on loopback and mTLS elsewhere. A public server serves only services of
`PUBLIC_SERVICES`, and health, over TLS with bearer tokens, or in plain text on loopback.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fourfold.errors import ConfigError
from fourfold.rpc.call_stats import CallStats
from fourfold.rpc.channel import PUBLIC_SERVER_OPTIONS, SERVER_OPTIONS, is_loopback, join_target, split_target
from fourfold.rpc.connection_limit import ConnectionLimit
from fourfold.rpc.interceptors import (
    Authorize,
    CallInterceptor,
    RefusalLog,
    authorize_certificate,
    authorize_loopback,
    authorize_token,
)
from fourfold.rpc.limits import CallSlots, Quotas
from fourfold.security.access import PUBLIC_SERVICES, Security
from fourfold.security.principal import LOCAL, LOCAL_AGENT, UNLIMITED

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Server:
    """One or more grpc.aio servers on one port. Add servicers, then start it on the event loop that will run it."""

    def __init__(
        self,
        *,
        listen: str,
        security: Security | None,
        public: bool = False,
        key: str = "listen",
        max_concurrent_rpcs: int = 1024,
        quotas: Quotas | None = None,
        stats: CallStats | None = None,
        acceptors: int = 1,
    ) -> None:
        """Prepare a server; nothing listens yet.

        Args:
            listen: "host:port"; port 0 selects a free port.
            security: TLS material; None for plain text on loopback.
            public: for agents: bearer tokens instead of certificates, no reflection.
            key: what the user set the address with, for messages.
            max_concurrent_rpcs: calls of one service in flight; more are refused at once with RESOURCE_EXHAUSTED.
                Watches and probes have limits of their own (`CallSlots`).
            quotas: limits of each caller; None: no limits.
            stats: counts the calls; None: for this server only.
            acceptors: grpc.aio servers on the port, among which the kernel divides the connections. Each accepts one
                call in a turn of the event loop, so a busy loop lets the calls of many clients wait.

        Raises:
            ConfigError: the address is malformed, or needs TLS or tokens.
        """
        self._host, self._port = split_target(listen)
        self._key = key
        self._security, self._public = security, public
        self._slots = CallSlots(calls_per_service=max_concurrent_rpcs, public=public)
        self._quotas = quotas or Quotas(lambda _principal: UNLIMITED)
        self._refusals = RefusalLog()
        self._stats = stats or CallStats()
        self._servicers: list[tuple[ServiceDescriptor, Callable[[Any, grpc.aio.Server], None], object]] = []
        self._acceptors = acceptors
        self._running: list[grpc.aio.Server] = []
        self._health = health.aio.HealthServicer()
        self._ready = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection_limit: asyncio.Task[None] | None = None
        if security is None and not is_loopback(self._host):
            raise ConfigError(
                f"{key} = {listen!r}: without TLS a service listens on loopback only; use 127.0.0.1, or make "
                f"certificates with `fourfold certs DIR` and set security.directory"
            )
        if public and security is not None and not security.tokens:
            raise ConfigError(
                f"{key} = {listen!r}: a public port needs bearer tokens; set security.tokens_file to the "
                f"tokens.txt that `fourfold certs` made"
            )

    def add(
        self, service: ServiceDescriptor, register: Callable[[Any, grpc.aio.Server], None], servicer: object
    ) -> None:
        """Add a service before `start`: descriptor, generated `add_XServiceServicer_to_server`, and servicer."""
        if self._running:
            raise RuntimeError("add servicers before start")
        if self._public and service.full_name not in PUBLIC_SERVICES:
            raise RuntimeError(f"{service.full_name} must not be on a public port")
        self._servicers.append((service, register, servicer))

    async def start(self) -> str:
        """Listen, and return the bound "host:port"; raise ConfigError if this machine cannot listen there."""
        interceptor = CallInterceptor(self._authorize(), self._slots, self._quotas, self._refusals, self._stats)
        servers = [self._make_server(interceptor) for _ in range(self._acceptors)]
        address = join_target(self._host, self._port)
        # gRPC's own exception has no cause, and gRPC prints the cause on stderr.
        if reason := bind_error(self._host, self._port):
            raise ConfigError(f"{self._key} = {address!r}: {reason}")
        port = self._port
        for server in servers:
            port = self._bind(server, port)
        await self._health.set("", _SERVING)  # the process lives, whether or not its services are ready
        await self._set_health(self._ready)
        for server in servers:
            await server.start()
        self._running = servers
        if self._public:
            self._connection_limit = asyncio.get_running_loop().create_task(ConnectionLimit(port).run())
        return join_target(self._host, port)

    def _make_server(self, interceptor: CallInterceptor) -> grpc.aio.Server:
        options = PUBLIC_SERVER_OPTIONS if self._public else SERVER_OPTIONS
        if self._acceptors > 1:
            options = tuple({**dict(options), "grpc.so_reuseport": 1}.items())
        server = grpc.aio.server(
            interceptors=(interceptor,),
            options=options,
            maximum_concurrent_rpcs=self._slots.maximum_concurrent_rpcs(len(self._servicers)),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for _, register, servicer in self._servicers:
            register(servicer, server)
        if not self._public:
            names = [service.full_name for service, _, _ in self._servicers]
            reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        return server

    @property
    def ready(self) -> bool:
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Set the health of every service. Call it on the server's event loop."""
        self._ready = ready
        if self._running:
            task = asyncio.get_running_loop().create_task(self._set_health(ready))
            self._tasks.add(task)  # the loop keeps only a weak reference, so that the task could vanish
            task.add_done_callback(self._tasks.discard)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls and cancel running ones after `grace_seconds`. Idempotent."""
        servers, self._running = self._running, []
        if self._connection_limit is not None:
            self._connection_limit.cancel()
        if servers:
            await self._health.enter_graceful_shutdown()
            await asyncio.gather(*(server.stop(grace_seconds) for server in servers))
            self._refusals.flush()

    async def _set_health(self, ready: bool) -> None:
        for service, _, _ in self._servicers:
            await self._health.set(service.full_name, _SERVING if ready else _NOT_SERVING)

    def _authorize(self) -> Authorize:
        if self._security is None:
            return authorize_loopback(LOCAL_AGENT if self._public else LOCAL)
        return (authorize_token if self._public else authorize_certificate)(self._security)

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        address = join_target(self._host, port)
        try:
            if self._security is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, self._security.server_credentials(public=self._public))
        except RuntimeError:
            hint = "is the certificate or its key damaged, or was the port taken just now?"
            raise ConfigError(f"{self._key} = {address!r}: the port could not be opened; {hint}") from None


def bind_error(host: str, port: int) -> str:
    """Try to listen on an address; return the reason why that fails, or an empty string."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC: a port in TIME_WAIT is free
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return explain_bind(error, port)
    return ""


def explain_bind(error: OSError, port: int) -> str:
    """Return the reason why this machine could not listen on a port, with the fix."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use by another process; choose another one, or port 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023"
    return f"this machine cannot listen there ({error.strerror or error}); give one of its own addresses"
