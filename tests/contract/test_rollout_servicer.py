"""RolloutService on a loopback server: its responses, each status code, and callers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import AlreadyExists, InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fourfold_rollout.engine import SampleOutput
from fourfold_rollout.generate import servicer as servicer_module
from fourfold_rollout.generate.outputs import CallOutputs
from tests.conftest import Serve
from tests.fakes.engine import CONTEXT, VOCABULARY
from tests.fakes.rollout import OPEN, SHA256, Service, request, rollout_service


@pytest.fixture
async def service(serve: Serve) -> AsyncIterator[Service]:
    async with rollout_service(serve) as running:
        yield running


async def collect(service: Service, message: pb.GenerateRequest) -> list[pb.SampleChunk]:
    async with aclosing(service.client.generate(message, timeout=5)) as chunks:
        return [chunk async for chunk in chunks]


class TestGenerate:
    async def test_info_describes_what_is_served(self, service: Service) -> None:
        info = await service.client.get_info(timeout=5)
        assert (info.model, info.tokenizer_sha256, info.policy_version) == ("tiny", SHA256, 0)
        assert (info.max_context_tokens, info.vocabulary_size, info.max_concurrent_samples) == (CONTEXT, VOCABULARY, 8)
        assert info.contract_version == CONTRACT_VERSION

    async def test_a_finished_sample_is_one_chunk(self, service: Service) -> None:
        answer = asyncio.create_task(collect(service, request(sample_count=3)))
        await service.running(3)
        service.engine.tick(2)
        service.engine.stop(service.engine.samples[1])
        await asyncio.sleep(0.02)
        service.engine.tick(2)
        chunks = await answer
        assert [r.sample_index for r in chunks] == [1, 0, 2]  # as they finish
        assert [r.finish_reason for r in chunks] == [
            pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_LENGTH,
        ]  # fmt: skip
        assert chunks[0].token_ids == np.array([10, 11], "<i4").tobytes()
        assert chunks[0].logprobs == np.array([-1, -2], "<f4").tobytes()

    async def test_what_is_ready_together_is_one_message_unless_it_is_large(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for limit, sizes in ((1 << 18, [4]), (40, [2, 2])):  # a chunk has 16 bytes of ids and 16 of logprobs
            monkeypatch.setattr(servicer_module, "_RESPONSE_BYTES", limit)
            call = RolloutServiceStub(service.channel).Generate(request(f"limit-{limit}", sample_count=4), timeout=5)
            await service.running(4)
            service.engine.tick(4)
            assert [len(response.chunks) async for response in call] == sizes
            assert await call.code() is grpc.StatusCode.OK

    async def test_flush_interval_coalesces_and_neither_the_first_token_nor_the_end_waits_for_it(
        self, service: Service
    ) -> None:
        answer = asyncio.create_task(collect(service, request(flush_seconds=10)))
        await service.running(1)
        for _ in range(4):
            service.engine.tick()
            await asyncio.sleep(0.01)
        chunks = await asyncio.wait_for(answer, 2)
        assert [len(chunk.token_ids) // 4 for chunk in chunks] == [1, 3]

    @pytest.mark.parametrize(("seconds", "batches"), [(None, 1), (1.0, 1), (0.9, 2)])
    async def test_calls_that_are_flushed_seldom_begin_together_like_calls_that_are_not(
        self, service: Service, seconds: float | None, batches: int
    ) -> None:
        # Their tokens are then those of calls without flushes: kernels round by the shape of the batch.
        service.servicer._coalescer._quiet, service.servicer._coalescer._longest = 0.5, 5.0
        calls = [asyncio.create_task(collect(service, request(name, flush_seconds=seconds))) for name in "ab"]
        await service.running(2)
        assert len(service.engine.batches) == batches
        service.engine.tick(4)
        await asyncio.gather(*calls)

    async def test_flush_interval_bounds_how_long_a_token_waits(self, service: Service) -> None:
        async with aclosing(service.client.generate(request(flush_seconds=0.05), timeout=5)) as chunks:
            for _ in range(2):
                following = asyncio.ensure_future(anext(chunks))
                await service.running(1)
                service.engine.tick()
                chunk = await asyncio.wait_for(following, 1)
                assert len(chunk.token_ids) == 4
                assert chunk.finish_reason == pb.FINISH_REASON_UNSPECIFIED

    async def test_what_was_sampled_in_an_interval_is_one_message(self, service: Service) -> None:
        """The service has one thread, which each message occupies about as long as a sampled token does."""
        call = RolloutServiceStub(service.channel).Generate(request(sample_count=4, flush_seconds=0.05), timeout=30)
        await service.running(4)
        messages = []
        for ticks in (1, 2, 1):
            service.engine.tick(ticks)
            message = await call.read()
            assert isinstance(message, pb.GenerateResponse)
            messages.append([len(chunk.token_ids) // 4 for chunk in message.chunks])
        assert messages == [[1] * 4, [2] * 4, [1] * 4]
        assert await call.read() is grpc.aio.EOF

    async def test_logprobs_are_never_above_zero(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        real = CallOutputs.put

        def slightly_positive(self: CallOutputs, index: int, output: SampleOutput) -> None:
            output.logprobs[:] = 1e-7
            real(self, index, output)

        monkeypatch.setattr(CallOutputs, "put", slightly_positive)
        answer = asyncio.create_task(service.client.complete(request(), timeout=5))
        await service.running(1)
        service.engine.tick(4)
        (sample,) = await answer
        assert (sample.logprobs == 0).all()


class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
            ({"prompt_token_ids": [1] * CONTEXT}, "must be shorter than the context of 32"),
            ({"prompt_token_ids": [VOCABULARY]}, "outside the vocabulary"),
            ({"request_id": "no spaces"}, "A-Za-z0-9_-"),
            ({"sampling_params": pb.SamplingParams(top_p=2)}, "top_p is 2"),
        ],
    )
    async def test_invalid_argument(self, service: Service, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            await service.client.complete(request(**fields), timeout=5)
        assert not service.engine.batches

    async def test_failed_precondition_when_the_policy_is_too_old(self, service: Service) -> None:
        with pytest.raises(WrongState, match="policy_version is 0, older than min_policy_version 1") as caught:
            await service.client.complete(request(min_policy_version=1), timeout=5)
        assert caught.value.reason == "POLICY_TOO_OLD"

    async def test_already_exists_when_the_id_is_live(self, service: Service) -> None:
        first = asyncio.create_task(service.client.complete(request("same"), timeout=5))
        await service.running(1)
        with pytest.raises(AlreadyExists, match="'same' is in flight"):
            await service.client.complete(request("same"), timeout=5)
        service.engine.tick(4)
        await first
        second = asyncio.create_task(service.client.complete(request("same"), timeout=5))
        await service.running(1)
        service.engine.tick(4)
        await second

    async def test_resource_exhausted_when_too_many_samples_are_in_flight(self, service: Service) -> None:
        first = asyncio.create_task(service.client.complete(request("a", sample_count=8), timeout=5))
        await service.running(8)
        with pytest.raises(Overloaded, match="8 samples are in flight") as caught:
            await service.client.complete(request("b"), timeout=5)
        assert caught.value.retry_after == pytest.approx(0.5)
        assert caught.value.reason == "TOO_MANY_SAMPLES"
        service.engine.tick(4)
        await first

    async def test_unavailable_when_the_engine_dies_with_its_first_cause(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(sample_count=2), timeout=5))
        await service.running(2)
        service.engine.die("the engine died: RuntimeError: out of memory")
        with pytest.raises(Unavailable, match="out of memory"):
            await answer
        with pytest.raises(Unavailable, match="out of memory"):
            await service.client.complete(request("again"), timeout=5)

    async def test_unavailable_while_draining_and_running_samples_end_with_what_they_have(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(servicer_module, "_DRAIN_SECONDS", 0.1)
        answer = asyncio.create_task(service.client.complete(request(), timeout=5))
        await service.running(1)
        service.engine.tick(2)
        drain = asyncio.create_task(service.servicer.drain())
        await asyncio.sleep(0.02)
        with pytest.raises(Unavailable, match="draining"):
            await service.client.complete(request("late"), timeout=5)
        (sample,) = await answer
        assert sample.finish_reason == pb.FINISH_REASON_ABORTED
        assert sample.token_ids.tolist() == [10, 11]
        await asyncio.wait_for(drain, 10)

    async def test_a_drain_ends_calls_that_wait_for_an_update(self, service: Service) -> None:
        await service.pause(1)
        waiting = asyncio.create_task(service.client.complete(request(), timeout=60))
        while await service.servicer._admission.wait_empty(0):
            await asyncio.sleep(0.01)
        await asyncio.wait_for(service.servicer.drain(), 10)
        with pytest.raises(Unavailable, match="draining") as caught:
            await waiting
        assert caught.value.reason == "DRAINING"


class TestLeaving:
    async def test_losing_the_client_aborts_its_samples(self, service: Service) -> None:
        stream = RolloutServiceStub(service.channel).Generate(request(sample_count=2), timeout=60)
        await service.running(2)
        await service.channel.close()
        await service.running(0)
        del stream

    async def test_the_place_of_a_call_that_left_is_free(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request("a", sample_count=8), timeout=60))
        await service.running(8)
        answer.cancel()
        await service.running(0)
        assert sorted(service.engine.log) == [f"abandon local/a-{i}" for i in range(8)]
        again = asyncio.create_task(service.client.complete(request("a", sample_count=8), timeout=5))
        await service.running(8)
        service.engine.tick(4)
        assert len(await again) == 8

    async def test_a_client_that_does_not_read_holds_up_no_update(self, service: Service) -> None:
        stream = RolloutServiceStub(service.channel).Generate(request(sample_count=8), timeout=60)
        await service.running(8)
        service.engine.tick(4)
        await asyncio.wait_for(service.pause(), 2)
        stream.cancel()


class TestLoad:
    async def test_load_is_reported_at_once_and_every_period(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(sample_count=2), timeout=5))
        await service.running(2)
        service.engine.tick(3)
        async with aclosing(service.client.watch_load(period=0.01)) as reports:
            first = await asyncio.wait_for(anext(reports), 1)
            assert (first.running_sample_count, first.sampled_token_count) == (2, 6)
            prompts = 2 * len(request().prompt_token_ids)
            assert (first.kv_cache_token_count, first.free_kv_cache_token_count) == (100, 100 - 6 - prompts)
            assert not first.updating_weights
            service.engine.tick(1)
            await answer
            await service.pause(4)
            async for report in reports:
                if report.updating_weights:
                    break
            assert report.running_sample_count == 0
            assert report.sampled_token_count == 8
            assert report.free_kv_cache_token_count == 100

    async def test_joining_an_epoch_shows_and_does_not_count_as_slow(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(), timeout=5))
        await service.running(1)
        service.engine.open_gate.clear()
        async with aclosing(service.client.watch_load(period=0.15)) as reports:
            await anext(reports)
            service.engine.tick(2)
            joining = asyncio.create_task(service.control.open(epoch=1, timeout=5, **OPEN))
            while not (first := await anext(reports)).updating_weights:
                pass
            assert first.token_rate > 0
            for _ in range(3):
                assert (await anext(reports)).token_rate == first.token_rate
            service.engine.open_gate.set()
            await joining
            await anext(reports)
            assert not (await anext(reports)).updating_weights
        service.engine.tick(2)
        await answer

    async def test_period_out_of_range_is_refused(self, service: Service) -> None:
        with pytest.raises(InvalidInput, match=r"period is 0.001 s; it must be in \[0.01, 60\]"):
            await anext(service.client.watch_load(period=0.001))
