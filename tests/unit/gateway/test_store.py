"""The session store: what a killed gateway keeps, a full disk, many sessions."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import ConfigError, DeadlinePassed, Internal, Unavailable
from fourfold.sample import VersionSpan
from fourfold.sample.sampled import SampledTokens
from fourfold_gateway import store as store_module
from fourfold_gateway.store import SessionStore, StoredSession, StoredTurn, StoreFull
from fourfold_gateway.trajectory import Limits, Sampling, SessionTokens, Turn

LIMITS = Limits(max_segments=8, max_context_tokens=1000)
OPEN = StoredSession(session_id="a", owner="agent", key_digest=b"k", state=pb.SESSION_STATE_OPEN)
CLOSED = dataclasses.replace(OPEN, state=pb.SESSION_STATE_CLOSED, reward=0.5, metrics={"calls": 2.0})
STORED = dataclasses.replace(CLOSED, state=pb.SESSION_STATE_STORED, settled_at=100.0)


def some_turns(count: int = 2) -> list[Turn]:
    """Return turns of one trajectory: the odd ones open segments."""
    trajectory = SessionTokens(LIMITS)
    turns = []
    for index in range(count):
        prompt = [index] if index % 2 else [*(trajectory.segments[0].token_ids.tolist() if index else []), 7]
        completion = SampledTokens(
            token_ids=np.array([3, 4, 5], np.int32),
            logprobs=np.array([-0.5, -0.25, 0], np.float32),
            version_spans=(
                VersionSpan(policy_version=1 << 40, token_count=1),
                VersionSpan(policy_version=2, token_count=2),
            ),
            constrained=np.array([True, False, False]) if index % 2 else np.empty(0, np.bool_),
        )
        pending = trajectory.begin_turn(prompt, Sampling(temperature=0.1, top_p=0.9, top_k=5))
        turns.append(
            trajectory.finish_turn(
                pending,
                completion,
                finish_reason=pb.FINISH_REASON_LENGTH,
                request_id=f"r{index}",
                request_sha256=b"\x00\x01",
                sample_index=index,
            )
        )
    return turns


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = SessionStore(tmp_path)
    yield store
    await store.stop()


async def test_sessions_and_turns_come_back_as_they_were(store: SessionStore, tmp_path: Path) -> None:
    await store.put_session(OPEN)
    turns = some_turns(3)
    for turn in turns:
        await store.add_turns("a", [StoredTurn(turn=turn, chat=b"\x00chat", reply=b"reply")])
    await store.stop()
    again = SessionStore(tmp_path)
    assert await again.load_unsettled() == [OPEN]
    rows = await again.load_turns("a")
    for row, turn in zip(rows, turns, strict=True):
        assert (row.chat, row.reply) == (b"\x00chat", b"reply")
        for field in dataclasses.fields(Turn):
            if field.name not in ("observation", "completion"):
                assert getattr(row.turn, field.name) == getattr(turn, field.name), field.name
        assert row.turn.observation.tolist() == turn.observation.tolist()
        ours, theirs = row.turn.completion, turn.completion
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert ours.version_spans == theirs.version_spans
        assert ours.constrained.tolist() == theirs.constrained.tolist()
    restored = SessionTokens.restore(LIMITS, [row.turn for row in rows])
    assert len(restored.segments) == 2
    await again.stop()


async def test_a_closed_session_is_in_the_outbox_until_it_is_settled(store: SessionStore) -> None:
    for name in ("a", "b", "c"):
        await store.close_session(dataclasses.replace(CLOSED, session_id=name), name.encode() * 10)
    entries = await store.read_outbox(max_count=2)
    assert [(entry.session_id, entry.trajectory) for entry in entries] == [("a", b"a" * 10), ("b", b"b" * 10)]
    assert [entry.session_id for entry in await store.read_outbox(after=entries[-1].id)] == ["c"]
    assert len(await store.read_outbox(max_bytes=25)) == 2
    assert len(await store.read_outbox(max_bytes=1)) == 1, "a large trajectory is not stuck"
    await store.settle(dataclasses.replace(STORED, session_id="a"))
    assert [entry.session_id for entry in await store.read_outbox()] == ["b", "c"]
    assert await store.load_session("a") == dataclasses.replace(STORED, session_id="a")
    assert [session.session_id for session in await store.load_unsettled()] == ["b", "c"]
    assert await store.load_session("d") is None


async def test_only_what_may_change_changes(store: SessionStore) -> None:
    await store.put_session(dataclasses.replace(OPEN, created_at=1.0))
    other = dataclasses.replace(CLOSED, owner="other", key_digest=b"x", created_at=2.0, idle_seconds=1.0, task_id="t")
    await store.put_session(other)
    kept = dataclasses.replace(other, owner="agent", key_digest=b"k", created_at=1.0, idle_seconds=600.0)
    assert await store.load_session("a") == kept


async def test_settled_sessions_are_pruned_and_others_stay(store: SessionStore) -> None:
    for name, session in (
        ("a", STORED),
        ("b", STORED),
        ("c", OPEN),
        ("d", dataclasses.replace(STORED, settled_at=300.0)),
    ):
        await store.put_session(dataclasses.replace(session, session_id=name))
        await store.add_turns(name, [StoredTurn(turn=some_turns(1)[0])])
    assert await store.prune(200.0, max_count=1) == 1
    assert await store.prune(200.0) == 1
    assert await store.prune(200.0) == 0
    assert [name for name in "abcd" if await store.load_session(name)] == ["c", "d"]
    assert [name for name in "abcd" if await store.load_turns(name)] == ["c", "d"]


async def test_a_change_that_fails_leaves_those_beside_it(store: SessionStore) -> None:
    turn = some_turns(1)[0]
    results = await asyncio.gather(
        *(store.add_turns(name, [StoredTurn(turn=turn)]) for name in ("a", "b", "a", "c")), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), type(None), Internal, type(None)]
    assert "UNIQUE constraint failed" in str(results[2])
    assert [len(await store.load_turns(name)) for name in "abc"] == [1, 1, 1]


async def test_calls_that_wait_share_a_commit(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    store._db.set_trace_callback(statements.append)
    begun, go_on = threading.Event(), threading.Event()

    def block(db: sqlite3.Connection) -> None:
        begun.set()
        assert go_on.wait(30)

    first = asyncio.ensure_future(store._do(block))
    assert await asyncio.to_thread(begun.wait, 30)
    others = [
        asyncio.ensure_future(store.put_session(dataclasses.replace(OPEN, session_id=f"s{i}"))) for i in range(50)
    ]
    cancelled = others.pop()
    await asyncio.sleep(0)
    cancelled.cancel()
    go_on.set()
    await asyncio.gather(first, *others)
    assert statements.count("COMMIT") == 2
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    closed = dataclasses.replace(CLOSED, session_id="closed")
    await store.close_session(closed, b"")
    assert statements[-5:].count("PRAGMA synchronous = FULL") == 1, "a closed session is flushed to the disk"


async def test_a_disk_that_hangs_is_named(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, timeout=0.2)
    started, release = threading.Event(), threading.Event()

    def block(_: object) -> bool:
        started.set()
        return release.wait(30)

    blocked = asyncio.ensure_future(store._do(block))
    assert await asyncio.to_thread(started.wait, 10)
    with pytest.raises(DeadlinePassed, match=r"did not finish within 0\.2 s; check the disk"):
        await store.put_session(OPEN)
    with pytest.raises(DeadlinePassed):
        await store.stop()
    release.set()
    with pytest.raises(DeadlinePassed):
        await blocked
    store._timeout = 30  # a busy disk may take longer than the time limit of this test
    await store.stop()
    with pytest.raises(Unavailable, match="is closed"):
        await store.put_session(OPEN)


async def test_one_gateway_has_a_folder(store: SessionStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another gateway has its sessions there"):
        SessionStore(tmp_path)
    await store.stop()
    await SessionStore(tmp_path).stop()


async def test_wrong_databases_are_clear_errors(tmp_path: Path) -> None:
    await SessionStore(tmp_path).stop()
    with sqlite3.connect(tmp_path / "sessions.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (store_module._VERSION,)
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="schema version 99; this release reads versions up to 1"):
        SessionStore(tmp_path)
    (tmp_path / "sessions.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="not a session store"):
        SessionStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use this folder"):
        SessionStore(tmp_path / "file" / "x")


WRITER = """
import asyncio, dataclasses, sys
from pathlib import Path
from tests.unit.gateway.test_store import CLOSED, OPEN, some_turns
from fourfold_gateway.store import SessionStore, StoredTurn

