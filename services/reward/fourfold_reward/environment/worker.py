"""Runs environments: the program of a worker process.

    service --stdin: {"id", "op", "episode", ...}--> worker --stdout: {"id", "ok"} or {"id", "error"}--> service

Many episodes share the process. `async def` methods run on one event loop, others in threads, so that an episode that
waits does not hold up the others. The worker enters its sandbox before it loads a user's file. It has no time limits:
the service cancels an episode, and kills the worker if that does not help.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from fourfold import sandbox
from fourfold.host import proxies
from fourfold.text import MAX_ERROR, clean
from fourfold.workers import frames, inside
from fourfold_reward.environment import adapters, tools, wire
from fourfold_reward.environment.protocol import Done, Endpoint, Observation
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.worker import describe, place_of, report_once, type_name

_THREADS: Final = 256
_THREAD_SECONDS: Final = 1.0  # that a running call may still take when its episode is truncated
_PACKAGE: Final = str(Path(__file__).parent)


def main(arguments: list[str]) -> int:
    """Answer requests of the service, `arguments[0]`, in the sandbox policy `arguments[1]` (JSON; empty: none)."""
    requests, replies, policy = inside.begin(arguments)
    asyncio.run(_serve(Worker(policy), requests, replies))
    os._exit(0)  # threads of a user's program must not keep the process alive


async def _serve(worker: Worker, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests at the same time, in any order, until the service closes the pipe."""
    reader = asyncio.StreamReader(limit=wire.MAX_FRAME_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    running: set[asyncio.Task[None]] = set()

    async def reply(request: Mapping[str, Any]) -> None:
        replies.write(frames.pack({"id": request["id"], **await worker.answer(request)}))
        replies.flush()

    while True:
        try:
            request = await frames.receive(reader)
        except asyncio.IncompleteReadError:
            os._exit(0)
        task = asyncio.create_task(reply(request))
        running.add(task)
        task.add_done_callback(running.discard)


@dataclass(slots=True)
class _Episode:
    environment: Any
    work: set[asyncio.Task[Any]] = field(default_factory=set)
    threads: int = 0  # calls of the user's program that run in a thread now


class Worker:
    """Holds the episodes of one process."""

    def __init__(self, policy: sandbox.Policy | None = None) -> None:
        """Start in the sandbox `policy` without an environment; the first request loads one."""
        self._policy = policy
        self._factory = adapters.Factory(make=object)
        self._tools: dict[str, tools.Tool] = {}
        self._episodes: dict[int, _Episode] = {}
        self._threads = ThreadPoolExecutor(_THREADS)
        self._reported: set[str] = set()

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a request. Exceptions of a user's program are caught here and nowhere else."""
        try:
            if self._policy is not None:
                sandbox.allow_cpu(self._policy.cpu_seconds)
            match request["op"]:
                case "load":
                    return {"ok": await self._load(EnvironmentSpec(**request["spec"]))}
                case "close":
                    return {"ok": await self._close(request["episode"])}
                case "ping":
                    return {"ok": {}}
                case "tool":
                    return {"ok": await self._call_tool(request)}
            return {"ok": await self._act(request)}
        except BaseException as error:  # a user's program may also raise SystemExit or KeyboardInterrupt
            return {"error": self._explain(error)}

    async def _load(self, spec: EnvironmentSpec) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        # In a thread: importing a library takes seconds, and must not run the user's code on the loop.
        self._factory = await loop.run_in_executor(self._threads, adapters.load, spec)
        found = await loop.run_in_executor(self._threads, tools.load, spec)
        self._tools = {tool.name: tool for tool in found}
        return {
            "agent": self._factory.is_agent,
            "wants_text": self._factory.wants_text,
            "tools": [tool.describe() for tool in self._tools.values()],
        }

    async def _act(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call the environment of an episode, and return the observation or the end."""
        episode = self._episodes.get(request["episode"])
        if request["op"] == "truncate" and (episode is None or episode.environment is None):
            return {}  # it does not exist, or is being made
        if episode is None:
            episode = self._episodes[request["episode"]] = _Episode(None)
        task = asyncio.current_task()
        assert task is not None
        episode.work.add(task)
        try:
            if episode.environment is None:
                episode.environment = await self._call(episode, self._factory.make)
            result = await self._dispatch(episode, request)
        finally:
            episode.work.discard(task)
        if isinstance(result, Done):
            return {"done": wire.done_to(result)}
        if isinstance(result, Observation):
            return {"observation": wire.observation_to(result)}
        if result is None and request["op"] == "truncate":
            return {}
        raise TypeError(f"{request['op']} returned {result!r:.100}; it must return an Observation or Done")

    async def _dispatch(self, episode: _Episode, request: Mapping[str, Any]) -> Any:
        environment = episode.environment
        match request["op"]:
            case "reset":
                task = wire.task_from(request["task"])
                result = await self._call(episode, environment.reset, task)
                if isinstance(result, Observation) and isinstance(result.content, str):
                    return Observation(adapters.first_prompt(task, result.content))
                return result
            case "step":
                return await self._call(episode, environment.step, wire.action_from(request["action"]))
            case "run":
                endpoint = Endpoint(**request["endpoint"])
                proxies.bypass(urlsplit(endpoint.base_url).hostname or "")  # for any client of the agent
                return await self._call(episode, environment.run, wire.task_from(request["task"]), endpoint)
            case "truncate":
                await _cancel(episode)
                method = getattr(environment, "truncate", None)
                # `truncate` must not meet a thread that still runs the same object.
                return None if method is None or await _threads_remain(episode) else await self._call(episode, method)
        raise ValueError(f"unknown operation {request['op']!r:.50}")

    async def _call_tool(self, request: Mapping[str, Any]) -> dict[str, Any]:
        episode = self._episodes[request["episode"]]
        task = asyncio.current_task()
        assert task is not None
        episode.work.add(task)
        try:
            tool = self._tools[request["name"]]
            try:
                arguments = tool.parse(request["arguments"])
            except ValueError as error:
                return {"text": tools.error_text(str(error)), "valid": False}
            try:
                result = await self._call(episode, tool.function, **arguments)
            except Exception as error:  # the model sees the error, and may try again
                return {"text": tools.error_text(describe(error)), "valid": True}
            return {"text": tools.result_text(result), "valid": True}
        finally:
            episode.work.discard(task)

    async def _call(self, episode: _Episode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)

        def in_thread() -> Any:
            try:
                return function(*args, **kwargs)
            except StopIteration as error:  # cannot be raised into a Future
                raise RuntimeError("StopIteration") from error
            finally:
                episode.threads -= 1

        episode.threads += 1
        result = await asyncio.get_running_loop().run_in_executor(self._threads, in_thread)
        return await _wait_for(result) if inspect.isawaitable(result) else result

    async def _close(self, number: int) -> dict[str, Any]:
        """End an episode. Return how many threads still run its program; they cannot be stopped."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            return {"stuck": 0}
        await _cancel(episode)
        if not episode.threads and (method := getattr(episode.environment, "close", None)) is not None:
            try:
                await self._call(episode, method)
            except Exception as error:
                self._explain(error)
        return {"stuck": episode.threads + len(episode.work)}

    def _explain(self, error: BaseException) -> str:
        """Return the type, text and place of an error; print its traceback if type or place are new."""
        place = place_of(error, "")
        if not issubclass(type(error), asyncio.CancelledError):
            report_once(error, f"environment raised {type_name(error)} at {place}", self._reported)
        suffix = f" ({place})" if place else ""
        return clean(describe(error), MAX_ERROR - len(suffix)) + suffix


async def _cancel(episode: _Episode) -> None:
    """Cancel the other calls of an episode."""
    if others := episode.work - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=1)


async def _threads_remain(episode: _Episode) -> bool:
    """Wait a moment for the calls in threads, which cannot be cancelled; return whether some still run."""
    until = time.monotonic() + _THREAD_SECONDS
    while episode.threads and time.monotonic() < until:  # noqa: ASYNC110 - a thread cannot set an asyncio.Event
        await asyncio.sleep(0.01)
    return episode.threads > 0


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
