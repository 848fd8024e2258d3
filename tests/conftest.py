"""Shared by all tests: real servers on loopback, a clock that only moves when told, quiet hypothesis."""

from __future__ import annotations

import os

# OpenMP reads this when torch is imported, here and in the processes that tests start. On busy cores, threads that wait
# for each other made a test of small tensors take 33 s instead of 0.7 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from hypothesis import settings

from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.tracing import spans
from fourfold.tracing.spans import Span
from tests.fakes.clock import FakeClock

if TYPE_CHECKING:
    from tests.fakes.trainer_service import Start, Trainer

# Two shared cores: a slow example is no failure. The same examples every time, so that red is red again.
settings.register_profile("fourfold", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("fourfold")

# A shell has what it starts in the background ignore Ctrl-C, and all that the tests start would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Collect no garbage while thousands of tests are imported: they keep what they make."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again."""
    gc.freeze()
    gc.enable()


Servicer = tuple[ServiceDescriptor, Callable[[Any, grpc.aio.Server], None], object]
Serve = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a plain internal server with the given (descriptor, register, servicer) and return a channel to it."""
    servers: list[Server] = []
    channels: list[grpc.aio.Channel] = []

    async def start(*servicers: Servicer, max_concurrent_rpcs: int = 1024) -> grpc.aio.Channel:
        server = Server(listen="127.0.0.1:0", security=None, max_concurrent_rpcs=max_concurrent_rpcs)
        for servicer in servicers:
            server.add(*servicer)
        servers.append(server)
        channels.append(open_channel(await server.start(), None))
        server.set_ready(True)
        return channels[-1]

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


@pytest.fixture
def ended() -> Iterator[list[Span]]:
    """Make spans; return those that ended."""
    found: list[Span] = []
    spans.install(found.append)
    yield found
    spans.install(None)


@pytest.fixture
async def start_trainer(serve: Serve, tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that serves a trainer with a fake engine; all trainers stop at the end of the test."""
    from tests.fakes.trainer_service import trainers  # imports torch, which most tests do not need

    async with trainers(serve, tmp_path) as start:
        yield start


@pytest.fixture
async def trainer(start_trainer: Start) -> Trainer:
    """Return a trainer of the default recipe with a fake engine."""
    return await start_trainer()


@pytest.fixture
def clock() -> FakeClock:
    """Time that stands still until a test moves it."""
    return FakeClock()


@pytest.fixture
def unused_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
