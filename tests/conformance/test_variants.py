"""`fourfold conformance reward` names what is wrong with services that break the contract, each in one way."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest

from fourfold.errors import Overloaded
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import pack_floats
from fourfold_tools.conformance.checks import Finding
from fourfold_tools.conformance.reward import CHECKS, RewardProbe
from tests.conformance.toy_rollout import abort

Context = grpc.aio.ServicerContext[Any, Any]
LIMIT = 64
SHA256 = b"h" * 32


class Correct(pb_grpc.RewardServiceServicer):
    """Keeps the contract; subclasses break it."""

    info = pb.GetInfoResponse(name="correct@1", max_sample_count=LIMIT, contract_version="1.0")
    receive_bytes = 16 << 20

    def __init__(self) -> None:
        self.calls = 0
        self.began = time.monotonic()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return self.info

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        self.calls += 1
        if fault := self.refusal(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        return self.answer(request, [self.one(item) for item in request.items])

    def answer(self, request: pb.ScoreRequest, scores: list[pb.SampleScore]) -> pb.ScoreResponse:
        return pb.ScoreResponse(scores=scores)

    def refusal(self, request: pb.ScoreRequest) -> str:
        ids = [item.experience.sample_id for item in request.items]
        if not ids or len(set(ids)) < len(ids):
            return "no items, or repeated ids"
        if self.info.max_sample_count and len(ids) > self.info.max_sample_count:
            return "too many items"
        if request.ByteSize() > 8 << 20:
            return "too large"
        return "" if all(re.fullmatch("[A-Za-z0-9_-]{1,128}", name) for name in ids) else "a malformed id"

    def one(self, item: pb.ScoreItem) -> pb.SampleScore:
        made = pb.SampleScore(sample_id=item.experience.sample_id)
        if item.verifier:
            made.error.CopyFrom(pb.SampleError(code=5, reason="NOT_FOUND", message="no such verifier"))
        elif not self.readable(item.metadata_json):
            made.error.CopyFrom(pb.SampleError(code=3, reason="BAD_METADATA", message="not an object"))
        else:
            made.score = self.score(item)
        return made

    def readable(self, text: str) -> bool:
        try:
            return isinstance(json.loads(text or "{}"), dict)
        except (ValueError, RecursionError):
            return False

    def score(self, item: pb.ScoreItem) -> float:
        return 0.25 + len(item.completion_text) % 7


def variant(**changes: Any) -> type[Correct]:
    return type("Variant", (Correct,), changes)


def changed(change: Callable[[pb.SampleScore], Any]) -> type[Correct]:
    """Return a service that changes each of its scores."""

    def one(self: Correct, item: pb.ScoreItem) -> pb.SampleScore:
        made = Correct.one(self, item)
        if made.HasField("score"):
            change(made)
        return made

    return variant(one=one)


def informed(*, one: Any = Correct.one, **fields: Any) -> type[Correct]:
    info = pb.GetInfoResponse(name="correct@1", max_sample_count=LIMIT)
    info.MergeFrom(pb.GetInfoResponse(**fields))
    return variant(info=info, one=one)


def rewarded(rewards: Callable[[bytes], list[float]]) -> type[Correct]:
    """Return a service that reads tokens and sends rewards for them."""

    def one(self: Correct, item: pb.ScoreItem) -> pb.SampleScore:
        made = Correct.one(self, item)
        if made.HasField("score"):
            made.token_rewards = pack_floats(rewards(item.experience.action_mask))
        return made

    return informed(tokenizer_sha256=SHA256, one=one)


def turn_rewarded(item: pb.ScoreItem, turns: int) -> pb.SampleScore:
    return pb.SampleScore(sample_id=item.experience.sample_id, score=1.0, turn_rewards=[0.5] * turns)


def error_with_turn_rewards(self: Correct, item: pb.ScoreItem) -> pb.SampleScore:
    made = Correct.one(self, item)
    error()(made)
    made.turn_rewards.append(1.0)
    return made


def answered(change: Callable[[list[pb.SampleScore]], list[pb.SampleScore]]) -> type[Correct]:
    return variant(answer=lambda self, request, scores: pb.ScoreResponse(scores=change(scores)))


def error(*, code: int = 13, reason: str = "BROKEN", message: str = "") -> Callable[[pb.SampleScore], Any]:
    return lambda made: made.error.CopyFrom(pb.SampleError(code=code, reason=reason, message=message))


def zero_for_errors(self: Correct, item: pb.ScoreItem) -> pb.SampleScore:
    made = Correct.one(self, item)
    return pb.SampleScore(sample_id=made.sample_id, score=0) if made.error.reason == "BAD_METADATA" else made


def without_arrays(self: Correct, item: pb.ScoreItem) -> float:
    if item.experience.token_ids:
        raise ValueError("I cannot read this")
    return Correct.score(self, item)


def accepts(*faults: str) -> type[Correct]:
    def refusal(self: Correct, request: pb.ScoreRequest) -> str:
        found = Correct.refusal(self, request)
        return "" if found in faults else found

    return variant(refusal=refusal)


class Hangs(Correct):
    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await asyncio.sleep(1000)
        raise AssertionError


class Fails(Correct):
    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await context.abort(grpc.StatusCode.INTERNAL, "out of order")
        raise AssertionError


class ZerosAtTheDeadline(Correct):
    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        made = await super().Score(request, context)
        if (context.time_remaining() or 9.0) < 2:
            for score in made.scores:
                score.score = 0
        return made


class MixesCalls(Correct):
    running: pb.ScoreRequest

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        self.running = request
        await asyncio.sleep(0.002)
        scores = [self.one(item) for item in self.running.items]
        return await super().Score(request, context) if self.running is request else pb.ScoreResponse(scores=scores)


class ChangesItsName(Correct):
    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        self.calls += 1
        return pb.GetInfoResponse(name=f"changing@{self.calls}")


class FailsTheBatch(Correct):
    def refusal(self, request: pb.ScoreRequest) -> str:
        bad = any(not self.readable(item.metadata_json) for item in request.items)
        return "bad metadata" if bad else super().refusal(request)


VARIANTS: dict[str, tuple[type[Correct], str]] = {
    # the six that were missed once
    "zero in place of an error": (variant(one=zero_for_errors), "error_is_not_zero"),
    "crash on token arrays": (variant(score=without_arrays), "arrays"),
    "small message limit": (variant(receive_bytes=2 << 20), "size"),
    "score of the id": (
        variant(score=lambda self, item: float(len(item.experience.sample_id))),
        "ids_change_nothing",
    ),
    "drift with calls": (variant(score=lambda self, item: 1.0 + self.calls // 90), "drift"),
    "wrong tokenizer": (informed(tokenizer_sha256=b"x" * 32), "tokenizer"),
    # responses
    "NaN": (changed(lambda made: setattr(made, "score", math.nan)), "single"),
    "infinity": (changed(lambda made: setattr(made, "score", math.inf)), "single"),
    "too few scores": (answered(lambda scores: scores[1:]), "single"),
    "too many scores": (answered(lambda scores: [*scores, *scores[:1]]), "single"),
    "no scores": (answered(lambda scores: []), "single"),
    "another order": (answered(lambda scores: scores[::-1]), "single"),
    "foreign ids": (changed(lambda made: setattr(made, "sample_id", "other")), "single"),
    "no outcome": (changed(lambda made: made.ClearField("score")), "single"),
    "error with code 0": (changed(error(code=0)), "single"),
    "error with code 99": (changed(error(code=99)), "single"),
    "error without a reason": (changed(error(reason="")), "single"),
    "error with a sentence as reason": (changed(error(reason="it broke")), "single"),
    "error with control characters": (changed(error(message="\x1b[31mred")), "single"),
    "error with a long message": (changed(error(message="x" * 2000)), "single"),
    "errors only": (changed(error()), "single"),
    "abstention in small letters": (changed(lambda made: setattr(made, "abstain_reason", "no idea")), "single"),
    "65 components": (changed(lambda made: made.components.update({f"c{i}": 1.0 for i in range(65)})), "single"),
    "component name with a line end": (changed(lambda made: made.components.update({"a\nb": 1.0})), "single"),
    "negative cost": (changed(lambda made: setattr(made, "cost_usd", -0.01)), "single"),
    "cost that is NaN": (changed(lambda made: setattr(made, "cost_usd", math.nan)), "single"),
    "turn rewards that are infinite": (changed(lambda made: made.turn_rewards.append(math.inf)), "single"),
    "turn rewards without a score": (variant(one=error_with_turn_rewards), "single"),
    "token rewards that are NaN": (changed(lambda made: setattr(made, "token_rewards", b"\0\0\xc0\x7f")), "single"),
    "token rewards of half a number": (changed(lambda made: setattr(made, "token_rewards", b"\0\0")), "single"),
    "token rewards without arrays": (changed(lambda made: setattr(made, "token_rewards", bytes(4))), "single"),
    "too few token rewards": (rewarded(lambda mask: [1.0] * (len(mask) - 1)), "single"),
    "token rewards of the prompt": (rewarded(lambda mask: [1.0] * len(mask)), "single"),
    "token rewards that change": (rewarded(lambda mask: [random.random() * m for m in mask]), "repeated_request"),
    "turn rewards of other turns": (
        informed(tokenizer_sha256=SHA256, one=lambda self, item: turn_rewarded(item, 2)),
        "single",
    ),
    "component that is NaN": (changed(lambda made: made.components.update({"a": math.nan})), "single"),
    # GetInfo
    "name without a version": (informed(name="correct"), "info"),
    "negative limit": (informed(max_sample_count=-1), "info"),
    "short hash": (informed(tokenizer_sha256=b"x"), "info"),
    "another contract": (informed(contract_version="2.0"), "info"),
    "changing name": (ChangesItsName, "info"),
    # requests
    "scores an unknown verifier": (
        variant(one=lambda self, item: pb.SampleScore(sample_id=item.experience.sample_id, score=1)),
        "unknown_verifier",
    ),
    "accepts no items and repeated ids": (accepts("no items, or repeated ids"), "malformed_requests"),
    "accepts malformed ids": (accepts("a malformed id"), "malformed_requests"),
    "accepts more than its limit": (accepts("too many items"), "limit"),
    "accepts 9 MiB": (accepts("too large"), "size"),
    "fails the whole batch": (FailsTheBatch, "malformed_metadata"),
    # behaviour
    "hangs": (Hangs, "single"),
    "fails": (Fails, "single"),
    "random": (variant(score=lambda self, item: random.random()), "repeated_request"),
    "rank in the batch": (
        variant(
            answer=lambda self, request, scores: pb.ScoreResponse(
                scores=[pb.SampleScore(sample_id=s.sample_id, score=i) for i, s in enumerate(scores)]
            )
        ),
        "batch_changes_nothing",
    ),
    "zeros at the deadline": (ZerosAtTheDeadline, "deadline"),
    "mixes concurrent calls": (MixesCalls, "concurrent_calls"),
    "drift with time": (variant(score=lambda self, item: time.monotonic() - self.began), "drift"),
}


async def examine(
    service: Correct,
    *,
    seconds: float = 5.0,
    sha256: bytes = SHA256,
    unscorable: Sequence[pb.ScoreItem] = (),
    tolerance: float = 0.0,
) -> list[Finding]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", service.receive_bytes)])
    pb_grpc.add_RewardServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_send_message_length", 16 << 20), ("grpc.enable_retries", 0)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub: Any = pb_grpc.RewardServiceStub(channel)
            probe = RewardProbe(
                stub, "service", seconds, tokenizer_sha256=sha256, unscorable=unscorable, tolerance=tolerance
            )
            return list(await CHECKS.run(probe))
    finally:
        await server.stop(0)


def broken(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.status == "broken"}


async def test_a_service_of_tokens_gets_them_for_samples_that_it_cannot_judge() -> None:
    """Otherwise it refuses them because it has no tokens, and the rule could not fail."""

    def needs_tokens(self: Correct, item: pb.ScoreItem) -> pb.SampleScore:
        if item.experience.token_ids:
            return Correct.one(self, item)
        error = pb.SampleError(code=3, reason="NO_TOKENS", message="no tokens")
        return pb.SampleScore(sample_id=item.experience.sample_id, error=error)

    item = pb.ScoreItem(completion_text="cannot be judged")
    item.experience.sample_id = "unscorable-0"
    findings = await examine(informed(tokenizer_sha256=SHA256, one=needs_tokens)(), sha256=b"", unscorable=[item])
    assert broken(findings) == {"error_is_not_zero"}, findings
    assert [finding.name for finding in findings if finding.status == "skipped"] == ["tokenizer", "pure"]


@pytest.mark.parametrize("limit", [0, 1, 2, LIMIT])
@pytest.mark.parametrize("sha256", [b"", SHA256], ids=["texts", "tokens"])
async def test_a_correct_service_passes_with_any_limit(limit: int, sha256: bytes) -> None:
    info = pb.GetInfoResponse(name="correct@1", max_sample_count=limit, tokenizer_sha256=sha256, reads_messages=True)
    findings = await examine(variant(info=info)())
    assert broken(findings) == set(), findings
    assert not any(finding.status == "not run" for finding in findings)


@pytest.mark.parametrize("name", ["token", "turn"])
async def test_rewards_of_tokens_and_turns_that_fit_are_accepted(name: str) -> None:
    service = rewarded(lambda mask: [0.5 * m for m in mask])
    if name == "turn":
        service = changed(lambda made: made.turn_rewards.append(0.5))
    findings = await examine(service())
    assert broken(findings) == set(), findings


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_variant_is_named(name: str) -> None:
    service, check = VARIANTS[name]
    findings = await examine(service(), seconds=0.5 if name == "hangs" else 5.0)
    assert check in broken(findings), [(f.name, f.status, f.text) for f in findings]
    assert all(finding.text for finding in findings if finding.status == "broken")


async def test_the_owner_of_a_service_may_name_samples_that_it_cannot_judge() -> None:
    class Judges(Correct):
        def score(self, item: pb.ScoreItem) -> float:
            return 0.0 if item.completion_text == "unreadable" else 1.0

    item = pb.ScoreItem(completion_text="unreadable")
    item.experience.sample_id = "unscorable-1"
    findings = await examine(Judges(), unscorable=[item])
    found = next(finding for finding in findings if finding.name == "error_is_not_zero")
    assert found.status == "broken" and "unscorable-1 of --unscorable has the score 0" in found.text


async def test_rounding_is_a_difference_unless_it_is_allowed() -> None:
    class Rounds(Correct):
        calls = 0

        def score(self, item: pb.ScoreItem) -> float:
            self.calls += 1
            return super().score(item) + 0.001 * (self.calls % 2)

    for tolerance, wanted in ((0.0, True), (0.01, False)):
        findings = await examine(Rounds(), tolerance=tolerance)
        assert ("drift" in broken(findings)) is wanted, [(f.name, f.status, f.text) for f in findings]


# -- scorers that say `pure = true`, and refusals of concurrent calls --------------------------------------------------


def pure(score: object = Correct.score, **fields: object) -> Correct:
    service = informed(pure=True, **fields)
    service.score = score  # type: ignore[method-assign, assignment]
    return service()


async def test_a_pure_scorer_passes_with_and_without_tokens() -> None:
    for fields in ({}, {"tokenizer_sha256": SHA256}):
        findings = await examine(pure(**fields))
        assert broken(findings) == set(), findings
        assert next(f.status for f in findings if f.name == "pure") == "ok"


async def test_a_scorer_that_is_not_pure_is_not_held_to_it() -> None:
    assert next(f.status for f in await examine(Correct()) if f.name == "pure") == "skipped"


async def test_a_pure_scorer_that_depends_on_ids_is_named() -> None:
    def of_the_trajectory(self: Correct, item: pb.ScoreItem) -> float:
        return float(item.experience.trajectory_id.endswith("7"))

    found = broken(await examine(pure(of_the_trajectory)))
    assert found == {"pure"}, found


async def test_a_pure_scorer_that_depends_on_other_items_is_named() -> None:
    def of_the_calls(self: Correct, item: pb.ScoreItem) -> float:
        return float(self.calls % 2)

    assert "pure" in broken(await examine(pure(of_the_calls)))


@pytest.mark.parametrize("delay", [0.1, None])
async def test_concurrent_calls_may_be_refused_with_a_retry_delay(delay: float | None) -> None:
    class Busy(Correct):
        running = 0

        async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
            if self.running > 3:
                await abort(context, Overloaded("busy", retry_after=delay))
            self.running += 1
            try:
                await asyncio.sleep(0.01)
                return await super().Score(request, context)
            finally:
                self.running -= 1

    assert ("concurrent_calls" in broken(await examine(Busy()))) is (delay is None)
