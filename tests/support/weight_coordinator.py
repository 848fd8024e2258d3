"""Runs the weight updates of a coordinator with its real broker, and lets a test act between its calls.

The calls are intercepted where they leave the process, by their names in the contract, so that it does not matter how
the coordinator makes them. It runs in the test's process, or, to be killed, in one of its own: `python -m
tests.support.weight_coordinator TASK.json`, which settles a version and has one `Meeting` that ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, Self
from unittest import mock

import grpc
import numpy as np

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1.rollout_control_service_pb2_grpc import RolloutControlServiceStub
from fourfold.rpc.channel import CLIENT_OPTIONS, call, open_channel
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1.trainer_weight_service_pb2_grpc import TrainerWeightServiceStub
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.routing.trainer_session import TrainerSession
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.ledger import Ledger
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.weights import backends, fan_out, update
from fourfold_coordinator.weights.broker import WeightBroker
from fourfold_coordinator.weights.status import WeightPlaneStatus

_log = logging.getLogger(__name__)
UPDATE_SECONDS: Final = float(os.environ.get("FOURFOLD_FAULTS_SECONDS", "6"))
_ABORT_SECONDS: Final = UPDATE_SECONDS * 2 / 3
"""Longest time of an abort, in place of 15 s: tests wait for it where a process does not answer."""
MIXED: Final = "auto"
"""Backend of a recipe for GPUs that cannot read each other's memory: cuda_ipc on one GPU, nccl between two."""
Moment = Literal["before", "during", "after"]
"""Of a call: before it is sent; while it is under way, without holding it up; after it was answered well."""
Action = Callable[[], Awaitable[None]]


class Tap:
    """Intercepts calls: runs actions before, during or after them, and records them."""

    def __init__(self) -> None:
        self._actions: dict[tuple[Moment, str, str], Action] = {}
        self._running: set[asyncio.Task[None]] = set()
        self.seen: list[tuple[str, str]] = []
        """Member and method of every call that was sent."""
        self.requests: dict[tuple[str, str], Any] = {}
        """The last request of each."""

    def on(self, moment: Moment, member: str, method: str, action: Action) -> None:
        """Do something at the next such call, once."""
        self._actions[moment, member, method] = action

    @property
    def pending(self) -> list[tuple[Moment, str, str]]:
        """The calls whose actions have not run yet."""
        return list(self._actions)

    async def reach(self, moment: Moment, member: str, method: str) -> None:
        """Run the action of this moment, if there is one."""
        action = self._actions.pop((moment, member, method), None)
        if action is None:
            return
        if moment != "during":
            return await action()
        task = asyncio.ensure_future(action())
        self._running.add(task)

    async def finish(self) -> None:
        """Wait for the actions that were started during calls."""
        await asyncio.gather(*self._running)


class _Interceptor(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, tap: Tap, member: str) -> None:
        self._tap, self._member = tap, member

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        path = details.method if isinstance(details.method, str) else details.method.decode()
        method = path.rpartition("/")[2]
        await self._tap.reach("before", self._member, method)
        self._tap.seen.append((self._member, method))
        self._tap.requests[self._member, method] = request
        call = await continuation(details, request)
        await self._tap.reach("during", self._member, method)
        try:
            code = await call.code()
        except asyncio.CancelledError:
            call.cancel()  # waiting for a call's code does not cancel the call
            raise
        if code == grpc.StatusCode.OK:
            await self._tap.reach("after", self._member, method)
        return call


