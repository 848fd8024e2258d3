"""Divides the episodes of an environment service among its worker processes, which `fourfold.workers.pool` keeps.

A process that dies or hangs costs its own episodes, which fail with a reason, and is replaced. A call that passes its
deadline is cancelled. If its thread goes on, the process takes no new episode and ends after its last one, because a
thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.workers.child import WorkerDied
from fourfold.workers.pool import Pool
from fourfold_reward.environment import wire
from fourfold_reward.environment.process import EnvironmentProcess, EnvironmentRaised
from fourfold_reward.environment.protocol import Action, Done, Endpoint, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.worker_sandbox import WorkerSandbox

_log = logging.getLogger(__name__)

_LOAD_SECONDS: Final = 120.0
_ANSWER_SECONDS: Final = 3.0  # a process whose event loop does not answer for this time is blocked


class EpisodeFailed(Exception):
    """An episode cannot go on. `reason` is UPPER_SNAKE_CASE."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The description of the environment by its workers."""

    agent: bool
    wants_text: bool
    tools: tuple[Mapping[str, str], ...]


class EnvironmentPool:
    """Worker processes. Use it from one event loop, in the main thread."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        processes: int,
        step_seconds: float,
        sandbox: WorkerSandbox,
        on_failure: Callable[[str], None],
    ) -> None:
        """Create a pool; `start` starts the processes. `on_failure` gets a message if a task ends because of a bug."""
        self.loaded = Loaded(agent=False, wants_text=False, tools=())
        self._spec, self._count, self._sandbox = spec, processes, sandbox
        self.step_seconds = step_seconds
        self._numbers = itertools.count()
        self._pool = Pool(self._launch, title="environment pool", on_failure=on_failure)
        self._retired: list[EnvironmentProcess] = []  # they take no new episodes
        self.deaths = 0

    async def start(self) -> None:
        """Start the processes. Raises ConfigError: the environment or a tool cannot be loaded."""
        try:
            await self._pool.start(self._count)
        except WorkerDied as error:
            raise ConfigError(f"[environment] cannot be loaded: {error}") from None

    async def close(self) -> None:
        """Stop the processes; running episodes fail."""
        await self._pool.close()
        await asyncio.gather(*(process.kill() for process in self._retired))

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [process.pid for process in (*self._pool.children, *self._retired)]

    def states(self) -> dict[str, int]:
        """Return the number of running processes by state."""
        return {"live": len(self._pool.children), "retired": len(self._retired)}

    async def open(self) -> Episode:
        """Begin an episode in the process with the fewest. Waits for a process; give the wait a deadline."""
        while not (free := [each for each in self._pool.free if not each.died.is_set()]):
            self._pool.filled.clear()
            await self._pool.filled.wait()
        process = min(free, key=lambda each: each.episodes)
        process.episodes += 1
        return Episode(self, process, next(self._numbers))

    async def release(self, process: EnvironmentProcess) -> None:
        """End an episode of a process; end the process if it was the last one of a retired process."""
        process.episodes -= 1
        if process in self._retired and not process.episodes:
            await process.end("its last episode ended, and a thread of an earlier one still runs")

    async def retire(self, process: EnvironmentProcess, cause: str) -> None:
        """Give a process no new episodes, and start another one in its place."""
        if process in self._retired or process.died.is_set():
            return
        self._retired.append(process)
        _log.warning("environment process retired: pid=%d cause=%s", process.pid, cause)
        self._pool.release(process)
        # At most one per slot: an environment that always hangs must not fill the memory.
        alive = [each for each in self._retired if not each.died.is_set()]
        if len(alive) > self._count:
            await alive[0].end("too many processes have threads that do not end")

    async def _launch(self) -> EnvironmentProcess:
        process = await EnvironmentProcess.launch(self._sandbox, step_seconds=self.step_seconds)
        process.begin()
        try:
            result = await process.call({"op": "load", "spec": asdict(self._spec)}, timeout=_LOAD_SECONDS)
            self.loaded = _loaded_from(result)
        except BaseException as error:
            await process.end(f"it could not load the environment: {error}")
            if isinstance(error, EnvironmentRaised | TimeoutError):
                raise WorkerDied(str(error) or f"loading took longer than {_LOAD_SECONDS:g} s") from None
            raise
        self._pool.tasks.add(self._watch(process))
        return process

    async def _watch(self, process: EnvironmentProcess) -> None:
        """Forget a process when it has died."""
        await process.died.wait()
        if process in self._retired:
            self._retired.remove(process)
            return
        self.deaths += 1
        _log.warning(
            "environment process died: pid=%d episodes=%d cause=%s", process.pid, process.episodes, process.death
        )
        self._pool.release(process)


def _loaded_from(data: Mapping[str, Any]) -> Loaded:
    try:
        tools = tuple(
            {key: str(tool[key]) for key in ("name", "description", "parameters_json")} for tool in data["tools"]
        )
        return Loaded(agent=data["agent"] is True, wants_text=data["wants_text"] is True, tools=tools)
    except (KeyError, TypeError) as error:
        raise WorkerDied(f"the worker sent an invalid description of the environment: {error!r}") from None


class Episode:
    """One episode in a process. Every method but `close` raises EpisodeFailed."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess, number: int) -> None:
        """Take a place in a process; use `EnvironmentPool.open`."""
        self._pool, self._process, self._number = pool, process, number
        self._open = True

    async def reset(self, task: Task) -> Observation | Done:
        """Begin the episode."""
        return self._result(await self._call("reset", task=wire.task_to(task)))

    async def step(self, action: Action) -> Observation | Done:
        """Hand over a turn."""
        return self._result(await self._call("step", action=wire.action_to(action)))

    async def run(self, task: Task, endpoint: Endpoint, *, timeout: float) -> Done:
        """Run a whole episode of an agent that calls the model itself.

        Raises TimeoutError: it took longer than `timeout` seconds; it is cancelled, and `truncate` may follow.
        """
        call = {"op": "run", "episode": self._number, "task": wire.task_to(task), "endpoint": asdict(endpoint)}
        with _failures():
            data = await self._process.call(call, timeout=timeout)
        result = self._result(data)
        if isinstance(result, Observation):
            raise EpisodeFailed("ENVIRONMENT_ERROR", "run returned an observation; it must return Done")
        return result

    async def truncate(self) -> Done | None:
        """Ask for the reward so far; None: the environment gives none."""
        data = await self._call("truncate")
        result = self._result(data) if data else None
        return result if isinstance(result, Done) else None

    async def call_tool(self, name: str, arguments: str) -> tuple[str, bool]:
        """Call a tool of a user. Return the text for the model, and whether name and arguments were valid."""
        data = await self._call("tool", name=name, arguments=arguments)
        text = data.get("text")
        if not isinstance(text, str) or len(text) > wire.MAX_CHARACTERS:
            raise EpisodeFailed("ENVIRONMENT_ERROR", f"tool {name!r} gave no text that fits")
        return text, data.get("valid") is True

    async def close(self) -> None:
        """End the episode and all its calls. Kill the process if it does not answer. Idempotent."""
        if not self._open:
            return
        self._open = False
        process, seconds = self._process, self._pool.step_seconds + _ANSWER_SECONDS
        closing = asyncio.ensure_future(process.call({"op": "close", "episode": self._number}, timeout=seconds))
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio logs unseen ones
        try:
            await asyncio.wait({closing}, timeout=_ANSWER_SECONDS)
            if not closing.done():  # the environment's own `close` may take long; the other episodes go on meanwhile
                await process.call({"op": "ping"}, timeout=_ANSWER_SECONDS)
            await self._retire_if_stuck(closing, seconds)
        except (WorkerDied, EnvironmentRaised):
            pass
        except TimeoutError:
            await process.end(f"it did not answer for {_ANSWER_SECONDS:g} s; an `async def` must not block")
        finally:
            closing.cancel()
            await self._pool.release(process)

    async def _retire_if_stuck(self, closing: asyncio.Future[dict[str, Any]], seconds: float) -> None:
        try:
            stuck = (await closing).get("stuck")
        except TimeoutError:
            await self._pool.retire(self._process, f"`close` of an environment took longer than {seconds:g} s")
            return
        if stuck:
            await self._pool.retire(self._process, "a call passed its deadline, and its thread still runs")

    async def _call(self, op: str, **values: Any) -> dict[str, Any]:
        seconds = self._pool.step_seconds
        try:
            with _failures():
                return await self._process.call({"op": op, "episode": self._number, **values}, timeout=seconds)
        except TimeoutError:
            raise EpisodeFailed(
                "STEP_TIMEOUT", f"{op} took longer than environment.step_seconds = {seconds:g}; raise it, or be faster"
            ) from None

    def _result(self, data: Mapping[str, Any]) -> Observation | Done:
        try:
            if isinstance(data.get("done"), Mapping):
                return wire.done_from(data["done"])
            if isinstance(data.get("observation"), Mapping):
                return wire.observation_from(data["observation"])
        except (ValueError, KeyError, TypeError) as error:
            raise EpisodeFailed("ENVIRONMENT_ERROR", f"the worker sent an invalid result: {error}") from None
        raise EpisodeFailed("ENVIRONMENT_ERROR", "the worker sent neither an observation nor an end")


class _failures:
    """Raises errors of a worker as EpisodeFailed."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, WorkerDied):
            raise EpisodeFailed("ENVIRONMENT_DIED", str(error)) from None
        if isinstance(error, EnvironmentRaised):
            raise EpisodeFailed("ENVIRONMENT_ERROR", str(error)) from None
