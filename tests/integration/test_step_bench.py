"""Tests `fourfold bench step` with a real run, one that fails, and one that is interrupted."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fourfold import metrics as m
from tests.support.bench_command import bench, start

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

_SMALL = ("step", "--device", "cpu", "--prompts", "3", "--group-size", "2", "--prompt-tokens", "16")


def test_the_phases_of_real_steps_add_up(tmp_path: Path) -> None:
    out, kept = tmp_path / "result.json", tmp_path / "kept"
    sizes = ("--new-tokens", "24", "--steps", "2")
    done = bench(*_SMALL, *sizes, "--json", str(out), "--keep", str(kept), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "generate" in done.stdout and "wall" in done.stdout and "OpenRLHF" not in done.stdout
    results = json.loads(out.read_text())["results"]
    assert len(results["steps"]) == len(results["phases_by_step"]) == 2
    for phases, row in zip(results["phases_by_step"], results["steps"], strict=True):
        wall = phases.pop("wall")
        assert sum(phases.values()) == pytest.approx(wall)
        assert -0.01 < phases["other"] < max(0.1, 0.2 * wall), "no time is counted twice, and little is in no phase"
        assert set(phases) >= {"generate", "reward", "reference", "train", "publish", "other"}
        # Samples of so small a model may be finished while the update before their step ends.
        assert phases["generate"] >= 0
        assert min(phases["train"], phases["publish"]) > 0
        assert row[m.RESPONSE_LENGTH] == 24 and row[m.TOTAL_LENGTH] == 40, "every sample runs to the limit"
        assert row[m.USEFUL_GROUPS] == 1, "scores differ within every group"
    assert results["tokens"] == {"sampled": 3 * 2 * 24, "trained": 3 * 2 * 40}
    assert "mfu" not in results, "there is no GPU"
    assert results["end"]["exported_bytes"] > 0
    assert "no service was restarted" in done.stdout
    assert not _processes(kept)


@pytest.mark.soak
def test_a_run_that_fails_says_what_died_and_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = bench(*_SMALL, "--new-tokens", "24", "--kv-cache-gib", "100000", "--keep", str(kept), folder=tmp_path)
    assert done.returncode == 1
    assert "fourfold: The run failed. rollout-0 died" in done.stderr, done.stderr[-3000:]
    assert "less than requested memory" in done.stderr, "the end of its log"
    assert (kept / "runs" / "bench-step.failed" / "logs" / "rollout-0.log").exists()
    assert not _processes(kept)


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with start(*_SMALL, "--new-tokens", "24", "--keep", str(kept), folder=tmp_path) as process:
        try:
            end = time.monotonic() + 300
            while not (kept / "runs" / "bench-step" / "logs" / "trainer-0.log").exists():
                assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
                time.sleep(0.1)
            assert len(_processes(kept)) > 3
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "interrupted" in error
    assert not _processes(kept)


def _processes(folder: Path) -> list[int]:
    """Return the processes whose working directory is the folder, as that of the benchmark's `fourfold run` is."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # gone, or another user's
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found
