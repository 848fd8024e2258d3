"""Checks of GetInfo, of text, and of turns outside of sessions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from fourfold.bounds import MAX_NUMBER
from fourfold.contract import contract_problem
from fourfold.errors import FourfoldError, Internal, Unavailable, WrongState
from fourfold.rpc.codec import read_floats
from fourfold_tools.conformance.calls import (
    check_health_of,
    check_model,
    check_no_deadline,
    check_retry_delay,
    check_tokenizer_is,
    collect,
    refuse,
    with_unknown_field,
)
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.gateway.probe import QUESTION, SERVICE, GatewayProbe, user

TURNS: Final = Checks[GatewayProbe]()
_TEXTS: Final = (QUESTION, "", " two  spaces ", "line\nend", "\u00e9\U0001f600", "1,000")
_MOST_FULL_CONTEXT: Final = 200_000
_FAST_CALLS: Final = 200.0


@TURNS.add
async def check_info(probe: GatewayProbe) -> None:
    """GetInfo has model, tokenizer, limits, and a contract version of the same MAJOR."""
    info = await probe.get_info()
    check_model(info)
    if not info.contract_version:
        raise Violation("contract_version is empty; a gateway always has one")
    if problem := contract_problem(info.contract_version):
        raise Violation(problem)
    if not 0 <= info.policy_version <= MAX_NUMBER:
        raise Violation(f"policy_version is {info.policy_version}; it must be in [0, 2^53]")
    if info.http_url.endswith("/"):
        raise Violation(f"http_url is {info.http_url[:100]!r}; it has no slash at its end")
    if info.training and not info.run_name:
        raise Violation("run_name is empty, and training is true")
    again = await probe.get_info()
    again.policy_version, again.training, again.run_name = info.policy_version, info.training, info.run_name
    if again != info:
        raise Violation("a second GetInfo had another answer; model and limits must stay the same")
    probe.info = info


@TURNS.add
async def check_health(probe: GatewayProbe) -> None:
    """The health service answers SERVING for "" and for the full name of the service."""
    await check_health_of(probe.channel, SERVICE, seconds=probe.seconds)


@TURNS.add
async def check_tokenizer(probe: GatewayProbe) -> None:
    """The hash of the tokenizer is that of the run."""
    if not probe.tokenizer_sha256:
        raise Skipped("no --model was given")
    check_tokenizer_is(probe.tokenizer_sha256, probe.info.tokenizer_sha256)


@TURNS.add
async def check_text(probe: GatewayProbe) -> None:
    """Tokenize and Detokenize are inverse, and an id outside the vocabulary is INVALID_ARGUMENT."""
    for text in _TEXTS:
        ids = await probe.encode(text)
        if not text and ids:
            raise Violation(f"an empty text has the tokens {ids[:5]}; it has none")
        if not all(0 <= i < probe.info.vocabulary_size for i in ids):
            raise Violation(f"the text {text!r} has a token outside the vocabulary")
        if ids != await probe.encode(text):
            raise Violation(f"the text {text!r} twice has different tokens")
    response = await probe.call(pb.DetokenizeRequest(token_ids=await probe.encode()))
    if response.text.strip() != QUESTION:
        raise Violation(f"the tokens of {QUESTION!r} have the text {response.text[:80]!r}")
    for bad in (-1, probe.info.vocabulary_size):
        work = probe.stub.Detokenize(pb.DetokenizeRequest(token_ids=[bad]), timeout=probe.seconds)
        await refuse(work, f"Detokenize of the id {bad}", "INVALID_ARGUMENT")


@TURNS.add
async def check_chat_template(probe: GatewayProbe) -> None:
    """ApplyChatTemplate has text and ids that belong together; no messages are INVALID_ARGUMENT."""
    rendered = await probe.template([user()])
    if QUESTION not in rendered.text:
        raise Violation(f"the rendered text {rendered.text[:100]!r} lacks the message")
    if list(rendered.token_ids) != await probe.encode(rendered.text):
        raise Violation("token_ids are not those of the rendered text")
    work = probe.stub.ApplyChatTemplate(pb.ApplyChatTemplateRequest(), timeout=probe.seconds)
    await refuse(work, "a conversation without messages", "INVALID_ARGUMENT")


@TURNS.add
async def check_turn(probe: GatewayProbe) -> None:
    """A turn of messages has tokens with log-probabilities, a finish reason, and the message of the assistant."""
    rendered = await probe.template([user()])
    for flush in (None, 0.0):
        sample = await probe.one(probe.request(messages=[user()], flush=flush))
        if sample.prompt_token_count != len(rendered.token_ids):
            raise Violation(
                f"prompt_token_count is {sample.prompt_token_count}, and the messages have {len(rendered.token_ids)} "
                f"tokens"
            )


@TURNS.add
async def check_prompts(probe: GatewayProbe) -> None:
    """A prompt may be a text or token ids, too."""
    ids = await probe.encode()
    await probe.one(probe.request(ids=ids))
    sample = await probe.one(probe.request(text=QUESTION))
    if not len(ids) <= sample.prompt_token_count <= len(ids) + 4:  # special tokens may be added
        raise Violation(f"prompt_token_count is {sample.prompt_token_count}, and the text has {len(ids)} tokens")


@TURNS.add
async def check_several_samples(probe: GatewayProbe) -> None:
    """A turn with several samples ends each of them, under its own sample_index."""
    await probe.turn(probe.request(count=3))
    await probe.turn(probe.request(count=3, flush=0.0))


@TURNS.add
async def check_stop(probe: GatewayProbe) -> None:
    """A token of stop_token_ids ends a turn with the finish reason STOP."""
    first = await probe.one(probe.request(temperature=0.0))
    stop = first.ids[0]
    sample = await probe.one(probe.request(temperature=0.0, stop_token_ids=[stop]))
    if stop in sample.ids[:-1]:
        raise Violation("a turn goes on after a token of stop_token_ids")
    if sample.ids[-1] == stop and sample.finish != pb.FINISH_REASON_STOP:
        raise Violation(
            f"a turn ended with a token of stop_token_ids and finish_reason {sample.finish}; it must be STOP"
        )


def _parameter(**fields: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.sampling_params.MergeFrom(pb.SamplingParams(**fields))


def _field(**fields: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.MergeFrom(pb.GenerateRequest(**fields))


_MALFORMED: Final[Sequence[tuple[str, Callable[[pb.GenerateRequest], None]]]] = (
    ("a turn without a prompt", lambda request: request.ClearField("prompt")),
    ("a prompt without tokens", lambda request: request.token_ids.SetInParent()),
    ("a conversation without messages", lambda request: request.chat.SetInParent()),
    ("a prompt with the token -1", lambda request: request.token_ids.ids.append(-1)),
    *((f"temperature = {value}", _parameter(temperature=value)) for value in (-1.0, 2.5, math.nan)),
    *((f"top_p = {value}", _parameter(top_p=value)) for value in (0.0, 1.5)),
    ("top_k = 0", _parameter(top_k=0)),
    *((f"max_tokens = {value}", _parameter(max_tokens=value)) for value in (0, -1)),
    *((f"seed = {value}", _parameter(seed=value)) for value in (-1, MAX_NUMBER)),
    ("17 texts in stop", _parameter(stop=["x"] * 17)),
    ("a stop text of 257 characters", _parameter(stop=["x" * 257])),
    ("an empty stop text", _parameter(stop=[""])),
    ("65 stop_token_ids", _parameter(stop_token_ids=[1] * 65)),
    *((f"sample_count = {value}", _field(sample_count=value)) for value in (0, 257)),
    ("min_policy_version = -1", _field(min_policy_version=-1)),
    ("flush_interval = 11 s", lambda request: request.flush_interval.FromSeconds(11)),
)


@TURNS.add
async def check_malformed_turns(probe: GatewayProbe) -> None:
    """A malformed turn is refused with INVALID_ARGUMENT before anything is sampled."""
    for what, change in _MALFORMED:
        request = probe.request()
        change(request)
        await refuse(probe.drop(request), what, "INVALID_ARGUMENT")


@TURNS.add
async def check_context_length(probe: GatewayProbe) -> None:
    """A prompt that leaves no room in the context is INVALID_ARGUMENT, reason CONTEXT_LENGTH."""
    if (context := probe.info.max_context_tokens) > _MOST_FULL_CONTEXT:
        raise Skipped(f"a prompt of {context} tokens is larger than a request")
    ids = (await probe.encode())[:1] * context
    await refuse(
        probe.drop(probe.request(ids=ids)), f"a prompt of {context} tokens", "INVALID_ARGUMENT", reason="CONTEXT_LENGTH"
    )


@TURNS.add
async def check_no_deadlines(probe: GatewayProbe) -> None:
    """Calls without a deadline are refused with INVALID_ARGUMENT, reason NO_DEADLINE."""
    seconds = probe.seconds
    await check_no_deadline(collect(probe.stub.Generate(probe.request())), "Generate", seconds=seconds)
    await check_no_deadline(probe.stub.GetInfo(pb.GetInfoRequest()), "GetInfo", seconds=seconds)


@TURNS.add
async def check_unknown_fields(probe: GatewayProbe) -> None:
    """Unknown fields of a request are ignored."""
    await probe.turn(with_unknown_field(probe.request()))
    await probe.call(with_unknown_field(pb.GetQuotaRequest()))


@TURNS.add
async def check_score_tokens(probe: GatewayProbe) -> None:
    """ScoreTokens has a log-probability for each token, and NaN for the first; malformed ids are INVALID_ARGUMENT."""
    ids = await probe.encode()
    try:
        response = await probe.call(pb.ScoreTokensRequest(token_ids=ids))
    except (WrongState, Unavailable) as error:
        raise Skipped(f"the engines score no tokens: {error.message[:200]}") from None
    except Internal as error:
        if error.reason not in ("UNIMPLEMENTED", "ENGINE_FAILED"):
            raise
        raise Skipped(f"the engines score no tokens: {error.message[:200]}") from None
    values = read_floats(response.logprobs)
    if len(values) != len(ids):
        raise Violation(f"{len(ids)} tokens have {len(values)} log-probabilities")
    if not math.isnan(values[0]) or not all(-math.inf < value <= 1e-3 for value in values[1:].tolist()):
        raise Violation("log-probabilities must be NaN for the first token, and finite and at most 0 for the others")
    for what, bad in (("one token", ids[:1]), ("an unknown token", [*ids, probe.info.vocabulary_size])):
        work = probe.stub.ScoreTokens(pb.ScoreTokensRequest(token_ids=bad), timeout=probe.seconds)
        await refuse(work, f"ScoreTokens of {what}", "INVALID_ARGUMENT")


@TURNS.add
async def check_concurrent_turns(probe: GatewayProbe) -> None:
    """Concurrent turns get their own samples."""
    requests = [probe.request(ids=(await probe.encode()), max_tokens=2 + number) for number in range(4)]
    for request, result in zip(
        requests, await asyncio.gather(*map(probe.one, requests), return_exceptions=True), strict=True
    ):
        if isinstance(result, FourfoldError) and result.retry_after is not None:
            continue  # back-pressure
        if isinstance(result, BaseException):
            raise result
        most = request.sampling_params.max_tokens
        if result.finish == pb.FINISH_REASON_LENGTH and len(result.ids) != most:
            raise Violation(f"a turn of max_tokens = {most} ended with LENGTH after {len(result.ids)} tokens")


@TURNS.add
async def check_call_rate(probe: GatewayProbe) -> None:
    """More calls per second than the quota allows are RESOURCE_EXHAUSTED with a retry delay."""
    quota = await probe.call(pb.GetQuotaRequest())
    rate = quota.max_calls_per_second
    if not 0 < rate <= _FAST_CALLS:
        raise Skipped(
            "the caller has no limit of calls per second"
            if not rate
            else f"{rate:g} calls a second are too many for a check"
        )
    stub: Any = AgentServiceStub(probe.channel)  # without pauses
    calls = [stub.GetQuota(pb.GetQuotaRequest(), timeout=probe.seconds) for _ in range(int(4 * rate) + 4)]
    refusals = 0
    for call in calls:
        try:
            refusal = await refuse(call, "a call above the limit", "RESOURCE_EXHAUSTED")
        except Violation as error:
            if not str(error).startswith("a call above the limit was accepted"):
                raise
            continue
        refusals += 1
        check_retry_delay(refusal, "a call above the limit")
    await asyncio.sleep(1.0)
    if not refusals:
        raise Violation(f"{len(calls)} calls at once were all accepted; the quota has {rate:g} per second")
