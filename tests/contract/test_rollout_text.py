"""ScoreTokens, ParseCompletion and grammars of a RolloutService on a loopback server, with fake engine and parsers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded, Unavailable, WrongState
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_rollout.engine import GrammarConstraint, ParsedText
from tests.conftest import Serve
from tests.fakes.engine import CONTEXT, STOP_TOKEN
from tests.fakes.rollout import OPEN, Service, request, rollout_service, until

TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
CONTENT = "line\nline " * 1000  # a message for people would be one line of at most 4,096 characters


@dataclass(slots=True)
class FakeText:
    """Implements `TextWork`."""

    tool_parser: str = "hermes"
    reasoning_parser: str = ""
    error: str = ""
    checked: list[tuple[GrammarConstraint, list[int], list[int]]] = field(default_factory=list)

    async def parse(self, text: str, tools_json: str) -> ParsedText:
        if text == "slow":
            await asyncio.sleep(60)
        return ParsedText(content=CONTENT, reasoning="a\nb", tool_calls=(("f", '{"x":\n1}'),))

    async def check_grammar(
        self, constraint: GrammarConstraint, stop_token_ids: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self.checked.append((constraint, list(stop_token_ids), list(accepted)))
        if self.error:
            raise InvalidInput(self.error)


@pytest.fixture
def text() -> FakeText:
    return FakeText()


@pytest.fixture
async def service(serve: Serve, text: FakeText) -> AsyncIterator[Service]:
    async with rollout_service(serve, text=text) as running:
        yield running


class TestScoreTokens:
    async def test_logprobs_are_those_of_the_engine(self, service: Service) -> None:
        values, version = await service.client.score_tokens([5, 10, 20], timeout=5)
        assert version == 0
        assert np.isnan(values[0])
        assert values[1:].tolist() == [-1.0, -2.0]

    @pytest.mark.parametrize("ids", [[], [1], [1] * CONTEXT, [1, 100], [1, -1]])
    async def test_tokens_must_be_in_range(self, service: Service, ids: list[int]) -> None:
        with pytest.raises(InvalidInput):
            await service.client.score_tokens(ids, timeout=5)

    async def test_a_call_counts_as_a_sample(self, service: Service) -> None:
        gate = asyncio.Event()
        service.engine.on_score = gate.wait
        calls = [asyncio.create_task(service.client.score_tokens([1, 2], timeout=5)) for _ in range(8)]
        await until(lambda: service.engine.log.count("score") == 8)
        with pytest.raises(Overloaded) as caught:
            await service.client.score_tokens([1, 2], timeout=5)
        assert caught.value.reason == "TOO_MANY_SAMPLES"
        gate.set()
        await asyncio.gather(*calls)

    async def test_an_update_that_comes_between_makes_it_compute_again(self, service: Service) -> None:
        gate = asyncio.Event()
        service.engine.on_score = gate.wait
        call = asyncio.create_task(service.client.score_tokens([1, 2], timeout=5))
        await until(lambda: "score" in service.engine.log)
        await service.pause(3, control_pb.PAUSE_MODE_KEEP)
        await service.control.receive(epoch=3, policy_version=3, timeout=2)
        await service.control.commit(epoch=3, policy_version=3, timeout=2)
        gate.set()
        _, version = await call
        assert version == 3
        assert service.engine.log.count("score") == 2

    async def test_an_interruption_by_an_update_is_not_an_error(self, service: Service) -> None:
        async def interrupted() -> None:
            service.engine.on_score = None
            raise Unavailable("interrupted", reason="INTERRUPTED")

        service.engine.on_score = interrupted
        values, _ = await service.client.score_tokens([1, 20], timeout=5)
        assert values[1] == -2

    async def test_values_of_a_version_that_is_held_wait_for_its_release(self, service: Service) -> None:
        await service.control.open(epoch=1, timeout=2, **OPEN)
        await service.control.begin(epoch=1, policy_version=1, pause_mode=control_pb.PAUSE_MODE_WAIT, timeout=2)
        await service.control.receive(epoch=1, policy_version=1, timeout=2)
        await service.control.commit(epoch=1, policy_version=1, hold=True, timeout=2)
        call = asyncio.create_task(service.client.score_tokens([1, 2], timeout=5))
        await until(lambda: "score" in service.engine.log)
        await asyncio.sleep(0.05)
        assert not call.done()
        await service.control.release(epoch=1, policy_version=1, timeout=2)
        assert (await call)[1] == 1


class TestParseCompletion:
    async def test_texts_arrive_unchanged(self, service: Service) -> None:
        parsed = await service.client.parse_completion("text", tools_json=TOOLS, timeout=5)
        assert (parsed.content, parsed.reasoning) == (CONTENT, "a\nb")
        assert [(call.name, call.arguments_json) for call in parsed.tool_calls] == [("f", '{"x":\n1}')]

    async def test_info_has_the_names_of_the_parsers(self, service: Service, text: FakeText) -> None:
        text.reasoning_parser = "qwen3"
        info = await service.client.get_info(timeout=5)
        assert (info.tool_parser, info.reasoning_parser) == ("hermes", "qwen3")

    async def test_tools_need_a_parser(self, service: Service, text: FakeText) -> None:
        text.tool_parser = ""
        with pytest.raises(WrongState, match=r"rollout\.tool_parser"):
            await service.client.parse_completion("text", tools_json=TOOLS, timeout=5)

    async def test_a_text_above_a_mebibyte_is_refused(self, service: Service) -> None:
        with pytest.raises(InvalidInput, match="1048578 bytes"):
            await service.client.parse_completion("\u00e9" * ((1 << 19) + 1), timeout=5)

    async def test_a_parser_that_is_slow_ends_at_the_callers_deadline(self, service: Service) -> None:
        with pytest.raises(DeadlinePassed):
            await service.client.parse_completion("slow", timeout=0.3)

    async def test_without_parsers_all_text_is_content(self, serve: Serve) -> None:
        async with rollout_service(serve) as service:
            assert (
                await service.client.parse_completion("<think>a</think>b", timeout=5)
            ).content == "<think>a</think>b"


def constrained(**fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=4, grammar=pb.Grammar(regex="[ab]+"))
    return request(sampling_params=params, **fields)


class TestGrammar:
    async def test_the_engine_gets_the_grammar_and_the_caller_the_mask(self, service: Service, text: FakeText) -> None:
        service.engine.masks = [True, False, True, False]
        call = asyncio.create_task(service.client.complete(constrained(grammar_prefix_count=2), timeout=5))
        await service.running(1)
        service.engine.tick(4)
        (sample,) = await call
        assert sample.constrained.tolist() == [True, False, True, False]
        constraint = GrammarConstraint(kind="regex", text="[ab]+", prefix_count=2)
        assert service.engine.samples[0].request.grammar == constraint
        assert text.checked == [(constraint, [STOP_TOKEN], [2, 3])]

    async def test_a_sample_that_nothing_constrains_has_no_mask(self, service: Service) -> None:
        service.engine.masks = [False] * 4
        call = asyncio.create_task(service.client.complete(constrained(), timeout=5))
        await service.running(1)
        service.engine.tick(4)
        assert len((await call)[0].constrained) == 0

    async def test_a_grammar_that_does_not_compile_never_reaches_the_engine(
        self, service: Service, text: FakeText
    ) -> None:
        text.error = "unbalanced ["
        with pytest.raises(InvalidInput, match="unbalanced"):
            await service.client.complete(constrained(), timeout=5)
        assert not service.engine.samples

    @pytest.mark.parametrize(
        ("grammar", "prefix", "rule"),
        [
            (pb.Grammar(), 0, "empty"),
            (pb.Grammar(regex=""), 0, "0 bytes"),
            (pb.Grammar(regex="a" * (1 << 16) + "b"), 0, "65537 bytes"),
            (pb.Grammar(regex="a\0"), 0, "NUL"),
            (pb.Grammar(regex="a"), -1, "prefix_count is -1"),
            (pb.Grammar(regex="a"), 3, "prefix_count is 3"),
            (None, 1, "there is no grammar"),
        ],
    )
    async def test_a_grammar_out_of_range_is_refused(
        self, service: Service, grammar: pb.Grammar | None, prefix: int, rule: str
    ) -> None:
        message = request(sampling_params=pb.SamplingParams(grammar=grammar), grammar_prefix_count=prefix)
        with pytest.raises(InvalidInput, match=rule):
            await service.client.complete(message, timeout=5)

    async def test_an_engine_without_grammars_says_why(self, service: Service, serve: Serve) -> None:
        service.engine.description = replace(service.engine.description, grammar_obstacle="a patch is disabled")
        with pytest.raises(WrongState, match="a patch is disabled"):
            await service.client.complete(constrained(), timeout=5)
        async with rollout_service(serve) as bare:
            with pytest.raises(WrongState, match="no grammar compiler"):
                await bare.client.complete(constrained(), timeout=5)