class Coordinator:
    """The part of a coordinator that updates weights. Use it as an async context manager."""

    def __init__(self, config: Config, members: Sequence[Member], ledger: Path) -> None:
        """Register the members; more may `join`."""
        self.tap = Tap()
        self._names = {member.target: member.member_id for member in members}
        self._channels: list[grpc.aio.Channel] = []
        tokenizer = members[0].tokenizer_sha256
        self._registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=tokenizer, ttl=1e6)
        self.router = Router(
            self._registry,
            open_channel=self._open,
            wait_seconds=config.retry.service_wait_seconds,
        )
        board = RunBoard(name=config.name, step_count=config.steps)
        self.session = TrainerSession(self.router, config, board)
        self._ledger = Ledger(ledger)
        probe = np.random.default_rng(7).integers(3, 500, 24).astype(np.int32)
        self.broker = WeightBroker(
            config,
            self.router,
            self.session,
            self._ledger,
            disk=DiskWriter(ledger.parent, board, wait_seconds=config.retry.service_wait_seconds),
            probe_ids=probe,
            status=WeightPlaneStatus(),
        )
        self._tokens: dict[str, bytes] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._patched = ExitStack()
        self._patched.enter_context(mock.patch.object(update, "_ABORT_SECONDS", _ABORT_SECONDS))
        if config.weights.backend == MIXED:
            self._patched.enter_context(mock.patch.object(update, "group_by_backend", _without_peer_access))
        for member in members:
            self.join(member)

    async def __aenter__(self) -> Self:
        self._tasks.append(asyncio.create_task(self.router.run()))
        await self.session.connect()
        engines = [r for r in self._registry.members() if r.role == Role.ROLE_ROLLOUT]
        await self.router.wait_for({Role.ROLE_ROLLOUT: len(engines)})
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ledger.close()
        self._patched.close()

    def keep(self) -> None:
        """From now on, update engines that join late or failed."""
        self._tasks.append(asyncio.create_task(self.broker.run()))

    def join(self, member: Member) -> None:
        """Take a member up, or a new process of one."""
        self._names[member.target] = member.member_id
        self._tokens[member.member_id] = self._registry.register(member)

    def leave(self, member_id: str) -> None:
        """Let a member go."""
        self._registry.deregister(self._tokens[member_id])

    async def settle(self, version: int) -> None:
        """Bring every engine to the trainer's `version`."""
        await self.broker.resync(version, step=1)

    async def publish(self, version: int) -> None:
        """The same, of engines that this coordinator knows."""
        async with self.broker.lock:
            await self.broker.publish(version, step=1)

    def versions(self) -> Mapping[str, int]:
        """Return the versions of the engines that get requests, by member id."""
        replicas = self.router.replicas(Role.ROLE_ROLLOUT)
        return {r.member.member_id: r.version for r in replicas if not r.unusable_reason}

    def _open(self, member: Member) -> grpc.aio.Channel:
        tap = _Interceptor(self.tap, self._names[member.target])
        return grpc.aio.insecure_channel(member.target, options=CLIENT_OPTIONS, interceptors=[tap])


def _without_peer_access(
    wanted: str,
    trainer: weight.GetManifestResponse,
    engines: Sequence[fan_out.DescribedEngine],
    *,
    host: str,
    interface: str,
) -> list[backends.BackendGroup]:
    """Choose backends as where no GPU reads another one's memory."""
    trainer.reachable_device_uuids[:] = trainer.device_uuids
    return backends.group_by_backend(wanted, trainer, engines, host=host, interface=interface)


async def ends_in(seconds: float, work: Awaitable[None]) -> None:
    """Await an update that may fail but must end in time."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except FourfoldError as error:
        _log.info("the update ended with %s: %s", type(error).__name__, error)


async def ends_well(seconds: float, work: Awaitable[None]) -> None:
    """Await an update that must succeed."""
    async with asyncio.timeout(seconds):
        await work


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something has come about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def after(seconds: float, *actions: tuple[Callable[[int], None], int]) -> Callable[[], Awaitable[None]]:
    """Return an action that waits, then signals processes one after the other."""

    async def act() -> None:
        await asyncio.sleep(seconds)
        for action, pid in actions:
            action(pid)

    return act


async def repeat(target: str, tap: Tap, member: str, method: str, *, epochs_earlier: int = 0) -> None:
    """Make the last such call to a member once more, perhaps under an earlier epoch."""
    trainer = member.startswith("trainer")
    request = tap.requests.get((member, method))
    if request is None:  # an abort: there was no need for it
        abort = weight.AbortWeightsRequest if trainer else control.AbortWeightsRequest
        request = abort(epoch=tap.requests[member, "OpenWeights"].epoch)
    request = copy(request)
    request.epoch -= epochs_earlier
    channel = open_channel(target, None)
    stub = (TrainerWeightServiceStub if trainer else RolloutControlServiceStub)(channel)
    try:
        await call(getattr(stub, method), request, timeout=5.0, peer=member)
    finally:
        await channel.close()


async def _settle(task: dict[str, Any]) -> None:
    """Settle a version, and end by SIGKILL at a call."""

    async def die() -> None:
        await asyncio.sleep(task["seconds"])
        os.kill(os.getpid(), signal.SIGKILL)

    async def freeze() -> None:
        os.kill(task["stop"], signal.SIGSTOP)

    members = [Member(**{**m, "tokenizer_sha256": bytes.fromhex(m["tokenizer_sha256"])}) for m in task["members"]]
    config = configuration.load(Path(task["recipe"]))
    async with Coordinator(config, members, Path(task["ledger"])) as coordinator:
        tap, (moment, member, method) = coordinator.tap, task["die"]
        tap.on(moment, member, method, die)
        if task["stop"]:
            tap.on("before", "trainer-0", "SendWeights", freeze)
        if task["hold"]:
            tap.on("before", task["hold"], method, asyncio.Event().wait)  # type: ignore[arg-type]
        await coordinator.settle(task["version"])


def write_task(path: Path, members: Sequence[Member], **fields: Any) -> None:
    """Write what `python -m tests.support.weight_coordinator` does; see `_settle`."""
    plain = [{**asdict(m), "tokenizer_sha256": m.tokenizer_sha256.hex()} for m in members]
    path.write_text(json.dumps({"stop": 0, "hold": "", "seconds": 0.0, **fields, "members": plain}))


if __name__ == "__main__":
    asyncio.run(_settle(json.loads(Path(sys.argv[1]).read_text())))
