"""Checks of calls: refusals, ids, cancellation, deadlines, limits, parsing and load reports."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from fourfold.bounds import MAX_NUMBER
from fourfold.errors import FourfoldError, Overloaded, WrongState
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_tools.conformance.calls import check_no_deadline, collect, refuse, unary
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.rollout.probe import RolloutProbe

CALLS: Final = Checks[RolloutProbe]()
_SHORT_SECONDS: Final = 1.0
_GRACE_SECONDS: Final = 5.0
_MOST_FILLED: Final = 1024
_FILL_SECONDS: Final = 20.0
_ATTEMPTS: Final = 5
_REPORTS: Final = 3
_LARGE_TEXT: Final = 1 << 20


def _parameter(**fields: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.sampling_params.MergeFrom(pb.SamplingParams(**fields))


def _field(**fields: Any) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.MergeFrom(pb.GenerateRequest(**fields))


def _flush(seconds: int) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: request.flush_interval.FromSeconds(seconds)


def _id(text: str) -> Callable[[pb.GenerateRequest], None]:
    return lambda request: setattr(request, "request_id", text)


_MALFORMED: Final[Sequence[tuple[str, Callable[[pb.GenerateRequest], None]]]] = (
    *((f"request_id = {text[:20]!r}", _id(text)) for text in ("", "a b", "a/b", "\u00e9", "a" * 129)),
    ("an empty prompt", lambda request: request.ClearField("prompt_token_ids")),
    ("a prompt with the token -1", _field(prompt_token_ids=[-1])),
    *((f"temperature = {value}", _parameter(temperature=value)) for value in (-1.0, 0.005, 2.5, math.nan, math.inf)),
    *((f"top_p = {value}", _parameter(top_p=value)) for value in (0.0, -0.5, 1.5, math.nan)),
    *((f"top_k = {value}", _parameter(top_k=value)) for value in (0, -1)),
    *((f"max_tokens = {value}", _parameter(max_tokens=value)) for value in (0, -1)),
    *((f"seed = {value}", _parameter(seed=value)) for value in (-1, MAX_NUMBER)),
    ("65 stop_token_ids", _parameter(stop_token_ids=[1] * 65)),
    ("the stop token -1", _parameter(stop_token_ids=[-1])),
    *((f"sample_count = {value}", _field(sample_count=value)) for value in (0, -1, 257)),
    ("min_policy_version = -1", _field(min_policy_version=-1)),
    *((f"flush_interval = {value} s", _flush(value)) for value in (-1, 11)),
    ("grammar_prefix_count without a grammar", _field(grammar_prefix_count=1)),
)


@CALLS.add
async def check_malformed_requests(probe: RolloutProbe) -> None:
    """A malformed request is refused with INVALID_ARGUMENT before anything is sampled."""
    vocabulary, most = probe.info.vocabulary_size, probe.most_samples
    cases = [
        *_MALFORMED,
        (f"the token {vocabulary}", _field(prompt_token_ids=[vocabulary])),
        (f"the stop token {vocabulary}", _parameter(stop_token_ids=[vocabulary])),
    ]
    if most < 256:
        cases.append((f"sample_count = {most + 1}, of {most}", _field(sample_count=most + 1)))
    for what, change in cases:
        request = probe.request()
        change(request)
        await refuse(probe.refused(request), what, "INVALID_ARGUMENT")
    for size in (0, 1):
        tokens = pb.ScoreTokensRequest(token_ids=probe.prompt(size=1)[:size])
        await _refuse_score(probe, tokens, f"ScoreTokens of {size} tokens")
    tokens = pb.ScoreTokensRequest(token_ids=[*probe.prompt(), vocabulary])
    await _refuse_score(probe, tokens, f"ScoreTokens of the token {vocabulary}")


async def _refuse_score(probe: RolloutProbe, request: pb.ScoreTokensRequest, what: str) -> None:
    """Check a refusal of ScoreTokens, where the service has it; it may also say that it does not."""
    try:
        await refuse(probe.stub.ScoreTokens(request, timeout=probe.seconds), what, "INVALID_ARGUMENT")
    except Violation as error:
        if "FAILED_PRECONDITION" not in str(error) and "UNIMPLEMENTED" not in str(error):
            raise


@CALLS.add
async def check_long_prompt(probe: RolloutProbe) -> None:
    """A prompt that leaves no room in the context is refused with INVALID_ARGUMENT."""
    context = probe.info.max_context_tokens
    request = probe.request(prompt=probe.prompt(size=context))
    if probe.agent and request.ByteSize() > 1 << 20:
        raise Skipped(f"a prompt of {context} tokens is larger than a request on a public port")
    await refuse(probe.refused(request), f"a prompt of {context} tokens", "INVALID_ARGUMENT")


@CALLS.add
async def check_old_policy(probe: RolloutProbe) -> None:
    """A min_policy_version that is not served yet is refused with FAILED_PRECONDITION, reason POLICY_TOO_OLD."""
    request = probe.request(min_policy_version=(await probe.get_info()).policy_version + 1_000_000)
    await refuse(probe.refused(request), "a later policy", "FAILED_PRECONDITION", reason="POLICY_TOO_OLD")


@CALLS.add
async def check_no_deadlines(probe: RolloutProbe) -> None:
    """Calls without a deadline are refused with INVALID_ARGUMENT, reason NO_DEADLINE."""
    seconds = probe.seconds
    await check_no_deadline(collect(probe.stub.Generate(probe.request())), "Generate", seconds=seconds)
    await check_no_deadline(probe.stub.GetInfo(pb.GetInfoRequest()), "GetInfo", seconds=seconds)


@CALLS.add
async def check_request_id(probe: RolloutProbe) -> None:
    """The second of two live requests with one request_id is refused with ALREADY_EXISTS, and the first goes on."""
    if probe.info.max_concurrent_samples == 1:
        raise Skipped("the service takes one sample at a time")
    async with probe.live() as (request, call):
        again = probe.request(request_id=request.request_id, max_tokens=1)
        await refuse(probe.refused(again), "a live request_id", "ALREADY_EXISTS")
        async for response in call:
            if not response.chunks:
                raise Violation("the first call ended when its id was used again")
            break
        else:
            raise Violation(f"the first call ended with {(await call.code()).name} when its id was used again")
    if not await probe.becomes_free(request.request_id):
        raise Violation("a request_id was still refused seconds after its call had ended")


@CALLS.add
async def check_cancellation(probe: RolloutProbe) -> None:
    """Cancelling a call ends its samples in the engine."""
    if not await probe.idle():
        raise Skipped("other callers use the service")
    async with probe.live():
        pass
    if not await probe.idle():
        raise Violation(f"samples of a cancelled call still ran {_GRACE_SECONDS:g} s later")


@CALLS.add
async def check_deadline(probe: RolloutProbe) -> None:
    """A call ends at its deadline, and so do its samples in the engine."""
    if not await probe.idle():
        raise Skipped("other callers use the service")
    room = probe.info.max_context_tokens - len(probe.prompt())
    request = probe.request(max_tokens=room, count=min(4, probe.most_samples))
    loop = asyncio.get_running_loop()
    began, code = loop.time(), "OK"
    try:
        await collect(probe.stub.Generate(request, timeout=_SHORT_SECONDS))
    except grpc.aio.AioRpcError as error:
        code = error.code().name
    if code not in ("OK", "DEADLINE_EXCEEDED"):
        raise Violation(f"a call that met its deadline ended with {code}; it must be DEADLINE_EXCEEDED")
    if (took := loop.time() - began) > _SHORT_SECONDS + _GRACE_SECONDS:
        raise Violation(f"a call with a deadline of {_SHORT_SECONDS:g} s took {took:.1f} s")
    if not await probe.idle():
        raise Violation(f"samples of a call whose deadline had passed still ran {_GRACE_SECONDS:g} s later")


@CALLS.add
async def check_limit(probe: RolloutProbe) -> None:
    """More samples in flight than max_concurrent_samples are refused with RESOURCE_EXHAUSTED and a retry delay."""
    limit = probe.info.max_concurrent_samples
    if not 0 < limit <= _MOST_FILLED:
        raise Skipped(f"{limit} samples are too many for a check" if limit else "the service has no limit")
    if not await probe.idle():
        raise Skipped("other callers use the service")
    for _ in range(_ATTEMPTS):  # on a busy machine the samples may end before all of them run
        if await _refuses_more(probe, limit):
            break
        await probe.idle()
    else:
        raise Skipped(f"{limit} long samples never ran together")
    if not await probe.idle():
        raise Violation(f"samples of cancelled calls still ran {_GRACE_SECONDS:g} s later")


async def _refuses_more(probe: RolloutProbe, limit: int) -> bool:
    """Run `limit` samples, and check that one more is refused; return false if some ended before that was seen."""
    room = probe.info.max_context_tokens - len(probe.prompt())
    counts = [min(256, limit - begin) for begin in range(0, limit, 256)]
    calls = [
        asyncio.ensure_future(
            collect(probe.stub.Generate(probe.request(max_tokens=room, count=c), timeout=probe.seconds))
        )
        for c in counts
    ]
    try:
        if not await _running(probe, limit, calls):
            return False
        extra = probe.client.complete(probe.request(max_tokens=1))
        try:
            await extra
        except Overloaded as error:
            if error.retry_after is None or error.retry_after <= 0:
                raise Violation(
                    "RESOURCE_EXHAUSTED has no retry delay; it needs a google.rpc.RetryInfo above 0"
                ) from None
        else:
            if any(call.done() for call in calls):
                return False
            raise Violation(f"with {limit} samples in flight one more was sampled; GetInfo has a limit of {limit}")
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return True


async def _running(probe: RolloutProbe, count: int, calls: Sequence[asyncio.Future[Any]]) -> bool:
    """Wait until `count` samples run; return false if one of their calls ends before."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _FILL_SECONDS
    while loop.time() < end and not any(call.done() for call in calls):
        if (await probe.load()).running_sample_count >= count:
            return True
        await asyncio.sleep(0.02)
    return False


