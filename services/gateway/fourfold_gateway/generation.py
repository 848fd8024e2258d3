"""Samples the turns of agents, in sessions and outside of them: checks the request, calls engines, stores the turn.

Sampled tokens wait in three places: without `flush_interval` and without stop strings, in `_Turn._held` of the sampler
until their sample is finished; without `flush_interval` and with stop strings, in `early` (`_chunks`) until then; in a
session, the last chunk of each sample also waits in `last` (`_sample_in_session`) until the turn is stored.

Two drafts collect the same tokens: the sampler's `CompletionDraft` to continue them on another engine, and that of
`TurnText` to store them, cut at a stop string.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.arrays import Int32Array
from fourfold.bounds import MAX_SAMPLES_PER_CALL, MAX_STOP_CHARACTERS, MAX_STOPS
from fourfold.config.agents import CONSTRAINED_TOOL_PARSERS
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.errors import DeadlinePassed, FourfoldError, InvalidInput, StaleEpoch, Unavailable, WrongState
from fourfold.host.cancellation import completed
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.group_requests import GroupRequest
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import check_id, pack_floats, pack_ints
from fourfold.rpc.limits import Quotas
from fourfold_gateway.api import Caller
from fourfold_gateway.completion import TurnText
from fourfold_gateway.conversation import ChatPrompt, ChatTemplate
from fourfold_gateway.encoding import PromptEncoder
from fourfold_gateway.engines import EnginePool
from fourfold_gateway.sessions import Session
from fourfold_gateway.store import SessionStore, StoredTurn
from fourfold_gateway.trajectory import CONTEXT_LENGTH, PendingTurn, Sampling, Turn
from fourfold_gateway.turn_sampler import TurnRequest, TurnSampler

_log = logging.getLogger("fourfold.gateway.generation")

_MAX_STOP_IDS: Final = 64
_MAX_SEED: Final = 1 << 53
_MAX_FLUSH_SECONDS: Final = 10.0
_STOP_FLUSH_SECONDS: Final = 0.05  # delay until a stop string is found; the tokens sampled meanwhile are wasted
_PARSE_SECONDS: Final = 10.0


def engine_grammar(grammar: pb.Grammar, tools: Sequence[pb.Tool], tool_parser: str) -> rollout.Grammar:
    """Return the grammar for an engine.

    Args:
        grammar: of the request.
        tools: of the request.
        tool_parser: name of the engine's parser of tool calls; empty: none.

    Raises:
        InvalidInput: the grammar is empty, or names a tool that the request does not have.
        WrongState: the form of the model's tool calls is not known here.
    """
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidInput("sampling_params.grammar has no kind; set json_schema, regex, ebnf or tool_calls")
    if kind != "tool_calls":
        return rollout.Grammar(**{kind: getattr(grammar, kind)})
    wanted = grammar.tool_calls
    callable_tools = [tool for tool in tools if wanted.name in ("", tool.name)]
    if not callable_tools:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidInput(f"the grammar allows calls of {wanted.name or 'tools'!r:.80}; tools of the request: {names}")
    if tool_parser not in CONSTRAINED_TOOL_PARSERS:
        raise WrongState(
            f"tool calls in the form of rollout.tool_parser = {tool_parser!r} cannot be constrained; supported are "
            f"{', '.join(CONSTRAINED_TOOL_PARSERS)}: leave the grammar out",
            reason="NOT_SUPPORTED",
        )
    return rollout.Grammar(structural_tag_json=json.dumps(_hermes_tag(callable_tools, required=wanted.required)))


def tools_json(tools: Sequence[pb.Tool]) -> str:
    """Return tools as a JSON array, as in OpenAI's chat completions; empty for none."""
    functions = [{"name": tool.name, "description": tool.description, "parameters": _schema(tool)} for tool in tools]
    return json.dumps([{"type": "function", "function": one} for one in functions]) if functions else ""


