"""RolloutService and RolloutControlService on a loopback server, with an engine that a test moves by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold.errors import (
    AlreadyExists,
    DeadlinePassed,
    InvalidInput,
    Overloaded,
    StaleEpoch,
    Unavailable,
    WrongState,
)
from fourfold.rollout.client import RolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_control_service_pb2_grpc import add_RolloutControlServiceServicer_to_server
from fourfold.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from fourfold_rollout import servicer as servicer_module
from fourfold_rollout.admission import Limits
from fourfold_rollout.control_servicer import Identity, RolloutControlServicer
from fourfold_rollout.servicer import RolloutServicer, ServedModel
from fourfold_rollout.weights import EngineWeights
from tests.conftest import Serve
from tests.fakes.engine import CONTEXT, DIGEST, STOP_TOKEN, VOCABULARY, FakeEngine

SHA256 = bytes(range(32))
OPEN: dict[str, Any] = {
    "backend": "shm", "manifest": b"m", "offers": [b"o"], "receiver_count": 1, "first_receiver_index": 0,
}  # fmt: skip


@dataclass(slots=True)
class Service:
    """A running service and its clients."""

    engine: FakeEngine
    servicer: RolloutServicer
    channel: grpc.aio.Channel
    client: RolloutClient
    control: RolloutControlClient

    async def running(self, count: int) -> None:
        """Wait until so many samples are in the engine."""
        await until(lambda: self.engine.running_count == count)

    async def pause(self, version: int = 1, mode: Any = control_pb.PAUSE_MODE_WAIT, timeout: float = 2) -> None:
        await self.control.open(epoch=version, timeout=2, **OPEN)
        await self.control.begin(epoch=version, policy_version=version, pause_mode=mode, timeout=timeout)

    async def publish(self, version: int) -> None:
        await self.pause(version)
        await self.control.receive(epoch=version, policy_version=version, timeout=2)
        await self.control.commit(epoch=version, policy_version=version, timeout=2)


@pytest.fixture
async def service(serve: Serve) -> AsyncIterator[Service]:
    engine = FakeEngine(kv_cache_tokens=100)
    limits = Limits(
        max_context_tokens=CONTEXT,
        vocabulary_size=VOCABULARY,
        max_concurrent_samples=8,
        kv_cache_tokens=engine.description.kv_cache_tokens,
        stop_token_ids=(STOP_TOKEN,),
    )
    weights = EngineWeights(engine, update_timeout=5)
    servicer = RolloutServicer(ServedModel(name="tiny", tokenizer_sha256=SHA256, limits=limits), engine, weights)
    control = RolloutControlServicer(Identity(model_sha256=SHA256, host_id="here"), engine, weights, update_timeout=5)
    channel = await serve(
        (pb.DESCRIPTOR.services_by_name["RolloutService"], add_RolloutServiceServicer_to_server, servicer),
        (
            control_pb.DESCRIPTOR.services_by_name["RolloutControlService"],
            add_RolloutControlServiceServicer_to_server,
            control,
        ),
    )
    yield Service(
        engine,
        servicer,
        channel,
        RolloutClient(channel, peer="rollout-0"),
        RolloutControlClient(channel, peer="rollout-0"),
    )
    await weights.close()


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def request(name: str = "r", *, flush_seconds: float | None = None, **fields: Any) -> pb.GenerateRequest:
    defaults = {"request_id": name, "prompt_token_ids": [1, 2, 3], "sampling_params": pb.SamplingParams(max_tokens=4)}
    message = pb.GenerateRequest(**{**defaults, **fields})
    if flush_seconds is not None:
        message.flush_interval.FromNanoseconds(int(flush_seconds * 1e9))
    return message


async def collect(service: Service, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with aclosing(service.client.generate(message, timeout=5)) as responses:
        return [response async for response in responses]


class TestGenerate:
    async def test_info_describes_what_is_served(self, service: Service) -> None:
        info = await service.client.get_info(timeout=5)
        assert (info.model, info.tokenizer_sha256, info.policy_version) == ("tiny", SHA256, 0)
        assert (info.max_context_tokens, info.vocabulary_size, info.max_concurrent_samples) == (CONTEXT, VOCABULARY, 8)

    async def test_a_finished_sample_is_one_message(self, service: Service) -> None:
        answer = asyncio.create_task(collect(service, request(sample_count=3)))
        await service.running(3)
        service.engine.tick(2)
        service.engine.stop(service.engine.streams[1])
        await asyncio.sleep(0.02)
        service.engine.tick(2)
        responses = await answer
        assert [r.sample_index for r in responses] == [1, 0, 2]  # as they finish
        assert [r.finish_reason for r in responses] == [
            pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_LENGTH,
        ]  # fmt: skip
        assert responses[0].token_ids == np.array([10, 11], "<i4").tobytes()
        assert responses[0].logprobs == np.array([-1, -2], "<f4").tobytes()

    async def test_flush_zero_sends_each_token_as_it_comes(self, service: Service) -> None:
        answer = asyncio.create_task(collect(service, request(flush_seconds=0)))
        await service.running(1)
        for _ in range(4):
            service.engine.tick()
            await asyncio.sleep(0.02)
        responses = await answer
        assert [len(r.token_ids) // 4 for r in responses] == [1, 1, 1, 1]
        assert [r.finish_reason for r in responses[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * 3
        assert b"".join(r.token_ids for r in responses) == np.arange(10, 14, dtype="<i4").tobytes()

    async def test_flush_interval_coalesces_and_the_end_does_not_wait_for_it(self, service: Service) -> None:
        answer = asyncio.create_task(collect(service, request(flush_seconds=10)))
        await service.running(1)
        for _ in range(4):
            service.engine.tick()
            await asyncio.sleep(0.01)
        responses = await asyncio.wait_for(answer, 2)
        assert len(responses) == 1
        assert len(responses[0].token_ids) == 16

    async def test_flush_interval_bounds_how_long_a_token_waits(self, service: Service) -> None:
        async with aclosing(service.client.generate(request(flush_seconds=0.05), timeout=5)) as responses:
            first = asyncio.ensure_future(anext(responses))
            await service.running(1)
            service.engine.tick()
            response = await asyncio.wait_for(first, 1)
            assert len(response.token_ids) == 4
            assert response.finish_reason == pb.FINISH_REASON_UNSPECIFIED

    async def test_calls_that_arrive_together_are_one_batch_in_order_of_id(self, service: Service) -> None:
        answers = [asyncio.create_task(collect(service, request(name, sample_count=2))) for name in ("b", "a")]
        await service.running(4)
        assert service.engine.batches == [["a-0", "a-1", "b-0", "b-1"]]
        service.engine.tick(4)
        await asyncio.gather(*answers)

    async def test_the_version_that_sampled_is_on_every_response(self, service: Service) -> None:
        await service.publish(3)
        answer = asyncio.create_task(collect(service, request(min_policy_version=3)))
        await service.running(1)
        assert service.engine.streams[0].request.cache_salt == "v3"
        service.engine.tick(4)
        assert {r.policy_version for r in await answer} == {3}

    async def test_logprobs_are_never_above_zero(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        real = servicer_module._next

        async def slightly_positive(*args: Any) -> Any:
            output = await real(*args)
            output.logprobs[:] = [1e-7 for _ in output.logprobs]
            return output

        monkeypatch.setattr(servicer_module, "_next", slightly_positive)
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

    async def test_resource_exhausted_when_too_many_tokens_are_promised(self, service: Service) -> None:
        everything = pb.SamplingParams()
        first = asyncio.create_task(
            service.client.complete(request("a", sample_count=5, sampling_params=everything), timeout=5)
        )
        await service.running(5)
        with pytest.raises(Overloaded, match="160 tokens are promised"):
            await service.client.complete(request("b", sample_count=2, sampling_params=everything), timeout=5)
        service.engine.tick(CONTEXT)
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
        await asyncio.wait_for(drain, 1)

    async def test_deadline_is_required(self, service: Service) -> None:
        stub = RolloutServiceStub(service.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request()):
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


class TestLeaving:
    async def test_cancelling_the_call_aborts_its_samples(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(sample_count=4), timeout=60))
        await service.running(4)
        answer.cancel()
        await service.running(0)
        assert sorted(service.engine.log) == [f"abandon r-{i}" for i in range(4)]

    async def test_losing_the_client_aborts_its_samples(self, service: Service) -> None:
        stream = RolloutServiceStub(service.channel).Generate(request(sample_count=2), timeout=60)
        await service.running(2)
        await service.channel.close()
        await service.running(0)
        del stream

    async def test_the_deadline_aborts_its_samples(self, service: Service) -> None:
        with pytest.raises(DeadlinePassed):
            await service.client.complete(request(), timeout=0.2)
        await service.running(0)

    async def test_leaving_in_the_middle_of_a_stream_aborts_the_rest(self, service: Service) -> None:
        async with aclosing(service.client.generate(request(flush_seconds=0), timeout=60)) as responses:
            first = asyncio.ensure_future(anext(responses))
            await service.running(1)
            service.engine.tick()
            await first
        await service.running(0)

    async def test_the_place_of_a_call_that_left_is_free(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request("a", sample_count=8), timeout=60))
        await service.running(8)
        answer.cancel()
        await service.running(0)
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
            assert not first.updating_weights
            service.engine.tick(1)
            await answer
            await service.pause(4)
            async for report in reports:
                if report.updating_weights:
                    break
            assert report.running_sample_count == 0
            assert report.sampled_token_count == 8

    async def test_period_out_of_range_is_refused(self, service: Service) -> None:
        with pytest.raises(InvalidInput, match=r"period is 0.001 s; it must be in \[0.01, 60\]"):
            await anext(service.client.watch_load(period=0.001))


class TestControl:
    async def test_description(self, service: Service) -> None:
        answer = await service.control.describe(timeout=2)
        assert (answer.model_sha256, answer.host_id, list(answer.backends)) == (SHA256, "here", ["shm", "gloo"])
        assert (answer.worker_count, answer.device_type, answer.policy_version) == (1, "cpu", 0)
        assert answer.weight_state == control_pb.WEIGHT_STATE_CLEAN
        assert answer.engine_version

    async def test_an_update_from_begin_to_commit(self, service: Service) -> None:
        opened = await service.control.open(epoch=1, timeout=2, **OPEN)
        assert (opened.direct_tensor_count, opened.reload_tensor_count) == (0, 7)
        await service.control.begin(epoch=1, policy_version=2, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)
        assert (await service.control.describe(timeout=2)).weight_state == control_pb.WEIGHT_STATE_UPDATING
        assert await service.control.receive(epoch=1, policy_version=2, timeout=2) == DIGEST
        probe = await service.control.probe([5, 20, 30], timeout=2)
        assert np.isnan(probe[0])
        assert probe[1:].tolist() == [-2.0, -3.0]
        assert (await service.client.get_info(timeout=2)).policy_version == 0
        await service.control.commit(epoch=1, policy_version=2, timeout=2)
        assert (await service.client.get_info(timeout=2)).policy_version == 2

    async def test_abort_mode_ends_running_samples_with_what_they_have(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(sample_count=2), timeout=5))
        await service.running(2)
        service.engine.tick(1)
        await service.pause(mode=control_pb.PAUSE_MODE_ABORT)
        for sample in await answer:
            assert sample.finish_reason == pb.FINISH_REASON_ABORTED
            assert sample.token_ids.tolist() == [10]
            assert sample.version_spans[0].policy_version == 0

    async def test_a_call_during_an_update_waits_for_the_new_version(self, service: Service) -> None:
        await service.pause(1)
        answer = asyncio.create_task(service.client.complete(request(min_policy_version=1), timeout=5))
        await asyncio.sleep(0.05)
        assert service.engine.running_count == 0
        await service.control.receive(epoch=1, policy_version=1, timeout=2)
        await service.control.commit(epoch=1, policy_version=1, timeout=2)
        await service.running(1)
        service.engine.tick(4)
        (sample,) = await answer
        assert sample.version_spans[0].policy_version == 1

    async def test_deadline_exceeded_when_samples_do_not_finish_in_time(self, service: Service) -> None:
        answer = asyncio.create_task(service.client.complete(request(), timeout=5))
        await service.running(1)
        with pytest.raises(DeadlinePassed, match="still ran"):
            await service.pause(timeout=0.4)
        service.engine.tick(4)
        await answer
        assert (await service.control.describe(timeout=2)).weight_state == control_pb.WEIGHT_STATE_CLEAN

    async def test_dirty_engine_refuses_samples_until_it_is_refilled(self, service: Service) -> None:
        await service.pause(1)
        service.engine.receive_error = Unavailable("a trainer rank died")
        service.engine.abort_is_clean = False
        with pytest.raises(Unavailable, match="rank died"):
            await service.control.receive(epoch=1, policy_version=1, timeout=2)
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
        assert await service.control.abort(epoch=1, timeout=2) == control_pb.WEIGHT_STATE_DIRTY
        with pytest.raises(Unavailable, match="serves nothing") as caught:
            await service.client.complete(request(), timeout=5)
        assert caught.value.reason == "WEIGHTS_DIRTY"
        service.engine.receive_error = None
        await service.publish(2)
        assert (await service.control.describe(timeout=2)).weight_state == control_pb.WEIGHT_STATE_CLEAN

    async def test_stale_epoch_is_aborted(self, service: Service) -> None:
        await service.publish(5)
        with pytest.raises(StaleEpoch):
            await service.control.open(epoch=5, timeout=2, **OPEN)
        with pytest.raises(StaleEpoch):
            await service.control.begin(epoch=4, policy_version=6, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)

    async def test_old_version_is_a_failed_precondition(self, service: Service) -> None:
        await service.publish(5)
        with pytest.raises(WrongState, match="versions never go back"):
            await service.control.begin(epoch=5, policy_version=5, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)

    async def test_a_manifest_that_does_not_fit_is_a_failed_precondition(self, service: Service) -> None:
        service.engine.open_error = WrongState("the manifest has no tensor lm_head.weight")
        with pytest.raises(WrongState, match="lm_head"):
            await service.control.open(epoch=1, timeout=2, **OPEN)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"backend": "nccl"}, "this engine can use shm, gloo"),
            ({"manifest": b""}, "manifest has 0 bytes"),
            ({"manifest": bytes((8 << 20) + 1)}, "manifest has 8388609 bytes"),
            ({"offers": []}, "0 offers"),
            ({"offers": [bytes(4097)]}, "an offer has 4097 bytes"),
            ({"first_receiver_index": 1}, "do not fit into receiver_count 1"),
            ({"receiver_count": 0}, "do not fit into receiver_count 0"),
        ],
    )
    async def test_bad_open_is_an_invalid_argument(self, service: Service, change: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            await service.control.open(epoch=1, timeout=2, **{**OPEN, **change})
        assert not service.engine.log

    @pytest.mark.parametrize("mode", [control_pb.PAUSE_MODE_UNSPECIFIED, 77])
    async def test_unknown_pause_mode_is_an_invalid_argument(self, service: Service, mode: Any) -> None:
        with pytest.raises(InvalidInput, match="pause_mode"):
            await service.pause(mode=mode)

    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            ([1], "1 tokens; a probe of this engine must have 2 to 31"),
            ([1] * 32, "32 tokens"),
            ([1, VOCABULARY], "outside the vocabulary"),
        ],
    )
    async def test_bad_probe_is_an_invalid_argument(self, service: Service, ids: list[int], words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            await service.control.probe(ids, timeout=2)
