"""Serves the gateways of a run; follows gateways that join, move and leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import grpc

from fourfold.rpc.channel import open_channel
from fourfold.security.access import Security
from fourfold.security.principal import Principal
from fourfold_reward.environment.gateways import Gateway
from fourfold_reward.environment.runner import Runner

_log = logging.getLogger(__name__)

_GATEWAY: Final = Principal("gateway")


def open_gateway(target: str, security: Security | None) -> grpc.aio.Channel:
    """Return a channel to a gateway."""
    channel: grpc.aio.Channel = open_channel(target, security, server=_GATEWAY)
    return channel


@dataclass(slots=True, eq=False)
class _Member:
    """A gateway of the run at its present address."""

    gateway: Gateway
    target: str
    channels: list[grpc.aio.Channel]  # to all addresses so far: the end of a channel would cancel the calls in flight
    leasing: asyncio.Task[None] | None = None  # None: it left the run
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that one, and earlier ones whose last episodes run


class RunGateways:
    """The gateways of a run, by member id.

    A gateway that is started again has the sessions of the one before, and in general another port. Its episodes go on
    at the new address: at the old one, each of them would hold its place until its time is over.
    """

    def __init__(self, runner: Runner, security: Security | None, *, incarnation: str = "") -> None:
        """Start without gateways; `incarnation` is ours as a member of the run."""
        self._runner, self._security, self._incarnation = runner, security, incarnation
        self._members: dict[str, _Member] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def update(self, targets: Mapping[str, str]) -> None:
        """Serve the gateways at these addresses, and no longer take tasks of others.

        Raises the error of a gateway that is no longer served because of a bug.
        """
        if self._error is not None:
            raise self._error
        for name, target in targets.items():
            member = self._members.get(name)
            if member is None or member.target != target:
                member = self._find(name, target, member)
            if member.leasing is None:
                member.leasing = asyncio.create_task(self._runner.serve(member.gateway))
                member.tasks.add(member.leasing)
                member.leasing.add_done_callback(partial(self._on_end, name, member))
        for name in self._members.keys() - targets.keys():
            if (leasing := self._members[name].leasing) is not None:
                _log.info("gateway left: gateway=%s", name)
                leasing.cancel()
                self._members[name].leasing = None
            if targets:  # the run gives its tasks to other gateways; if there is none, its next process continues them
                self._runner.give_up(self._members[name].gateway)

    async def close(self) -> None:
        """Stop leasing, and wait for the episodes that still run."""
        tasks = [task for member in self._members.values() for task in member.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._closing)

    def _find(self, name: str, target: str, member: _Member | None) -> _Member:
        _log.info("gateway found: gateway=%s target=%s", name, target)
        channel, peer = open_gateway(target, self._security), f"gateway at {target}"
        if member is None:
            gateway = Gateway(channel, peer, incarnation=self._incarnation)
            member = self._members[name] = _Member(gateway, target, [channel])
        else:
            member.gateway.move(channel, peer)
            member.target = target
            member.channels.append(channel)
        return member

    def _on_end(self, name: str, member: _Member, task: asyncio.Task[None]) -> None:
        member.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        if not member.tasks:
            self._members.pop(name, None)
            closing = asyncio.create_task(_close(member.channels))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def _close(channels: list[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()
