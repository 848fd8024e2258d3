"""Checks that a reward service keeps the contract. No check depends on what the scores mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from google.rpc.code_pb2 import NOT_FOUND

from fourfold.contract import contract_problem
from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, Overloaded
from fourfold.reward.client import ids_fault, rewards_fault, score_fault
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.rpc.codec import read_floats
from fourfold.sample import Sample, VersionSpan
from fourfold.sample.wire import encode
from fourfold.text import MAX_ERROR
from fourfold_tools.conformance.calls import unary
from fourfold_tools.conformance.checks import Checks, Skipped, Violation

if TYPE_CHECKING:
    from fourfold.reward.v1.reward_service_pb2_grpc import RewardServiceAsyncStub

MAX_REQUEST_BYTES: Final = 8 << 20
_SHORT_SECONDS: Final = 1.0
_REPEATS: Final = 100
_IDS: Final = 32
_LARGE_BYTES: Final = 7 << 20
# Texts that break careless scorers: NaN and infinity as numbers, floats that overflow 32 bits, nothing, not ASCII.
_AWKWARD: Final = (*("nan", "inf", "-inf", "1e300", "", " ", "\x00", "\u00e9\U0001f600", "1,000", "{}", "x" * 100_000),)
_PLAIN: Final = ("12", "The answer is 12.", "13", "hello", "a longer text of several words")
_MALFORMED_METADATA: Final = ("{", "[]", "null", "NaN", '{"a": ' * 1000)
CHECKS: Final = Checks["RewardProbe"]()


@dataclass(slots=True)
class RewardProbe:
    """Calls one service, and keeps values that several checks need."""

    stub: RewardServiceAsyncStub
    peer: str
    seconds: float
    """Time limit of a call."""
    tokenizer_sha256: bytes = b""
    """Of the run's tokenizer; empty: not given."""
    unscorable: Sequence[pb.ScoreItem] = ()
    """Samples that the service cannot judge, from its owner."""
    tolerance: float = 0.0
    """Largest difference between scores of equal samples, relative to their size if that is above 1."""
    info: pb.GetInfoResponse = field(default_factory=pb.GetInfoResponse)
    first: dict[str, pb.SampleScore] = field(default_factory=dict)
    """Scores at the start, by completion."""

    def require_same(self, first: pb.SampleScore, second: pb.SampleScore, when: str) -> None:
        """Raise Violation if two outcomes of equal samples differ."""
        if not _same(first, second, self.tolerance):
            raise Violation(f"{when}: {_show(first)}, then {_show(second)}; equal samples have equal outcomes")

    async def get_info(self) -> pb.GetInfoResponse:
        """Ask for name and limits."""
        info: pb.GetInfoResponse = await unary(
            self.stub.GetInfo, pb.GetInfoRequest(), peer=self.peer, seconds=self.seconds
        )
        return info

    async def send(self, items: Sequence[pb.ScoreItem], *, seconds: float = 0.0) -> list[pb.SampleScore]:
        """Score items in one call; raise Violation if the response breaks a rule that every response must keep."""
        timeout = seconds or self.seconds
        response: pb.ScoreResponse = await unary(
            self.stub.Score, pb.ScoreRequest(items=items), peer=self.peer, seconds=timeout
        )
        _check_response(items, response)
        return list(response.scores)

    async def score(self, items: Sequence[pb.ScoreItem], *, seconds: float = 0.0) -> list[pb.SampleScore]:
        """Score items in as few calls as max_sample_count allows."""
        size = self.info.max_sample_count or len(items) or 1
        scores = list[pb.SampleScore]()
        for begin in range(0, len(items), size):
            scores += await self.send(items[begin : begin + size], seconds=seconds)
        return scores

    async def refuse(self, items: Sequence[pb.ScoreItem], what: str) -> None:
        """Send a malformed request; raise Violation unless the service refuses it with INVALID_ARGUMENT."""
        try:
            await self.send(items)
        except InvalidInput:
            return
        except (DeadlinePassed, Violation):
            raise
        except FourfoldError as error:
            raise Violation(f"{what} was refused with {error.code}; it must be INVALID_ARGUMENT") from None
        raise Violation(f"{what} was scored; it must be refused with INVALID_ARGUMENT, and nothing be scored")

    def item(
        self, sample_id: str, completion: str = "12", *, answer: str = "", metadata_json: str = "", verifier: str = ""
    ) -> pb.ScoreItem:
        """Return an item as a coordinator sends it: with arrays if the service reads tokens."""
        made = pb.ScoreItem(
            prompt_text="6 * 2 =",
            completion_text=completion,
            answer=answer,
            metadata_json=metadata_json,
            verifier=verifier,
        )
        made.experience.sample_id = sample_id
        made = self.with_arrays(made)
        if self.info.reads_messages:
            made.prompt_messages_json = '[{"role": "user", "content": "6 * 2 ="}]'
        return made

    def with_arrays(self, item: pb.ScoreItem) -> pb.ScoreItem:
        """Return an item of texts with arrays if the service reads tokens, so that they are not what it refuses."""
        made = pb.ScoreItem()
        made.CopyFrom(item)
        if self.info.tokenizer_sha256:
            made.experience.CopyFrom(encode(_sample(item.experience.sample_id)))
        return made

    async def nonzero(self) -> tuple[pb.ScoreItem, float]:
        """Return an item with a score that is not 0; raise Skipped if no text has one."""
        for text in (*_PLAIN, *_AWKWARD):
            for answer in ("12", ""):
                found = self.item("base", text, answer=answer)
                (scored,) = await self.score([found])
                if scored.HasField("score") and scored.score:
                    return found, scored.score
        raise Skipped("every text that was tried has the score 0 or none")


