"""Channels between services, and the one way a client makes a call.

Unknown channel arguments are ignored in silence by gRPC and names have changed before, so a
test looks every key up in the compiled library. Deadlines are passed with each call: a
timeout in the service config never reaches the server (grpc#34547).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import grpc

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.security import Security
from fourfold.status import from_rpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Options = Sequence[tuple[str, str | int]]

MAX_MESSAGE_BYTES: Final = 16 << 20

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


def open_channel(target: str, security: Security | None, *, token: str = "") -> grpc.aio.Channel:
    """Open a channel to `target`, "host:port"; it connects at the first call. Close it when done.

    Args:
        target: where the service listens.
        security: our certificates; None only for a service on this machine.
        token: bearer token for a public port; travels over TLS only.

    Raises:
        ConfigError: the target is not host:port, or it is on another machine and there is no TLS.
    """
    check_target(target, security)
    if security is None:
        if token:
            raise ConfigError(f"{target}: a token would travel in the clear; give security.directory as well")
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    return grpc.aio.secure_channel(target, security.channel_credentials(token), options=CLIENT_OPTIONS)


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
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{target!r} is no address; give HOST:PORT, for example 127.0.0.1:50051")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{target!r}: put an IPv6 address in brackets, for example [::1]:50051")
    return host.strip("[]"), int(port)


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
    """Make one unary call.

    Args:
        method: a stub's method.
        request: its message.
        timeout: seconds until the call is given up.
        peer: who is called, for messages, e.g. "rollout-0 at 127.0.0.1:5000".
        name: of the method, for messages.

    Raises:
        FourfoldError: what the server raised, or Unavailable or DeadlinePassed from the transport.
    """
    with errors(peer=peer, name=name, timeout=timeout):
        return await method(request, timeout=timeout)


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
        FourfoldError: what the server raised, or Unavailable or DeadlinePassed from the transport.
    """
    running = method(request, timeout=timeout)
    try:
        with errors(peer=peer, name=name, timeout=timeout):
            async for response in running:
                yield response
    finally:
        running.cancel()


@contextmanager
def errors(*, peer: str, name: str, timeout: float | None) -> Iterator[None]:
    """Turn what gRPC raises inside the block into our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known = from_rpc(error, peer=f"{peer}, {name}")
        if known.reason == "DEADLINE_EXCEEDED" and timeout is not None:  # ours, not one that the server raised
            known = DeadlinePassed(f"{peer}: {name} took longer than {timeout:g} s")
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
