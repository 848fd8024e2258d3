"""Gathers the ranks that other machines hold, before rank 0's process loads its models.

engine thread    gather() --waits------------------------------------> all ranks attached --> OtherMachines
event loop           '-> OfferRendezvous, renewed     AttachRanks (rank_servicer.py) -^
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

from fourfold.coordinator.client import RendezvousClient
from fourfold.errors import ConfigError, FourfoldError
from fourfold.host.network import interface_of
from fourfold.model import folder
from fourfold.rpc.channel import open_channel, split_target
from fourfold.security.access import COORDINATOR
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold_trainer.ranks.placement import INTERFACE_VARIABLE
from fourfold_trainer.ranks.rank_processes import OtherMachines
from fourfold_trainer.ranks.remote_ranks import RemoteRanks
from fourfold_trainer.service.rank_servicer import RankServicer
from fourfold_trainer.zero.meeting import TcpMeeting

_log = logging.getLogger("fourfold.trainer")

_CALL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0


class MeetingPoint:
    """The meeting of the ranks of one trainer. Make it before the server of `host` starts."""

    def __init__(self, options: ServeOptions, host: ServiceHost) -> None:
        """Serve RankService. `options.ranks` are those of this machine, from 0 on."""
        assert options.ranks is not None
        self._options, self._host, self._held = options, host, options.ranks
        self._servicer = RankServicer()
        self._meeting: TcpMeeting | None = None  # its server lives as long as the process
        host.server.add(
            pb.DESCRIPTOR.services_by_name["RankService"], pb_grpc.add_RankServiceServicer_to_server, self._servicer
        )

    def gather(self, model_folder: Path, loop: asyncio.AbstractEventLoop) -> OtherMachines:
        """Wait for the ranks of all machines; called in the engine thread while `loop` serves.

        Raises:
            ConfigError: this machine's address has no network interface.
            DeadlinePassed: ranks are missing after trainer.attach_seconds.
        """
        trainer, address = self._options.config.trainer, split_target(self._host.target)[0]
        os.environ[INTERFACE_VARIABLE] = self._options.interface or interface_of(address)
        remote = RemoteRanks(
            self._held.stop,
            trainer.ranks,
            version=version("fourfold"),
            model_sha256=folder.fingerprint(model_folder),
            on_death=self._host.fatal,
        )
        self._servicer.remote = remote
        with ExitStack() as stack:
            offering = asyncio.run_coroutine_threadsafe(self._offer(remote.secret), loop)
            stack.callback(offering.cancel)
            attached = remote.wait(timeout=trainer.attach_seconds)
        self._meeting = TcpMeeting(address, remote.secret.hex(), trainer.ranks, timeout=trainer.step_timeout_seconds)
        return OtherMachines(remote=remote, attached=attached, meeting=self._meeting.address)

    async def _offer(self, secret: bytes) -> None:
        """Offer this machine's address at the coordinator, until cancelled."""
        channel = open_channel(self._options.coordinator, self._host.security, server=COORDINATOR)
        client = RendezvousClient(channel, peer=f"coordinator at {self._options.coordinator}")
        wait = 0.0
        try:
            while True:
                await asyncio.sleep(wait)
                try:
                    ttl = await client.offer(
                        member_id=self._options.member_id,
                        target=self._host.target,
                        secret=secret,
                        timeout=_CALL_SECONDS,
                    )
                    wait = ttl / 3
                except FourfoldError as error:
                    _log.warning("the ranks on other machines cannot find this one: %s", error)
                    wait = _RETRY_SECONDS
        finally:
            await channel.close()


def check_ranks(options: ServeOptions) -> None:
    """Refuse ranks that cannot meet, before anything is loaded."""
    config, ranks = options.config, options.ranks
    assert ranks is not None
    text = "--rank " + (f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start))
    if ranks.stop > config.trainer.ranks:
        raise ConfigError(
            f"{text}: the recipe has trainer.ranks = {config.trainer.ranks}; raise it, or pass lower ranks"
        )
    if not options.coordinator:
        raise ConfigError(
            f"{text}: the machines of a trainer find each other through the coordinator; add --coordinator"
        )
    if config.trainer.attach_seconds >= config.trainer.step_timeout_seconds:
        raise ConfigError(
            f"{text}: trainer.attach_seconds = {config.trainer.attach_seconds:g} must be below "
            f"trainer.step_timeout_seconds = {config.trainer.step_timeout_seconds:g}, which limits the whole start"
        )
    if config.critic_apart:
        raise ConfigError(
            f"{text}: a critic with ranks of its own (critic.ranks = {config.critic.ranks}) is on one machine with the "
            f"policy; set critic.ranks = 0, or leave --rank out"
        )
