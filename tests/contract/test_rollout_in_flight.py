"""Updates over gRPC that do not wait for running samples: the samples continue, and held tokens wait or are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from fourfold.errors import InvalidInput, Unavailable, WrongState
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from tests.conftest import Serve
from tests.fakes.engine import SUMS
from tests.fakes.rollout import OPEN, Service, request, rollout_service, until

LONG = pb.SamplingParams(max_tokens=6)
KEEP, RECOMPUTE = control_pb.PAUSE_MODE_KEEP, control_pb.PAUSE_MODE_RECOMPUTE


@pytest.fixture(params=[KEEP, RECOMPUTE], ids=["keep", "recompute"])
def mode(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def service(serve: Serve) -> AsyncIterator[Service]:
    async with rollout_service(serve) as running:
        yield running


def start(service: Service, name: str, flush_seconds: float | None = None) -> asyncio.Task[list[Completion]]:
    message = request(name, flush_seconds=flush_seconds, sample_count=2, sampling_params=LONG)
    return asyncio.create_task(service.client.complete(message, timeout=10))


def spans(sample: Completion) -> list[tuple[int, int]]:
    return [(span.policy_version, span.token_count) for span in sample.version_spans]


async def pause(service: Service, mode: Any = KEEP) -> None:
    """Sample two tokens, then update up to before the commit; the engine's step in between must sample nothing."""
    service.engine.tick(2)
    await service.pause(1, mode=mode)
    service.engine.tick()
    await service.control.receive(epoch=1, policy_version=1, timeout=2)