@CALLS.add
async def check_parse_completion(probe: RolloutProbe) -> None:
    """ParseCompletion returns text without tool calls as it is, and refuses tools that it cannot read."""
    request = pb.ParseCompletionRequest(text="just a text")
    try:
        parsed = await unary(probe.stub.ParseCompletion, request, peer=probe.peer, seconds=probe.seconds)
    except WrongState as error:
        raise Skipped(f"the service parses nothing: {error.message[:200]}") from None
    except FourfoldError as error:
        if error.reason == "UNIMPLEMENTED":
            raise Skipped("the service has no ParseCompletion") from None
        raise
    if parsed.tool_calls or "just a text" not in (parsed.content, parsed.reasoning):
        raise Violation(f"the text 'just a text' was parsed to {str(parsed)[:200]!r}")
    call = probe.stub.ParseCompletion
    tools = pb.ParseCompletionRequest(text="x", tools_json='[{"type": "function"')
    if probe.info.tool_parser:
        await refuse(call(tools, timeout=probe.seconds), "malformed tools", "INVALID_ARGUMENT")
    else:
        work = call(tools, timeout=probe.seconds)
        await refuse(work, "tools without a parser", "FAILED_PRECONDITION", reason="NO_TOOL_PARSER")
    if not probe.agent:  # a public port refuses a message of this size itself
        large = pb.ParseCompletionRequest(text="x" * (_LARGE_TEXT + 1))
        await refuse(call(large, timeout=probe.seconds), "a text above 1 MiB", "INVALID_ARGUMENT")