def _sample(sample_id: str, count: int = 6) -> Sample:
    mask = np.arange(count) >= count // 2
    return Sample(
        sample_id=sample_id,
        group_id="conformance",
        token_ids=np.arange(1, count + 1, dtype=np.int32),
        behavior_logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(
            VersionSpan(policy_version=-1, token_count=count // 2),
            VersionSpan(policy_version=0, token_count=count - count // 2),
        ),
        temperature=1.0,
    )


# -- responses --------------------------------------------------------------------------------------------------------


def _check_response(items: Sequence[pb.ScoreItem], response: pb.ScoreResponse) -> None:
    if fault := ids_fault(items, response):
        raise Violation(fault[1])
    for item, score in zip(items, response.scores, strict=True):
        where, message = f"sample {score.sample_id[:40]}", score.error.message
        if fault := score_fault(score) or rewards_fault(item, score):
            raise Violation(f"{where}: {fault[1]}")
        if len(message) > MAX_ERROR or not (message or " ").isprintable():
            raise Violation(f"{where}: the message of an error is one line of at most {MAX_ERROR} characters")


def _show(score: pb.SampleScore) -> str:
    kind = score.WhichOneof("outcome")
    if kind == "score":
        return f"the score {score.score:g}"
    return f"the abstention {score.abstain_reason}" if kind == "abstain_reason" else f"the error {score.error.reason}"


def _same(first: pb.SampleScore, second: pb.SampleScore, tolerance: float) -> bool:
    """Compare outcomes, components and rewards; ids may differ. Messages of errors and costs may, too."""
    kinds = first.WhichOneof("outcome"), second.WhichOneof("outcome")
    if kinds == ("error", "error"):
        return (first.error.code, first.error.reason) == (second.error.code, second.error.reason)
    one, other = ((s.abstain_reason, set(s.components)) for s in (first, second))
    numbers, others = _numbers(first), _numbers(second)
    if kinds[0] != kinds[1] or one != other or len(numbers) != len(others):
        return False
    return all(
        a == b or abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)) for a, b in zip(numbers, others, strict=True)
    )


def _numbers(score: pb.SampleScore) -> list[float]:
    parts = [value for _, value in sorted(score.components.items())]
    return [score.score, *parts, *read_floats(score.token_rewards).tolist(), *score.turn_rewards]


# -- checks -----------------------------------------------------------------------------------------------------------


