"""Runs episodes: leases tasks of the gateways, opens a session for each, and moves turns between model and environment.

    NextTask -> OpenSession -> reset -> { Generate -> tools or step } ... -> CloseSession

An environment service is an agent like any other. An episode that fails is abandoned with a reason, and its group goes
on without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import FourfoldError, InvalidInput, NotFound, WrongState
from fourfold.text import clean
from fourfold_reward.columns import take_answer
from fourfold_reward.environment.gateways import AgentGateway, Turn, metrics_of, session_url
from fourfold_reward.environment.pool import EnvironmentPool, Episode, EpisodeFailed
from fourfold_reward.environment.protocol import (
    Action,
    Done,
    Endpoint,
    Message,
    Observation,
    RawText,
    Task,
    TokenIds,
    ToolCall,
)
from fourfold_reward.environment.python_tool import DESCRIPTION, PythonTool

_log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 60.0
_ERROR_PAUSE_SECONDS: Final = 2.0
# Before the run closes the group of a task: for the reward of a truncated episode, and for its way to the run.
_HAND_IN_SECONDS: Final = 10.0
_IDLE_MARGIN_SECONDS: Final = 60
_MAX_IDLE_SECONDS: Final = 3600
_MAX_CALLS_PER_TURN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of one episode, from the recipe."""

    max_turns: int
    max_new_tokens: int
    episode_seconds: float
    scores: bool
    """Whether the run's reward service scores sessions (agents.reward)."""
    tool_calls: str = "free"
    """environment.tool_calls."""


class _Truncated(Exception):
    """A limit ended the episode."""


class Runner:
    """Runs the episodes of one service."""

    def __init__(
        self, pool: EnvironmentPool, limits: EpisodeLimits, *, concurrent: int, python: PythonTool | None = None
    ) -> None:
        """Take a started pool. `concurrent` is the number of episodes at a time; `python` is the builtin tool."""
        self._pool, self._limits, self._python = pool, limits, python
        self._slots = asyncio.Semaphore(concurrent)
        self._running: dict[asyncio.Task[None], AgentGateway] = {}
        self._given_up: set[asyncio.Task[None]] = set()  # episodes of gateways that left
        self.outcomes: Counter[str] = Counter()  # DONE, TRUNCATED, or the reason of a failure
        self.draining = False

    @property
    def running(self) -> int:
        """Number of episodes that run now."""
        return len(self._running)

    async def serve(self, gateway: AgentGateway) -> None:
        """Lease tasks of one gateway and run them, until cancelled; return after the last of their episodes.

        Errors of the gateway are logged.
        """
        own: set[asyncio.Task[None]] = set()
        try:
            await self._lease(gateway, own)
        finally:
            if own:  # they still call the gateway, whose channel the caller closes
                await asyncio.wait(own)

    async def _lease(self, gateway: AgentGateway, own: set[asyncio.Task[None]]) -> None:
        reported = ""
        while not self.draining:
            await self._slots.acquire()
            try:
                info = await gateway.get_info()
                task = await gateway.next_task()
                reported = ""
            except FourfoldError as error:
                self._slots.release()
                if error.message != reported:
                    reported = error.message
                    _log.warning("no task from the gateway: cause=%s", error.message)
                await asyncio.sleep(error.retry_after or _ERROR_PAUSE_SECONDS)
                continue
            except BaseException:
                self._slots.release()
                raise
            if task is None or self.draining:  # the lease of a task that came too late ends by itself
                self._slots.release()
                continue
            episode = asyncio.create_task(self._run(gateway, info, task))
            self._running[episode] = gateway
            own.add(episode)
            episode.add_done_callback(own.discard)
            episode.add_done_callback(self._on_end)

    async def drain(self) -> None:
        """Abandon the running episodes, so that the run does not wait for them."""
        self.draining = True
        episodes = list(self._running)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def give_up(self, gateway: AgentGateway) -> None:
        """End the episodes of a gateway that has left the run: other agents attempt their tasks."""
        for episode, its_gateway in self._running.items():
            if its_gateway is gateway and episode not in self._given_up:
                self._given_up.add(episode)
                episode.cancel()

    def _on_end(self, episode: asyncio.Task[None]) -> None:
        del self._running[episode]
        self._given_up.discard(episode)
        self._slots.release()
        if not episode.cancelled() and (error := episode.exception()) is not None:
            _log.error("episode failed", exc_info=error)

    async def _run(self, gateway: AgentGateway, info: pb.GetInfoResponse, leased: pb.Task) -> None:
        """Run one episode and close its session, whatever happens."""
        seconds = self._limits.episode_seconds
        if leased.HasField("time_left"):
            left = leased.time_left.ToTimedelta().total_seconds()
            seconds = min(seconds, left - min(_HAND_IN_SECONDS, left / 10))
        loop = asyncio.get_running_loop()
        play = Play(self._pool, self._limits, self._python, gateway, info, leased, until=loop.time() + seconds)
        outcome = pb.CloseSessionRequest(session_id=play.session_id, abandon_reason="INTERNAL")
        given_up = False
        try:
            outcome = await play.outcome()
        except asyncio.CancelledError:
            given_up = asyncio.current_task() in self._given_up
            outcome.abandon_reason = "GATEWAY_LEFT" if given_up else "ENVIRONMENT_DRAINED"
            if not (self.draining or given_up):
                raise
        finally:
            await asyncio.shield(self._end(gateway, outcome, opened=play.opened and not given_up))

    async def _end(self, gateway: AgentGateway, outcome: pb.CloseSessionRequest, *, opened: bool) -> None:
        """Close the session of an episode, if it was opened, and count the episode."""
        ended = await self._close(gateway, outcome) if opened else outcome
        self.outcomes[ended.abandon_reason or ("TRUNCATED" if ended.truncated else "DONE")] += 1

    async def _close(self, gateway: AgentGateway, outcome: pb.CloseSessionRequest) -> pb.CloseSessionRequest:
        """Close a session; return its outcome."""
        until = asyncio.get_running_loop().time() + _CLOSE_SECONDS
        try:
            await gateway.close_session(outcome, until=until)
        except FourfoldError as error:  # the session expires, and the task is leased again
            if outcome.abandon_reason and isinstance(error, NotFound):
                return outcome  # the session was not open yet
            _log.warning("session not closed: session=%s cause=%s", outcome.session_id, error.message)
            if not outcome.abandon_reason and isinstance(error, InvalidInput | WrongState):
                # An open session would keep its task until it has been idle for longer than an episode.
                refused = pb.CloseSessionRequest(session_id=outcome.session_id, abandon_reason="ENVIRONMENT_ERROR")
                return await self._close(gateway, refused)
        return outcome


