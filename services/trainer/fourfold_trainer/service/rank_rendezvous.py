"""Gathers the ranks that other machines hold, before rank 0's process loads its models.

engine thread    gather() --waits------------------------------------> all ranks attached --> OtherMachines
event loop           '-> OfferRendezvous, renewed     AttachRanks (rank_servicer.py) -^

With trainer.min_ranks a trainer begins again by itself, with the ranks that are there, when a machine was lost, and
after a checkpoint when more ranks could train. The program then replaces itself (exec): a collective that never returns
and the state of NCCL, gloo and DeepSpeed end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, NoReturn

from fourfold.coordinator.client import RendezvousClient
from fourfold.errors import ConfigError, FourfoldError
from fourfold.model import folder
from fourfold.rpc.channel import open_channel, split_target
from fourfold.security.access import COORDINATOR
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.trainer.v1 import rank_service_pb2 as pb
from fourfold.trainer.v1 import rank_service_pb2_grpc as pb_grpc
from fourfold_trainer.ranks.placement import INTERFACE_VARIABLE, collective_interface
from fourfold_trainer.ranks.rank_processes import OtherMachines
from fourfold_trainer.ranks.remote_ranks import RemoteRanks
from fourfold_trainer.service.rank_servicer import RankServicer
from fourfold_trainer.zero.rendezvous_store import TcpRendezvous

_log = logging.getLogger("fourfold.trainer")

_CALL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
# A collective breaks a moment before the stream of the machine that is lost.
_LOSS_SECONDS: Final = 5.0
# In the environment of a program that replaced itself: how often it did so after a failure, without a checkpoint since.
_FAILURES_VARIABLE: Final = "FOURFOLD_TRAINER_FAILURES"


class RankRendezvous:
    """The rendezvous of the ranks of one trainer. Make it before the server of `host` starts."""

    def __init__(self, options: ServeOptions, host: ServiceHost) -> None:
        """Serve RankService. `options.ranks`: the ranks of this machine, from 0."""
        assert options.ranks is not None
        self._options, self._host, self._held = options, host, options.ranks
        self.servicer = RankServicer()
        self._remote: RemoteRanks | None = None
        self._growing = False
        self._failures = int(os.environ.get(_FAILURES_VARIABLE, "0"))
        self._store: TcpRendezvous | None = None  # its server lives as long as the process
        host.server.add(
            pb.DESCRIPTOR.services_by_name["RankService"], pb_grpc.add_RankServiceServicer_to_server, self.servicer
        )

    def gather(self, model_folder: Path, loop: asyncio.AbstractEventLoop) -> OtherMachines | None:
        """Wait for the ranks of the other machines; called in the engine thread while `loop` serves.

        Returns None if this machine's ranks train alone (trainer.min_ranks).

        Raises:
            ConfigError: this machine's address has no network interface.
            DeadlinePassed: too few ranks are there after trainer.attach_seconds.
        """
        trainer, address = self._options.config.trainer, split_target(self._host.target)[0]
        os.environ[INTERFACE_VARIABLE] = collective_interface(address, self._options.interface)
        remote = RemoteRanks(
            self._held.stop,
            trainer.ranks,
            least=trainer.min_ranks,
            unit=trainer.rank_unit,
            version=version("fourfold"),
            model_sha256=folder.fingerprint(model_folder),
            on_death=self._host.fatal,
        )
        self.servicer.remote = self._remote = remote
        with ExitStack() as stack:
            offering = asyncio.run_coroutine_threadsafe(self._offer(remote.secret), loop)
            stack.callback(offering.cancel)
            attached = remote.wait(timeout=trainer.attach_seconds)
            count = self._held.stop + sum(len(machine.ranks) for machine in attached)
            if count < trainer.ranks:
                _log.warning("training with %d of %d ranks: %s", count, trainer.ranks, remote.title)
                stack.pop_all()  # the others find this process, and wait
        if not attached:
            return None
        self._store = TcpRendezvous(address, remote.secret.hex(), count, timeout=trainer.step_timeout_seconds)
        return OtherMachines(remote=remote, held=self._held.stop, attached=attached, store_address=self._store.address)

    def fail(self, message: str) -> None:
        """End the service after a failure of the engine, in its thread. Name a lost machine if it is the cause."""
        if self._remote is not None and self._remote.wait_for_death(timeout=_LOSS_SECONDS):
            _log.error("%s", message)
            message = self._remote.death
        self._host.fatal(message)

    def on_checkpoint(self) -> None:
        """Begin again when more ranks could train; nothing is lost, because a checkpoint was just written."""
        self._failures = 0
        if self._remote is not None and self._remote.can_grow and not self._growing:
            _log.warning("more ranks wait: the trainer begins again with them")
            self._growing = True
            self._remote.end("the trainer begins again with more ranks")
            self._host.stop()

    def begins_again(self) -> bool:
        """Return whether the program must replace itself instead of ending: call it when the service has ended.

        A trainer that fails without a checkpoint in between ends after retry.restarts tries.
        """
        config, remote = self._options.config, self._remote
        if not config.trainer.min_ranks or remote is None or self._host.signalled:
            return False
        self._failures += not self._growing
        return bool(remote.death) and self._failures <= config.retry.restarts

    def replace_program(self, environment: Mapping[str, str]) -> NoReturn:
        """Start this program again in its own process, with `environment`, the environment of its start."""
        for path in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # that of the list is closed already
                os.set_inheritable(int(path.name), int(path.name) <= 2)
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**environment, _FAILURES_VARIABLE: str(self._failures)})

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
    """Refuse ranks that cannot meet, before models are loaded."""
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
