"""Keeps the worker processes of an environment service alive and divides the episodes among them.

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
from fourfold_reward.environment import wire
from fourfold_reward.environment.process import EnvironmentProcess, EnvironmentRaised
from fourfold_reward.environment.protocol import Action, Done, Endpoint, Observation, Task
from fourfold_reward.environment.spec import EnvironmentSpec
from fourfold_reward.worker_sandbox import WorkerSandbox

_log = logging.getLogger(__name__)

_LOAD_SECONDS: Final = 120.0
_ANSWER_SECONDS: Final = 3.0  # a process whose event loop does not answer for this time is blocked
_MAX_BACKOFF_SECONDS: Final = 30.0


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
        """Create a pool; `start` starts the processes. `on_failure` gets a message if a slot ends because of a bug."""
        self.loaded = Loaded(agent=False, wants_text=False, tools=())
        self._spec, self._count, self._sandbox = spec, processes, sandbox
        self.step_seconds = step_seconds
        self._on_failure = on_failure
        self._numbers = itertools.count()
        self._processes: list[EnvironmentProcess] = []
        self._changed = asyncio.Condition()
        self._slots: list[asyncio.Task[None]] = []
        self._closing = False
        self.deaths = 0

    async def start(self) -> None:
        """Start the processes. Raises ConfigError: the environment or a tool cannot be loaded."""
        try:
            first = await self._launch()
        except (EnvironmentRaised, WorkerDied, TimeoutError) as error:
            text = str(error) or f"loading took longer than {_LOAD_SECONDS:g} s"
            raise ConfigError(f"[environment] cannot be loaded: {text}") from None
        others = await asyncio.gather(*(self._launch() for _ in range(self._count - 1)), return_exceptions=True)
        for process in (first, *others):
            # A process that did not start is tried again.
            slot = asyncio.create_task(self._keep(None if isinstance(process, BaseException) else process))
            slot.add_done_callback(self._on_slot_end)
            self._slots.append(slot)

    async def close(self) -> None:
        """Stop the processes; running episodes fail."""
        self._closing = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(process.end("the service ends") for process in list(self._processes)))
        self._processes.clear()

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [process.pid for process in self._processes if not process.died.is_set()]

    def states(self) -> dict[str, int]:
        """Return the number of running processes by state."""
        alive = [process for process in self._processes if not process.died.is_set()]
        retired = sum(process.retired for process in alive)
        return {"live": len(alive) - retired, "retired": retired}

    async def open(self) -> Episode:
        """Begin an episode in the process with the fewest. Waits for a process; give the wait a deadline."""
        async with self._changed:
            while True:
                free = [p for p in self._processes if not p.retired and not p.died.is_set()]
                if free:
                    break
                await self._changed.wait()
            process = min(free, key=lambda p: p.episodes)
            process.episodes += 1
        return Episode(self, process, next(self._numbers))

    async def release(self, process: EnvironmentProcess) -> None:
        """End an episode of a process; end the process if it was the last one of a retired process."""
        process.episodes -= 1
        if process.retired and not process.episodes:
            await process.end("its last episode ended, and a thread of an earlier one still runs")

    async def retire(self, process: EnvironmentProcess, cause: str) -> None:
        """Give a process no new episodes, and start another one in its place."""
        if not process.retired and not process.died.is_set():
            process.retired = True
            _log.warning("environment process retired: pid=%d cause=%s", process.pid, cause)
            # At most one per slot: an environment that always hangs must not fill the memory.
            retired = [p for p in self._processes if p.retired and not p.died.is_set()]
            if len(retired) > self._count:
                await retired[0].end("too many processes have threads that do not end")
        await self._notify()

    async def _keep(self, first: EnvironmentProcess | None) -> None:
        """Keep one process alive and not retired."""
        process, failures = first, 0
        while True:
            if process is None:
                try:
                    process, failures = await self._launch(), 0
                except (EnvironmentRaised, WorkerDied, TimeoutError, OSError) as error:
                    failures += 1
                    seconds = min(2.0**failures / 2, _MAX_BACKOFF_SECONDS)
                    _log.error("environment process start failed: cause=%s retry_seconds=%g", error, seconds)
                    await asyncio.sleep(seconds)
                    continue
            async with self._changed:
                while not process.died.is_set() and not process.retired:
                    await self._changed.wait()  # `_watch` and `retire` notify
            process = None

    async def _launch(self) -> EnvironmentProcess:
        process = await EnvironmentProcess.launch(self._sandbox, step_seconds=self.step_seconds)
        process.begin()
        watch = asyncio.create_task(self._watch(process))
        try:
            result = await process.call({"op": "load", "spec": asdict(self._spec)}, timeout=_LOAD_SECONDS)
            self.loaded = _loaded_from(result)
        except BaseException as error:
            watch.cancel()
            await process.end(f"it could not load the environment: {error}")
            raise
        self._processes.append(process)
        await self._notify()
        return process

    async def _watch(self, process: EnvironmentProcess) -> None:
        """Remove a process when it has died."""
        await process.died.wait()
        if process in self._processes:
            self._processes.remove(process)
            if not process.retired and not self._closing:
                self.deaths += 1
                _log.warning(
                    "environment process died: pid=%d episodes=%d cause=%s",
                    process.pid,
                    process.episodes,
                    process.death,
                )
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _on_slot_end(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            _log.error("slot of the environment pool failed", exc_info=error)
            self._on_failure(f"the environment pool failed: {type(error).__name__}: {error}")


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
