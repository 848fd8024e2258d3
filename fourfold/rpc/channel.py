"""Channels between services, and the one way a client makes a call.

Unknown channel arguments are ignored in silence by gRPC and names have changed before, so a
test looks every key up in the compiled library. Deadlines are passed with each call: a
timeout in the service config never reaches the server (grpc#34547).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message

from fourfold.errors import ConfigError, DeadlinePassed, PeerFault, Unavailable
from fourfold.rpc.renewing_channel import RenewingChannel
from fourfold.rpc.scrub import scrub
from fourfold.rpc.status import from_rpc
from fourfold.security.access import Security
from fourfold.security.material import server_name
from fourfold.security.principal import Principal

Request = TypeVar("Request")
Response = TypeVar("Response", bound=Message)
Options = Sequence[tuple[str, str | int]]

MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_PUBLIC_MESSAGE_BYTES: Final = 1 << 20
MAX_TARGET_CHARACTERS: Final = 255 + len(":65535")
"""Of "host:port"; a DNS name has at most 255 characters."""

_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_BRACKETED: Final = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_PORT: Final = re.compile(r"[0-9]{1,5}")
# By which a deadline of gRPC may differ from our clock.
_CLOCK_SECONDS: Final = 0.05
# What gRPC says of a response above our own limit.
_TOO_LARGE: Final = "CLIENT: Received message larger than max"

SERVER_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # On by default: a second server on the port would take half of the calls in silence.
    ("grpc.so_reuseport", 0),
    # ping_timeout_ms is what finds a hung peer; without keepalive_time_ms it does nothing.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without these two the server cuts clients off that ping during a long silent call.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A connection that has not sent its TLS and HTTP/2 greetings by then is closed; by default after two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

# A port for agents is open to everybody. gRPC's memory quota cannot be set from Python, so the memory that callers can
# take is bounded by what they may send: `fourfold.rpc.interceptors` checks the token before it reads a request, and a
# caller without one leaves no more than the window of its streams (`lookahead_bytes`, which `bdp_probe` would raise).
PUBLIC_SERVER_OPTIONS: Final[Options] = (
    *((key, value) for key, value in SERVER_OPTIONS if key != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", MAX_PUBLIC_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
)

# Methods that the protos call idempotent and that answer fast or can be repeated at no harm.
# An update phase or a training step is not here: its caller decides. Nor is Deregister: a service that ends would wait
# for a coordinator that is gone, and a lease that is not given back expires.
RETRIED_METHODS: Final[dict[str, tuple[str, ...]]] = {
    "fourfold.rollout.v1.RolloutService": ("GetInfo",),
    "fourfold.rollout.v1.RolloutControlService": ("DescribeEngine",),
    "fourfold.reward.v1.RewardService": ("GetInfo", "Score"),
    "fourfold.reference.v1.ReferenceService": ("GetInfo", "ComputeLogprobs"),
    "fourfold.trainer.v1.TrainerService": ("GetStatus", "ComputeLogprobs"),
    "fourfold.trainer.v1.TrainerWeightService": ("GetManifest",),
    "fourfold.coordinator.v1.MembershipService": ("Register", "KeepAlive"),
    "fourfold.coordinator.v1.RunService": ("GetRun",),
}

SERVICE_CONFIG: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": s, "method": m} for s, methods in RETRIED_METHODS.items() for m in methods],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

CLIENT_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # By default a channel waits up to two minutes before it tries a peer again that was away, and
    # every call fails at once meanwhile: a restarted coordinator would stay without its services.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", SERVICE_CONFIG),
)


def open_channel(
    target: str, security: Security | None, *, server: Principal | None = None, token: str = ""
) -> grpc.aio.Channel:
    """Open a channel to `target`, "host:port"; it connects at the first call. Close it when done.

    Args:
        target: where the service listens.
        security: our certificates; None only for a service on this machine.
        server: who must answer there, needed with `security`; without a name, anybody of that role. TLS refuses
            every other server before it is sent anything.
        token: bearer token for a public port; travels over TLS only.

    Raises:
        ConfigError: the target is not host:port, or it is on another machine and there is no TLS.
    """
    check_target(target, security)
    if security is None:
        if token:
            raise ConfigError(f"{target}: a token would travel in the clear; give security.directory as well")
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    if server is None:
        raise ValueError(f"{target}: name the server that must answer there, for example server=COORDINATOR")
    # The authority is what gRPC compares with the names in the server's certificate; the target only says where it is.
    options = (*CLIENT_OPTIONS, ("grpc.default_authority", server_name(server)))
    return RenewingChannel(
        security, lambda: grpc.aio.secure_channel(target, security.channel_credentials(token), options=options)
    )


def check_target(target: str, security: Security | None) -> None:
    """Check that a channel may be opened to `target`.

    Raises:
        ConfigError: as `open_channel`.
    """
    host, _ = split_target(target)
    if security is None and not is_loopback(host):
        raise ConfigError(
            f"{target}: without TLS a service is only called on this machine (127.0.0.1); "
            f"make certificates with `fourfold certs DIR` and set security.directory"
        )


def split_target(target: str) -> tuple[str, int]:
    """Return host (without brackets) and port of "host:port".

    Raises:
        ConfigError: it is something else.
    """
    if len(target) > MAX_TARGET_CHARACTERS:
        raise ConfigError(
            f"an address of {len(target)} characters, {target[:40]!r}...; HOST:PORT has at most {MAX_TARGET_CHARACTERS}"
        )
    host, colon, port = target.rpartition(":")
    if not colon or not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"{target!r} is no address; give HOST:PORT, for example 127.0.0.1:50051")
    if _BRACKETED.fullmatch(host):
        return host[1:-1], int(port)
    if ":" in host:
        raise ConfigError(f"{target!r}: put an IPv6 address in brackets, for example [::1]:50051")
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"{target!r}: the host is neither an IP address nor a name of letters, digits, '.' and '-'")
    return host, int(port)


def join_target(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine for sure: a loopback address, or the name localhost. Never asks DNS."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def call(
    method: Callable[..., Awaitable[Response]], request: object, *, timeout: float, peer: str, name: str
) -> Response:
    """Make one unary call. The strings of the response are clean (`fourfold.rpc.scrub`).

    Args:
        method: a stub's method.
        request: its message.
        timeout: seconds until the call is given up.
        peer: who is called, for messages, e.g. "rollout-0 at 127.0.0.1:5000".
        name: of the method, for messages.

    Raises:
        PeerFault: the response is not one of this method.
        FourfoldError: what the server raised, or Unavailable or DeadlinePassed from the transport.
    """
    with errors(peer=peer, name=name, timeout=timeout):
        response: Response | None = await method(request, timeout=timeout)
    return checked(response, peer=peer, name=name)


async def stream(
    method: Callable[..., grpc.aio.UnaryStreamCall[Request, Response]],
    request: Request,
    *,
    timeout: float | None,
    peer: str,
    name: str,
) -> AsyncGenerator[Response, None]:
    """Make one server-streaming call; leaving the iterator (aclose, error, cancellation) cancels it.

    Raises:
        PeerFault: a response is not one of this method.
        FourfoldError: what the server raised, or Unavailable or DeadlinePassed from the transport.
    """
    running = method(request, timeout=timeout)
    try:
        with errors(peer=peer, name=name, timeout=timeout):
            async for response in running:
                yield checked(response, peer=peer, name=name)
    finally:
        running.cancel()


def checked(response: Response | None, *, peer: str, name: str) -> Response:
    """Return what came, its strings clean.

    grpc.aio logs a response that cannot be parsed and hands None to the caller, for unary calls and for streams.

    Raises:
        PeerFault: it is None.
    """
    if response is None:
        raise PeerFault(peer, "MALFORMED_RESPONSE", f"{name}: the response is not the message of this method")
    scrub(response)
    return response


def require(holds: bool, rule: str, *, peer: str, name: str, kind: str = "BAD_RESPONSE") -> None:
    """Check a rule of a method's contract.

    Args:
        holds: whether the response keeps it.
        rule: value and rule, for the message.
        peer: as of `call`.
        name: as of `call`.
        kind: reason of the fault.

    Raises:
        PeerFault: it does not.
    """
    if not holds:
        raise PeerFault(peer, kind, f"{name}: {rule}")


@contextmanager
def errors(*, peer: str, name: str, timeout: float | None) -> Iterator[None]:
    """Turn what gRPC raises inside the block into our errors."""
    began = time.monotonic()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known = from_rpc(error, peer=f"{peer}, {name}")
        if known.reason == "DEADLINE_EXCEEDED" and timeout is not None:  # no ErrorInfo: not one that a servicer raised
            if (seconds := time.monotonic() - began) < timeout - _CLOCK_SECONDS:
                text = f"{name}: answered DEADLINE_EXCEEDED after {seconds:.1f} of {timeout:g} s"
                raise PeerFault(peer, "WRONG_DEADLINE", text) from None
            known = DeadlinePassed(f"{peer}: {name} took longer than {timeout:g} s")
        elif known.reason == "RESOURCE_EXHAUSTED" and _TOO_LARGE in (error.details() or ""):
            text = f"{name}: a response is larger than {MAX_MESSAGE_BYTES} bytes"
            raise PeerFault(peer, "RESPONSE_TOO_LARGE", text) from None
        elif known.reason == "INTERNAL" and error.details() == "Internal error from Core":
            # A write that failed hides the status that ended the call (grpc#36066).
            known = Unavailable(f"{peer}, {name}: the connection broke while the request was sent")
        raise known from None
    except asyncio.CancelledError:
        # A call that was cancelled under us (its channel was closed) looks like a cancellation of
        # this task. It is not one unless somebody asked for it, and must not end the task silently.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable(f"{peer}, {name}: the call was cancelled because its channel was closed") from None
