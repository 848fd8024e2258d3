"""Base classes of the service clients: AsyncClient for asyncio, SyncClient for scripts and notebooks.

The client of a service is written once, as a subclass of AsyncClient. Its synchronous twin lists the same methods with
`blocking` and `blocking_stream`, which run them in an event loop on a thread that all synchronous clients share.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

import grpc
from google.protobuf.message import Message

from fourfold.errors import WrongState
from fourfold.rpc.channel import call, check_target, open_channel, stream
from fourfold.rpc.responses import ResponseCheck
from fourfold.security.access import Security
from fourfold.security.principal import Principal

DEFAULT_TIMEOUT_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 5.0

Client = TypeVar("Client", bound="AsyncClient")
Result = TypeVar("Result")
Response = TypeVar("Response", bound=Message)
Arguments = ParamSpec("Arguments")


class AsyncClient:
    """Base of the clients for asyncio. Use one in one event loop; it is also an async context manager."""

    _role: ClassVar[str]
    """Role of the service. TLS refuses a server whose certificate has another role."""
    _caller_role: ClassVar[str] = "coordinator"
    """Role whose certificates the service accepts: see POLICY in `fourfold.security.access`."""

    def __init__(
        self,
        target: str | grpc.aio.Channel,
        *,
        token: str = "",
        certs: str | Path = "",
        member: str = "",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        peer: str = "",
    ) -> None:
        """Check the arguments. The connection is made at the first call.

        Args:
            target: "HOST:PORT", or an open channel, which the client does not close.
            token: bearer token for the public port of a rollout service; needs `certs`.
            certs: folder that `fourfold certs` made; with a token its ca.pem is enough. Empty: no TLS, which is
                allowed for a service on this machine.
            member: member id whose DIR/MEMBER.pem is presented instead of a token. Default: "coordinator-0", and
                "viewer-0" or "operator-0" for a client of the coordinator.
            timeout: seconds, for each call that names no timeout of its own.
            peer: name of the service in error messages. Default: its role and target.

        Raises:
            ConfigError: The target is malformed, it is on another machine and `certs` is missing, or a certificate
                cannot be used.
        """
        self.timeout = timeout
        self.peer = peer or f"{self._role} service" + (f" at {target}" if isinstance(target, str) else "")
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        if not isinstance(target, str):
            self._connect: Callable[[], grpc.aio.Channel] = lambda: target
            self._owns_channel = False
            return
        caller = Principal(self._caller_role, member or f"{self._caller_role}-0")
        security = _load_security(Path(certs), token, caller) if certs else None
        check_target(target, security, token)
        server = Principal(self._role)
        self._connect = functools.partial(open_channel, target, security, server=server, token=token)
        self._owns_channel = True

    def _open(self) -> grpc.aio.Channel:
        """Return the channel; open it at the first call, because grpc binds a channel to the running event loop."""
        if self._closed:
            raise WrongState(f"the client for {self.peer} is closed; open a new one")
        if self._channel is None:
            self._channel = self._connect()
        return self._channel

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _countdown(self, timeout: float | None) -> Callable[[], float]:
        """Return a function that gives the seconds that are left of a timeout, for a method of several calls."""
        end = time.monotonic() + self._seconds(timeout)
        return lambda: max(end - time.monotonic(), 0.001)

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: Message, timeout: float | None
    ) -> Response:
        """Make a unary call; see `fourfold.rpc.channel.call`."""
        return await call(method, request, timeout=self._seconds(timeout), peer=self.peer)

    def _stream(
        self, method: Callable[..., grpc.aio.UnaryStreamCall[Any, Response]], request: Message, timeout: float | None
    ) -> AsyncGenerator[Response, None]:
        """Make a server-streaming call; without a timeout it has no deadline. See `fourfold.rpc.channel.stream`."""
        return stream(method, request, timeout=timeout, peer=self.peer)

    def _check(self, response: Message) -> ResponseCheck:
        """Return the checks for a response of this service."""
        return ResponseCheck(self.peer, response.DESCRIPTOR.name.removesuffix("Response"))

    async def aclose(self) -> None:
        """Close the connection. Calls in flight raise Unavailable, and later calls raise WrongState."""
        self._closed = True
        self.__dict__.pop("_stub", None)  # a cached property of the subclasses: the next call must see `_closed`
        if self._channel is not None and self._owns_channel:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()


def _load_security(certs: Path, token: str, caller: Principal) -> Security | None:
    # A file is ca.pem, which an agent has instead of a folder. Without a token, the server refuses such a caller.
    if token or certs.is_file():
        return Security.for_agent(certs / "ca.pem" if certs.is_dir() else certs)
    # The schema takes 0.2 s to import, and a caller with a token needs none.
    from fourfold.config.schema import SecurityConfig

    return Security.load(SecurityConfig(directory=str(certs)), caller)


class SyncClient(Generic[Client]):
    """Base of the clients for scripts and notebooks: every call blocks its thread.

    Arguments, errors and default timeouts are those of the asyncio client.
    A client may be used from several threads, and where an event loop runs already, as in Jupyter. It is a context
    manager. Ctrl-C during a call cancels the call.
    """

    _async_type: type[Client]

    def __init__(
        self,
        target: str,
        *,
        token: str = "",
        certs: str | Path = "",
        member: str = "",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Check the arguments, which are those of the asyncio client; the target is always "HOST:PORT"."""
        self._client = self._async_type(target, token=token, certs=certs, member=member, timeout=timeout)
        self._loop = _LoopThread.acquire(self)
        self._closed = False

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of the asyncio client and wait for its result."""
        if self._closed:
            work.close()
            raise WrongState(f"the client for {self._client.peer} is closed; open a new one")
        return self._loop.run(work)

    def close(self) -> None:
        """Close the connection. Calls in flight raise Unavailable, and later calls raise WrongState."""
        if not self._closed:
            self._closed = True
            self._loop.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def blocking(
    method: Callable[Concatenate[Client, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[SyncClient[Client], Arguments], Result]:
    """Return the synchronous form of a method of an asyncio client, with the same arguments."""

    @functools.wraps(method)
    def run(self: SyncClient[Client], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._run(method(self._client, *args, **kwargs))

    return run


def blocking_stream(
    method: Callable[Concatenate[Client, Arguments], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[SyncClient[Client], Arguments], Generator[Result, None, None]]:
    """Return the synchronous form of a streaming method. Closing the generator cancels the call."""

    @functools.wraps(method)
    def run(
        self: SyncClient[Client], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Generator[Result, None, None]:
        responses = self._run(_begin(method, self._client, *args, **kwargs))
        try:
            while True:
                try:
                    response = self._run(_next(responses))
                except StopAsyncIteration:
                    return
                yield response
        finally:
            if not self._closed:  # a closed client has ended its streams
                self._run(_aclose(responses))

    return run


# On the loop, because the first call of a client opens its channel, which grpc binds to the running event loop.
async def _begin(
    method: Callable[Arguments, AsyncGenerator[Result, None]], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> AsyncGenerator[Result, None]:
    return method(*args, **kwargs)


async def _next(responses: AsyncGenerator[Result, None]) -> Result:
    return await anext(responses)


async def _aclose(responses: AsyncGenerator[Any, None]) -> None:
    await responses.aclose()


class _LoopThread:
    """An event loop in a daemon thread, from the first synchronous client of the process to the last.

    One for all clients: grpc.aio has one poller per process, and a further loop costs each loop a wake-up per event.
    """

    _lock: ClassVar = threading.Lock()
    _shared: ClassVar[_LoopThread | None] = None

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._clients: weakref.WeakSet[SyncClient[Any]] = weakref.WeakSet()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fourfold-clients", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, client: SyncClient[Any]) -> _LoopThread:
        """Return the thread of this process, and start it if there is none."""
        with cls._lock:
            if cls._shared is None or cls._shared._pid != os.getpid():  # a fork copies the object, not the thread
                cls._shared = cls()
            cls._shared._clients.add(client)
            return cls._shared

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the thread and wait for it. An exception in the waiting thread cancels it."""
        if self._pid != os.getpid():
            work.close()
            raise WrongState("this client was opened before a fork; open a new one in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise WrongState("a synchronous client was called from a callback of its own event loop; use the async one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # nothing happens when it is done; after Ctrl-C it ends the call

    def release(self, client: SyncClient[Any]) -> None:
        """Close a client; stop the thread with the last one."""
        self.run(client._client.aclose())
        with self._lock:
            self._clients.discard(client)
            if self._clients:
                return
            if _LoopThread._shared is self:
                _LoopThread._shared = None
        self.run(_settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _settle() -> None:
    """Let the cancelled calls of other threads end: a loop that stops first would leave their threads waiting."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_CLOSE_SECONDS)
    await asyncio.get_running_loop().shutdown_asyncgens()


@atexit.register
def _close_all() -> None:
    """Close the clients that the program left open: a daemon thread inside grpc can crash an ending interpreter."""
    shared = _LoopThread._shared
    if shared is not None and shared._pid == os.getpid():
        for client in list(shared._clients):
            client.close()
