"""The states of a weight update: its transitions, the requests that wait, and that nothing is served in between."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.errors import DeadlinePassed, InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold_rollout.pause import controller
from fourfold_rollout.pause.controller import PauseMode
from fourfold_rollout.update import controller as module
from fourfold_rollout.update.controller import WeightController
from fourfold_rollout.update.state import TRANSITIONS, UpdatePhase, WeightUpdate
from tests.fakes.engine import DIGEST, FakeEngine, FakeSample, epoch_terms, sample_request


def make(update_timeout: float = 5.0) -> tuple[FakeEngine, WeightController]:
    engine = FakeEngine()
    return engine, WeightController(engine, update_timeout=update_timeout)


async def open_epoch(weights: WeightController, epoch: int = 1) -> None:
    await weights.open(epoch_terms(epoch), timeout=1)


async def begin(
    weights: WeightController, version: int = 1, *, epoch: int = 1, timeout: float = 1, **more: Any
) -> None:
    mode = more.get("mode", PauseMode.WAIT)
    await weights.begin(epoch=epoch, policy_version=version, mode=mode, timeout=timeout)


async def update(weights: WeightController, version: int, epoch: int = 1) -> None:
    await begin(weights, version, epoch=epoch)
    assert await weights.receive(epoch=epoch, policy_version=version, timeout=1) == DIGEST
    await weights.commit(epoch=epoch, policy_version=version, timeout=1)


async def served(weights: WeightController, timeout: float = 0.05) -> int:
    async with weights.serving(timeout) as lease:
        return lease.version


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


class TestTransitions:
    def test_the_table_of_the_controller_is_true(self) -> None:
        rows = [line.split() for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
        described = {(row[0], row[-1]) for row in rows if row[0] in UpdatePhase.__members__}
        assert len(rows) == len(described) + 1, "each row but the heading is one transition"
        assert described == {(a.name, b.name) for a, following in TRANSITIONS.items() for b in following}

    def test_a_transition_that_the_table_does_not_have_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="cannot go from READY to COMMITTED"):
            WeightUpdate().enter(UpdatePhase.COMMITTED)


class TestUpdate:
    async def test_committed_version_is_served(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        await update(weights, 1)
        await update(weights, 2)
        assert await served(weights) == 2
        assert engine.log == [
            "open 1", "settle", "receive 1", "commit 1", "settle", "receive 2", "commit 2",
        ]  # fmt: skip

    async def test_each_call_may_be_repeated(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        for _ in range(2):
            await begin(weights, 3)
        for _ in range(2):
            assert await weights.receive(epoch=1, policy_version=3, timeout=1) == DIGEST
        assert await weights.commit(epoch=1, policy_version=3, timeout=1) > 0.0, "the pause"
        assert await weights.commit(epoch=1, policy_version=3, timeout=1) == 0.0
        assert engine.log.count("receive 3") == engine.log.count("commit 3") == 1
        for _ in range(2):
            assert await weights.abort(epoch=1, timeout=1)
        assert weights.policy_version == 3

    async def test_order_is_enforced(self) -> None:
        _, weights = make()
        with pytest.raises(StaleEpoch):
            await begin(weights)
        await open_epoch(weights)
        with pytest.raises(WrongState, match="BeginWeights first"):
            await weights.receive(epoch=1, policy_version=1, timeout=1)
        with pytest.raises(WrongState, match="BeginWeights first"):
            await weights.commit(epoch=1, policy_version=1, timeout=1)
        await begin(weights, 1)
        with pytest.raises(WrongState, match="ReceiveWeights first"):
            await weights.commit(epoch=1, policy_version=1, timeout=1)
        with pytest.raises(WrongState, match="to version 1, not 2"):
            await weights.receive(epoch=1, policy_version=2, timeout=1)
        with pytest.raises(WrongState, match="abort it before version 2"):
            await begin(weights, 2)

    async def test_versions_never_go_back(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        await update(weights, 5)
        for version in (5, 4):
            with pytest.raises(WrongState, match="not above the served version 5"):
                await begin(weights, version)
        with pytest.raises(InvalidInput):
            await begin(weights, -1)

    async def test_stale_epoch_is_refused_by_every_call(self) -> None:
        _, weights = make()
        await open_epoch(weights, 7)
        with pytest.raises(StaleEpoch, match="not above the last one, 7"):
            await open_epoch(weights, 7)
        for call in (
            begin(weights, epoch=6),
            weights.receive(epoch=6, policy_version=1, timeout=1),
            weights.commit(epoch=6, policy_version=1, timeout=1),
            weights.abort(epoch=6, timeout=1),
        ):
            with pytest.raises(StaleEpoch):
                await call

    async def test_manifest_that_does_not_fit_leaves_the_open_epoch(self) -> None:
        engine, weights = make()
        await open_epoch(weights, 1)
        engine.open_error = WrongState("tensor x is missing")
        with pytest.raises(WrongState, match="tensor x"):
            await open_epoch(weights, 2)
        await update(weights, 1, epoch=1)

    async def test_senders_that_cannot_be_met_close_the_epoch(self) -> None:
        engine, weights = make()
        await open_epoch(weights, 1)
        engine.open_error = DeadlinePassed("nobody came")
        with pytest.raises(DeadlinePassed):
            await open_epoch(weights, 2)
        engine.open_error = None
        with pytest.raises(StaleEpoch, match="the open one is none"):
            await begin(weights, epoch=1)
        with pytest.raises(StaleEpoch, match="not above the last one, 2"):
            await open_epoch(weights, 2)
        await open_epoch(weights, 3)


class TestRunningSamples:
    async def test_wait_lets_them_finish(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        async with weights.serving(1) as lease:
            pause = asyncio.create_task(begin(weights))
            await asyncio.sleep(0.02)
            assert not pause.done()
            assert lease.version == 0
        await pause

    async def test_past_the_deadline_the_update_fails_and_they_go_on(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        async with weights.serving(1):
            with pytest.raises(DeadlinePassed, match="still ran"):
                await begin(weights, timeout=0.03)
            assert await served(weights) == 0
        await update(weights, 1)

    async def test_abort_interrupts_them_and_those_that_come_late(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        async with weights.serving(1):
            pause = asyncio.create_task(begin(weights, mode=PauseMode.ABORT))
            await asyncio.sleep(controller._INTERRUPT_INTERVAL_SECONDS * 2.5)
            assert engine.log.count("interrupt") >= 2
        await pause
        assert engine.log[-1] == "settle"

    async def test_who_comes_during_an_update_waits_and_gets_the_new_version(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        await begin(weights)
        waiting = asyncio.create_task(served(weights, timeout=1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await weights.receive(epoch=1, policy_version=1, timeout=1)
        await weights.commit(epoch=1, policy_version=1, timeout=1)
        assert await waiting == 1

    async def test_the_wait_ends_with_the_callers_deadline(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        await begin(weights)
        with pytest.raises(Unavailable, match="being updated to version 1") as caught:
            await served(weights, timeout=0.02)
        assert caught.value.retry_after


class TestFailure:
    async def test_clean_abort_serves_the_old_version(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        await begin(weights)
        engine.receive_error = Unavailable("a trainer rank died")
        with pytest.raises(Unavailable, match="rank died"):
            await weights.receive(epoch=1, policy_version=1, timeout=1)
        with pytest.raises(WrongState, match="has failed"):
            await weights.receive(epoch=1, policy_version=1, timeout=1)
        with pytest.raises(WrongState, match="has failed"):
            await weights.probe([1, 2], timeout=1)
        assert await weights.abort(epoch=1, timeout=1)
        assert await served(weights) == 0

    async def test_dirty_serves_nothing_until_an_update_succeeds(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        await update(weights, 1)
        await begin(weights, 2)
        engine.abort_is_clean = False
        assert not await weights.abort(epoch=1, timeout=1)
        assert weights.dirty
        with pytest.raises(Unavailable, match="serves nothing"):
            await served(weights)
        with pytest.raises(Unavailable):
            await weights.probe([1, 2], timeout=1)
        await open_epoch(weights, 2)
        await update(weights, 1, epoch=2)  # an engine that is dirty may be refilled with any version
        assert await served(weights) == 1

    async def test_received_but_not_committed_is_dirty_whatever_the_worker_says(self) -> None:
        engine, weights = make()
        engine.abort_is_clean = True
        await open_epoch(weights)
        await begin(weights)
        await weights.receive(epoch=1, policy_version=1, timeout=1)
        assert not await weights.abort(epoch=1, timeout=1)

    async def test_an_abort_without_an_update_tells_what_the_worker_says(self) -> None:
        engine, weights = make()
        await open_epoch(weights)
        assert await weights.abort(epoch=1, timeout=1)
        assert await served(weights) == 0
        await open_epoch(weights, 2)
        engine.abort_is_clean = False
        assert not await weights.abort(epoch=2, timeout=1)
        assert weights.dirty
        with pytest.raises(Unavailable, match="serves nothing"):
            await served(weights)

    async def test_transfer_goes_on_when_its_caller_leaves(self) -> None:
        engine, weights = make()
        receive = await self._receiving(engine, weights)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        engine.receive_gate.set()
        assert await weights.receive(epoch=1, policy_version=1, timeout=1) == DIGEST
        assert engine.log.count("receive 1") == 1

    async def test_abort_ends_a_transfer_before_its_own_turn_comes(self) -> None:
        engine, weights = make()
        receive = await self._receiving(engine, weights)
        assert await weights.abort(epoch=1, timeout=1)
        with pytest.raises(StaleEpoch, match="stopped"):
            await receive
        assert engine.log[-2:] == ["stop 1", "abort 1"]

    async def test_a_new_epoch_ends_the_transfer_of_the_old_one(self) -> None:
        engine, weights = make()
        receive = await self._receiving(engine, weights)
        await open_epoch(weights, 2)
        with pytest.raises(StaleEpoch, match="stopped"):
            await receive
        assert engine.log[-3:] == ["stop 1", "abort 1", "open 2"]
        assert await served(weights) == 0

    async def test_abort_of_another_epoch_ends_no_transfer(self) -> None:
        engine, weights = make()
        receive = await self._receiving(engine, weights)
        with pytest.raises(DeadlinePassed, match="another weight call"):
            await weights.abort(epoch=2, timeout=0.02)
        with pytest.raises(StaleEpoch):
            await open_epoch(weights, 1)
        assert not receive.done()
        engine.receive_gate.set()
        assert await receive == DIGEST

    @pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
    async def test_watchdog_lets_paused_samples_go_on_as_they_were(
        self, monkeypatch: pytest.MonkeyPatch, mode: PauseMode
    ) -> None:
        monkeypatch.setattr(module, "_WATCHDOG_EXTRA_SECONDS", 0.0)
        engine, weights = make(update_timeout=0.05)
        await open_epoch(weights)
        async with weights.serving(1) as lease:
            (sample,) = await engine.submit([sample_request()])
            lease.mark_in_flight()
            engine.tick(2)
            await begin(weights, mode=mode)
            assert engine.paused
            await until(lambda: not weights.updating)
            engine.tick(2)
        assert isinstance(sample, FakeSample)
        assert (sample.versions, sample.keys) == ([0] * 4, [0] * 4)
        assert engine.log == ["open 1", "pause", "stop 1", "abort 1", "resume"]

    async def test_watchdog_ends_a_transfer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_WATCHDOG_EXTRA_SECONDS", 0.0)
        engine, weights = make(update_timeout=0.05)
        receive = await self._receiving(engine, weights)
        with pytest.raises(StaleEpoch, match="stopped"):
            await receive
        assert await served(weights) == 0

    async def test_watchdog_whose_turn_does_not_come_says_so_and_tries_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "_WATCHDOG_EXTRA_SECONDS", 0.0)
        engine, weights = make(update_timeout=0.05)
        monkeypatch.setattr(engine, "abort_transfers", lambda *, epoch: None)  # a worker that hangs
        receive = await self._receiving(engine, weights)
        await until(lambda: "another weight call was not done" in caplog.text)
        assert weights.updating
        engine.receive_gate.set()
        await receive
        await until(lambda: not weights.updating)
        with pytest.raises(Unavailable, match="serves nothing"):
            await served(weights)

    async def test_abort_ends_the_joining_of_an_epoch(self) -> None:
        engine, weights = make()
        await open_epoch(weights, 1)
        engine.open_gate.clear()
        joining = asyncio.create_task(open_epoch(weights, 2))
        await asyncio.sleep(0.01)
        assert await weights.abort(epoch=2, timeout=1)
        with pytest.raises(StaleEpoch, match="stopped"):
            await joining
        with pytest.raises(StaleEpoch, match="the open one is none"):
            await begin(weights, epoch=1)

    async def _receiving(self, engine: FakeEngine, weights: WeightController) -> asyncio.Task[bytes]:
        await open_epoch(weights)
        await begin(weights)
        engine.receive_gate.clear()
        receive = asyncio.create_task(weights.receive(epoch=1, policy_version=1, timeout=5))
        await asyncio.sleep(0.01)
        return receive


class TestProbe:
    async def test_it_works_between_receive_and_commit(self) -> None:
        _, weights = make()
        await open_epoch(weights)
        await begin(weights)
        await weights.receive(epoch=1, policy_version=1, timeout=1)
        first, second = await weights.probe([5, 20], timeout=1)
        assert math.isnan(first)
        assert second == -2.0

    async def test_it_waits_for_no_running_sample(self) -> None:
        _, weights = make()
        async with weights.serving(1):
            assert len(await weights.probe([5, 20], timeout=1)) == 2
