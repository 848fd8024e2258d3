"""Supervision of real child processes: the first death is explained, and nothing outlives its owner."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold.host import logs, postmortem, process
from fourfold.host.postmortem import Death, log_tail
from fourfold.host.process import Command, Supervisor
from fourfold.host.process_tree import descendants, kill_group


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    owner = Supervisor(tmp_path / "logs")
    yield owner
    owner.stop(grace_seconds=0)


def shell(name: str, script: str) -> Command:
    return Command(name=name, argv=("/bin/sh", "-c", script))


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ready_line_gives_the_target_and_output_goes_to_the_log(supervisor: Supervisor) -> None:
    child = supervisor.start(shell("rollout-0", "echo loading; echo oops >&2; echo READY 127.0.0.1:5000; sleep 60"))
    assert supervisor.wait_ready(["rollout-0"], timeout_seconds=10) == {"rollout-0": "127.0.0.1:5000"}
    assert child.log.read_text() == "loading\noops\nREADY 127.0.0.1:5000\n"
    assert child.log.name == "rollout-0.log"


def test_first_death_is_explained_with_exit_code_and_last_lines(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(shell("trainer-0", "echo READY a:1; while [ ! -e $0.go ]; do sleep 0.01; done; exit 1"))
    supervisor.start(shell("rollout-0", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit 9"))
    supervisor.start(shell("reward-0", "seq 1 40; echo the reason; exit 3"))
    wait_for(lambda: not supervisor.children["reward-0"].alive)
    (tmp_path / "go").touch()
    wait_for(lambda: not supervisor.children["rollout-0"].alive)
    first, second = supervisor.deaths()
    assert (first.name, first.exit_code, first.signal) == ("reward-0", 3, 0)
    assert (second.name, second.exit_code) == ("rollout-0", 9)
    text = first.explain()
    assert "reward-0 died before it was ready: ended with exit code 3." in text
    assert text.splitlines()[-1] == "  | the reason"
    assert len(first.last_lines) == 30
    assert first.log in text
    assert supervisor.deaths() == []  # each is returned once


def running_in_group(group: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.parametrize(
    ("oom_kills", "words"),
    [(0, "its sender is unknown, and no out-of-memory kill was recorded"), (1, "out-of-memory killer struck")],
)
def test_sigkill_is_named_and_an_out_of_memory_kill_recognised(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, oom_kills: int, words: str
) -> None:
    child = supervisor.start(shell("trainer-0", "echo READY a:1; sleep 60"))
    supervisor.wait_ready(["trainer-0"], timeout_seconds=10)
    before = postmortem.oom_kill_count()
    monkeypatch.setattr(process, "oom_kill_count", lambda: before + oom_kills)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: not child.alive)
    (death,) = supervisor.deaths()
    assert death.explain().startswith("trainer-0 died: killed by SIGKILL")
    assert words in death.explain()


def test_a_death_for_lack_of_shared_memory_names_it(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A semaphore that does not fit into /dev/shm fails as a full disk does, and names no file."""
    supervisor.start(shell("rollout-0", "echo 'OSError: [Errno 28] No space left on device'; exit 1"))
    wait_for(lambda: not supervisor.children["rollout-0"].alive)
    (death,) = supervisor.deaths()
    # Launchers explain deaths on other machines: the numbers are those of the machine on which the process died.
    monkeypatch.setattr("shutil.disk_usage", lambda path: pytest.fail(f"asked for {path}"))
    *_, last = death.explain().splitlines()
    words = (
        rf"{tmp_path}/logs has [\d,]+ of [\d,]+ MiB free, /dev/shm has [\d,]+ of [\d,]+ MiB free; make room there .*"
    )
    assert re.fullmatch(words, last), last


def test_a_death_is_noticed_without_the_log(supervisor: Supervisor) -> None:
    child = supervisor.start(shell("reward-0", "sleep 60"))
    child.log.unlink()
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: not child.alive)
    assert "It wrote nothing to its log" in supervisor.deaths()[0].explain()


def test_a_death_is_noticed_whatever_the_child_printed(supervisor: Supervisor) -> None:
    child = supervisor.start(
        shell("reward-0", "printf 'READY \\377\\n'; head -c 9000 /dev/zero | tr '\\0' '['; exit 3")
    )
    wait_for(lambda: not child.alive)
    assert "ended with exit code 3" in supervisor.deaths()[0].explain()


