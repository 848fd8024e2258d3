"""Two hundred updates of a real vLLM engine, in ten epochs: nothing grows, in the engine or in the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.support.weight_engine import Engine, running_engine
from tests.support.weight_trainer import Trainer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

UPDATES_OF_AN_EPOCH: Final = 20
EPOCHS: Final = 10
WARM_UP: Final = 3
"""Epochs after which memory is not to grow any more: by then every allocator has what it needs."""


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Iterator[Engine]:
    with running_engine() as running:
        running.load(tiny_model("llama", 1))
        yield running


def memory(pid: int) -> int:
    """Bytes that a process has in memory, shared ones included."""
    return int(psutil.Process(pid).memory_info().rss)


def held(pid: int) -> dict[str, int]:
    """What a process holds, by kind."""
    process = psutil.Process(pid)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "shared mappings": mapped.count("/memfd:") + mapped.count("/dev/shm/"),
    }


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_nothing_grows_over_two_hundred_updates(
    engine: Engine, tiny_model: Callable[..., Path], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, two = tiny_model("llama", 1), tiny_model("llama", 2)
    fresh = engine.generate()
    trainer = Trainer(two, ranks=2)
    pids = {"engine": engine.pid, "trainer": os.getpid()}
    kept: list[dict[str, dict[str, int]]] = []
    sizes: dict[str, list[int]] = {name: [] for name in pids}
    for _ in range(EPOCHS):
        trainer.open(engine, backend)
        for _ in range(UPDATES_OF_AN_EPOCH):
            trainer.update(engine)
        for name, pid in pids.items():
            sizes[name].append(memory(pid))
        assert trainer.close(engine) == "clean"
        kept.append({name: held(pid) for name, pid in pids.items()})
    assert kept[-1] == kept[WARM_UP - 1], kept
    assert not list(tmp_path.iterdir())
    for name, found in sizes.items():
        assert max(found[WARM_UP:]) <= found[WARM_UP - 1] * 1.02, (name, found)
    assert engine.generate() != fresh
    trainer.become(one)
    trainer.open(engine, backend)
    trainer.update(engine)
    assert engine.generate() == fresh
    trainer.close(engine)
