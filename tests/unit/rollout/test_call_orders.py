"""Random orders of control calls and samples (a stateful property test of `WeightController`).

Versions never go back, dirty or sleeping engines serve nothing, every delivered token has the version that sampled it,
and no token of an unreleased version is delivered.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fourfold.errors import FourfoldError, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_rollout.generate.outputs import CallOutputs
from fourfold_rollout.pause.controller import PauseMode
from fourfold_rollout.update.controller import WeightController
from fourfold_rollout.update.state import UpdatePhase
from tests.fakes.engine import FakeEngine, FakeSample, epoch_terms, sample_request

pytestmark = pytest.mark.timeout(240)  # half a minute on an idle machine

WHICH = st.sampled_from(["open", "begin", "receive", "commit", "release", "abort", "sleep", "wake"])


class Call:
    """A Generate call of one sample, as the servicer runs it."""

    def __init__(self, engine: FakeEngine, weights: WeightController, *, streaming: bool, length: int) -> None:
        self.engine, self.weights, self.streaming, self.length = engine, weights, streaming, length
        self.chunks: list[pb.SampleChunk] = []
        self.sample: FakeSample | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        with suppress(Unavailable):
            async with self.weights.serving(60) as lease:
                outputs = CallOutputs(1, self.weights.token_hold, self.chunks.append)
                message = sample_request(max_tokens=self.length, streaming=self.streaming, sink=outputs)
                try:
                    (sample,) = await self.engine.submit([message])
                    assert isinstance(sample, FakeSample)
                    self.sample = sample
                    lease.mark_in_flight()
                    await outputs.complete()
                finally:
                    if not outputs.done:
                        outputs.close()
                        if self.sample is not None:
                            await self.engine.abandon([self.sample])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._setup())
        self.epoch = 0
        self.committed = [0]
        self.calls: list[Call] = []
        self.released = {0}  # versions whose tokens may be delivered

    async def _setup(self) -> None:
        self.engine = FakeEngine(sleep_mode=True)
        self.weights = WeightController(self.engine, update_timeout=5.0)

    def call(self, work: Any) -> bool:
        async def run() -> None:
            try:
                await work
            finally:
                for _ in range(10):  # calls that were let in or ended do what they do
                    await asyncio.sleep(0)

        with suppress(FourfoldError):
            self.loop.run_until_complete(run())
            return True
        return False

    def fitting(self, step: int) -> int:
        """Return the version of the open update or the next one, plus `step`."""
        update = self.weights._update
        return step + (update.version if update.is_open else self.weights.policy_version + 1)

    @property
    def holding(self) -> bool:
        return self.weights.token_hold.holding

    @rule(mode=st.sampled_from([PauseMode.KEEP, *PauseMode]), hold=st.booleans(), steps=st.integers(1, 4))
    def go_on(self, mode: PauseMode, hold: bool, steps: int) -> None:
        """Make the next calls of a successful update, so that long sequences get far."""
        for _ in range(steps):
            self._next(mode, hold=hold)
            self.sample(1)

    def _next(self, mode: PauseMode, *, hold: bool) -> None:
        phase = self.weights._update.phase
        if self.weights._epochs.open is None:
            self.open(1)
        elif phase is UpdatePhase.READY:
            self.begin(0, mode)
        elif phase is UpdatePhase.PAUSED:
            self.receive(0, fails=False)
        elif phase is UpdatePhase.RECEIVED:
            self.commit(0, hold=hold, fails=False)
        elif phase is UpdatePhase.COMMITTED:
            self.release(0)
        else:
            self.abort(clean=False)

    @rule(step=st.sampled_from([0, 0, -1, 1, 2]), flag=st.booleans(), mode=st.sampled_from(PauseMode), which=WHICH)
    def do_anything(self, step: int, flag: bool, mode: PauseMode, which: str) -> None:
        if which == "open":
            self.open(step)
        elif which == "begin":
            self.begin(step, mode)
        elif which == "receive":
            self.receive(step, fails=flag)
        elif which == "commit":
            self.commit(step, hold=flag, fails=mode is PauseMode.WAIT)
        elif which == "release":
            self.release(step)
        elif which == "abort":
            self.abort(clean=flag)
        elif which == "sleep" and self.call(self.weights.sleep(1 + flag, timeout=1)):
            assert not self.engine.running
            assert not flag or self.weights.dirty
        else:
            self.call(self.weights.wake(["weights", "kv_cache"][flag:], timeout=1))

    def open(self, step: int) -> None:
        if self.call(self.weights.open(epoch_terms(self.epoch + step), timeout=1)):
            self.epoch += step
            self._ended()

    def begin(self, step: int, mode: PauseMode) -> None:
        timeout = 0.02 if mode is PauseMode.WAIT else 0.2
        version = self.fitting(step)
        self.call(self.weights.begin(epoch=self.epoch, policy_version=version, mode=mode, timeout=timeout))

    def receive(self, step: int, *, fails: bool) -> None:
        self.engine.receive_error = Unavailable("lost") if fails else None
        self.call(self.weights.receive(epoch=self.epoch, policy_version=self.fitting(step), timeout=1))

    def commit(self, step: int, *, hold: bool, fails: bool) -> None:
        version, before, dirty = self.fitting(step), self.weights.policy_version, self.weights._sampling.dirty
        self.engine.commit_error = Unavailable("lost") if fails and not hold else None
        self.engine.forget_error = Unavailable("lost") if fails and hold else None
        recomputes = self.weights._sampling.samples_paused and self.weights._sampling._recompute
        received = self.weights._update.phase is UpdatePhase.RECEIVED
        if self.call(self.weights.commit(epoch=self.epoch, policy_version=version, hold=hold, timeout=1)):
            assert f"receive {version}" in self.engine.log or version == before
            assert version >= before or dirty
            if not hold:
                self._served(version)
            if received and recomputes:
                assert {key for sample in self.engine.running for key in sample.keys} <= {version}
        elif self.weights._update.phase is UpdatePhase.COMMITTED and not self.holding:
            self.released.add(self.weights.policy_version)  # served, and not noted

    def release(self, step: int) -> None:
        self.engine.commit_error = None
        version = self.fitting(step)
        if self.call(self.weights.release(epoch=self.epoch, policy_version=version, timeout=1)):
            self._served(version)

    def abort(self, *, clean: bool) -> None:
        self.engine.abort_is_clean = clean
        if self.call(self.weights.abort(epoch=self.epoch, timeout=1)):
            self._ended()

    @rule(streaming=st.booleans(), length=st.integers(3, 12))
    def start(self, streaming: bool, length: int) -> None:
        async def run() -> None:
            self.calls.append(Call(self.engine, self.weights, streaming=streaming, length=length))

        self.call(run())

    @rule(count=st.integers(1, 3))
    def do_sample(self, count: int) -> None:
        self.sample(count)

    @rule()
    def pull(self) -> None:
        """Flush, as `CallOutputs.flush_every` does for callers with a flush interval."""

        async def run() -> None:
            for call in self.calls:
                if call.sample is not None:
                    call.sample.flush()

        self.call(run())

    def sample(self, count: int) -> None:
        async def run() -> None:
            self.engine.tick(count)

        self.call(run())

    @invariant()
    def nothing_is_sampled_while_weights_change(self) -> None:
        if self.weights.updating and self.weights._update.phase is not UpdatePhase.COMMITTED:
            assert self.engine.paused or not self.engine.running

    @invariant()
    def dirty_or_sleeping_engines_serve_nothing(self) -> None:
        if self.weights.dirty or self.weights.sleeping:
            assert not self.engine.running

    @invariant()
    def every_token_has_the_version_that_sampled_it(self) -> None:
        for call in self.calls:
            tagged = [c.policy_version for c in call.chunks for _ in range(len(c.token_ids) // 4)]
            ids = np.frombuffer(b"".join(c.token_ids for c in call.chunks), "<i4").tolist()
            assert ids == [10 + i for i in range(len(ids))]
            assert tagged == (call.sample.versions[: len(tagged)] if call.sample else [])
            assert set(tagged) <= self.released
            if call.task.done() and call.chunks:
                assert call.chunks[-1].finish_reason

    def _served(self, version: int) -> None:
        self.released.add(version)
        self.committed.append(version)

    def _ended(self) -> None:
        """Forget the chunks of finished calls: the number of a dirty version may be used again for other weights."""
        if not self.weights.updating:
            self.released &= set(self.committed)
            for call in self.calls:
                call.chunks = call.chunks if not call.task.done() else []

    def teardown(self) -> None:
        async def end() -> None:
            await self.weights.close()
            for call in self.calls:
                call.task.cancel()
            await asyncio.gather(*(call.task for call in self.calls), return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
