"""Engines with one configuration on one host: the first starts alone, the others after it in parallel."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fourfold_rollout.vllm.compile_cache import compiled_once


class Starts:
    """Engines that start in threads, as if in processes: each opens the lock's file for itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.inside = threading.Semaphore(0)  # released by each engine that has entered
        self.go = threading.Event()

    def start(self, key: str = "k", wait_seconds: float = 60) -> threading.Thread:
        def run() -> None:
            with compiled_once(self.root, key, wait_seconds=wait_seconds):
                self.inside.release()
                assert self.go.wait(20)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def entered(self, seconds: float = 20) -> bool:
        return self.inside.acquire(timeout=seconds)

    def finish(self, *threads: threading.Thread) -> None:
        self.go.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_the_first_is_alone_and_the_others_follow_together(tmp_path: Path) -> None:
    first, others = Starts(tmp_path), Starts(tmp_path)
    one = first.start()
    assert first.entered()
    threads = [others.start() for _ in range(2)]
    assert not others.entered(0.3), "a second one compiles at the same time"
    first.finish(one)
    assert all(others.entered() for _ in threads)
    third = others.start()
    assert others.entered(), "what is compiled, nobody waits for"
    others.finish(*threads, third)


def test_another_key_waits_for_nobody(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    threads = [starts.start(key) for key in ("a", "b")]
    assert all(starts.entered() for _ in threads)
    starts.finish(*threads)


def test_a_start_that_fails_leaves_the_next_one_to_compile(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no memory"), compiled_once(tmp_path, "k"):
        raise RuntimeError("no memory")
    starts = Starts(tmp_path)
    threads = [starts.start() for _ in range(2)]
    assert starts.entered() and not starts.entered(0.3)
    starts.finish(*threads)


def test_a_child_that_was_forked_within_does_not_keep_the_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with compiled_once(tmp_path, "k"):
        child = os.fork()
        if not child:
            os.read(reader, 1)
            os._exit(0)
    try:
        (tmp_path / "fourfold" / "k.compiled").unlink()  # so that the lock alone decides
        starts = Starts(tmp_path)
        thread = starts.start()
        assert starts.entered(5)
        starts.finish(thread)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    first = starts.start()
    assert starts.entered()
    second = starts.start(wait_seconds=0.2)
    assert starts.entered()
    starts.finish(first, second)