def _hermes_tag(tools: Sequence[pb.Tool], *, required: bool) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": _schema(tool)},
            "end": "}\n</tool_call>",
        }
        for tool in tools
    ]
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "at_least_one": required}
    return {"type": "structural_tag", "format": triggered}


def _schema(tool: pb.Tool) -> dict[str, Any]:
    try:
        schema = json.loads(tool.parameters_json or '{"type": "object", "properties": {}}')
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidInput(f"tool {tool.name!r:.80}: parameters_json must be a JSON object, a JSON Schema")
    return schema


@dataclass(slots=True)
class _Plan:
    """A checked request."""

    request: pb.GenerateRequest
    session: Session | None
    prompt_ids: Int32Array
    chat: ChatPrompt | None
    turn: TurnRequest
    sampling: Sampling

    @property
    def count(self) -> int:
        return self.turn.group.count


class Generator:
    """Samples the turns of one gateway."""

    def __init__(
        self,
        *,
        engines: EnginePool,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        encoder: PromptEncoder,
        store: SessionStore,
        quotas: Quotas,
        max_context_tokens: int,
        run_info: Callable[[], experience.GetRunInfoResponse],
    ) -> None:
        self._engines, self._tokenizer, self._template = engines, tokenizer, template
        self._encoder, self._store, self._quotas, self._run_info = encoder, store, quotas, run_info
        self._max_context_tokens = max_context_tokens
        self._sampler = TurnSampler(engines, stop_token_ids=tokenizer.stop_token_ids)
        self.turns = 0  # number of finished turns
        self.tokens = 0  # number of sampled tokens of finished turns

    async def generate(
        self, caller: Caller, session: Session | None, request: pb.GenerateRequest, *, timeout: float
    ) -> AsyncGenerator[pb.TurnChunk, None]:
        """Sample one turn; see `AgentApi.generate`."""
        if session is None:
            plan = await self._plan(caller, request, None)
            with self._quotas.tokens(caller.principal, self._cost(plan)):
                async with aclosing(self._chunks(plan, timeout, {})) as chunks:
                    async for chunk in chunks:
                        yield chunk
            return
        session.check_open()
        if session.closing.locked():  # the trajectory would not contain a turn that begins now
            raise WrongState(
                f"session {session.session_id} is being closed; open another one", reason="SESSION_NOT_OPEN"
            )
        session.touch()
        session.turns_in_flight += 1
        own: asyncio.Event | None = None
        try:
            digest = _digest(request)
            if request.request_id:
                check_id(request.request_id, "request_id")
                while (running := session.running.get(request.request_id)) is not None:
                    await running.wait()
                if turns := _stored_turns(session, request, digest):
                    for chunk in itertools.chain.from_iterable(self._replay(session, request, turn) for turn in turns):
                        yield chunk
                    return
                own = session.running[request.request_id] = asyncio.Event()
            plan = await self._plan(caller, request, session)
            with self._quotas.tokens(caller.principal, self._cost(plan)):
                async with aclosing(self._sample_in_session(session, plan, digest, timeout)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            session.turns_in_flight -= 1
            session.touch()
            if own is not None:  # only the call that created the event sets it
                del session.running[request.request_id]
                own.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _plan(self, caller: Caller, request: pb.GenerateRequest, session: Session | None) -> _Plan:
        most = min(self._max_context_tokens, self._engines.max_context_tokens() or self._max_context_tokens) - 1
        _check_length(len(request.token_ids.ids), most, least=0)  # first, because the conversion of many ids is slow
        ids, chat = await self._prompt(caller, request, session)
        _check_length(len(ids), most)
        room = most + 1 - len(ids)
        if int(ids.view(np.uint32).max()) >= self._engines.vocabulary_size:
            raise InvalidInput(f"a token id is outside the vocabulary [0, {self._engines.vocabulary_size})")
        count = request.sample_count if request.HasField("sample_count") else 1
        _check("sample_count", count, 1, MAX_SAMPLES_PER_CALL)
        _check("min_policy_version", request.min_policy_version, 0, _MAX_SEED)
        params = self._params(request, room, training=session is not None and session.task is not None)
        flush = request.flush_interval.ToNanoseconds() / 1e9 if request.HasField("flush_interval") else None
        _check("flush_interval", flush or 0.0, 0, _MAX_FLUSH_SECONDS)
        stop = request.sampling_params.stop
        if stop:
            flush = min(_STOP_FLUSH_SECONDS if flush is None else flush, _STOP_FLUSH_SECONDS)
        group = GroupRequest(
            name=uuid.uuid4().hex, prompt_token_ids=ids, params=params, count=count, version=request.min_policy_version
        )
        key = session.session_id if session else hashlib.blake2b(ids[:64].tobytes(), digest_size=8).hexdigest()
        turn = TurnRequest(group=group, key=key, flush_seconds=flush, separate=bool(stop))
        sampling = Sampling(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)
        return _Plan(request, session, ids, chat, turn, sampling)

    async def _prompt(
        self, caller: Caller, request: pb.GenerateRequest, session: Session | None
    ) -> tuple[Int32Array, ChatPrompt | None]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return np.array(request.token_ids.ids, np.int32), None
        if kind is None:
            raise InvalidInput("the request has no prompt; set token_ids, chat or text")
        if kind == "chat" and session is not None:
            prompt = await self._encoder.run(caller.principal, request.chat, session.conversation.make_prompt)
            return prompt.token_ids, prompt
        if kind == "chat":
            _, ids = await self._encoder.run(caller.principal, request.chat, self._template.encode)
        else:
            ids = await self._encoder.run(caller.principal, request.text, self._tokenizer.encode, add_special=True)
        return np.array(ids, np.int32), None

    def _params(self, request: pb.GenerateRequest, room: int, *, training: bool) -> rollout.SamplingParams:
        asked = request.sampling_params
        _check("sampling_params.stop", len(asked.stop), 0, MAX_STOPS)
        if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in asked.stop):
            raise InvalidInput(f"sampling_params.stop: each text must have 1 to {MAX_STOP_CHARACTERS} characters")
        _check("sampling_params.stop_token_ids", len(asked.stop_token_ids), 0, _MAX_STOP_IDS)
        seed = asked.seed if asked.HasField("seed") else secrets.randbelow(_MAX_SEED)
        _check("sampling_params.seed", seed, 0, _MAX_SEED - 1)
        seed %= _MAX_SEED - MAX_SAMPLES_PER_CALL  # so that the seed of the last sample is valid, too
        if asked.HasField("max_tokens"):
            _check("sampling_params.max_tokens", asked.max_tokens, 1, 1 << 30)
            room = min(room, asked.max_tokens)
        # The engine checks the ranges of the other parameters.
        params = rollout.SamplingParams(
            temperature=asked.temperature if asked.HasField("temperature") else 1.0,
            top_p=asked.top_p if asked.HasField("top_p") else 1.0,
            top_k=asked.top_k if asked.HasField("top_k") else None,
            stop_token_ids=asked.stop_token_ids,
            seed=seed,
        )
        if training:  # trained samples must come from the distribution of the recipe
            run = self._run_info()
            params.temperature, params.top_p = run.temperature, 1.0
            params.ClearField("top_k")
            params.stop_token_ids.extend(run.stop_token_ids)
            room = min(room, run.max_new_tokens)
        params.max_tokens = room
        if asked.HasField("grammar"):
            parser = next((e.info.tool_parser for e in self._engines.usable if e.info), "")
            params.grammar.CopyFrom(engine_grammar(asked.grammar, request.chat.tools, parser))
        return params

    def _cost(self, plan: _Plan) -> int:
        return plan.count * (len(plan.prompt_ids) + plan.turn.group.params.max_tokens)

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def _sample_in_session(
        self, session: Session, plan: _Plan, digest: bytes, timeout: float
    ) -> AsyncGenerator[pb.TurnChunk, None]:
        """Sample a turn; add its samples to the session before the agent gets their last chunks."""
        pending: list[PendingTurn] = []
        last: list[pb.TurnChunk] = []
        try:
            for _ in range(plan.count):
                pending.append(session.trajectory.begin_turn(plan.prompt_ids, plan.sampling))
            completions: dict[int, TurnText] = {}
            async with aclosing(self._chunks(plan, timeout, completions)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
                        yield chunk
                    else:  # add all samples of the turn to the session, or none
                        last.append(chunk)
            session.check_open()
            last.sort(key=lambda chunk: chunk.sample_index)
            # Completed even if the agent leaves: otherwise the session could close before the turn is stored.
            await completed(self._commit(session, plan, pending, completions, last, digest))
        finally:
            for turn in pending:
                session.trajectory.cancel_turn(turn)
        for chunk in last:
            yield chunk

    async def _commit(
        self,
        session: Session,
        plan: _Plan,
        pending: list[PendingTurn],
        completions: dict[int, TurnText],
        last: list[pb.TurnChunk],
        digest: bytes,
    ) -> None:
        """Add the samples of a turn to the session and to the store, all or none."""
        session.key = ""
        turns: list[StoredTurn] = []
        async with session.writing:
            undo = session.trajectory.snapshot(), session.conversation.snapshot()
            try:
                for chunk, begun in zip(last, pending, strict=True):
                    turn = session.trajectory.finish_turn(
                        begun,
                        completions[chunk.sample_index].tokens(),
                        finish_reason=chunk.finish_reason,
                        request_id=plan.request.request_id,
                        request_sha256=digest,
                        sample_index=chunk.sample_index,
                    )
                    chat, reply = b"", b""
                    if plan.chat is not None:
                        chat, reply = session.conversation.record(plan.chat, turn, chunk.message)
                    turns.append(StoredTurn(turn=turn, chat=chat, reply=reply))
                await self._store.add_turns(session.session_id, turns)
            except DeadlinePassed:
                raise  # the store may still write the turns
            except BaseException:
                for go_back in undo:
                    go_back()
                raise
        session.set(session.stored)  # wakes the watchers of the session

    async def _chunks(
        self, plan: _Plan, timeout: float, completions: dict[int, TurnText]
    ) -> AsyncGenerator[pb.TurnChunk, None]:
        """Yield the chunks of all samples; the last chunk of each has its message."""
        stop, whole = plan.request.sampling_params.stop, not plan.request.HasField("flush_interval")
        for index in range(plan.count):
            completions[index] = TurnText(index, self._tokenizer, stop)
        early: dict[int, list[pb.TurnChunk]] = {}
        finished = 0
        async with aclosing(self._sampler.sample(plan.turn, timeout=timeout)) as chunks:
            async for sampled in chunks:
                completion = completions[sampled.sample_index]
                if completion.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    continue
                chunk = completion.add(sampled)
                if completion.stopped:
                    plan.turn.stopped.add(completion.index)
                if completion.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    await self._finish(plan, completion, chunk)
                    finished += 1
                elif whole:
                    early.setdefault(completion.index, []).append(chunk)
                    continue
                for part in (*early.pop(completion.index, ()), chunk):
                    yield part
                if finished == plan.count:
                    return

    async def _finish(self, plan: _Plan, completion: TurnText, chunk: pb.TurnChunk) -> None:
        """Complete the last chunk of a sample."""
        self.turns += 1
        self.tokens += len(completion.ids)
        reason = completion.finish_reason
        if plan.request.WhichOneof("prompt") != "token_ids":
            chunk.prompt_token_count = len(plan.prompt_ids)
        if plan.request.WhichOneof("prompt") == "chat":
            chunk.message.CopyFrom(await self._message(plan, completion))
            if chunk.message.tool_calls and reason == pb.FINISH_REASON_STOP:
                reason = pb.FINISH_REASON_TOOL_CALLS
        chunk.finish_reason = reason

    async def _message(self, plan: _Plan, completion: TurnText) -> pb.Message:
        """Return the assistant's message; an engine parses tool calls and reasoning where its recipe names parsers."""
        message = pb.Message(role="assistant", content=completion.text)
        tools = plan.request.chat.tools
        infos = [engine.info for engine in self._engines.usable if engine.info]
        if not any((info.tool_parser and tools) or info.reasoning_parser for info in infos):
            return message
        text, wanted = completion.raw_text(), tools_json(tools)
        try:
            parsed = await self._engines.call(
                plan.turn.key,
                lambda client: client.parse_completion(text, tools_json=wanted, timeout=_PARSE_SECONDS),
                timeout=_PARSE_SECONDS,
            )
        except (InvalidInput, WrongState) as error:
            _log.info("completion could not be parsed: %s", error)
            return message
        except FourfoldError as error:
            raise Unavailable(
                f"no engine parsed the turn ({error.reason}); repeat the turn", reason="PARSER_FAILED", retry_after=0.5
            ) from error
        message.content, message.reasoning = parsed.content, parsed.reasoning
        for call in parsed.tool_calls:
            name = f"call_{uuid.uuid4().hex[:24]}"
            message.tool_calls.add(id=name, name=call.name, arguments_json=call.arguments_json)
        return message

    def _replay(self, session: Session, request: pb.GenerateRequest, turn: Turn) -> list[pb.TurnChunk]:
        """Return the chunks of a stored turn with its text, one for each policy version."""
        tokens, reply = turn.completion, session.conversation.reply_of(turn)
        completion = TurnText(turn.sample_index, self._tokenizer, request.sampling_params.stop)
        chunks, begin = list[pb.TurnChunk](), 0
        for span in tokens.version_spans:
            part = slice(begin, begin + span.token_count)
            begin += span.token_count
            sampled = rollout.SampleChunk(
                token_ids=pack_ints(tokens.token_ids[part]),
                logprobs=pack_floats(tokens.logprobs[part]),
                policy_version=span.policy_version,
            )
            # This only tells `add` that the text is complete; the turn's own finish reason follows below.
            if begin == tokens.token_ids.size:
                sampled.finish_reason = rollout.FINISH_REASON_STOP
            chunks.append(completion.add(sampled))
        chunks[-1].finish_reason = turn.finish_reason
        if request.WhichOneof("prompt") != "token_ids":
            chunks[-1].prompt_token_count = turn.prompt_token_count
        if reply is not None:
            chunks[-1].message.CopyFrom(reply)
        return chunks


def _stored_turns(session: Session, request: pb.GenerateRequest, digest: bytes) -> list[Turn]:
    """Return the stored turns of an earlier call with this request_id; raise if that call had another request."""
    turns = [turn for turn in session.trajectory.turns if turn.request_id == request.request_id]
    if turns and turns[0].request_sha256 != digest:
        # StaleEpoch, because its code is ABORTED, which AgentService documents for this case; no epoch is meant.
        raise StaleEpoch(
            f"request_id {request.request_id} belongs to another turn of this session; choose a new one",
            reason="REQUEST_ID_REUSED",
        )
    return turns


def _digest(request: pb.GenerateRequest) -> bytes:
    same = pb.GenerateRequest()
    same.CopyFrom(request)
    same.ClearField("flush_interval")
    return hashlib.sha256(same.SerializeToString(deterministic=True)).digest()


def _check_length(count: int, most: int, *, least: int = 1) -> None:
    """Raise InvalidInput unless a prompt has tokens, and leaves room for one in the context."""
    if not least <= count <= most:
        raise InvalidInput(
            f"the prompt has {count} tokens; it must have 1 to {most}: shorten the history", reason=CONTEXT_LENGTH
        )


def _check(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidInput(f"{what} is {value}; it must be in [{low}, {high}]")
