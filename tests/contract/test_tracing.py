"""Traces of a whole run with toy engines, of the engine's servicer, and of calls of foreign clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from fourfold.reward.client import AsyncRewardClient, RewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.server import Server
from fourfold.tracing import export
from fourfold.tracing.propagation import format_traceparent, outgoing
from fourfold.tracing.spans import Span, SpanContext, Spans
from tests.conftest import Serve
from tests.fakes.rollout import request, rollout_service
from tests.fakes.servicers import Reward
from tests.fakes.stage import Stage, until, watch_for
from tests.fakes.toy_scorers import FakeReference
from tests.fakes.trainer_engine import group_of
from tests.fakes.trainer_service import Trainer
from tests.support.otlp import FoundSpan, check_trace, hanging_receiver, read_files

SERVER, CLIENT = 2, 3
PHASES = ["wait", "generate", "score", "queue", "train"]


def by_trace(found: list[FoundSpan]) -> list[list[FoundSpan]]:
    traces = defaultdict[bytes, list[FoundSpan]](list)
    for span in found:
        traces[span.trace_id].append(span)
    return list(traces.values())


async def test_each_sample_of_a_run_has_a_whole_trace(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, tracing={"file": True, "sample_ratio": 1.0}, algorithm={"kl": {"coef": 0.1}})
    stage.others = [FakeReference("reference-0", stage.config)]
    await stage.complete()
    traces = by_trace(read_files(stage.folder / "traces"))
    roots = [check_trace(trace) for trace in traces]
    names = {"sample": 24, "evaluation": 32, "fourfold.trainer.v1.TrainerService/TrainStep": 2}
    assert Counter(root.name for root in roots) == names
    samples = {row["sample_id"]: row for row in stage.lines("samples.jsonl")}
    for root, trace in zip(roots, traces, strict=True):
        phases = sorted((span for span in trace if span.parent == root.span_id), key=lambda span: span.start)
        if root.name == "evaluation":
            assert [span.name for span in phases] == ["generate", "score"]
            assert Counter(span.name.rpartition("/")[2] for span in trace if "/" in span.name) == {
                "Generate": 2,
                "Score": 2,
            }
        if root.name != "sample":
            continue
        assert [span.name for span in phases] == PHASES
        calls = Counter((span.name.rpartition("/")[2], span.kind) for span in trace if "/" in span.name)
        assert calls == {
            (name, kind): 1 for name in ("Generate", "Score", "ComputeLogprobs", "TrainStep") for kind in (2, 3)
        }
        row = samples.pop(root.attributes["fourfold.sample_id"])
        (scored,) = (span for span in trace if span.name.endswith("/Score") and span.kind == CLIENT)
        assert scored.attributes["gen_ai.evaluation.score.value"] == pytest.approx(row["score"])
        (trained,) = (span for span in trace if span.name.endswith("/TrainStep") and span.kind == CLIENT)
        assert trained.attributes["fourfold.step"] == row["step"] and "fourfold.policy_version" in trained.attributes
        assert phases[-1].links[0] in {root.span_id for root in roots if root.name != "sample"}
    assert not samples


async def test_a_collector_that_hangs_is_a_condition_of_the_run_and_costs_no_time(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_COLLECTOR_SECONDS", 0.5)
    with hanging_receiver() as address:
        stage = make_stage(tracing={"endpoint": f"http://{address}", "sample_ratio": 1.0})
        seen = asyncio.Event()

        async def wait(step: int) -> None:
            if step == 3:
                await seen.wait()

        stage.trainer.on_train = wait
        await stage.start()
        status = await watch_for(stage, lambda s: any(c.subject == "tracing" for c in s.conditions))
        (condition,) = (c for c in status.conditions if c.subject == "tracing")
        assert address in condition.text and "tracing.endpoint" in condition.text
        seen.set()
        await until(lambda: (stage.folder / "report.json").exists(), 30)
        began = time.monotonic()
        assert await stage.finish() == 0
        assert time.monotonic() - began < export.FLUSH_SECONDS + 3


async def test_a_sample_ends_in_the_engine_before_the_others_of_its_call(serve: Serve, ended: list[Span]) -> None:
    async with rollout_service(serve) as service:
        with Spans({index: Span("caller", None) for index in (0, 2)}) as callers:
            call = asyncio.create_task(_collect(service, request(sample_count=3)))
            await service.running(3)
            service.engine.tick()
            service.engine.stop(service.engine.running[2])
            await until(lambda: len(ended) > 2)
            assert list(callers.running()) == [0, 2]
            while not call.done():
                service.engine.tick()
                await asyncio.sleep(0.01)
            await call
    names = [(span.name.rpartition("/")[2], span.kind) for span in ended if span.name != "caller"]
    assert Counter(names) == {("queue", "internal"): 2, ("generate", "internal"): 2, ("Generate", "server"): 2}
    first, last = (span for span in ended if span.kind == "server")
    assert (first.attributes["gen_ai.usage.output_tokens"], last.attributes["gen_ai.usage.output_tokens"]) == (1, 4)
    assert last.attributes["gen_ai.request.model"] == "tiny" and last.attributes["gen_ai.usage.input_tokens"] == 3
    assert last.attributes["gen_ai.response.finish_reasons"] == ("length",)


async def _collect(service: Any, message: rollout.GenerateRequest) -> list[Any]:
    return [chunk async for chunk in service.client.generate(message, timeout=10)]


async def test_a_step_has_its_work_in_the_trainer(trainer: Trainer, ended: list[Span]) -> None:
    with Spans({index: Span("caller", None) for index in range(3)}):
        await trainer.train(1, group_of([0, 1]))
    names = Counter((span.name.rpartition("/")[2], span.kind) for span in ended)
    assert names == {("caller", "internal"): 3, ("TrainStep", "server"): 3, ("optimizer_step", "internal"): 3}
    (work,) = {tuple(span.attributes.items()) for span in ended if span.name == "optimizer_step"}
    assert dict(work) == {"fourfold.step": 1, "fourfold.policy_version": 1}


async def test_a_service_joins_the_trace_of_a_foreign_client(serve: Serve, ended: list[Span]) -> None:
    seen: list[Any] = []

    class Watching(Reward):
        async def GetInfo(self, request: reward.GetInfoRequest, context: Any) -> reward.GetInfoResponse:
            seen.append(outgoing())  # what the calls of the servicer would carry
            return reward.GetInfoResponse(name="x")

    channel = await serve(Watching().servicer())
    parent = SpanContext(f"{0xABC:032x}", f"{0xDEF:016x}")
    stub = RewardServiceStub(channel)
    await stub.GetInfo(reward.GetInfoRequest(), timeout=5, metadata=(("traceparent", format_traceparent(parent)),))
    (span,) = ended
    assert (span.parent, span.kind, span.error) == (parent, "server", None)
    method = "fourfold.reward.v1.RewardService/GetInfo"
    assert span.attributes == {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": "OK"}
    assert seen == [(("traceparent", format_traceparent(span.context)),)]
    await stub.GetInfo(reward.GetInfoRequest(), timeout=5)
    assert len(ended) == 1 and seen[1] is None


async def test_the_trace_of_an_agent_goes_on_in_a_service(ended: list[Span]) -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(*Reward().servicer())
    target = await server.start()
    tracer = TracerProvider().get_tracer("agent")

    def turn() -> int:
        with RewardClient(target) as client, tracer.start_as_current_span("turn") as span:
            client.get_info()
        return span.get_span_context().span_id

    blocking = await asyncio.to_thread(turn)
    async with AsyncRewardClient(target) as client:
        with tracer.start_as_current_span("turn") as span:
            await client.get_info()
        await client.get_info()
    await server.stop(0)
    assert [int(s.parent.span_id, 16) for s in ended if s.parent] == [blocking, span.get_span_context().span_id]


async def test_a_call_that_fails_has_its_status(serve: Serve, ended: list[Span]) -> None:
    async with rollout_service(serve) as service:
        with pytest.raises(Exception, match="prompt"), Spans({0: Span("caller", None)}):
            await _collect(service, request(prompt_token_ids=[]))
    server, caller = ended
    assert (server.error, server.attributes["rpc.response.status_code"]) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert caller.error is not None