@dataclass(slots=True)
class _Prompt:
    """The prompt of the next turn: a conversation, or token ids."""

    messages: list[pb.Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    whole: bool = False  # the environment gives the whole prompt as token ids


class Play:
    """One episode."""

    def __init__(
        self,
        pool: EnvironmentPool,
        limits: EpisodeLimits,
        python: PythonTool | None,
        gateway: AgentGateway,
        info: pb.GetInfoResponse,
        leased: pb.Task,
        *,
        until: float,
    ) -> None:
        """Prepare an attempt at a leased task that ends at the loop's time `until`."""
        self.session_id = uuid.uuid4().hex
        self.opened = False
        self._pool, self._limits, self._python, self._gateway, self._info = pool, limits, python, gateway, info
        self._leased, self._until = leased, until
        self._turns = 0
        self._calls = self._valid_calls = 0
        self._prompt = _Prompt()
        self._key = ""

    async def outcome(self) -> pb.CloseSessionRequest:
        """Run the episode and return how to close its session. An error becomes a reason to abandon it."""
        try:
            async with asyncio.timeout_at(self._until):
                episode = await self._pool.open()
        except TimeoutError:
            return self._abandon("NO_ENVIRONMENT", "no environment process started in time")
        try:
            await self._open_session()
            return self._close_with(await self._play(episode))
        except EpisodeFailed as error:
            return self._abandon(error.reason, str(error))
        except FourfoldError as error:
            return self._abandon("GATEWAY_ERROR", error.message)
        finally:
            await episode.close()

    async def _open_session(self) -> None:
        idle = min(int(self._limits.episode_seconds) + _IDLE_MARGIN_SECONDS, _MAX_IDLE_SECONDS)
        request = pb.OpenSessionRequest(
            session_id=self.session_id, task_id=self._leased.task_id, idle_timeout=Duration(seconds=idle)
        )
        self.opened = True  # it may be so if this call is cancelled
        try:
            self._key = (await self._gateway.open(request, until=self._until)).session_key
        except FourfoldError:
            self.opened = False
            raise

    async def _play(self, episode: Episode) -> Done:
        """Run the episode to its end, or to a limit."""
        try:
            async with asyncio.timeout_at(self._until):
                task = await self._task()
                if self._pool.loaded.agent:
                    return await self._run_agent(episode, task)
                result = await episode.reset(task)
                while isinstance(result, Observation):
                    await self._observe(result)
                    result = await self._turn(episode)
                return result
        except (TimeoutError, _Truncated):
            done = await episode.truncate()
        if done is None:
            raise EpisodeFailed("TRUNCATED", "a limit ended the episode, and the environment gives no reward for it")
        return Done(done.reward, done.turn_rewards, done.metrics, truncated=True)

    async def _run_agent(self, episode: Episode, task: Task) -> Done:
        url = session_url(self._info, self.session_id)
        endpoint = Endpoint(base_url=url, api_key=self._key, model=self._info.model)
        seconds = self._until - asyncio.get_running_loop().time()
        return await episode.run(task, endpoint, timeout=max(seconds, 0.001))

    async def _task(self) -> Task:
        leased = self._leased
        try:
            metadata = json.loads(leased.metadata_json or "{}")
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            raise EpisodeFailed("BAD_TASK", "metadata_json of the task is not a JSON object")
        text = leased.text
        if self._pool.loaded.wants_text and leased.messages:
            text = await self._gateway.render(pb.Chat(messages=leased.messages), until=self._until)
        return Task(
            task_id=leased.task_id,
            group_id=leased.group_id,
            sample_index=leased.sample_index,
            group_size=leased.group_size,
            messages=tuple(map(_message_from, leased.messages)),
            text=text,
            answer=leased.answer,
            answer_value=take_answer(metadata, leased.answer),
            metadata=metadata,
            evaluation=leased.evaluation,
            seed=leased.seed,
        )

    async def _observe(self, observation: Observation) -> None:
        """Add an observation to the prompt. Raises EpisodeFailed: its kind differs from earlier ones."""
        prompt, content = self._prompt, observation.content
        mixed = EpisodeFailed("ENVIRONMENT_ERROR", "an episode has messages, raw text or token ids; not two of these")
        match content:
            case RawText(text):
                if prompt.messages or prompt.whole:
                    raise mixed
                prompt.token_ids += await self._gateway.tokenize(text, until=self._until)
            case TokenIds(ids):
                if prompt.messages or (prompt.token_ids and not prompt.whole):
                    raise mixed
                prompt.token_ids, prompt.whole = list(ids), True
            case messages:
                if prompt.token_ids:
                    raise mixed
                assert not isinstance(messages, str)  # `wire` makes a text a message
                prompt.messages += map(_message_to, messages)

    async def _turn(self, episode: Episode) -> Observation | Done:
        """Sample turns until one goes to the environment: the service answers tool calls itself."""
        while True:
            turn = await self._generate()
            calls = list(turn.message.tool_calls)
            if not calls or self._prompt.token_ids or not self._has_tools:
                action = Action(
                    text=turn.message.content if self._prompt.messages else turn.text,
                    message=_message_from(turn.message),
                    turn=self._turns - 1,
                    truncated=turn.truncated,
                    token_ids=turn.token_ids if self._prompt.whole else (),
                )
                return await episode.step(action)
            for number, tool_call in enumerate(calls):
                if number < _MAX_CALLS_PER_TURN:
                    text = await self._call_tool(episode, tool_call)
                else:
                    text = f"Error: a turn may have at most {_MAX_CALLS_PER_TURN} calls"
                self._prompt.messages.append(
                    pb.Message(role="tool", content=text, name=tool_call.name, tool_call_id=tool_call.id)
                )

    async def _generate(self) -> Turn:
        """Sample one turn and add it to the prompt. Raises _Truncated: no turn or no token is left."""
        prompt = self._prompt
        if self._turns >= self._limits.max_turns or len(prompt.token_ids) >= self._info.max_context_tokens:
            raise _Truncated
        request = pb.GenerateRequest(session_id=self.session_id, request_id=f"turn-{self._turns}")
        request.sampling_params.max_tokens = self._limits.max_new_tokens
        if prompt.token_ids:
            left = self._info.max_context_tokens - len(prompt.token_ids)
            request.sampling_params.max_tokens = min(self._limits.max_new_tokens, left)
            request.token_ids.ids.extend(prompt.token_ids)
        else:
            request.chat.messages.extend(prompt.messages)
            request.chat.tools.extend(self._tools())
            if self._limits.tool_calls != "free":
                grammar = request.sampling_params.grammar.tool_calls
                grammar.required = self._limits.tool_calls == "required" and not self._calls
        try:
            turn = await self._gateway.generate(request, until=self._until)
        except InvalidInput as error:
            if not self._turns:
                raise EpisodeFailed("PROMPT_REFUSED", error.message) from None
            _log.debug("turn refused: session=%s cause=%s", self.session_id, error.message)
            raise _Truncated from None  # the observations filled the context
        self._turns += 1
        if prompt.token_ids:
            prompt.token_ids += turn.token_ids
        else:
            prompt.messages.append(turn.message)
        return turn

    @property
    def _has_tools(self) -> bool:
        return bool(self._pool.loaded.tools) or self._python is not None

    def _tools(self) -> list[pb.Tool]:
        described = [*self._pool.loaded.tools, *([DESCRIPTION] if self._python is not None else [])]
        return [pb.Tool(**tool) for tool in described]

    async def _call_tool(self, episode: Episode, tool_call: pb.ToolCall) -> str:
        """Return the result of a call as text; errors of the call are text for the model, too."""
        self._calls += 1
        known = {tool["name"] for tool in self._pool.loaded.tools}
        if tool_call.name in known:
            text, valid = await episode.call_tool(tool_call.name, tool_call.arguments_json)
        elif self._python is not None and tool_call.name == DESCRIPTION["name"]:
            text, valid = await self._python.call(tool_call.arguments_json)
        else:
            names = ", ".join(tool.name for tool in self._tools())
            text, valid = f"Error: there is no tool {clean(tool_call.name, 64)!r}; the tools are: {names}", False
        self._valid_calls += valid
        return text

    def _close_with(self, done: Done) -> pb.CloseSessionRequest:
        if not self._turns and not self._pool.loaded.agent:
            reason = "TRUNCATED" if done.truncated else "ENVIRONMENT_ERROR"
            raise EpisodeFailed(reason, "the episode ended before the first turn, so that there is nothing to train on")
        metrics: dict[str, float] = {"turns": float(self._turns)}
        if self._has_tools:
            metrics |= {"tool_calls": float(self._calls), "tool_calls_valid": float(self._valid_calls)}
        request = pb.CloseSessionRequest(session_id=self.session_id, truncated=done.truncated)
        request.metrics.update(metrics_of({**metrics, **done.metrics}))
        if done.reward is not None:
            request.reward = done.reward
        elif self._limits.scores:
            request.score = True
        else:
            raise EpisodeFailed("NO_REWARD", 'Done(None) asks for a score, and agents.reward = "agent"')
        if not self._pool.loaded.agent and any(turn >= self._turns for turn in done.turn_rewards):
            raise EpisodeFailed("ENVIRONMENT_ERROR", f"turn_rewards names a turn that is not below {self._turns}")
        for turn, reward in done.turn_rewards.items():
            request.turn_rewards.add(turn_index=turn, reward=reward)
        return request

    def _abandon(self, reason: str, message: str) -> pb.CloseSessionRequest:
        _log.warning("episode abandoned: task=%s reason=%s cause=%s", self._leased.task_id, reason, message)
        return pb.CloseSessionRequest(session_id=self.session_id, abandon_reason=reason)


def _message_from(message: pb.Message) -> Message:
    calls = tuple(ToolCall(c.id, c.name, c.arguments_json) for c in message.tool_calls)
    return Message(message.role, message.content, message.name, calls, message.tool_call_id, message.reasoning)


def _message_to(message: Message) -> pb.Message:
    calls = [pb.ToolCall(id=c.id, name=c.name, arguments_json=c.arguments_json) for c in message.tool_calls]
    return pb.Message(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )
