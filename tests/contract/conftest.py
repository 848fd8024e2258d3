"""Whole runs with toy engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.fakes.stage import Stage


@pytest.fixture
async def make_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Stage]]:
    """Make stages; they and their services are gone when the test ends."""
    from fourfold_coordinator.reporting import report
    from tests.fakes.stage import Stage

    # Drawing takes half a second; a unit test of the report does it.
    monkeypatch.setattr(report, "draw_curve", lambda path, *args, **kwargs: path.write_bytes(b""))
    stages: list[Stage] = []

    def make(**changes: Any) -> Stage:
        root = tmp_path / f"stage{len(stages)}"
        root.mkdir()
        stages.append(Stage(root, **changes))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.close()
