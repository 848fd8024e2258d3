"""Checks of a Generate request, and the limits on samples and tokens in flight."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from fourfold.config.table import MIN_TEMPERATURE
from fourfold.errors import AlreadyExists, InvalidInput, Overloaded, PermissionDenied
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.limits import Quotas, limits_by_role
from fourfold.security.principal import CallerLimits, Principal
from fourfold_rollout.generate.admission import Admission, GenerateCall, GenerateLimits, parse
from tests.fakes.engine import NullSink
from tests.fakes.rollout import NO_QUOTAS

COORDINATOR, AGENT = Principal("coordinator"), Principal("agent", "anna")
LIMITS = GenerateLimits(
    max_context_tokens=32, vocabulary_size=100, max_concurrent_samples=8, kv_cache_tokens=100, stop_token_ids=(2, 3)
)


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "r", "prompt_token_ids": [1, 4, 5], **fields})


def params(**fields: Any) -> pb.GenerateRequest:
    return request(sampling_params=pb.SamplingParams(**fields))


class TestParse:
    def test_defaults_are_those_of_the_proto(self) -> None:
        call = parse(request(), LIMITS, COORDINATOR)
        assert (call.temperature, call.top_p, call.top_k, call.sample_count) == (1.0, 1.0, 0, 1)
        assert call.max_tokens == 29  # what the context allows
        assert call.stop_token_ids == (2, 3)
        assert call.flush_seconds is None
        assert call.min_policy_version == 0
        assert 0 <= call.seed < 2**53
        assert call.seed != parse(request(), LIMITS, COORDINATOR).seed

    @pytest.mark.parametrize(
        ("fields", "name", "value"),
        [
            ({"temperature": 0.0}, "temperature", 0.0),
            ({"temperature": 2.0}, "temperature", 2.0),
            ({"temperature": MIN_TEMPERATURE}, "temperature", MIN_TEMPERATURE),  # a bit less in float32
            ({"seed": 0}, "seed", 0),
            ({"max_tokens": 1000}, "max_tokens", 29),  # cut to the context
            ({"max_tokens": 5}, "max_tokens", 5),
            ({"stop_token_ids": [7, 2]}, "stop_token_ids", (2, 3, 7)),
        ],
    )
    def test_values_are_read_as_the_proto_says(self, fields: dict[str, Any], name: str, value: object) -> None:
        assert getattr(parse(params(**fields), LIMITS, COORDINATOR), name) == value

    def test_a_flush_interval_of_zero_is_one(self) -> None:
        with_flush = request()
        with_flush.flush_interval.FromNanoseconds(0)
        assert parse(with_flush, LIMITS, COORDINATOR).flush_seconds == 0.0

    def test_sample_i_uses_seed_plus_i_and_the_salt_of_the_weights(self) -> None:
        call = parse(
            request(sample_count=3, sampling_params=pb.SamplingParams(seed=40, top_k=5, top_p=0.5, max_tokens=2)),
            LIMITS,
            COORDINATOR,
        )
        samples = call.samples("v9.2", NullSink())
        assert [s.seed for s in samples] == [40, 41, 42]
        assert [s.key for s in samples] == [f"coordinator/r-{i}" for i in range(3)]
        assert {s.cache_salt for s in samples} == {"v9.2"}
        assert (samples[0].top_k, samples[0].top_p, samples[0].streaming) == (5, 0.5, False)

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            (request(request_id=""), "request_id"),
            (request(request_id="a b"), "A-Za-z0-9_-"),
            (request(prompt_token_ids=[]), "prompt_token_ids is empty"),
            (request(prompt_token_ids=[1] * 32), "32 tokens; it must be shorter than the context of 32"),
            (request(prompt_token_ids=[1, 100]), r"100, which is outside the vocabulary \[0, 100\)"),
            (request(prompt_token_ids=[-1]), "-1, which is outside"),
            (request(sample_count=0), "sample_count is 0"),
            (request(sample_count=9), r"sample_count is 9; it must be in \[1, 8\]"),
            (request(min_policy_version=-1), "min_policy_version is -1"),
            (params(temperature=-0.1), "temperature"),
            (params(temperature=2.1), r"temperature is 2.1; it must be in \[0.01, 2\], or 0 for greedy"),
            (params(temperature=0.005), r"temperature is 0.005; .* the engine would raise a value"),
            (params(temperature=0.00999), "temperature is 0.00999"),
            (params(temperature=float("nan")), "temperature is nan"),
            (params(top_p=0.0), "top_p is 0"),
            (params(top_p=1.5), "top_p is 1.5"),
            (params(top_k=0), "top_k is 0"),
            (params(max_tokens=0), "max_tokens is 0"),
            (params(seed=-1), "seed is -1"),
            (params(seed=2**53), "seed"),
            (params(stop_token_ids=[100]), "stop_token_ids holds 100"),
            (params(stop_token_ids=[1] * 65), "65 ids; at most 64"),
        ],
    )
    def test_bad_value_is_refused_with_value_and_rule(self, bad: pb.GenerateRequest, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            parse(bad, LIMITS, COORDINATOR)

    @pytest.mark.parametrize("nanoseconds", [-1, 10_000_000_001])
    def test_flush_interval_out_of_range_is_refused(self, nanoseconds: int) -> None:
        bad = request()
        bad.flush_interval.FromNanoseconds(nanoseconds)
        with pytest.raises(InvalidInput, match="flush_interval"):
            parse(bad, LIMITS, COORDINATOR)


def call(
    name: str, samples: int = 1, max_tokens: int = 1, caller: Principal = COORDINATOR, limits: GenerateLimits = LIMITS
) -> GenerateCall:
    message = request(
        request_id=name, sample_count=samples, sampling_params=pb.SamplingParams(max_tokens=max_tokens, seed=1)
    )
    return parse(message, limits, caller)


class TestAdmission:
    async def test_live_request_id_is_refused_and_free_again_afterwards(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        async with admission.enter(call("a"), is_retry=False):
            with pytest.raises(AlreadyExists, match="'a' is in flight"):
                await admission.enter(call("a"), is_retry=False).__aenter__()
        async with admission.enter(call("a"), is_retry=False):
            pass

    async def test_a_retry_takes_the_place_of_its_dead_first_attempt(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        mark_in_flight = asyncio.Event()

        async def first() -> None:
            async with admission.enter(call("a", samples=8), is_retry=False):
                mark_in_flight.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(first())
        await mark_in_flight.wait()
        async with admission.enter(call("a", samples=8), is_retry=True):
            assert task.cancelled() or task.cancelling()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_a_second_retry_does_not_interrupt_the_end_of_the_first_attempt(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        mark_in_flight, ending, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with admission.enter(call("a"), is_retry=False):
                mark_in_flight.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    await ending.wait()  # its samples are taken out of the engine
                    ended.set()

        async def again() -> None:
            async with admission.enter(call("a"), is_retry=True):
                assert ended.is_set()

        tasks = [asyncio.create_task(first())]
        await mark_in_flight.wait()
        for _ in range(2):
            tasks.append(asyncio.create_task(again()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        ending.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert ended.is_set() and isinstance(results[0], asyncio.CancelledError)
        assert None in results[1:], "one of the retries has the place, or has had it"

    async def test_wait_empty_tells_whether_all_calls_have_left(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        assert await admission.wait_empty(0)
        async with admission.enter(call("a"), is_retry=False):
            assert not await admission.wait_empty(0.01)
        assert await admission.wait_empty(0)


SHARED = dataclasses.replace(LIMITS, agent_samples=2, agent_token_share=0.25)  # 50 of the 200 tokens


def agent(name: str, samples: int = 1, max_tokens: int = 1, who: str = "anna") -> GenerateCall:
    return call(name, samples, max_tokens, Principal("agent", who), SHARED)


async def refused(admission: Admission, call: GenerateCall) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        await admission.enter(call, is_retry=False).__aenter__()
    assert caught.value.retry_after
    return caught.value


class TestAgents:
    async def test_all_agents_together_get_their_samples_and_the_coordinator_all_that_are_free(self) -> None:
        admission = Admission(SHARED, NO_QUOTAS)
        async with admission.enter(agent("a"), is_retry=False), admission.enter(agent("b", who="bert"), is_retry=False):
            error = await refused(admission, agent("c"))
            assert "2 samples are in flight and 1 more would pass the limit of 2 for agents" in error.message
            async with admission.enter(call("c", samples=6), is_retry=False):
                error = await refused(admission, call("d"))
                assert "8 samples are in flight and 1 more would pass the limit of 8 (" in error.message
        async with admission.enter(call("c", samples=8), is_retry=False):
            assert "the limit of 8 (" in (await refused(admission, agent("a"))).message

    async def test_all_agents_together_get_their_tokens_and_the_coordinator_all_that_are_free(self) -> None:
        admission = Admission(SHARED, NO_QUOTAS)
        async with admission.enter(agent("a", max_tokens=29), is_retry=False):  # 32 of 50
            error = await refused(admission, agent("b", max_tokens=20, who="bert"))
            assert "32 tokens are promised to calls in flight and 23 more would pass the limit of 50 for agents" in (
                error.message
            )
            async with admission.enter(call("c", samples=5, max_tokens=29), is_retry=False):  # 192 in all
                assert "limit of 200;" in (await refused(admission, call("d", max_tokens=29))).message

    async def test_the_coordinators_only_call_fits_whatever_agents_hold(self) -> None:
        admission = Admission(SHARED, NO_QUOTAS)
        async with (
            admission.enter(agent("a", max_tokens=29), is_retry=False),
            admission.enter(call("c", samples=7, max_tokens=29), is_retry=False),  # 32 + 224 tokens of 200
        ):
            pass

    def test_a_call_that_agents_can_never_make_is_refused_for_good(self) -> None:
        with pytest.raises(InvalidInput, match=r"sample_count is 3; it must be in \[1, 2\]"):
            agent("a", samples=3)
        with pytest.raises(InvalidInput, match=r"asks for 64 tokens .* agents may have 50 in flight together"):
            agent("a", samples=2, max_tokens=29)
        assert call("a", 8, 29, limits=SHARED).token_count == 256, (
            "the coordinator may: a call that is alone always fits"
        )
        with pytest.raises(PermissionDenied, match="all 8 samples are reserved for the run"):
            call("a", caller=AGENT, limits=dataclasses.replace(LIMITS, agent_samples=0))

    async def test_a_service_without_a_coordinator_reserves_nothing(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        async with admission.enter(call("a", samples=8, max_tokens=29, caller=AGENT), is_retry=False):
            assert "the limit of 8 (" in (await refused(admission, call("b"))).message

    async def test_tokens_in_flight_of_one_agent_are_limited(self) -> None:
        admission = Admission(LIMITS, Quotas(limits_by_role(CallerLimits(tokens_in_flight=40))))
        async with admission.enter(call("a", max_tokens=29, caller=AGENT), is_retry=False):
            assert (await refused(admission, call("b", max_tokens=29, caller=AGENT))).reason == (
                "TOO_MANY_TOKENS_IN_FLIGHT"
            )
            async with admission.enter(call("b", max_tokens=29, caller=Principal("agent", "bert")), is_retry=False):
                pass
        assert await admission.wait_empty(0), "a call that was refused is not in flight"

    async def test_a_request_id_belongs_to_its_caller(self) -> None:
        admission = Admission(LIMITS, NO_QUOTAS)
        async with admission.enter(call("a"), is_retry=False), admission.enter(call("a", caller=AGENT), is_retry=True):
            task = asyncio.current_task()
            assert task is not None and not task.cancelling(), "an agent's retry ends no call of the coordinator"
            ours, theirs = (call("a", caller=c).samples("", NullSink())[0].key for c in (COORDINATOR, AGENT))
            assert ours != theirs