async def agent(store, name):
    turns = some_turns(4)
    for number in range(10**6):
        session = dataclasses.replace(OPEN, session_id=f"{name}-{number}")
        await store.put_session(session)
        for turn in turns:
            await store.add_turns(session.session_id, [StoredTurn(turn=turn)])
            print("turn", session.session_id, turn.number, flush=True)
        await store.close_session(dataclasses.replace(CLOSED, session_id=session.session_id), b"t")
        print("closed", session.session_id, 0, flush=True)

async def main():
    store = SessionStore(Path(sys.argv[1]))
    await asyncio.gather(*(agent(store, f"agent{i}") for i in range(8)))

asyncio.run(main())
"""


def write_until_killed(folder: Path) -> list[list[str]]:
    """Return what a process reported before it was killed: kind, session and number of a turn."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(400)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    return [line.split() for line in lines if line.endswith("\n")]


async def test_a_killed_gateway_keeps_what_it_reported(tmp_path: Path) -> None:
    reported = await asyncio.to_thread(write_until_killed, tmp_path / "store")
    assert len(reported) >= 400
    store = SessionStore(tmp_path / "store")
    for name in {name for _, name, _ in reported}:
        session = await store.load_session(name)
        assert session is not None
        turns = {str(row.turn.number) for row in await store.load_turns(name)}
        assert turns >= {number for kind, other, number in reported if (kind, other) == ("turn", name)}
        SessionTokens.restore(LIMITS, [row.turn for row in await store.load_turns(name)])
    closed = [name for kind, name, _ in reported if kind == "closed"]
    outbox = [entry.session_id for entry in await store.read_outbox(max_count=10_000)]
    assert closed
    assert set(outbox) >= set(closed)
    assert len(outbox) == len(set(outbox))
    assert len(await store.load_unsettled()) <= len(outbox) + 8
    await store.stop()


