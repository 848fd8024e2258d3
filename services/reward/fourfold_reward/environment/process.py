"""One worker process of an environment service, and the calls that run in it at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Self

from fourfold.workers import frames
from fourfold.workers.child import Child, WorkerDied
from fourfold_reward.environment import wire
from fourfold_reward.worker_sandbox import WorkerSandbox

_MODULE: Final = "fourfold_reward.environment.worker"


class EnvironmentProcess(Child):
    """A worker process that answers many requests at the same time."""

    @classmethod
    async def launch(cls, sandbox: WorkerSandbox, *, step_seconds: float) -> Self:
        """Start a process with the rights of users' functions."""
        rights = partial(sandbox.rights, builtin=False, timeout_seconds=step_seconds)
        return await cls.start(_MODULE, rights, frames.Frames(wire.MAX_FRAME_BYTES), purpose="reward-worker")

    def begin(self) -> None:
        """Read replies from now on. Call it once."""
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.death = ""
        self.died = asyncio.Event()
        self.episodes = 0
        self._reading = asyncio.create_task(self._take_replies())

    async def call(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request and return the result.

        Raises:
            TimeoutError: no reply within `timeout` seconds. Other requests go on.
            WorkerDied: the process ended or broke the protocol.
            EnvironmentRaised: the user's program raised an exception.
        """
        if self.died.is_set():
            raise WorkerDied(self.death)
        number, reply = next(self._ids), asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(timeout):
                self.send(frames.pack({"id": number, **request}))
                answer: dict[str, Any] = await reply
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise EnvironmentRaised(str(answer["error"]))
        result = answer.get("ok")
        if not isinstance(result, dict):
            raise WorkerDied("the worker sent a reply without a result")
        return result

    async def end(self, cause: str) -> None:
        """Kill the process; every waiting call raises WorkerDied with `cause`."""
        self._fail(cause)
        self._reading.cancel()
        await super().kill()

    async def kill(self) -> None:
        """Kill the process, as the pool does when the service ends."""
        await self.end("the service ends")

    async def _take_replies(self) -> None:
        try:
            while True:
                for reply in map(frames.unpack, await self.receive()):
                    waiting = self._waiting.get(reply["id"]) if isinstance(reply.get("id"), int) else None
                    if waiting is not None and not waiting.done():  # a late reply of a call that timed out has none
                        waiting.set_result(reply)
        except WorkerDied as error:
            cause = str(error)
        except ValueError as error:
            cause = f"the worker broke the protocol: {error}"
        self._fail(cause)
        await super().kill()

    def _fail(self, cause: str) -> None:
        if self.died.is_set():
            return
        self.death = cause
        self.died.set()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(WorkerDied(cause))


class EnvironmentRaised(Exception):
    """The user's program raised an exception. The text is its type, message and place."""