class TestPausedSamples:
    @pytest.mark.parametrize("flush_seconds", [None, 0.0, 5.0], ids=["packed", "at-once", "flushed"])
    async def test_samples_go_on_and_no_chunk_has_two_versions(
        self, service: Service, mode: Any, flush_seconds: float | None
    ) -> None:
        answer = start(service, "a", flush_seconds)
        await service.running(2)
        await pause(service, mode)
        await service.control.commit(epoch=1, policy_version=1, timeout=2)
        service.engine.tick(4)
        for sample in await answer:
            assert spans(sample) == [(0, 2), (1, 4)]
            assert sample.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
            assert sample.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
            assert sample.finish_reason == pb.FINISH_REASON_LENGTH
        dropped = "forget" if mode == KEEP else "recompute"
        # Nothing else stands between the transfer and the samples.
        assert service.engine.log == ["open 1", "pause", "receive 1", dropped, "resume", "commit 1"]
        for drawn in service.engine.samples:
            assert drawn.keys == ([0, 0] if mode == KEEP else [1, 1]) + [1] * 4

    async def test_several_updates_of_one_sample(self, service: Service, mode: Any) -> None:
        answer = start(service, "a")
        await service.running(2)
        for version in (1, 2, 3):
            service.engine.tick()
            await service.pause(version, mode=mode)
            await service.control.receive(epoch=version, policy_version=version, timeout=2)
            await service.control.commit(epoch=version, policy_version=version, hold=version == 2, timeout=2)
            if version == 2:
                service.engine.tick()
                await service.control.release(epoch=2, policy_version=2, timeout=2)
        service.engine.tick(2)
        assert [spans(sample) for sample in await answer] == [[(0, 1), (1, 1), (2, 2), (3, 2)]] * 2
        for drawn in service.engine.samples:
            assert drawn.keys == ([0, 1, 2, 2, 3, 3] if mode == KEEP else [3] * 6)

    async def test_an_update_given_up_in_time_is_not_seen(self, service: Service, mode: Any) -> None:
        answer = start(service, "a")
        await service.running(2)
        service.engine.tick(2)
        await service.pause(mode=mode)
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_CLEAN
        service.engine.tick(4)
        assert [spans(sample) for sample in await answer] == [[(0, 6)]] * 2
        assert not {"forget", "recompute"} & set(service.engine.log), "keys and values of the old weights are right"

    async def test_a_mode_is_that_of_its_own_update(self, service: Service) -> None:
        answer = start(service, "a")
        await service.running(2)
        for version, mode in ((1, RECOMPUTE), (2, KEEP)):
            service.engine.tick()
            await service.pause(version, mode=mode)
            await service.control.receive(epoch=version, policy_version=version, timeout=2)
            await service.control.commit(epoch=version, policy_version=version, timeout=2)
        service.engine.tick(4)
        await answer
        assert [drawn.keys for drawn in service.engine.samples] == [[1, 1, 2, 2, 2, 2]] * 2

    async def test_no_version_is_committed_while_the_engine_has_old_prefixes(self, service: Service, mode: Any) -> None:
        answer = start(service, "a")
        await service.running(2)
        await pause(service, mode)
        service.engine.forget_error = Unavailable("no answer")
        for _ in range(2):
            with pytest.raises(Unavailable, match="no answer"):
                await service.control.commit(epoch=1, policy_version=1, timeout=2)
        assert (await service.control.describe(timeout=2)).policy_version == 0
        assert service.engine.paused
        service.engine.forget_error = None
        await service.control.commit(epoch=1, policy_version=1, timeout=2)
        service.engine.tick(4)
        assert [spans(sample) for sample in await answer] == [[(0, 2), (1, 4)]] * 2

    async def test_on_weights_that_are_mixed_they_end_with_what_they_had(self, service: Service, mode: Any) -> None:
        answer = start(service, "a")
        await service.running(2)
        await pause(service, mode)
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
        for sample in await answer:
            assert spans(sample) == [(0, 2)]
            assert sample.finish_reason == pb.FINISH_REASON_ABORTED
        assert not service.engine.paused

    async def test_no_probe_while_samples_stand_still(self, service: Service) -> None:
        answer = start(service, "a")
        await service.running(2)
        await pause(service)
        with pytest.raises(WrongState, match="commit with hold before a probe"):
            await service.control.probe([1, 2], timeout=2)
        answer.cancel()

    async def test_a_call_that_is_being_submitted_comes_before_the_pause(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_enter, submit = asyncio.Event(), service.engine.submit

        async def slow(requests: Any) -> Any:
            await may_enter.wait()
            return await submit(requests)

        monkeypatch.setattr(service.engine, "submit", slow)
        answer = start(service, "a")
        await asyncio.sleep(0.15)  # it has a lease, and waits in front of the engine
        begin = asyncio.create_task(service.pause(mode=KEEP))
        await asyncio.sleep(0.05)
        assert not begin.done()
        may_enter.set()
        await begin
        assert service.engine.log[-1] == "pause"
        answer.cancel()


class TestHold:
    @pytest.mark.parametrize("flush_seconds", [None, 0.0], ids=["packed", "at-once"])
    async def test_tokens_wait_for_the_release(self, service: Service, flush_seconds: float | None) -> None:
        answer, fresh, chunks = await self._held(service, flush_seconds)
        assert {c.policy_version for c in chunks} <= {0}
        assert not fresh.done()
        assert len(await service.control.probe([1, 2], timeout=2)) == 2
        for _ in range(2):
            await service.control.release(epoch=1, policy_version=1, timeout=2)
        await answer
        for index in range(2):
            mine = [(c.policy_version, len(c.token_ids) // 4) for c in chunks if c.sample_index == index]
            assert mine == [(0, 2), (1, 4)] if flush_seconds is None else [(0, 1)] * 2 + [(1, 1)] * 4
        assert [spans(sample) for sample in await fresh] == [[(1, 6)]] * 2
        assert (await service.control.describe(timeout=2)).weight_state == control_pb.WEIGHT_STATE_CLEAN

    @pytest.mark.parametrize("flush_seconds", [None, 0.0], ids=["packed", "at-once"])
    async def test_dropped_tokens_never_leave(self, service: Service, flush_seconds: float | None) -> None:
        answer, fresh, chunks = await self._held(service, flush_seconds)
        late = start(service, "late")  # not one token yet
        await service.running(2)
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
        await answer
        assert {c.policy_version for c in chunks} == {0}
        assert sum(len(c.token_ids) for c in chunks) == 2 * 2 * 4
        assert [c.finish_reason for c in chunks if c.finish_reason] == [pb.FINISH_REASON_ABORTED] * 2
        for call in (fresh, late):
            with pytest.raises(Unavailable, match="given up") as caught:
                await call
            assert caught.value.retry_after
        info = await service.control.describe(timeout=2)
        assert (info.policy_version, info.weight_state) == (0, control_pb.WEIGHT_STATE_DIRTY)

        await service.publish(2)
        after = start(service, "after")
        await service.running(2)
        service.engine.tick(6)
        assert [spans(sample) for sample in await after] == [[(2, 6)]] * 2

    async def test_a_version_that_comes_again_shares_no_cached_prefix_with_what_was_dropped(
        self, service: Service
    ) -> None:
        async def fill(epoch: int, *, hold: bool) -> None:
            control: Any = service.control
            numbers = {"epoch": epoch, "policy_version": 1}
            await control.open(epoch=epoch, timeout=2, **OPEN)
            await control.begin(**numbers, pause_mode=KEEP, timeout=2)
            await control.receive(**numbers, timeout=2)
            await control.commit(**numbers, hold=hold, timeout=2)

        calls = [start(service, "old")]
        await service.running(2)
        await fill(1, hold=True)
        calls.append(start(service, "dropped"))
        await service.running(4)
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
        await fill(2, hold=False)
        calls.append(start(service, "again"))
        await service.running(2)
        service.engine.tick(6)
        await asyncio.gather(*calls, return_exceptions=True)
        assert [spans(sample) for sample in calls[-1].result()] == [[(1, 6)]] * 2
        salts = {s.request.key: s.request.cache_salt for s in service.engine.samples}
        for call in ("old", "dropped", "again"):
            assert salts[f"local/{call}-0"] == salts[f"local/{call}-1"]
        assert len(set(salts.values())) == 3

    async def test_no_second_update_before_the_release(self, service: Service) -> None:
        await pause(service)
        for _ in range(2):
            await service.control.commit(epoch=1, policy_version=1, hold=True, timeout=2)
        with pytest.raises(WrongState, match="not released"):
            await service.control.begin(epoch=1, policy_version=2, pause_mode=KEEP, timeout=2)
        with pytest.raises(WrongState, match="call ReleaseWeights"):
            await service.control.commit(epoch=1, policy_version=1, timeout=2)
        with pytest.raises(WrongState, match="committed already"):
            await service.control.receive(epoch=1, policy_version=1, timeout=2)
        await service.control.release(epoch=1, policy_version=1, timeout=2)
        await service.control.begin(epoch=1, policy_version=2, pause_mode=KEEP, timeout=2)
        with pytest.raises(WrongState, match="not committed"):
            await service.control.release(epoch=1, policy_version=2, timeout=2)

    async def test_a_drain_waits_for_no_release(self, service: Service) -> None:
        answer, fresh, _ = await self._held(service, None)
        await asyncio.wait_for(service.servicer.drain(), 5)
        await answer
        with pytest.raises(Unavailable, match="given up"):
            await fresh

    async def _held(self, service: Service, flush_seconds: float | None) -> tuple[Any, Any, list[pb.SampleChunk]]:
        """Return a call that began before the update and one that began in the hold, and the chunks of the first."""
        chunks: list[pb.SampleChunk] = []

        async def stream() -> None:
            message = request("old", flush_seconds=flush_seconds, sample_count=2, sampling_params=LONG)
            async with aclosing(service.client.generate(message, timeout=10)) as parts:
                async for part in parts:
                    chunks.append(part)

        answer = asyncio.create_task(stream())
        await service.running(2)
        await pause(service)
        await service.control.commit(epoch=1, policy_version=1, hold=True, timeout=2)
        fresh = start(service, "fresh")
        await service.running(4)
        service.engine.tick(6)
        await until(lambda: len(chunks) >= (2 if flush_seconds is None else 4))
        await asyncio.sleep(0.05)
        return answer, fresh, chunks


class TestOtherCalls:
    async def test_phase_is_described_as_text(self, service: Service) -> None:
        async def phase() -> str:
            return (await service.control.describe(timeout=2)).update_phase

        assert await phase() == ""
        await service.pause(1)
        assert await phase() == "paused"
        service.engine.receive_gate.clear()
        receive = asyncio.create_task(service.control.receive(epoch=1, policy_version=1, skip_sums=True, timeout=5))
        await asyncio.sleep(0.1)
        info = await service.control.describe(timeout=2)
        assert info.update_phase == "receiving"
        assert 0.05 < info.update_phase_seconds < 30
        service.engine.receive_gate.set()
        await receive
        assert service.engine.log[-1] == "receive 1 without sums"
        await service.control.commit(epoch=1, policy_version=1, hold=True, timeout=2)
        assert await phase() == "committed, not released"
        await service.control.release(epoch=1, policy_version=1, timeout=2)
        assert await phase() == ""

    async def test_sums_of_the_open_epoch(self, service: Service) -> None:
        await service.publish(3)
        assert await service.control.sums(epoch=3, timeout=2) == SUMS

    async def test_sleep_where_there_is_nothing_to_give_up(self, service: Service) -> None:
        with pytest.raises(WrongState, match="runs on CPU"):
            await service.control.sleep(level=1, timeout=2)
        with pytest.raises(InvalidInput, match="level is 3"):
            await service.control.sleep(level=3, timeout=2)
        with pytest.raises(InvalidInput, match="'kv' is unknown"):
            await service.control.wake("kv", timeout=2)
        await service.control.wake(timeout=2)
        assert not (await service.control.describe(timeout=2)).sleeping
