"""Checks of sessions: opening, turns and their exact tokens, repeated calls, and cancelled turns."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import read_ints
from fourfold.sample.wire import decode
from fourfold.types.v1 import experience_pb2 as types
from fourfold_tools.conformance.calls import refuse
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.gateway.probe import FEW_TOKENS, QUESTION, GatewayProbe, Sampled, user

SESSIONS: Final = Checks[GatewayProbe]()
_OPEN: Final = pb.SESSION_STATE_OPEN
_LONG_TOKENS: Final = 4096
_LEAVE_SECONDS: Final = 5.0
_SESSIONS: Final = 4


@SESSIONS.add
async def check_open(probe: GatewayProbe) -> None:
    """OpenSession returns an open session and its key; the same call again returns the same."""
    async with probe.session() as opened:
        session = opened.session
        if session.state != _OPEN or session.turn_count or session.token_count or session.task_id:
            raise Violation(f"a new session without a task is {str(session)[:200]!r}; it must be OPEN, and empty")
        if not opened.session_key:
            raise Violation("session_key is empty; it is the bearer token of the session for HTTP")
        again = await probe.call(pb.OpenSessionRequest(session_id=session.session_id))
        if (again.session_key, again.session.state) != (opened.session_key, _OPEN):
            raise Violation("the same OpenSession again had another key or state; it is idempotent by session_id")
        other = pb.OpenSessionRequest(session_id=session.session_id, own_group=pb.OwnGroup(key="conformance"))
        work = probe.stub.OpenSession(other, timeout=probe.seconds)
        await refuse(work, "OpenSession with the id of another attempt", "ALREADY_EXISTS")
        async with probe.session() as second:
            if second.session_key == opened.session_key:
                raise Violation("two sessions have one session_key")


@SESSIONS.add
async def check_malformed_open(probe: GatewayProbe) -> None:
    """A malformed session_id or idle_timeout is refused with INVALID_ARGUMENT."""
    for text in ("", "a b", "a" * 129, "\u00e9", "a/b"):
        work = probe.stub.OpenSession(pb.OpenSessionRequest(session_id=text), timeout=probe.seconds)
        await refuse(work, f"session_id = {text[:20]!r}", "INVALID_ARGUMENT")
    for seconds in (0, 3601, -1):
        request = pb.OpenSessionRequest(session_id=f"conformance-{uuid.uuid4().hex}")
        request.idle_timeout.FromSeconds(seconds)
        work = probe.stub.OpenSession(request, timeout=probe.seconds)
        await refuse(work, f"idle_timeout = {seconds} s", "INVALID_ARGUMENT")


@SESSIONS.add
async def check_session(probe: GatewayProbe) -> None:
    """A conversation of two turns is one segment, with the tokens, log-probabilities and versions as they were sent."""
    rendered = await probe.template([user()])
    async with probe.session() as opened:
        name = opened.session.session_id
        first = await probe.one(probe.request(name, messages=[user()], request_id="one", flush=0.0))
        assert first.message is not None
        second = await probe.one(probe.request(name, messages=[user(), first.message, user()], request_id="two"))
        exported = await probe.export(name)
        (segment,) = _segments(exported, 1)
        _check_turns(probe, segment, exported.turns, [first, second])
        if read_ints(segment.token_ids)[: len(rendered.token_ids)].tolist() != list(rendered.token_ids):
            raise Violation("the segment does not begin with the tokens of the rendered prompt")
        for turn, sample, request_id in zip(exported.turns, (first, second), ("one", "two"), strict=True):
            if turn.request_id != request_id or turn.message != sample.message:
                raise Violation(f"turn {request_id!r} has another request_id or message in ExportSession")
            if turn.prompt_token_count != sample.prompt_token_count:
                raise Violation(
                    f"turn {request_id!r} begins at token {turn.prompt_token_count} of its segment, and its prompt had "
                    f"{sample.prompt_token_count} tokens"
                )
        state = exported.session
        if (state.turn_count, state.segment_count, state.token_count) != (2, 1, len(segment.action_mask)):
            raise Violation(f"turns, segments and tokens of the session are {str(state)[:200]!r}")


def _segments(exported: pb.ExportSessionResponse, count: int) -> Sequence[types.Experience]:
    if len(exported.segments) != count or exported.session.segment_count != count:
        raise Violation(
            f"the session has {len(exported.segments)} segments, and segment_count = {exported.session.segment_count}; "
            f"its turns make {count}"
        )
    return exported.segments


def _check_turns(
    probe: GatewayProbe, segment: types.Experience, turns: Sequence[pb.Turn], sampled: Sequence[Sampled]
) -> None:
    """Check that a segment has exactly the sampled tokens of its turns, where the turns say."""
    if len(turns) != len(sampled):
        raise Violation(f"ExportSession has {len(turns)} turns of {len(sampled)}")
    try:
        sample = decode(
            segment, vocabulary_size=probe.info.vocabulary_size, max_tokens=probe.info.max_context_tokens
        )  # checks lengths and ranges, NaN outside of the action mask, and that the spans add up
    except InvalidInput as error:
        raise Violation(f"a segment cannot be trained on: {error.message}") from None
    mask = np.zeros(len(sample.token_ids), np.bool_)
    versions = np.concatenate([np.full(span.token_count, span.policy_version) for span in sample.version_spans])
    for number, (turn, wanted) in enumerate(zip(turns, sampled, strict=True)):
        part = slice(turn.prompt_token_count, turn.prompt_token_count + turn.completion_token_count)
        mask[part] = True
        if sample.token_ids[part].tolist() != wanted.ids:
            raise Violation(
                f"turn {number} has other tokens in its segment than in its chunks; ids are kept as sampled"
            )
        if not np.array_equal(sample.behavior_logprobs[part], np.array(wanted.logprobs, np.float32)):
            raise Violation(f"turn {number} has other log-probabilities in its segment than in its chunks")
        if versions[part].tolist() != wanted.versions:
            raise Violation(f"turn {number} has other policy versions in its segment than in its chunks")
    if not np.array_equal(mask, sample.action_mask):
        raise Violation("action_mask is not 1 exactly where the turns sampled tokens")


@SESSIONS.add
async def check_turns_by_ids(probe: GatewayProbe) -> None:
    """A prompt of ids that begins with a whole segment continues it; another one opens a new segment."""
    async with probe.session() as opened:
        name, ids = opened.session.session_id, await probe.encode()
        first = await probe.one(probe.request(name, ids=ids))
        second = await probe.one(probe.request(name, ids=[*ids, *first.ids, *ids[:1]]))
        exported = await probe.export(name)
        (segment,) = _segments(exported, 1)
        _check_turns(probe, segment, exported.turns, [first, second])
        branch = await probe.one(probe.request(name, ids=[*ids[1:], *ids]))
        exported = await probe.export(name)
        segments = _segments(exported, 2)
        index = exported.turns[-1].segment_index
        _check_turns(probe, segments[index], exported.turns[-1:], [branch])
        if [(s.segment_index, s.segment_count) for s in segments] != [(0, 2), (1, 2)]:
            raise Violation("segments have a wrong segment_index or segment_count")


@SESSIONS.add
async def check_several_samples_in_a_session(probe: GatewayProbe) -> None:
    """Every sample of a turn but the first is a segment of its own."""
    async with probe.session() as opened:
        name = opened.session.session_id
        samples = await probe.turn(probe.request(name, ids=await probe.encode(), count=2))
        exported = await probe.export(name)
        segments = _segments(exported, 2)
        for turn, sample in zip(exported.turns, samples, strict=True):
            _check_turns(probe, segments[turn.segment_index], [turn], [sample])


@SESSIONS.add
async def check_repeated_turn(probe: GatewayProbe) -> None:
    """A repeated request_id gets the stored turn; with other content it is ABORTED, reason REQUEST_ID_REUSED."""
    async with probe.session() as opened:
        name = opened.session.session_id
        request = probe.request(name, text=QUESTION, request_id="again")
        first, together = await asyncio.gather(probe.one(request), probe.one(request))
        for sample, when in ((together, "at the same time"), (await probe.one(request), "afterwards")):
            for part in ("ids", "logprobs", "versions", "text", "finish", "message", "prompt_token_count"):
                if getattr(sample, part) != getattr(first, part):
                    raise Violation(f"the same request_id {when} had other {part}; the turn is sampled once")
        if (count := (await probe.export(name)).session.turn_count) != 1:
            raise Violation(f"three calls with one request_id made {count} turns")
        other = probe.request(name, text=QUESTION + QUESTION, request_id="again")
        await refuse(probe.drop(other), "another turn with a used request_id", "ABORTED", reason="REQUEST_ID_REUSED")
        for text in ("a b", "a" * 129):
            bad = probe.request(name, request_id=text)
            await refuse(probe.drop(bad), f"request_id = {text[:20]!r}", "INVALID_ARGUMENT")


@SESSIONS.add
async def check_failed_turn(probe: GatewayProbe) -> None:
    """A refused turn does not belong to its session."""
    async with probe.session() as opened:
        name = opened.session.session_id
        await refuse(probe.drop(probe.request(name, max_tokens=-1)), "max_tokens = -1", "INVALID_ARGUMENT")
        if count := (await probe.export(name)).session.turn_count:
            raise Violation(f"a session whose only turn was refused has {count} turns")


@SESSIONS.add
async def check_cancelled_turn(probe: GatewayProbe) -> None:
    """A cancelled turn does not belong to its session, which takes further turns and can be closed."""
    async with probe.session() as opened:
        name, ids = opened.session.session_id, await probe.encode()
        room = probe.info.max_context_tokens - len(ids)
        request = probe.request(name, ids=ids, max_tokens=min(room, _LONG_TOKENS), flush=0.0)
        call = probe.stub.Generate(request, timeout=probe.seconds)
        try:
            async for response in call:
                if any(chunk.finish_reason for chunk in response.chunks):
                    raise Skipped("a long turn ended with its first message")
                break
        finally:
            call.cancel()
        await probe.one(probe.request(name, ids=ids, max_tokens=FEW_TOKENS))
        await asyncio.sleep(0.2)
        if (count := (await probe.export(name)).session.turn_count) != 1:
            raise Violation(f"after a cancelled turn and another one the session has {count} turns; it must have 1")
        async with asyncio.timeout(_LEAVE_SECONDS):
            await probe.close(name, reward=0.0)


@SESSIONS.add
async def check_unknown_session(probe: GatewayProbe) -> None:
    """Calls on a session that does not exist are NOT_FOUND."""
    name, stub, seconds = f"conformance-{uuid.uuid4().hex}", probe.stub, probe.seconds
    await refuse(probe.drop(probe.request(name)), "a turn of an unknown session", "NOT_FOUND")
    for what, work in (
        ("CloseSession", stub.CloseSession(pb.CloseSessionRequest(session_id=name, reward=1.0), timeout=seconds)),
        ("ExportSession", stub.ExportSession(pb.ExportSessionRequest(session_id=name), timeout=seconds)),
    ):
        await refuse(work, f"{what} of an unknown session", "NOT_FOUND")
    call = stub.WatchSession(pb.WatchSessionRequest(session_id=name), timeout=seconds)
    await refuse(_first(call), "WatchSession of an unknown session", "NOT_FOUND")


async def _first(call: object) -> None:
    async for _ in call:  # type: ignore[attr-defined]  # grpc-stubs have no common type of streaming calls
        return


@SESSIONS.add
async def check_watch(probe: GatewayProbe) -> None:
    """WatchSession sends the present state at once, then changes, and ends when the session is settled."""
    async with probe.session() as opened:
        name = opened.session.session_id
        call = probe.stub.WatchSession(pb.WatchSessionRequest(session_id=name))  # watches need no deadline
        states = list[pb.Session]()
        try:
            async with asyncio.timeout(probe.seconds):
                async for message in call:
                    states.append(message.session)
                    if len(states) == 1:
                        await probe.give_up(name)
        except TimeoutError:
            what = "went on after the session was settled" if states else "did not send the present state"
            raise Violation(f"WatchSession {what}, in {probe.seconds:g} s") from None
        finally:
            call.cancel()
        if not states or states[0].state != _OPEN or states[-1].state != pb.SESSION_STATE_ABANDONED:
            shown = ", ".join(pb.SessionState.Name(state.state) for state in states)
            raise Violation(f"WatchSession sent {shown or 'nothing'}; it must begin with OPEN and end with ABANDONED")


@SESSIONS.add
async def check_concurrent_sessions(probe: GatewayProbe) -> None:
    """Sessions that run at the same time have their own turns."""

    async def work(number: int) -> None:
        async with probe.session() as opened:
            name, ids = opened.session.session_id, [*await probe.encode(), *await probe.encode(str(number))]
            sample = await probe.one(probe.request(name, ids=ids, max_tokens=2 + number))
            exported = await probe.export(name)
            (segment,) = _segments(exported, 1)
            _check_turns(probe, segment, exported.turns, [sample])
            if read_ints(segment.token_ids)[: len(ids)].tolist() != ids:
                raise Violation("a session has the prompt of another one")

    if (count := int(min(_SESSIONS, await probe.sessions_left()))) < 2:
        raise Skipped("the quota of the caller has no two sessions left")
    await asyncio.gather(*map(work, range(count)))