def test_wait_ready_reports_a_child_that_died_instead(supervisor: Supervisor) -> None:
    supervisor.start(shell("rollout-0", "echo no such model; exit 1"))
    with pytest.raises(Unavailable, match=r"rollout-0 died before it was ready: ended with exit code 1"):
        supervisor.wait_ready(["rollout-0"], timeout_seconds=10)


def test_wait_ready_has_a_deadline(supervisor: Supervisor) -> None:
    supervisor.start(shell("rollout-0", "sleep 60"))
    with pytest.raises(DeadlinePassed, match=r"rollout-0 not ready after 0 s; .*rollout-0\.log"):
        supervisor.wait_ready(["rollout-0"], timeout_seconds=0.1)


def test_json_records_of_a_log_are_shown_as_text(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    record = {"time": "2026-01-02T03:04:05.678Z", "level": "error", "message": "cannot load", "traceback": "a\nb"}
    log.write_text(f'plain {{\n{json.dumps(record)}\n{{"other": 1}}\n')
    assert log_tail(log) == ("plain {", "03:04:05 error: cannot load", "a", "b", '{"other": 1}')
    assert log_tail(tmp_path / "none.log") == ()


def test_a_log_that_is_too_long_is_cut_off_and_its_end_still_explains_a_death(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_ROTATION_SECONDS", 3600)
    monkeypatch.setattr(logs, "MAX_BYTES", 20_000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 500)
    earlier = supervisor.start(shell("rollout-0", "seq 1 2000"))  # a process of the same name and log
    wait_for(lambda: not earlier.alive)
    supervisor.deaths()
    script = f"seq 1 5000; echo READY a:1; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo the reason; exit 3"
    child = supervisor.start(shell("rollout-0", script))
    supervisor.wait_ready(["rollout-0"], timeout_seconds=10)
    before = child.log.read_text()
    child.rotate_log()
    kept = child.log.read_text()
    assert 450 < len(kept) <= 500 and before.endswith("\n" + kept)
    assert child.log.with_name("rollout-0.log.1").read_text() == before
    child.rotate_log()  # short now: nothing happens
    (tmp_path / "go").touch()
    wait_for(lambda: not child.alive)
    (death,) = supervisor.deaths()
    assert death.was_ready and len(death.last_lines) == 30 and death.last_lines[-2:] == ("READY a:1", "the reason")
    assert child.log.read_text() == kept + "the reason\n"


def test_a_last_line_that_is_longer_than_what_is_kept_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 100)
    log = tmp_path / "x.log"
    for text, kept in (("a\n" + "b" * 2000 + "c\n", "b" * 98 + "c\n"), ("a\n" + "b" * 2000, "b" * 100)):
        log.write_text(text)
        assert logs.rotate(log)
        assert log.read_text() == kept
        assert log.with_name("x.log.1").read_text() == text


def test_a_log_whose_end_cannot_be_written_back_counts_as_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller must read such a log from byte 0 on, or it would miss the lines that follow."""
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    log = tmp_path / "x.log"
    log.write_text("line\n" * 1000)
    truncate = os.truncate

    def fill_the_disk(path: Path, length: int) -> None:
        truncate(path, length)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit))

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "truncate", fill_the_disk)
            assert logs.rotate(log)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.read_text() == ""


def test_logs_are_watched_while_their_processes_run(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_ROTATION_SECONDS", 0.01)
    monkeypatch.setattr(logs, "MAX_BYTES", 1000)
    monkeypatch.setattr(logs, "KEPT_BYTES", 100)
    children = [supervisor.start(shell(name, "seq 1 2000; sleep 60")) for name in ("rollout-0", "rollout-1")]
    wait_for(lambda: all(child.log.with_name(f"{child.log.name}.1").exists() for child in children))
    wait_for(lambda: all(child.log.stat().st_size <= 1000 for child in children))


def test_what_keeps_a_child_from_being_ready_is_read_from_its_log(supervisor: Supervisor) -> None:
    script = 'echo "NOT READY: a"; echo "NOT READY: b c"; read line < {}; echo READY a:1; sleep 9'
    pipes = {name: supervisor._log_directory / f"{name}.pipe" for name in ("reward-0", "reward-1")}
    for name, pipe in pipes.items():
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)
        supervisor.start(shell(name, script.format(pipe)))
    wait_for(lambda: all(supervisor.obstacle(name) == "b c" for name in pipes))
    assert not any(map(supervisor.is_ready, pipes))
    pipes["reward-0"].write_text("go on\n")
    wait_for(lambda: supervisor.is_ready("reward-0"))
    assert supervisor.obstacle("reward-0") == supervisor.obstacle("no such child") == ""
    supervisor.children["reward-1"].kill_group()
    wait_for(lambda: not supervisor.children["reward-1"].alive)
    (death,) = supervisor.deaths()
    assert death.was_ready, "it had started, and is started again"


def test_the_limit_of_open_files_is_raised_to_what_the_owner_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        assert process.raise_file_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_program_that_is_not_there_is_one_clear_error(supervisor: Supervisor) -> None:
    with pytest.raises(Unavailable, match="x-0: cannot start /no/such/program"):
        supervisor.start(Command(name="x-0", argv=("/no/such/program",)))


def test_restarted_child_continues_its_log_and_is_judged_by_its_own_lines(supervisor: Supervisor) -> None:
    supervisor.start(shell("rollout-0", "echo READY a:1; echo first life; exit 1"))
    wait_for(lambda: not supervisor.children["rollout-0"].alive)
    child = supervisor.start(shell("rollout-0", "echo second life; exit 2"))
    assert not child.poll_ready()
    wait_for(lambda: not child.alive)
    first, second = supervisor.deaths()
    assert (first.was_ready, second.was_ready) == (True, False)
    assert second.last_lines == ("second life",)
    assert child.log.read_text().count("life") == 2


def test_stop_ends_all_at_once_and_kills_what_ignores_it(supervisor: Supervisor, tmp_path: Path) -> None:
    grandchildren = f"sleep 60 & setsid sleep 60 & echo $! > {tmp_path}/pid"
    supervisor.start(shell("deaf", f"trap '' TERM; {grandchildren}; echo READY a:1; while :; do sleep 1; done"))
    supervisor.start(shell("polite", "trap 'echo bye; exit 0' TERM; echo READY a:1; while :; do sleep 0.05; done"))
    supervisor.wait_ready(["deaf", "polite"], timeout_seconds=10)
    wait_for(lambda: (tmp_path / "pid").read_text().strip())
    detached = int((tmp_path / "pid").read_text())
    assert is_running(detached)

    began = time.monotonic()
    supervisor.stop(grace_seconds=1.5)
    assert 1.5 <= time.monotonic() - began < 10
    assert "bye" in supervisor.children["polite"].log.read_text()
    deaths = {death.name: death for death in supervisor.deaths()}
    assert deaths["polite"].exit_code == 0 and not deaths["polite"].signal
    assert deaths["deaf"].signal == signal.SIGKILL
    wait_for(lambda: not is_running(detached))  # it is in another session, and found by its tag
    assert running_in_group(supervisor.children["deaf"].pid) == []
    with pytest.raises(Unavailable, match="being stopped"):
        supervisor.start(shell("late", "true"))


def test_a_reaped_process_is_not_signalled_under_a_pid_that_may_be_another_ones(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = supervisor.start(shell("rollout-0", "exit 1"))
    wait_for(lambda: not replaced.alive)
    stopped = supervisor.start(shell("rollout-0", "sleep 60"))
    used: list[int] = []

    def note_and_kill(pid: int) -> None:
        used.append(pid)
        kill_group(pid)

    def find_descendants(roots: set[int]) -> set[int]:
        used.extend(roots)
        return descendants(roots)

    monkeypatch.setattr(process, "kill_group", note_and_kill)
    monkeypatch.setattr("fourfold.host.process.descendants", find_descendants)
    supervisor.stop(grace_seconds=0)
    assert set(used) == {stopped.pid}
    used.clear()
    supervisor.stop()
    monkeypatch.setattr(os, "kill", lambda pid, number: used.append(pid))
    for child in (replaced, stopped):
        child.terminate()
        child.give_notice()
    assert not used


_SEMAPHORE = """
import multiprocessing, os, sys, time
lock = multiprocessing.get_context("spawn").Lock()
print("READY a:1", lock._semlock.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["stop", "replace", "guard"])
def test_killed_processes_leave_no_semaphore_behind(supervisor: Supervisor, tmp_path: Path, end: str) -> None:
    command = Command(name="rollout-0", argv=(sys.executable, "-c", _SEMAPHORE))
    if end == "guard":
        script = f"from tests.unit.host.test_process import *; s = Supervisor(Path({str(tmp_path)!r}) / 'logs'); "
        script += f"s.start({command!r}); time.sleep(60)"
        owner = subprocess.Popen([sys.executable, "-c", script])
    else:
        child = supervisor.start(command)
    log = tmp_path / "logs" / "rollout-0.log"
    wait_for(lambda: log.exists() and "READY a:1 /mp-" in log.read_text(), 30)
    semaphore = Path("/dev/shm", "sem." + log.read_text().split()[-1].removeprefix("/"))
    assert semaphore.exists()
    if end == "stop":
        supervisor.stop(grace_seconds=0)
    elif end == "replace":
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: not child.alive)
        supervisor.start(shell("rollout-0", "sleep 60"))
    else:
        owner.kill()
        owner.wait()
    wait_for(lambda: not semaphore.exists())


