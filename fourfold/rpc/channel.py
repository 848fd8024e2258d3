"""Channels to other services, and the functions that make calls on them with our deadlines and errors.

gRPC ignores unknown channel arguments without an error, and their names have changed before, so a test looks up every
key in the compiled library. Each call carries its own deadline: the server never receives a timeout of the service
config (grpc#34547).
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from fourfold.address import is_loopback as is_loopback
from fourfold.address import join_target as join_target
from fourfold.address import split_target as split_target
from fourfold.errors import ConfigError, DeadlinePassed, PeerFault, Unavailable
from fourfold.rpc.responses import clean_response
from fourfold.rpc.status import from_rpc
from fourfold.security.access import Security
from fourfold.security.material import server_name
from fourfold.security.principal import Principal
from fourfold.tracing import propagation

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Options = Sequence[tuple[str, str | int]]

MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_PUBLIC_MESSAGE_BYTES: Final = 1 << 20
# gRPC may report a deadline this much earlier than our clock.
_DEADLINE_TOLERANCE_SECONDS: Final = 0.05
# gRPC's text for a response above our own size limit.
_TOO_LARGE: Final = "CLIENT: Received message larger than max"

SERVER_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # On by default: a second server on the same port would silently take half of the calls.
    ("grpc.so_reuseport", 0),
    # ping_timeout_ms detects a hung peer, but has no effect without keepalive_time_ms.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without these two the server disconnects clients that send pings during a long call without data.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A connection whose TLS and HTTP/2 handshakes take longer is closed. The default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

# Anyone can connect to a public port. gRPC's memory quota cannot be set from Python, so the size of what callers may
# send bounds the memory that they can take. `fourfold.rpc.interceptors` checks the token before it reads a request. A
# caller without a token can fill only the window of its streams (`lookahead_bytes`, which `bdp_probe` would raise).
PUBLIC_SERVER_OPTIONS: Final[Options] = (
    *((key, value) for key, value in SERVER_OPTIONS if key != "grpc.max_receive_message_length"),
    ("grpc.max_receive_message_length", MAX_PUBLIC_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
)

# Methods that the protos declare idempotent and that are cheap to repeat. The phases of a weight update and training
# steps are absent because the coordinator decides about their retries. Deregister is absent because a service that
# shuts down would wait for a coordinator that is gone; its lease expires anyway.
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
    # By default a channel waits up to two minutes between connection attempts, and meanwhile every call fails at once:
    # services would not reach a restarted coordinator.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # By default, channels of a process to one address without TLS share a connection: a new channel to a restarted
    # service would fail until an older one, whose connection attempt failed, tries again.
    ("grpc.use_local_subchannel_pool", 1),
    # By default, gRPC connects through the proxy that http_proxy names, even on loopback (`fourfold.host.proxies`).
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", SERVICE_CONFIG),
)


def open_channel(
    target: str, security: Security | None, *, server: Principal | None = None, token: str = ""
) -> grpc.aio.Channel:
    """Open a channel to `target`, "host:port". It connects at the first call. The caller closes it.

    Args:
        target: address of the service.
        security: our certificates; None only for a service on this machine.
        server: required with `security`: the principal that the server's certificate must name; without a name, any
            principal of that role. TLS rejects every other server before any data is sent.
        token: bearer token for a public port; only sent over TLS.

    Raises:
        ConfigError: the target is not host:port, or it is on another machine and there is no TLS.
    """
    check_target(target, security, token)
    if security is None:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    if server is None:
        raise ValueError(f"{target}: name the server that must answer there, for example server=COORDINATOR")
    # gRPC compares the authority, not the target, with the names in the server's certificate.
    options = (*CLIENT_OPTIONS, ("grpc.default_authority", server_name(server)))
    return RenewingChannel(
        security, lambda: grpc.aio.secure_channel(target, security.channel_credentials(token), options=options)
    )


def check_target(target: str, security: Security | None, token: str = "") -> None:
    """Raise ConfigError when `open_channel` would refuse `target`."""
    host, _ = split_target(target)
    if security is None and token:
        raise ConfigError(f"{target}: a token without TLS could be read on the way; give certificates as well")
    if security is None and not is_loopback(host):
        raise ConfigError(
            f"{target}: without TLS a service is only called on this machine (127.0.0.1); "
            f"make certificates with `fourfold certs DIR` and set security.directory"
        )


class RenewingChannel(grpc.aio.Channel):
    """A channel that uses a renewed certificate for every call that begins after the renewal.

    grpc fixes the credentials of a channel when the channel is made, so an old channel would reconnect with the old
    certificate until it expires. This class makes a new channel after a renewal. Running calls keep the old channel.
    """

    def __init__(self, security: Security, make: Callable[[], grpc.aio.Channel]) -> None:
        """Make the first channel; `make` returns one with the current certificate."""
        self._security: Final = security
        self._make: Final = make
        self._material = security.material
        self._channel = make()
        self._closed = False

    def _method(self, kind: str, *args: Any, **options: Any) -> Any:
        """Return a stub's method that binds itself again when the channel changes."""
        channel: grpc.aio.Channel | None = None
        bound: Any = None

        def begin_call(*call_args: Any, **call_options: Any) -> Any:
            nonlocal channel, bound
            current = self.current()
            if current is not channel:
                channel, bound = current, getattr(current, kind)(*args, **options)
            return bound(*call_args, **call_options)

        return begin_call

    unary_unary: Any = functools.partialmethod(_method, "unary_unary")
    unary_stream: Any = functools.partialmethod(_method, "unary_stream")
    stream_unary: Any = functools.partialmethod(_method, "stream_unary")
    stream_stream: Any = functools.partialmethod(_method, "stream_stream")

    def current(self) -> grpc.aio.Channel:
        """Return the channel for a call that begins now."""
        material = self._security.material
        if material is not self._material and not self._closed:
            # The old channel is not closed, which would cancel its calls: grpc destroys it after the last of them.
            self._material, self._channel = material, self._make()
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def method_name(request: Message) -> str:
    """Return the name of the method that takes a request, "GetInfo" for GetInfoRequest."""
    return request.DESCRIPTOR.name.removesuffix("Request")


