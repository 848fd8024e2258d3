"""`fourfold conformance rollout` names what is wrong with services that break the contract, each in one way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from fourfold.errors import FourfoldError, InvalidInput
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold_tools.conformance.checks import Finding
from fourfold_tools.conformance.rollout import CHECKS, RolloutProbe
from tests.conformance.toy_rollout import SAMPLES, Context, ToyRollout, serving

Chunks = Sequence[pb.SampleChunk]


def variant(**changes: Any) -> type[ToyRollout]:
    return type("Variant", (ToyRollout,), changes)


def informed(**fields: Any) -> type[ToyRollout]:
    """Return a service whose GetInfo has other fields."""

    def info(self: ToyRollout) -> pb.GetInfoResponse:
        made = ToyRollout.info(self)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    return variant(info=info)


def chunked(**fields: Any) -> type[ToyRollout]:
    """Return a service whose chunks have other fields."""

    def changed(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
        for name, value in fields.items():
            setattr(chunk, name, value)
        return [chunk]

    return variant(changed=changed)


def accepts(*names: str) -> type[ToyRollout]:
    """Return a service that does not check some fields."""

    def fault(self: ToyRollout, request: pb.GenerateRequest) -> FourfoldError | None:
        copy = pb.GenerateRequest()
        copy.CopyFrom(request)
        for name in names:
            message: Any = copy if name in request.DESCRIPTOR.fields_by_name else copy.sampling_params
            message.ClearField(name)
        return ToyRollout.fault(self, copy)

    return variant(fault=fault)


def shifted(self: ToyRollout, last: int, token: int, params: pb.SamplingParams, logprob: float) -> float:
    return ToyRollout.reported(self, last, token, params, logprob) - 0.3


def raw(self: ToyRollout, last: int, token: int, params: pb.SamplingParams, logprob: float) -> float:
    """Return the log-probability before temperature, top_k and top_p."""
    return float(self.distribution(last, pb.SamplingParams())[token])


def without_stop_token(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
    if chunk.finish_reason == pb.FINISH_REASON_STOP:
        chunk.token_ids, chunk.logprobs = chunk.token_ids[:-4], chunk.logprobs[:-4]
    return [chunk]


def length_for_stop(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
    chunk.finish_reason = pb.FINISH_REASON_LENGTH if chunk.finish_reason else pb.FINISH_REASON_UNSPECIFIED
    return [chunk]


def without_end(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
    chunk.finish_reason = pb.FINISH_REASON_UNSPECIFIED
    return [chunk]


def one_index(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
    chunk.sample_index = 0
    return [chunk]


def split(self: ToyRollout, request: pb.GenerateRequest, chunk: pb.SampleChunk) -> Chunks:
    first = pb.SampleChunk(sample_index=chunk.sample_index, token_ids=chunk.token_ids[:4], logprobs=chunk.logprobs[:4])
    chunk.token_ids, chunk.logprobs = chunk.token_ids[4:], chunk.logprobs[4:]
    return [first, chunk] if first.token_ids else [chunk]


def ignores_max_tokens(self: ToyRollout, request: pb.GenerateRequest) -> int:
    return ToyRollout.most_tokens(self, request) + 1


def too_short(self: ToyRollout, request: pb.GenerateRequest) -> int:
    return max(1, ToyRollout.most_tokens(self, request) - 1)


def beyond_the_context(self: ToyRollout, request: pb.GenerateRequest) -> int:
    params = request.sampling_params
    return params.max_tokens if params.HasField("max_tokens") else 2


def random_draw(self: ToyRollout, logprobs: Any, rng: np.random.Generator, params: pb.SamplingParams) -> int:
    return int(rng.choice(len(logprobs), p=np.exp(logprobs)))


def without_stop(self: ToyRollout, request: pb.GenerateRequest, index: int) -> list[pb.SampleChunk]:
    request.sampling_params.ClearField("stop_token_ids")
    return ToyRollout.sample(self, request, index)


def zero_is_unset(self: ToyRollout, request: pb.GenerateRequest, index: int) -> int:
    if not request.sampling_params.seed:
        request.sampling_params.ClearField("seed")
    return ToyRollout.seed(self, request, index)


_drawn = itertools.count()


def without_top_k(self: ToyRollout, last: int, params: pb.SamplingParams) -> Any:
    params.ClearField("top_k")
    return ToyRollout.distribution(self, last, params)


class GoesOn(ToyRollout):
    """Computes samples to their end, after their caller has left."""

    def free(self, request: pb.GenerateRequest) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(self.finish(request)))

    async def finish(self, request: pb.GenerateRequest) -> None:
        await asyncio.sleep(30 if request.sampling_params.max_tokens > 16 else 0)
        ToyRollout.free(self, request)


class KeepsIds(ToyRollout):
    def free(self, request: pb.GenerateRequest) -> None:
        self.running -= request.sample_count or 1


class MixesCalls(ToyRollout):
    """Samples the prompt that came last."""

    prompt: Sequence[int] = ()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> Any:
        self.prompt = list(request.prompt_token_ids)
        await asyncio.sleep(0.005)
        del request.prompt_token_ids[:]
        request.prompt_token_ids.extend(self.prompt)
        async for response in ToyRollout.Generate(self, request, context):
            yield response


class SamplesFirst(ToyRollout):
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> Any:
        if request.sampling_params.temperature > 2:
            chunk = pb.SampleChunk(token_ids=pack_ints([1]), logprobs=pack_floats([-1.0]))
            yield pb.GenerateResponse(chunks=[chunk])
        async for response in ToyRollout.Generate(self, request, context):
            yield response


class RefusesUnknownFields(ToyRollout):
    def fault(self, request: pb.GenerateRequest) -> FourfoldError | None:
        known = pb.GenerateRequest()
        known.CopyFrom(request)
        known.DiscardUnknownFields()
        return ToyRollout.fault(self, request) if known.ByteSize() == request.ByteSize() else InvalidInput("unknown")


async def no_deadline_needed(self: ToyRollout, context: Context) -> None:
    return None


def loaded(**fields: Any) -> type[ToyRollout]:
    def load(self: ToyRollout) -> pb.WatchLoadResponse:
        report = ToyRollout.load(self)
        report.MergeFrom(pb.WatchLoadResponse(**fields))
        return report

    return variant(load=load)


class LoadFalls(ToyRollout):
    def load(self) -> pb.WatchLoadResponse:
        self.calls += 1
        return pb.WatchLoadResponse(sampled_token_count=max(0, 1000 - self.calls))


class ChangesItsModel(ToyRollout):
    def info(self) -> pb.GetInfoResponse:
        made = ToyRollout.info(self)
        made.model = f"toy-{self.calls}"
        return made


class VersionFalls(ToyRollout):
    def info(self) -> pb.GetInfoResponse:
        self.version = max(0, 5 - self.calls)
        return ToyRollout.info(self)


VARIANTS: dict[str, tuple[type[ToyRollout], str]] = {
    # GetInfo and health
    "no model": (informed(model=""), "info"),
    "short hash": (informed(tokenizer_sha256=b"h"), "info"),
    "no context": (informed(max_context_tokens=0), "info"),
    "another contract": (informed(contract_version="2.0"), "info"),
    "changing model": (ChangesItsModel, "info"),
    "a version that falls": (VersionFalls, "info"),
    "not healthy": (variant(serving=health_pb2.HealthCheckResponse.NOT_SERVING), "health"),
    "another tokenizer": (informed(tokenizer_sha256=b"i" * 32), "tokenizer"),
    # samples
    "log-probability above 0": (variant(reported=lambda *_: 0.5), "sample"),
    "log-probability that is NaN": (variant(reported=lambda *_: float("nan")), "sample"),
    "half a log-probability": (chunked(logprobs=b"\0\0"), "sample"),
    "token outside the vocabulary": (chunked(token_ids=pack_ints([40]), logprobs=pack_floats([-1.0])), "sample"),
    "no tokens": (chunked(token_ids=b"", logprobs=b""), "sample"),
    "aborts": (chunked(finish_reason=pb.FINISH_REASON_ABORTED), "sample"),
    "no finish reason": (variant(changed=without_end), "sample"),
    "a mask without a grammar": (chunked(constrained_mask=b"\1" * 8), "sample"),
    "one token too many": (variant(most_tokens=ignores_max_tokens), "max_tokens"),
    "LENGTH too early": (variant(most_tokens=too_short), "max_tokens"),
    "more than the context": (variant(most_tokens=beyond_the_context), "context"),
    "one index for all": (variant(changed=one_index), "several_samples"),
    "does not stream": (variant(is_whole=lambda self, request: True), "streaming"),
    "streams without being asked": (variant(changed=split), "streaming"),
    "versions of the future": (chunked(policy_version=9), "versions"),
    "a version that is not served": (accepts("min_policy_version"), "old_policy"),
    # seeds and parameters
    "greedy is random": (variant(draw=random_draw), "greedy"),
    "ignores seeds": (variant(seed=lambda self, request, index: next(_drawn)), "seeds"),
    "0 is no seed": (variant(seed=zero_is_unset), "seeds"),
    "one seed where none is set": (variant(seed=lambda self, request, i: request.sampling_params.seed + i), "seeds"),
    "one seed for all samples": (
        variant(seed=lambda self, request, index: request.sampling_params.seed),
        "seed_of_each_sample",
    ),
    "goes on after a stop token": (variant(sample=without_stop), "stop_tokens"),
    "drops the stop token": (variant(changed=without_stop_token), "stop_tokens"),
    "LENGTH for a stop token": (variant(changed=length_for_stop), "stop_tokens"),
    "log-probabilities before temperature": (variant(reported=raw), "distribution"),
    "ignores top_k": (variant(distribution=without_top_k), "distribution"),
    "log-probabilities of another model": (variant(reported=shifted), "logprobs"),
    "a first score that is 0": (variant(score=lambda self, tokens: [0.0] * len(tokens)), "score_tokens"),
    "mixes concurrent calls": (MixesCalls, "concurrent_calls"),
    # requests
    "accepts a temperature of 0.005": (accepts("temperature"), "malformed_requests"),
    "accepts a seed of 2^53": (accepts("seed"), "malformed_requests"),
    "accepts any flush_interval": (accepts("flush_interval"), "malformed_requests"),
    "samples before it refuses": (SamplesFirst, "malformed_requests"),
    "errors without details": (variant(details=False), "malformed_requests"),
    "refuses unknown fields": (RefusesUnknownFields, "unknown_fields"),
    "needs no deadline": (variant(check_deadline=no_deadline_needed), "no_deadlines"),
    "accepts a live id": (variant(no_room=lambda self, request: None), "request_id"),
    "keeps ids": (KeepsIds, "request_id"),
    "goes on after cancellation": (GoesOn, "cancellation"),
    "goes on after the deadline": (GoesOn, "deadline"),
    "no limit": (variant(no_room=lambda self, request: None), "limit"),
    "no retry delay": (variant(retry_after=None), "limit"),
    # the other calls
    "loses text": (variant(parsed=lambda self, text: pb.ParseCompletionResponse()), "parse_completion"),
    "accepts any period": (variant(is_period=lambda self, seconds: True), "load_period"),
    "a count that falls": (LoadFalls, "load"),
    "more free than there is": (loaded(free_kv_cache_token_count=5), "load"),
}


async def examine(service: ToyRollout, *only: str) -> list[Finding]:
    async with serving(service) as channel:
        probe = RolloutProbe(channel=channel, peer="service", seconds=10.0, tokenizer_sha256=b"h" * 32)
        return list(await CHECKS.run(probe, only={"info", *only} if only else ()))


def broken(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.status == "broken"}


@pytest.mark.parametrize("samples", [1, 2, SAMPLES])
async def test_a_correct_service_passes_with_any_limit(samples: int) -> None:
    findings = await examine(informed(max_concurrent_samples=samples)(), *([] if samples == SAMPLES else ["sample"]))
    assert broken(findings) == set(), findings
    skipped = {finding.name for finding in findings if finding.status != "ok"}
    assert skipped <= {"grammar"}, findings


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_variant_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_tools.conformance.rollout.probe.LIVE_SECONDS", 0.5)
    service, check = VARIANTS[name]
    findings = await examine(service(), check)
    assert check in broken(findings), [(f.name, f.status, f.text) for f in findings]
    assert all(finding.text for finding in findings if finding.status == "broken")


def test_every_variant_breaks_a_check_that_exists() -> None:
    assert {check for _, check in VARIANTS.values()} <= set(CHECKS.names)
