"""Whole runs with toy engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.memory_folder import memory_folder

if TYPE_CHECKING:
    from tests.fakes.stage import Stage


@pytest.fixture
async def make_stage(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Stage]]:
    """Return a function that makes stages; the fixture ends them and their services.

    Their folders are in memory: the coordinator writes its ledger on its event loop, and a disk that stalls for some
    seconds, for example beside an installation, fails calls that have a deadline of 5 s.
    """
    from fourfold_coordinator.reporting import report
    from tests.fakes.stage import Stage

    # Drawing takes half a second; a unit test of the report does it.
    monkeypatch.setattr(report, "draw_curve", lambda path, *args, **kwargs: path.write_bytes(b""))
    stages: list[Stage] = []

    with memory_folder() as folder:

        def make(**changes: Any) -> Stage:
            root = folder / f"stage{len(stages)}"
            root.mkdir()
            stages.append(Stage(root, **changes))
            return stages[-1]

        yield make
        for stage in stages:
            await stage.close()