@CHECKS.add
async def check_info(probe: RewardProbe) -> None:
    """GetInfo has name@version, a limit that is not negative, and a contract version of the same MAJOR."""
    info = await probe.get_info()
    name, at, version = info.name.rpartition("@")
    if not (name and at and version) or not info.name.isprintable():
        raise Violation(f"name is {info.name[:80]!r}; it must be name@version, which the run records")
    if info.max_sample_count < 0:
        raise Violation(f"max_sample_count is {info.max_sample_count}; it must be 0 (no limit) or more")
    if len(info.tokenizer_sha256) not in (0, 32):
        raise Violation(f"tokenizer_sha256 has {len(info.tokenizer_sha256)} bytes; it must have 32 or none")
    if problem := contract_problem(info.contract_version):
        raise Violation(problem)
    probe.info = info
    if await probe.get_info() != info:
        raise Violation("a second GetInfo had another answer; name and limits must stay the same")


@CHECKS.add
async def check_tokenizer(probe: RewardProbe) -> None:
    """A service that reads tokens has the hash of the run's tokenizer."""
    theirs = probe.info.tokenizer_sha256
    if not theirs:
        raise Skipped("the service reads no tokens")
    if not probe.tokenizer_sha256:
        raise Skipped("the service reads tokens; give --model FOLDER, so that its tokenizer's hash can be compared")
    if theirs != probe.tokenizer_sha256:
        raise Violation(
            f"tokenizer_sha256 is {theirs.hex()[:12]}..., and that of the model is {probe.tokenizer_sha256.hex()[:12]}"
            f"...: SHA-256 over the SHA-256 of tokenizer.json and of the chat template"
        )


@CHECKS.add
async def check_single(probe: RewardProbe) -> None:
    """One sample is scored, also with the longest id."""
    scores = await probe.score([probe.item("a" * 128), *(probe.item(f"p{i}", text) for i, text in enumerate(_PLAIN))])
    probe.first = dict(zip(_PLAIN, scores[1:], strict=True))
    if not any(score.HasField("score") for score in scores):
        raise Violation(f"no plain sample has a score; the first one has {_show(scores[0])}")


@CHECKS.add
async def check_arrays(probe: RewardProbe) -> None:
    """A sample with token arrays is scored, and a service of texts ignores them."""
    bare = probe.item("s")
    full = pb.ScoreItem(experience=encode(_sample("s")))
    full.MergeFrom(bare)
    scores = await probe.score([full])
    if not probe.info.tokenizer_sha256:
        probe.require_same((await probe.score([bare]))[0], scores[0], "a text without and with token arrays")
    elif scores[0].HasField("error"):
        raise Violation(f"a sample with valid arrays has {_show(scores[0])}: {scores[0].error.message[:200]}")
    long = probe.item("long")
    long.experience.CopyFrom(encode(_sample("long", 4096)))
    await probe.score([long])


@CHECKS.add
async def check_order(probe: RewardProbe) -> None:
    """Scores have the order and the ids of the request."""
    count = min(probe.info.max_sample_count or 200, 200)
    await probe.score([probe.item(f"s-{(i * 7919) % 1000}_X", str(i)) for i in range(count)])


@CHECKS.add
async def check_repeated_request(probe: RewardProbe) -> None:
    """The same request has the same response."""
    items = [probe.item(f"s{i}", text, answer="12", metadata_json='{"k": 1}') for i, text in enumerate(_PLAIN)]
    for before, after in zip(await probe.score(items), await probe.score(items), strict=True):
        probe.require_same(before, after, f"sample {before.sample_id} twice")


@CHECKS.add
async def check_ids_change_nothing(probe: RewardProbe) -> None:
    """A score does not depend on the sample_id, nor on the group_id."""
    for text in _PLAIN[:2]:
        items = [probe.item(f"{'abc'[i % 3]}{i * 977}", text, answer="12") for i in range(_IDS)]
        for number, item in enumerate(items):
            item.experience.group_id = f"g{number // 4}"
        scores = await probe.score(items)
        for item, score in zip(items, scores, strict=True):
            names = f"{items[0].experience.sample_id} and {item.experience.sample_id}"
            probe.require_same(scores[0], score, f"the same text with the ids {names}")


