"""Any order of control calls and samples: versions never go back, dirty or sleeping engines serve nothing, every token
that leaves has the version that sampled it, and none leaves of weights that nobody released."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fourfold.errors import FourfoldError, Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_rollout.engine import EpochTerms, SampleRequest
from fourfold_rollout.outputs import Outputs
from fourfold_rollout.phases import PauseMode
from fourfold_rollout.weights import EngineWeights
from tests.fakes.engine import FakeEngine, FakeSample

# From the version that fits to some that do not.
VERSIONS = st.sampled_from([0] * 8 + [-1, 1, 2])


class Call:
    """What the servicer does for a call of one sample."""

    def __init__(self, engine: FakeEngine, weights: EngineWeights, *, streaming: bool, length: int) -> None:
        self.engine, self.weights, self.streaming, self.length = engine, weights, streaming, length
        self.chunks: list[pb.SampleChunk] = []
        self.sample: FakeSample | None = None
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        with suppress(Unavailable):
            async with self.weights.serving(60) as lease:
                outputs = Outputs(1, self.weights.gate, self.chunks.append, flush_seconds=0 if self.streaming else None)
                message = SampleRequest(
                    key="k", prompt_token_ids=[1], temperature=1, top_p=1, top_k=0, max_tokens=self.length,
                    stop_token_ids=(), seed=0, cache_salt="", streaming=self.streaming, sink=outputs,
                )  # fmt: skip
                try:
                    (sample,) = await self.engine.submit([message])
                    assert isinstance(sample, FakeSample)
                    self.sample = sample
                    lease.entered()
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
        self.released = {0}
        """Versions whose tokens may leave."""

    async def _setup(self) -> None:
        self.engine = FakeEngine(sleep_mode=True)
        self.weights = EngineWeights(self.engine, update_timeout=5.0)

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
        return self.weights.gate.holding

    @rule(step=st.integers(0, 1))
    def open(self, step: int) -> None:
        terms = EpochTerms(
            epoch=self.epoch + step, backend="shm", manifest=b"m", offers=(b"o",), receiver_count=1,
            first_receiver_index=0,
        )  # fmt: skip
        if self.call(self.weights.open(terms, timeout=1)):
            self.epoch += step
            self._ended()

    @rule(step=VERSIONS, mode=st.sampled_from(PauseMode))
    def begin(self, step: int, mode: PauseMode) -> None:
        version = self.fitting(step)
        timeout = 0.02 if mode is PauseMode.WAIT else 0.2
        self.call(self.weights.begin(epoch=self.epoch, policy_version=version, mode=mode, timeout=timeout))

    @rule(step=VERSIONS, fails=st.booleans())
    def receive(self, step: int, fails: bool) -> None:
        version = self.fitting(step)
        self.engine.receive_error = Unavailable("lost") if fails else None
        self.call(self.weights.receive(epoch=self.epoch, policy_version=version, timeout=1))

    @rule(step=VERSIONS, hold=st.booleans(), fails=st.booleans())
    def commit(self, step: int, hold: bool, fails: bool) -> None:
        version = self.fitting(step)
        before, dirty = self.weights.policy_version, self.weights._sampling.dirty
        self.engine.commit_error = Unavailable("lost") if fails and not hold else None
        if self.call(self.weights.commit(epoch=self.epoch, policy_version=version, hold=hold, timeout=1)):
            assert f"receive {version}" in self.engine.log or version == before
            assert version >= before or dirty
            if not self.holding:
                self.released.add(version)
                self.committed.append(version)
        elif self.weights.phase[0].startswith("committed") and not self.holding:
            self.released.add(self.weights.policy_version)  # served, and not noted

    @rule(step=VERSIONS)
    def release(self, step: int) -> None:
        version = self.fitting(step)
        self.engine.commit_error = None
        if self.call(self.weights.release(epoch=self.epoch, policy_version=version, timeout=1)):
            self.released.add(version)
            self.committed.append(version)

    @rule(clean=st.booleans())
    def abort(self, clean: bool) -> None:
        self.engine.abort_is_clean = clean
        if self.call(self.weights.abort(epoch=self.epoch, timeout=1)):
            self._ended()

    @rule(level=st.integers(1, 2))
    def sleep(self, level: int) -> None:
        if self.call(self.weights.sleep(level, timeout=1)):
            assert not self.engine.running
            assert level == 1 or self.weights.dirty

    @rule(tags=st.lists(st.sampled_from(["weights", "kv_cache"]), max_size=2, unique=True))
    def wake(self, tags: list[str]) -> None:
        self.call(self.weights.wake(tags, timeout=1))

    @rule(streaming=st.booleans(), length=st.integers(1, 8))
    def start(self, streaming: bool, length: int) -> None:
        async def run() -> None:
            self.calls.append(Call(self.engine, self.weights, streaming=streaming, length=length))

        self.call(run())

    @rule(count=st.integers(1, 4))
    def sample(self, count: int) -> None:
        async def run() -> None:
            self.engine.tick(count)

        self.call(run())

    @precondition(lambda self: self.weights.updating and not self.weights.phase[0].startswith("committed"))
    @rule()
    def nobody_samples_while_weights_change(self) -> None:
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

    def _ended(self) -> None:
        """A version that is dirty now may come again, as another one."""
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
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
