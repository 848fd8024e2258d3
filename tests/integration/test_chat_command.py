"""`fourfold chat` and `fourfold watch` as processes, with toy engines."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import Stage, staged, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


def test_chat_answers_piped_lines_and_leaves_nothing(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    process = stage.start("model-folder", command="chat")
    output, errors = process.communicate("3 * 4 =\n\n/new\n5 * 6 =\n", timeout=40)
    assert process.returncode == 0, errors
    first, second = output.split()
    assert first in ("12", "13") and second in ("30", "31")  # the toy is not always right
    assert "ready after" in errors
    assert stage.descendants() == {}


def test_chat_says_when_the_context_is_full(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    process = stage.start("model-folder", command="chat")
    output, errors = process.communicate("3 * 4 =\n" * 4, timeout=40)  # the toy's context is 64 tokens
    assert process.returncode == 0, errors
    assert "[the context of 64 tokens is full; /new starts a new chat]" in output


def test_chat_that_is_interrupted_ends_cleanly(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    process = stage.start("model-folder", command="chat")
    until(lambda: any("serve rollout" in line for line in stage.descendants().values()))
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode == 0 and "Traceback" not in errors
    assert stage.descendants() == {}


def test_chat_with_a_service_that_is_not_there_is_one_clear_error(
    make_stage: Callable[..., Stage], unused_port: int
) -> None:
    stage = make_stage()
    process = stage.start("model-folder", "--target", f"127.0.0.1:{unused_port}", command="chat")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.match(rf"fourfold: rollout service at 127.0.0.1:{unused_port}, GetInfo: ", errors), errors


@pytest.mark.slow
def test_watch_shows_a_run_that_goes_on(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)
    early = stage.start("runs/toy", command="watch")
    _, errors = early.communicate(timeout=20)
    assert early.returncode == 1 and "runs/toy: no run was started here" in errors
    process = stage.start("toy.toml", delay=0.3)
    stage.wait_for_step(process, 1)
    watching = stage.start("runs/toy", command="watch")
    output, errors = watching.communicate(timeout=40)
    assert watching.returncode == 0, errors
    assert "step 1/4  reward " in output and "step 4/4  reward " in output


@pytest.mark.slow
def test_watch_of_a_stopped_run_says_where_it_stopped_and_how_to_continue(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=20)
    process = stage.start("toy.toml", delay=0.3)
    stage.wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    watching = stage.start("runs/latest", command="watch")
    output, errors = watching.communicate(timeout=40)
    assert watching.returncode == 1 and not errors
    stopped = r"^runs/toy does not run: it was stopped by SIGINT \(Ctrl-C\) after step \d of 20\.$"
    assert re.search(stopped, output, re.MULTILINE), output
    assert re.search(r"^It continues from the checkpoint of step 2", output, re.MULTILINE), output
    (command,) = re.findall(r"^  \S*fourfold run (--resume runs/toy)$", output, re.MULTILINE)
    resumed = stage.start(*command.split(), "--set", "steps=4", delay=0.1)
    output, errors = resumed.communicate(timeout=60)
    assert resumed.returncode == 0 and "resumed after step " in output, errors