@CHECKS.add
async def check_pure(probe: RewardProbe) -> None:
    """With pure = true, equal items have equal outcomes, whatever their ids, in any call and at any time."""
    if not probe.info.pure:
        raise Skipped("the service has pure = false")
    size = probe.info.max_sample_count or _IDS
    for text in (*_PLAIN[:3], "nan", ""):
        known: pb.SampleScore | None = None
        for number, others in enumerate((0, min(3, size - 1), 0)):
            item = probe.item(f"pure-{number}", text, answer="12", metadata_json='{"k": 1}')
            item.experience.group_id = f"g{number}"
            item.experience.trajectory_id = f"trajectory-{number * 977}"
            *_, score = await probe.send([*(probe.item(f"o{i}", _PLAIN[i % 5]) for i in range(others)), item])
            probe.require_same(known or score, score, f"the item {text!r} of a pure scorer, with other ids")
            known = known or score


@CHECKS.add
async def check_batch_changes_nothing(probe: RewardProbe) -> None:
    """A score does not depend on the other samples of its call."""
    items = [probe.item(f"s{i}", text) for i, text in enumerate((*_PLAIN, "nan", ""))]
    together = await probe.score(items)
    for item, score in zip(items, together, strict=True):
        probe.require_same(score, (await probe.score([item]))[0], f"sample {score.sample_id} with others and alone")


@CHECKS.add
async def check_finite(probe: RewardProbe) -> None:
    """Awkward texts have finite scores or errors."""
    await probe.score([probe.item(f"s{i}", text, answer=text[:100]) for i, text in enumerate(_AWKWARD)])


@CHECKS.add
async def check_error_is_not_zero(probe: RewardProbe) -> None:
    """A sample that cannot be judged has an error or an abstention, and never the score 0."""
    unscorable = [probe.with_arrays(item) for item in probe.unscorable]
    for item, score in zip(unscorable, await probe.score(unscorable), strict=True):
        if score.HasField("score"):
            raise Violation(f"sample {item.experience.sample_id} of --unscorable has {_show(score)}; it must have none")
    base, right = await probe.nonzero()
    for what, change in _MALFORMATIONS:
        bad = pb.ScoreItem()
        bad.CopyFrom(base)
        change(bad)
        try:
            (score,) = await probe.score([bad])
        except InvalidInput:
            continue
        if score.HasField("score") and score.score == 0:
            raise Violation(f"{what} turns the score {right:g} into 0; a sample that cannot be judged has an error")


def _cut_arrays(item: pb.ScoreItem) -> None:
    item.experience.token_ids = item.experience.token_ids[:-3]


_MALFORMATIONS: Final[Sequence[tuple[str, Callable[[pb.ScoreItem], None]]]] = (
    *(
        (f"metadata_json = {text[:20]!r}", lambda item, text=text: setattr(item, "metadata_json", text))
        for text in _MALFORMED_METADATA
    ),
    ("an unknown verifier", lambda item: setattr(item, "verifier", "no-such-verifier")),
    ("an array of the wrong length", _cut_arrays),
    ("malformed prompt_messages_json", lambda item: setattr(item, "prompt_messages_json", "[{")),
)


@CHECKS.add
async def check_malformed_metadata(probe: RewardProbe) -> None:
    """A sample with malformed metadata fails no other sample."""
    for text in _MALFORMED_METADATA:
        good, bad = probe.item("good"), probe.item("bad", metadata_json=text)
        first, _ = await probe.score([good, bad])
        probe.require_same(
            (await probe.score([good]))[0], first, f"a sample alone and beside metadata_json = {text[:20]!r}"
        )


@CHECKS.add
async def check_unknown_verifier(probe: RewardProbe) -> None:
    """An unknown verifier is the error NOT_FOUND of its sample alone."""
    good = probe.item("good")
    first, second = await probe.score([good, probe.item("bad", verifier="no-such-verifier")])
    probe.require_same((await probe.score([good]))[0], first, "a sample alone and beside one with an unknown verifier")
    if second.error.code != NOT_FOUND:
        raise Violation(f"verifier = 'no-such-verifier' has {_show(second)}; it must be an error with code NOT_FOUND")


