"""The clients without asyncio: one loop thread for all, deadlines, closing, Ctrl-C, threads, and a loop that runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fourfold import AsyncRolloutClient, RolloutClient, SamplingParams, TrainerClient
from fourfold.errors import ConfigError, DeadlinePassed, InvalidInput, Unavailable, WrongState
from fourfold.rpc.server import Server
from fourfold.security.access import Security
from tests.conftest import Servicer
from tests.fakes.servicers import Rollout, Trainer, generated, sample
from tests.security.pki import Pki

THREAD = "fourfold-clients"


class Running:
    """A server on a thread of its own, so that a test may block."""

    def __init__(self, security: Security | None = None) -> None:
        self.security = security
        self.rollout = Rollout(generated(0, 1, 2), generated(0, 3, done=True))
        self.trainer = Trainer()
        self.target = ""
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        server = Server(listen="127.0.0.1:0", security=self.security)
        servicers: list[Servicer] = [self.rollout.servicer(), self.trainer.servicer()]
        for servicer in servicers:
            server.add(*servicer)
        self.target = await server.start()
        server.set_ready(True)
        self._ready.set()
        while not self._end.is_set():
            await asyncio.sleep(0.02)
        await server.stop(0)

    def stop(self) -> None:
        self._end.set()
        self._thread.join(10)


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def loop_threads() -> list[str]:
    """Return where each loop thread of this process is, so that a failure says what one that remains waits for."""
    frames = sys._current_frames()
    alive = [thread.ident or 0 for thread in threading.enumerate() if thread.name == THREAD]
    return ["".join(traceback.format_stack(frames.get(ident))) for ident in alive]


def test_a_sample_is_drawn_whole_or_in_chunks(server: Running) -> None:
    with RolloutClient(server.target) as client:
        (completion,) = client.sample([4, 5], SamplingParams(max_tokens=8))
        assert completion.token_ids.tolist() == [1, 2, 3]
        chunks = list(client.stream([4, 5], SamplingParams(max_tokens=8)))
    assert [chunk.token_ids.tolist() for chunk in chunks] == [[1, 2], [3]]
    assert chunks[-1].finish_reason and not chunks[0].finish_reason


def test_a_batch_may_be_made_of_samples(server: Running) -> None:
    with TrainerClient(server.target) as client:
        assert client.train_step(4, [sample("a"), sample("b")]).metrics["train/samples_per_step"] == 2
        assert [status.step for status in client.watch_status()] == [3, 4]


def test_a_stream_may_be_the_first_call(server: Running) -> None:
    with RolloutClient(server.target) as client:
        assert next(client.watch_load(timeout=5)).policy_version == 7
    with RolloutClient(server.target) as client, ThreadPoolExecutor() as threads:
        assert threads.submit(lambda: next(client.watch_load(timeout=5))).result(10).policy_version == 7


def test_a_call_has_the_deadline_of_the_client_or_its_own(server: Running) -> None:
    server.rollout.hang = True
    with RolloutClient(server.target, timeout=0.3) as client:
        with pytest.raises(
            DeadlinePassed, match=r"Generate of .* took longer than 0\.3 s|Generate took longer than 0.3 s"
        ):
            client.sample([4])
        with pytest.raises(DeadlinePassed, match=r"0\.1 s"):
            client.sample([4], timeout=0.1)


def test_a_closed_client_refuses_calls_and_the_last_one_ends_the_thread(server: Running) -> None:
    first, second = RolloutClient(server.target), RolloutClient(server.target)
    assert len(loop_threads()) == 1
    first.close()
    first.close()
    with pytest.raises(WrongState, match=r"the client for rollout service at 127.* is closed; open a new one"):
        first.get_info()
    assert second.get_info() is not None and len(loop_threads()) == 1
    second.close()
    assert loop_threads() == []


def test_closing_ends_the_calls_of_other_threads(server: Running) -> None:
    server.rollout.hang = True
    client = RolloutClient(server.target)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.sample, [4])
        time.sleep(0.3)
        client.close()
        with pytest.raises((Unavailable, WrongState)):
            call.result(10)


def test_leaving_a_stream_early_cancels_it(server: Running) -> None:
    server.rollout.hang = True
    with RolloutClient(server.target) as client:
        stream = client.stream([4])
        assert next(stream).token_ids.tolist() == [1, 2]
        stream.close()
        deadline = time.monotonic() + 5
        while not server.rollout.how and time.monotonic() < deadline:
            time.sleep(0.01)
    assert server.rollout.how in ("CancelledError", "GeneratorExit")


def test_ctrl_c_ends_a_call(server: Running) -> None:
    server.rollout.hang = True
    with RolloutClient(server.target) as client:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.sample([4], timeout=40)
        assert time.monotonic() - began < 20
        deadline = time.monotonic() + 5
        while not server.rollout.how and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.rollout.how, "the service still works on it"


def test_threads_share_a_client(server: Running) -> None:
    with RolloutClient(server.target) as client, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: client.sample([4])[0].token_ids.tolist(), range(40)))
    assert found == [[1, 2, 3]] * 40


async def test_a_client_works_where_a_loop_runs_as_in_a_notebook(server: Running) -> None:
    with RolloutClient(server.target) as client:
        assert client.sample([4])[0].token_ids.tolist() == [1, 2, 3]


async def test_the_asyncio_client_opens_and_closes_its_own_channel(server: Running) -> None:
    async with AsyncRolloutClient(server.target) as client:
        assert [chunk.token_ids.tolist() async for chunk in client.stream([4])] == [[1, 2], [3]]
    with pytest.raises(WrongState, match="is closed"):
        await client.get_info()


def test_what_cannot_be_called_is_refused_before_the_first_call() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("nonsense", {}, "HOST:PORT"),
        ("10.1.2.3:50060", {}, "without TLS a service is only called on this machine"),
        ("127.0.0.1:50060", {"token": "secret"}, "a token without TLS"),
        ("127.0.0.1:50060", {"certs": "/nowhere"}, "ca.pem"),
    ]
    for target, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            RolloutClient(target, **options)
    assert loop_threads() == []


def test_an_error_of_the_service_is_raised_as_its_class(server: Running) -> None:
    server.rollout.chunks = (InvalidInput("max_tokens is 0; it must be at least 1"),)
    with RolloutClient(server.target) as client, pytest.raises(InvalidInput, match="max_tokens is 0"):
        client.sample([4])


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Running]:
    """Serve with the certificate of rollout-0; the folder has those of all members."""
    running = Running(Pki(tmp_path).load("rollout-0"))
    yield running
    running.stop()


def test_a_member_presents_its_certificate_and_checks_the_role_of_the_service(secured: Running, tmp_path: Path) -> None:
    with RolloutClient(secured.target, certs=tmp_path) as client:
        assert client.sample([4])[0].token_ids.tolist() == [1, 2, 3]
    with pytest.raises(ConfigError, match="not the certificate of coordinator/reward-0"):
        RolloutClient(secured.target, certs=tmp_path, member="reward-0")
    with TrainerClient(secured.target, certs=tmp_path) as trainer, pytest.raises(Unavailable, match="another member"):
        trainer.get_status()
