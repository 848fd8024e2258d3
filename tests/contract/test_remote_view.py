"""`fourfold view` over a coordinator: real gRPC with certificates and tokens, and a folder of a run behind it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from fourfold import errors
from fourfold.config import SecurityConfig
from fourfold.coordinator.client import AsyncRunFileClient, RunFileClient
from fourfold.coordinator.v1 import run_file_service_pb2 as files
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1.run_file_service_pb2_grpc import (
    add_RunFileServiceServicer_to_server,
)
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.security.access import COORDINATOR, Security
from fourfold.security.principal import Principal
from fourfold_coordinator.launch.run_names import LEDGER_FILE
from fourfold_coordinator.reporting.run_files import RunFileServicer
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import Ledger
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.samples import SAMPLES_FILE
from fourfold_coordinator.view import reader as view_reader
from fourfold_coordinator.view import remote
from fourfold_coordinator.view.app import make_app
from fourfold_coordinator.view.reader import RunFolders, RunReader
from fourfold_tools import certs
from tests.support.view_run import append_step, trajectory, write_run

LOCAL = "http://127.0.0.1:8440"
_RUN = run.DESCRIPTOR.services_by_name["RunService"]
_FILES = files.DESCRIPTOR.services_by_name["RunFileService"]


class _Coordinator:
    """Both services of viewers on a server of a thread, because `fourfold view` blocks its own."""

    def __init__(self, folder: Path, servicer: Any = None, **options: Any) -> None:
        self.board = RunBoard(name=folder.name, step_count=9)
        self._servicer = servicer or RunFileServicer(folder, folder / "tokenizer.json")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.target = self._do(self._start(options))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self, options: dict[str, Any]) -> str:
        self._server = Server(listen="127.0.0.1:0", **({"security": None} | options))
        self._server.add(_RUN, add_RunServiceServicer_to_server, RunServicer(self.board))
        self._server.add(_FILES, add_RunFileServiceServicer_to_server, self._servicer)
        return await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(0)
        await self._loop.shutdown_asyncgens()  # calls of viewers that go on have files open
        await self._loop.shutdown_default_executor()

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)


Start = Callable[..., _Coordinator]


@pytest.fixture(autouse=True)
def frequent_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_UPDATE_SECONDS", 0.05)
    monkeypatch.setattr(view_reader, "_UPDATE_SECONDS", 0.05)
    monkeypatch.setattr(view_reader, "_STATE_SECONDS", 0.1)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[_Coordinator] = []

    def begin(*args: Any, **options: Any) -> _Coordinator:
        started.append(_Coordinator(*args, **options))
        return started[-1]

    yield begin
    for coordinator in started:
        coordinator.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "host" / "one")


Open = Callable[..., RunReader]


@pytest.fixture
def open_remote(start: Start, tmp_path: Path) -> Iterator[Open]:
    """Open remote runs with their copies in `tmp_path`. They are closed before the coordinators of `start`."""
    with ExitStack() as opened:

        def enter(target: str, **options: Any) -> RunReader:
            return opened.enter_context(remote.open_remote(target, **({"room": _room(tmp_path)} | options)))

        yield enter
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("copy", "fourfold-clients")]


def _room(tmp_path: Path, gib: float = remote.COPY_GIB) -> remote.CopyRoom:
    return remote.CopyRoom(tmp_path / "cache", gib)


def _until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def test_the_pages_of_a_remote_run_equal_those_of_its_machine(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    coordinator = start(folder)
    reader = open_remote(coordinator.target)
    local = RunReader(folder, cache=tmp_path / "local")
    assert (reader.name, reader.state(), reader.steps()) == ("one", "running", local.steps())
    assert reader.recipe() == local.recipe()
    with TestClient(make_app(RunFolders([reader])), base_url=LOCAL) as client:
        _until(lambda: "9 trajectories" in client.get("/run/one/samples").text, "samples were copied and indexed")
        assert "apples" in client.get("/run/one/samples?text=apples").text
        _until(lambda: "60.7%; version 1" in client.get("/run/one/sample/p2-0-0").text, "tokens were copied, too")
        assert "rollout-0" in client.get("/run/one/timeline").text
        assert "The coordinator does not answer" not in client.get("/run/one/weights").text
        coordinator.board.set_phase(run.RUN_PHASE_DONE)
        _until(lambda: reader.state() == "finished", "the end of the run is seen")


def test_new_lines_arrive_and_a_restart_from_a_checkpoint_replaces_old_ones(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    reader = open_remote(start(folder).target)
    copy = reader.folder / SAMPLES_FILE
    source = folder / SAMPLES_FILE

    def is_equal() -> bool:
        reader.state()
        return copy.exists() and copy.read_bytes() == source.read_bytes()

    _until(is_equal, "the first copy")
    append_step(folder, 4, [trajectory("h4-0-0", "new words", step=4)])
    _until(is_equal, "a new step")
    assert reader.steps()[-1]["step"] == 4
    lines = source.read_bytes().splitlines(keepends=True)
    # As long as before, and with the same end: only earlier bytes differ.
    source.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"new words", b"old words")]))
    _until(is_equal, "a line that was replaced")
    source.write_bytes(b"".join(lines[:2]))
    _until(is_equal, "fewer lines")
    assert reader.report().seconds == 9.0
    (folder / "report.json").unlink()
    _until(lambda: reader.state() and reader.report().seconds is None, "a report that a resumed run removed")
    assert reader.faults() == []


def test_a_coordinator_that_is_gone_leaves_its_copy(
    start: Start, open_remote: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_reader, "_STATE_SECONDS", 2.0)  # each question to a lost coordinator takes a second
    ledger = Ledger(folder / LEDGER_FILE)
    answers = [{"prompt": "p", "completion": "c", "answer": "a", "score": 1.0}]
    row = EvalRow(step=0, score=0.5, half_width=None, answer_count=8, missing_count=0, answers=answers)
    ledger.add_eval(row)
    ledger.close()
    coordinator = start(folder)
    reader = open_remote(coordinator.target)
    assert reader.state() == "running"
    _until(lambda: reader.evaluations() == [row], "evaluations come from the ledger")
    coordinator.stop()
    (reader.folder / "report.json").unlink(missing_ok=True)
    _until(lambda: reader.state() == "unreachable", "the state follows")
    with TestClient(make_app(RunFolders([reader])), base_url=LOCAL) as client:
        page = client.get("/run/one").text
        assert "The coordinator does not answer. The copy ends after step 3 of 9. If the run has stopped," in page
        assert "<body data-live>" in page, "it shows by itself that the coordinator answers again"
        assert "no updates are in progress" not in client.get("/run/one/weights").text
    assert reader.steps() and reader.weight_plane() is None and reader.evaluations() == [row]
    with pytest.raises(errors.Unavailable, match=r"coordinator service at .*nothing listens there"):
        open_remote(coordinator.target)


def test_two_machines_may_have_runs_with_the_same_name(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    coordinators = [start(folder), start(write_run(tmp_path / "other" / "one"))]
    (tmp_path / "other" / "one" / "report.json").unlink()
    readers = [open_remote(each.target) for each in coordinators]
    second = f"one@{coordinators[1].target}"
    runs = RunFolders(readers)
    assert [reader.name for reader in readers] == ["one", second]
    coordinators[1].board.set_phase(run.RUN_PHASE_STOPPED)
    with TestClient(make_app(runs), base_url=LOCAL) as client:
        page = client.get(f"/run/{second}").text
        assert f"<strong>{second}</strong>" in page and "<code>fourfold run --resume runs/one</code>" in page


def test_what_a_coordinator_said_last_of_the_run_remains(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    (folder / "report.json").unlink()
    coordinator = start(folder)
    reader = open_remote(coordinator.target)
    coordinator.board.set_phase(run.RUN_PHASE_STOPPED)
    _until(lambda: reader.state() == "stopped", "the end is seen")
    coordinator.stop()
    _until(lambda: reader.faults() if reader.state() else [], "the coordinator is gone")
    assert reader.state() == "stopped"


def test_a_token_needs_the_scope_view(start: Start, open_remote: Open, folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    certs.make(directory, [])
    tokens = directory / "tokens.txt"
    viewer = certs.add_token(tokens, "viewer", scopes=["view"])
    agent = certs.add_token(tokens, "alice")
    config = SecurityConfig(directory=str(directory), tokens_file=str(tokens))
    security = Security.load(config, Principal("coordinator", "coordinator-0"), public=True)
    public = start(folder, security=security, public=True).target
    internal = start(folder, security=security).target
    authority = tmp_path / "laptop"
    authority.mkdir()
    (authority / "ca.pem").write_bytes((directory / "ca.pem").read_bytes())
    opened = open_remote(public, certs=str(authority), token=viewer)
    assert opened.steps()
    assert open_remote(internal, certs=str(directory)).steps()
    for token, text in ((agent, "may not call GetRun: its scopes are generate, info, train"), ("x" * 20, "unknown")):
        with pytest.raises((errors.PermissionDenied, errors.Unauthenticated), match=text):
            open_remote(public, certs=str(authority), token=token)
    for role in ("gateway", "environment", "reward"):  # some of them may call RunService
        asyncio.run(_is_refused(internal, role, directory))


async def _is_refused(target: str, role: str, directory: Path) -> None:
    security = Security.load(SecurityConfig(directory=str(directory)), Principal(role, f"{role}-0"))
    async with open_channel(target, security, server=COORDINATOR) as channel:
        with pytest.raises(errors.PermissionDenied, match=f"{role}-0 may not call .*RunFileService"):
            await anext(AsyncRunFileClient(channel).read_file(files.RUN_FILE_SAMPLES))


def test_malformed_requests_are_refused(start: Start, folder: Path) -> None:
    with RunFileClient(start(folder).target) as client:
        for request in (
            {"file": files.RUN_FILE_UNSPECIFIED},
            {"file": 99},
            {"file": files.RUN_FILE_SAMPLES, "offset": -1},
            {"file": files.RUN_FILE_SAMPLES, "offset": 5},
            {"file": files.RUN_FILE_SAMPLES, "tail": b"x"},
        ):
            with pytest.raises(errors.InvalidInput):
                list(client.read_file(**request))
        parts = list(client.read_file(files.RUN_FILE_SAMPLES, offset=1 << 40, tail=b"x" * 32))
        assert parts[0][0] == 0 and b"".join(data for _, data in parts) == (folder / SAMPLES_FILE).read_bytes()
        (folder / "report.json").unlink()
        assert list(client.read_file(files.RUN_FILE_REPORT)) == [(0, b"")], "a missing file is empty"


class _Mixed(RunFileServicer):
    """Sends the real files, but two that are malformed, and parts of a third one that do not follow each other."""

    async def ReadFile(self, request: files.ReadFileRequest, context: Any) -> AsyncIterator[files.ReadFileResponse]:
        if request.file == files.RUN_FILE_TIMELINE:
            yield files.ReadFileResponse(offset=7, data=b"{}")
        elif request.file in (files.RUN_FILE_REPORT, files.RUN_FILE_EVALUATIONS):
            data = b'{"seconds": "<b>", "step": 1}\n'
            yield files.ReadFileResponse(offset=request.offset, data=data[request.offset :])
        else:
            async for response in super().ReadFile(request, context):
                yield response


def test_what_a_hostile_coordinator_sends_is_its_named_fault_and_the_rest_is_shown(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text("[batch]\nprompts_per_step = 2\n")
    recipe = folder / "config.toml"
    recipe.write_text(f'include = "{secret}"\n' + recipe.read_text())
    coordinator = start(folder, _Mixed(folder, folder / "tokenizer.json"))
    reader = open_remote(coordinator.target)
    sent = f"coordinator service at {coordinator.target}: "
    with TestClient(make_app(RunFolders([reader])), base_url=LOCAL) as client:
        _until(lambda: "9 trajectories" in client.get("/run/one/samples").text, "samples come, too")
        page = client.get("/run/one").text
        assert f"{sent}report.json: seconds is &#39;&lt;b&gt;&#39;: " in page and "<polyline" in page
        assert f"{sent}evaluations.jsonl: 1 lines are left out; in the first, score is" in page
        assert "timeline.jsonl was not copied: " in page and "ReadFile: offset is 7; the next byte is at 0" in page
        assert reader.config() is None, "no file of this machine is read for its recipe"
        coordinator.board.status.phase_progress = float("nan")
        _until(lambda: "state of the run: " in client.get("/run/one").text, "a malformed state is named, too")
        assert "a number in the status is not finite" in client.get("/run/one").text


def test_an_endless_recipe_is_refused(start: Start, open_remote: Open, folder: Path, tmp_path: Path) -> None:
    (folder / "config.toml").write_text("# no end\n" * 20_000)
    coordinator = start(folder)
    with pytest.raises(errors.PeerFault, match=rf"{coordinator.target}: .*config.toml has more than 131,072 bytes"):
        open_remote(coordinator.target)


def test_a_viewer_that_leaves_while_a_file_is_opened_leaves_no_open_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, opened, go = RunFileServicer(folder, folder / "tokenizer.json"), list[Any](), threading.Event()
    content = servicer._content

    def slow(kind: Any) -> Any:
        go.wait(20)
        opened.append(content(kind))
        return opened[0]

    async def leave() -> None:
        reading = servicer.ReadFile(files.ReadFileRequest(file=files.RUN_FILE_SAMPLES), cast(Any, None))
        first = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.wait({first})
        go.set()
        async with asyncio.timeout(20):
            while not (opened and opened[0].closed):
                await asyncio.sleep(0.01)

    monkeypatch.setattr(servicer, "_content", slow)
    asyncio.run(leave())


class _Endless(RunFileServicer):
    """Sends a timeline that never ends."""

    async def ReadFile(self, request: files.ReadFileRequest, context: Any) -> AsyncIterator[files.ReadFileResponse]:
        if request.file != files.RUN_FILE_TIMELINE:
            async for response in super().ReadFile(request, context):
                yield response
            return
        offset = request.offset
        while True:
            yield files.ReadFileResponse(offset=offset, data=b"{}\n" * 10_000)
            offset += 30_000


def test_all_copies_together_stay_below_the_limit(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path
) -> None:
    coordinator = start(folder, _Endless(folder, folder / "tokenizer.json"))
    room = _room(tmp_path, 0.001)
    limit = int(0.001 * (1 << 30))
    reader = open_remote(coordinator.target, room=room)
    rule = rf"--copy-limit 0.001: timeline.jsonl of the coordinator service at {coordinator.target} would exceed"

    def faults() -> str:
        reader.state()
        return "\n".join(reader.faults())

    _until(lambda: re.search(rf"{rule}.*{room.folder} use 0.000\d+; remove copies", faults()), "the limit is named")
    used = sum(path.stat().st_size for path in room.folder.rglob("*") if path.is_file())
    assert limit - 200_000 < used <= limit
    assert reader.steps(), "what was copied is shown"
    (room.folder / "old").write_bytes(b"x" * 100)
    for gib in (0.001, 1e-6):  # another view of the same user, also with a lower limit
        room = _room(tmp_path, gib)
        room.count()
        with pytest.raises(errors.ConfigError, match=f"--copy-limit {gib:g}: more would exceed these GiB"):
            room.take(limit, "more")


@pytest.mark.parametrize("name", ["../../evil", "a/b", ".."])
def test_a_hostile_name_of_a_run_leaves_the_cache(
    start: Start, open_remote: Open, folder: Path, tmp_path: Path, name: str
) -> None:
    coordinator = start(folder)
    coordinator.board.status.name = name
    with pytest.raises(errors.PeerFault, match="is no name of a run"):
        open_remote(coordinator.target)
    assert not (tmp_path / "cache").exists()