@CHECKS.add
async def check_malformed_requests(probe: RewardProbe) -> None:
    """No items, repeated ids and malformed ids are refused with INVALID_ARGUMENT."""
    await probe.refuse([], "a request without items")
    await probe.refuse([probe.item("a"), probe.item("b"), probe.item("a")], "a request with the id 'a' twice")
    for sample_id in ("", "a b", "a" * 129, "\u00e9", "a/b"):
        await probe.refuse([probe.item(sample_id)], f"the sample_id {sample_id[:20]!r}")


@CHECKS.add
async def check_limit(probe: RewardProbe) -> None:
    """More items than max_sample_count are refused with INVALID_ARGUMENT."""
    if not (limit := probe.info.max_sample_count):
        raise Skipped("the service has no limit of its own")
    await probe.refuse([probe.item(f"s{i}") for i in range(limit + 1)], f"{limit + 1} items")


@CHECKS.add
async def check_size(probe: RewardProbe) -> None:
    """A request of almost 8 MiB is scored, and a larger one is refused with INVALID_ARGUMENT."""
    count = min(probe.info.max_sample_count or 8, 8)
    items = [probe.item(f"s{i}", "x" * (_LARGE_BYTES // count)) for i in range(count)]
    try:
        await probe.send(items)
    except (InvalidInput, Overloaded) as error:
        size = pb.ScoreRequest(items=items).ByteSize()
        raise Violation(f"a request of {size} bytes was refused ({error.message[:100]}); 8 MiB must fit") from None
    await probe.refuse([probe.item("a", "x" * (MAX_REQUEST_BYTES + (1 << 20)))], "a request of 9 MiB")
    await probe.score([probe.item("a")])


@CHECKS.add
async def check_deadline(probe: RewardProbe) -> None:
    """A call ends at its deadline with scores or errors, and the next call is answered."""
    items = [probe.item(f"s{i}", "sleep") for i in range(min(probe.info.max_sample_count or 100, 100))]
    began = time.monotonic()
    try:
        hurried = await probe.send(items, seconds=_SHORT_SECONDS)
    except DeadlinePassed:
        hurried = []
    if (took := time.monotonic() - began) > _SHORT_SECONDS + 10:
        raise Violation(f"a call with a deadline of {_SHORT_SECONDS:g} s took {took:.1f} s")
    (calm,) = await probe.score([probe.item("next", "sleep")])
    for score in hurried:
        if score.HasField("score"):
            probe.require_same(calm, score, "a sample with much time, and with little")


@CHECKS.add
async def check_concurrent_calls(probe: RewardProbe) -> None:
    """Concurrent calls get their own responses."""
    count = min(probe.info.max_sample_count or 20, 20)
    calls = [[probe.item(f"c{number}-{i}", _PLAIN[number % 3]) for i in range(count)] for number in range(16)]
    for number, found in enumerate(await asyncio.gather(*map(probe.send, calls), return_exceptions=True)):
        if isinstance(found, Overloaded) and found.retry_after:
            continue  # back-pressure
        if isinstance(found, BaseException):
            raise found
        if known := probe.first.get(_PLAIN[number % 3]):
            for score in found:
                probe.require_same(known, score, "a sample alone and among concurrent calls")


@CHECKS.add
async def check_drift(probe: RewardProbe) -> None:
    """A score is the same at the end of all checks, and after a hundred calls, as at the start."""
    for text, known in probe.first.items():
        probe.require_same(known, (await probe.score([probe.item("again", text)]))[0], f"{text!r} now and at the start")
    text = next(iter(probe.first), _PLAIN[0])
    began = time.monotonic()
    before = (await probe.score([probe.item("s0", text)]))[0]
    for number in range(1, _REPEATS + 1):
        (after,) = await probe.score([probe.item(f"s{number}", text)])
        probe.require_same(before, after, f"the same sample {number} calls later")
        if time.monotonic() - began > probe.seconds:
            break  # of a slow scorer
