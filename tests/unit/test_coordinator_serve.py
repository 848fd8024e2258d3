"""What the coordinator refuses before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold_coordinator.memory import MemoryMeter, pss_bytes
from fourfold_coordinator.serve import check, locked, write_atomically
from tests.fakes.toy import make_config


def test_a_group_that_no_rollout_service_would_take_is_refused(tmp_path: Path) -> None:
    check(make_config(tmp_path))
    with pytest.raises(ConfigError, match=r"batch.group_size = 4, but rollout.max_concurrent_samples = 3"):
        check(make_config(tmp_path, rollout={"max_concurrent_samples": 3}))
    with pytest.raises(ConfigError, match=r"evaluation.samples_per_prompt = 9"):
        check(make_config(tmp_path, rollout={"max_concurrent_samples": 8}, evaluation={"samples_per_prompt": 9}))


def test_one_run_folder_has_one_coordinator(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ConfigError, match="another coordinator runs there"):
            with locked(tmp_path):
                pass
    with locked(tmp_path):
        pass


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.address"
    write_atomically(path, "127.0.0.1:1\n")
    write_atomically(path, "127.0.0.1:2\n")
    assert path.read_text() == "127.0.0.1:2\n"
    assert list(tmp_path.iterdir()) == [path]


def test_memory_is_the_sum_over_the_processes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOURFOLD_PARENT_PID", raising=False)
    meter = MemoryMeter()
    blob = bytearray(b"x" * 50_000_000)
    assert meter.sample() > len(blob)
    assert pss_bytes(2**22 + 1) == 0, "a process that is gone"
    assert MemoryMeter(pss=lambda pid: 7).sample() % 7 == 0