def test_children_that_outlive_their_leader_in_its_group_end_when_it_is_replaced(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    first = supervisor.start(shell("rollout-0", f"sleep 60 & echo $! > {tmp_path}/pid; exit 1"))
    wait_for(lambda: not first.alive)
    left = int((tmp_path / "pid").read_text())
    assert is_running(left)
    supervisor.start(shell("rollout-0", "sleep 60"))
    wait_for(lambda: not is_running(left))


def test_a_death_under_a_pid_that_was_used_before_is_reported(supervisor: Supervisor) -> None:
    first = supervisor.start(shell("rollout-0", "exit 1"))
    wait_for(lambda: not first.alive)
    assert [death.exit_code for death in supervisor.deaths()] == [1]
    second = supervisor.start(shell("rollout-0", "exit 2"))
    wait_for(lambda: not second.alive)
    second.reap()
    second.pid = first.pid
    assert [death.exit_code for death in supervisor.deaths()] == [2]


def test_kill_does_not_wait(supervisor: Supervisor) -> None:
    child = supervisor.start(shell("deaf", "trap '' TERM; echo READY a:1; while :; do sleep 1; done"))
    supervisor.wait_ready(["deaf"], timeout_seconds=10)
    began = time.monotonic()
    supervisor.kill()
    supervisor.stop(grace_seconds=30)
    assert time.monotonic() - began < 15
    assert not is_running(child.pid)


_PARENT = """
import sys, time
from pathlib import Path
from fourfold.host.process import Command, Supervisor
supervisor = Supervisor(Path(sys.argv[1]))
supervisor.start(Command(name="child", argv=tuple(sys.argv[2:])))
time.sleep(60)
"""


def test_descendants_that_detached_themselves_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    child = ("/bin/sh", "-c", "setsid sleep 60 & echo $!; wait")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path), *child], env=env)
    log = tmp_path / "child.log"
    try:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        pid = int(log.read_text())
        assert is_running(pid)
    finally:
        parent.kill()
        parent.wait(10)
    wait_for(lambda: not is_running(pid))


