"""Changes of scorers whose call is cancelled, or that cannot be saved."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.host.clock import SYSTEM_CLOCK
from fourfold_coordinator.rewards.scorers import ScorerTable
from fourfold_coordinator.routing.registry import Registry
from tests.fakes.toy import make_config

OLD, NEW = "127.0.0.1:5001", "127.0.0.1:5002"


class Desk:
    """The scorers of a run whose services all answer, and a ledger whose writes wait for `go`."""

    def __init__(self, root: Path) -> None:
        self.saved = ""
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.error: OSError | None = None
        self.registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=b"t" * 32)
        router: Any = SimpleNamespace(clock=SYSTEM_CLOCK, replicas=lambda *_: [], notify=lambda: None)
        config = make_config(root, reward={"target": OLD})
        self.table = ScorerTable(config, self.registry, router)
        self.table.restore("", self.save)

    async def save(self, state: str) -> None:
        self.saved = state  # the write; then it is synced
        self.reached.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error

    @property
    def targets(self) -> list[str]:
        return [member.target for member in self.registry.members()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_a_change_that_is_being_saved_counts_although_its_call_is_cancelled(desk: Desk) -> None:
    swap = asyncio.create_task(desk.table.swap("reward", [NEW]))
    await desk.reached.wait()
    swap.cancel()
    await asyncio.sleep(0.01)
    assert not swap.done(), "the next change waits for this one"
    desk.go.set()
    await asyncio.gather(swap, return_exceptions=True)
    assert swap.cancelled()
    (scorer,) = desk.table.scorers
    assert [scorer.live.targets] == [tuple(json.loads(desk.saved)["scorers"][0]["live"]["targets"])] == [(NEW,)]
    assert desk.targets == [NEW]
    back = await desk.table.rollback("reward")
    assert back.live.targets == (OLD,) and desk.targets == [OLD]


@pytest.mark.parametrize("change", ["swap", "rollback"])
async def test_a_change_that_cannot_be_saved_leaves_no_member(desk: Desk, change: str) -> None:
    desk.go.set()
    await desk.table.swap("reward", [NEW])
    desk.error = OSError("disk")
    with pytest.raises(OSError, match="disk"):
        await (desk.table.swap("reward", ["127.0.0.1:5003"]) if change == "swap" else desk.table.rollback("reward"))
    (scorer,) = desk.table.scorers
    assert scorer.live.targets == (NEW,) and desk.targets == [NEW]
    with pytest.raises(OSError, match="disk"):
        await desk.table.score_again("reward")
    assert desk.targets == [NEW], "a deployment in use stays"