async def call(method: Callable[..., Awaitable[Response]], request: Message, *, timeout: float, peer: str) -> Response:
    """Make one unary call of a stub's method and return its response with clean strings.

    `timeout` is the deadline in seconds. `peer` names the service in messages, e.g. "rollout-0 at 127.0.0.1:5000".

    Raises:
        PeerFault: the response is malformed.
        FourfoldError: the server's error, or Unavailable or DeadlinePassed from the transport.
    """
    name = method_name(request)
    with translate_errors(peer=peer, name=name, timeout=timeout):
        response: Response | None = await method(request, timeout=timeout, metadata=propagation.outgoing())
    return clean_response(response, peer=peer, name=name)


async def stream(
    method: Callable[..., grpc.aio.UnaryStreamCall[Request, Response]],
    request: Request,
    *,
    timeout: float | None,
    peer: str,
) -> AsyncGenerator[Response, None]:
    """Make one server-streaming call; arguments and errors as of `call`.

    Leaving the iterator (aclose, error, cancellation) cancels the call.
    """
    name = method_name(request)
    running = method(request, timeout=timeout, metadata=propagation.outgoing())
    try:
        with translate_errors(peer=peer, name=name, timeout=timeout):
            async for response in running:
                yield clean_response(response, peer=peer, name=name)
    finally:
        running.cancel()


@contextmanager
def translate_errors(*, peer: str, name: str, timeout: float | None) -> Iterator[None]:
    """Raise errors of gRPC inside the block as FourfoldError."""
    began = time.monotonic()
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known = from_rpc(error, peer=f"{peer}, {name}")
        # A reason that equals the status code comes from gRPC; an error of a servicer has its own reason.
        if known.reason == "DEADLINE_EXCEEDED" and timeout is not None:
            if (seconds := time.monotonic() - began) < timeout - _DEADLINE_TOLERANCE_SECONDS:
                text = f"{name}: answered DEADLINE_EXCEEDED after {seconds:.1f} of {timeout:g} s"
                raise PeerFault(peer, "WRONG_DEADLINE", text) from None
            known = DeadlinePassed(f"{peer}: {name} took longer than {timeout:g} s")
        elif known.reason == "RESOURCE_EXHAUSTED" and _TOO_LARGE in (error.details() or ""):
            text = f"{name}: a response is larger than {MAX_MESSAGE_BYTES} bytes"
            raise PeerFault(peer, "RESPONSE_TOO_LARGE", text) from None
        elif known.reason == "INTERNAL" and error.details() == "Internal error from Core":
            # A failed write hides the status that ended the call (grpc#36066).
            known = Unavailable(f"{peer}, {name}: the connection broke while the request was sent")
        raise known from None
    except asyncio.CancelledError:
        # grpc raises CancelledError also when the channel was closed. Without a cancellation request for this task, the
        # error would end the task silently.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable(f"{peer}, {name}: the call was cancelled because its channel was closed") from None