@CALLS.add
async def check_load(probe: RolloutProbe) -> None:
    """WatchLoad sends the present load at once, then one report every period; its count of tokens never falls."""
    request = pb.WatchLoadRequest()
    request.period.FromMilliseconds(100)
    call = probe.stub.WatchLoad(request)  # without a deadline, as watches need none
    first = before = pb.WatchLoadResponse()
    count = sampled = 0
    try:
        async with asyncio.timeout(probe.seconds):
            async for report in call:
                _check_report(before, report)
                count, before = count + 1, report
                if count == 1:
                    first, sampled = report, len(await probe.tokens())
                if count > _REPORTS and report.sampled_token_count >= first.sampled_token_count + sampled:
                    return
        raise Violation(f"WatchLoad ended by itself after {count} reports")
    except TimeoutError:
        text = f"{count} reports came" if count <= _REPORTS else f"no report counted the {sampled} tokens of a sample"
        raise Violation(f"WatchLoad with a period of 0.1 s: {text} in {probe.seconds:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise Violation(f"WatchLoad without a deadline ended with {error.code().name}; watches need none") from None
    finally:
        call.cancel()


def _check_report(before: pb.WatchLoadResponse, report: pb.WatchLoadResponse) -> None:
    """Check a report of the load, and that it follows the one before."""
    for name in ("sampled_token_count", "policy_version"):
        old, new = getattr(before, name), getattr(report, name)
        if new < old:
            raise Violation(f"{name} of WatchLoad fell from {old} to {new}; it never does")
    if report.running_sample_count < 0:
        raise Violation(f"running_sample_count is {report.running_sample_count}; it must be at least 0")
    if not 0 <= report.token_rate < math.inf:
        raise Violation(f"token_rate is {report.token_rate}; it must be finite and at least 0")
    free, total = report.free_kv_cache_token_count, report.kv_cache_token_count
    if not 0 <= free <= total:
        raise Violation(f"free_kv_cache_token_count is {free}, of {total}")


@CALLS.add
async def check_load_period(probe: RolloutProbe) -> None:
    """A period outside of 10 ms to 60 s is refused with INVALID_ARGUMENT."""
    for milliseconds in (1, 61_000, -1000):
        request = pb.WatchLoadRequest()
        request.period.FromMilliseconds(milliseconds)
        call = probe.stub.WatchLoad(request, timeout=probe.seconds)
        try:
            await refuse(_one(call), f"a period of {milliseconds} ms", "INVALID_ARGUMENT")
        finally:
            call.cancel()


async def _one(call: Any) -> None:
    async for _ in call:
        return


@CALLS.add
async def check_still_serving(probe: RolloutProbe) -> None:
    """After all checks the service samples as before."""
    await probe.sample(probe.request())
