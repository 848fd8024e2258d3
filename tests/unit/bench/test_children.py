"""What benchmarks share: their processes, their folders, their profiler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold_bench import sampler
from fourfold_bench.children import Children, workplace
from fourfold_bench.sampler import Profile


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    found = Children(tmp_path)
    yield found
    found.stop()


def test_a_child_that_fails_is_told_with_the_end_of_its_log(children: Children) -> None:
    with pytest.raises(Unavailable, match="no such thing"):
        children.run("model", "-c", "raise SystemExit('no such thing')", timeout=30)


def test_the_death_of_another_ends_the_wait(children: Children) -> None:
    children.start("service", "-c", "raise SystemExit(3)")
    children.start("client", "-c", "import time; time.sleep(60)")
    with pytest.raises(Unavailable, match="service died"):
        children.wait("client", timeout=30)


def test_a_service_that_was_ended_is_no_death(children: Children) -> None:
    children.start("service", "-c", "import time; print('READY 127.0.0.1:1'); time.sleep(60)")
    assert children.ready("service", timeout=30) == "127.0.0.1:1"
    children.end("service")
    children.run("next", "-c", "pass", timeout=30)


def test_a_wait_has_an_end(children: Children) -> None:
    calls: list[int] = []
    children.start("slow", "-c", "import time; time.sleep(60)")
    with pytest.raises(DeadlinePassed, match=r"slow still ran after 0 s; the log is .*slow\.log"):
        children.wait("slow", timeout=0.2, until=lambda: bool(calls.append(1)))  # type: ignore[func-returns-value]
    assert calls
    children.wait("slow", timeout=30, until=lambda: True)
    pid = children.pid("slow")
    children.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_a_folder_stays_when_its_block_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with workplace("bench-test") as folder:
        (folder / "a").touch()
    assert not folder.exists()
    with pytest.raises(Unavailable), workplace("bench-test") as folder:
        (folder / "log").touch()
        raise Unavailable("it died")
    kept = folder.with_name(f"kept-{folder.name}")
    assert (kept / "log").exists() and str(kept) in capsys.readouterr().err
    (kept / "log").unlink()
    kept.rmdir()


def test_a_folder_to_keep_must_be_empty(tmp_path: Path) -> None:
    with workplace("bench-test", keep=tmp_path / "k") as folder:
        (folder / "a").touch()
    assert (tmp_path / "k" / "a").exists()
    with pytest.raises(ConfigError, match="there is something in it"), workplace("bench-test", keep=tmp_path / "k"):
        pass


_WORK = """
import multiprocessing, time
def busy_work(end):
    while time.monotonic() < end:
        sum(range(1000))
if __name__ == "__main__":
    print("READY 127.0.0.1:1", flush=True)
    child = multiprocessing.get_context("fork").Process(target=busy_work, args=(time.monotonic() + 60,), name="forked")
    child.start()
    busy_work(time.monotonic() + 60)
"""


def test_a_profile_has_the_stacks_of_a_process_and_of_its_fork(children: Children, tmp_path: Path) -> None:
    profile = Profile(tmp_path / "profile")
    (tmp_path / "work.py").write_text(_WORK)
    children.start("work", str(tmp_path / "work.py"), env=profile.environment())
    children.ready("work", timeout=30)
    pid = children.pid("work")
    _until(lambda: len(list((tmp_path / "profile").glob("armed-*"))) == 2)
    assert profile.begin(pid) == 2
    time.sleep(0.5)
    assert profile.end() == 2
    texts = {path.name.partition("-")[0]: path.read_text() for path in (tmp_path / "profile").glob("*.txt")}
    assert set(texts) == {"work", "forked"}, "all of it is there when `end` returns"
    assert all("busy_work" in text and "in the stack" in text for text in texts.values())
    folded = next((tmp_path / "profile").glob("forked-*.folded")).read_text()
    assert folded.startswith("MainThread;") and folded.splitlines()[0].rpartition(" ")[2].isdigit()


def test_a_summary_counts_tops_and_stacks() -> None:
    lines = sampler.summary({"T;a (x.py:1);b (x.py:2)": 3, "T;a (x.py:1);c (x.py:5)": 1})
    text = "\n".join(lines)
    assert "thread T: 4 samples" in text
    assert " 75.0%  b (x.py:2)" in text and "100.0%  a (x.py)" in text
    assert sampler.stack(sys._getframe(), "T").rpartition(";")[2].startswith("test_a_summary_counts_tops_and_stacks")


def test_the_sampler_needs_nothing_heavy() -> None:
    code = "import sys; import fourfold_bench.sampler; print(sorted({'torch', 'numpy', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "[]"


def _until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.02)
