"""Tests the child processes and the folders of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold_bench.processes import BenchProcesses, workplace


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[BenchProcesses]:
    with BenchProcesses(tmp_path) as found:
        yield found


def test_the_error_of_a_failed_child_has_the_end_of_its_log(processes: BenchProcesses) -> None:
    with pytest.raises(Unavailable, match="no such thing"):
        processes.run("model", "-c", "raise SystemExit('no such thing')", timeout=30)


def test_the_death_of_another_child_ends_the_wait(processes: BenchProcesses) -> None:
    processes.start("service", "-c", "raise SystemExit(3)")
    processes.start("client", "-c", "import time; time.sleep(60)")
    with pytest.raises(Unavailable, match="service died"):
        processes.wait("client", timeout=30)


def test_the_end_of_a_service_is_not_reported_as_a_death(processes: BenchProcesses) -> None:
    processes.start("service", "-c", "import time; print('READY 127.0.0.1:1'); time.sleep(60)")
    assert processes.ready("service", timeout=30) == ["127.0.0.1:1"]
    processes.end("service")
    processes.run("next", "-c", "pass", timeout=30)


def test_a_wait_ends_at_its_timeout_or_its_condition(processes: BenchProcesses) -> None:
    calls: list[int] = []
    processes.start("slow", "-c", "import time; time.sleep(60)")
    with pytest.raises(DeadlinePassed, match=r"slow still ran after 0 s; the log is .*slow\.log"):
        processes.wait("slow", timeout=0.2, until=lambda: bool(calls.append(1)))  # type: ignore[func-returns-value]
    assert calls
    processes.wait("slow", timeout=30, until=lambda: True)
    pid = processes.pid("slow")
    processes.stop()
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
    with (
        pytest.raises(ConfigError, match=r"--keep .*: the folder must be empty or new"),
        workplace("bench-test", keep=tmp_path / "k"),
    ):
        pass