def test_a_service_that_ends_by_itself_says_why_in_its_last_words(supervisor: Supervisor) -> None:
    script = (
        "echo READY a:1; echo 'rollout-0: an earlier trouble'; echo 'rollout-0: its engine was killed by SIGKILL.' >&2;"
        "for i in $(seq 1 100); do echo '  | a line of its engine'; done; exit 1"
    )
    supervisor.start(shell("rollout-0", script))
    wait_for(lambda: not supervisor.children["rollout-0"].alive)
    (death,) = supervisor.deaths()
    assert death.message == "its engine was killed by SIGKILL"
    assert death.brief == "ended with exit code 1: its engine was killed by SIGKILL"
    assert death.explain().startswith("rollout-0 died: ended with exit code 1: its engine was killed by SIGKILL.")


def test_last_words_are_those_of_this_process_and_cannot_steer_a_terminal(supervisor: Supervisor) -> None:
    supervisor.start(shell("reward-0", "echo 'reward-0: of the first one'; exit 1"))
    wait_for(lambda: not supervisor.children["reward-0"].alive)
    supervisor.start(shell("reward-0", "printf '\\033[2J\\n'; exit 1"))
    wait_for(lambda: not supervisor.children["reward-0"].alive)
    first, second = supervisor.deaths()
    assert (first.message, second.message) == ("of the first one", "")
    assert second.last_lines == ("?[2J",)


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        ("rollout.kv_cache_gib is too large", ["Its log: logs/rollout-0.log"]),
        ("", ["Its last lines (logs/rollout-0.log):", "  | Traceback", "  | ValueError"]),
    ],
)
def test_the_reason_of_a_process_is_shown_instead_of_its_last_lines(message: str, lines: list[str]) -> None:
    death = Death(
        name="rollout-0",
        time=0.0,
        exit_code=1,
        signal=0,
        oom_kills=0,
        was_ready=False,
        log="logs/rollout-0.log",
        last_lines=("Traceback", "ValueError"),
        message=message,
    )
    reason = f": {message}" if message else ""
    assert death.explain().splitlines() == [
        f"rollout-0 died before it was ready: ended with exit code 1{reason}.",
        *lines,
    ]