FULL_DISK = """
import asyncio, dataclasses, os, resource, sys
from pathlib import Path
from tests.unit.gateway.test_store import CLOSED, OPEN, some_turns
from fourfold_gateway.store import SessionStore, StoredTurn, StoreFull

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            SessionStore(Path(sys.argv[1]))
        except StoreFull as error:
            print("opened:", error.retry_after, error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    descriptors = len(os.listdir("/proc/self/fd"))
    store = SessionStore(Path(sys.argv[1]))
    assert descriptors < 12, "a store that cannot be opened keeps its folder, or its file"
    await store.put_session(OPEN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    written = 0
    try:
        while True:
            name = f"s{written}"
            await store.close_session(dataclasses.replace(CLOSED, session_id=name), bytes(3000))
            written += 1
    except StoreFull as error:
        print(error.retry_after, error, flush=True)
    assert (await store.load_session("a")) == OPEN, "it can be read"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(await store.read_outbox(max_count=1000)) == written, "nothing is half-written"
    assert await store.load_session(f"s{written}") is None
    await store.close_session(dataclasses.replace(CLOSED, session_id="later"), bytes(3000))
    await store.stop()

asyncio.run(main())
"""


def test_a_full_disk_is_named_and_nothing_is_half_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    *opened, written = result.stdout.splitlines()
    told = f"{tmp_path}: the session store cannot be written"
    assert [line.startswith(f"opened: 5.0 {told}") for line in opened] == [True, True], opened
    assert written.startswith(f"5.0 {told}")
    assert "nothing was changed: make room on this disk" in result.stdout
    assert issubclass(StoreFull, Unavailable)


@pytest.mark.parametrize(("number", "expected"), [(errno.ENOSPC, StoreFull), (errno.EACCES, ConfigError)])
def test_a_disk_without_room_for_the_lock_is_full_and_no_wrong_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def refuse(path: object, *_: object) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(expected, match=f"{tmp_path}: .*{os.strerror(number)}"):
        SessionStore(tmp_path)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
async def test_ten_thousand_sessions_leave_memory_flat(store: SessionStore, tmp_path: Path) -> None:
    turns = some_turns(2)

    async def attempt(number: int) -> None:
        name = f"s{number}"
        await store.put_session(dataclasses.replace(OPEN, session_id=name))
        for turn in turns:
            await store.add_turns(name, [StoredTurn(turn=turn, chat=bytes(200))])
        await store.close_session(dataclasses.replace(CLOSED, session_id=name), bytes(500))
        await store.settle(dataclasses.replace(STORED, session_id=name))

    blocks, files = [], []
    for batch in range(20):
        await asyncio.gather(*(attempt(batch * 500 + number) for number in range(500)))
        assert await store.prune(200.0) == 500
        gc.collect()
        blocks.append(sys.getallocatedblocks())
        files.append(size_of(tmp_path))
    assert blocks[-1] < blocks[1] + 4_000, "less than one block of memory for each session"
    assert files[-1] < 2 * files[1] + (1 << 20), "pruned rows leave their space to others"
    assert await store.load_unsettled() == []
    assert await store.read_outbox() == []
