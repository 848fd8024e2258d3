"""The role `reward`: `fourfold serve reward RECIPE` runs this until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward import confinement, loader, verifiers
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.pool import WorkerPool
from fourfold_reward.servicer import RewardServicer
from fourfold_reward.verifiers import GymOptions


def main(options: ServeOptions) -> int:
    """Serve until the end; return the process's exit code."""
    return asyncio.run(serve(options))


async def serve(options: ServeOptions) -> int:
    """Start the workers, then serve.

    Raises:
        ConfigError: a verifier's name leads nowhere, or a verifier may not run here.
    """
    reward = options.config.reward
    offer = find_offer(options.config)
    host = ServiceHost(options, role=Role.ROLE_REWARD)
    pool = WorkerPool(
        verifier=offer.configured,
        options=offer.tasks,
        processes=reward.processes,
        timeout_seconds=reward.timeout_seconds,
        on_failure=host.fatal,
        confinement=confinement.from_config(options.config, options.run_dir, evaluating=offer.evaluating),
    )
    servicer = RewardServicer(pool, offer.find)
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    host.server.add(service, add_RewardServiceServicer_to_server, servicer)

    async def start() -> None:
        await pool.start()
        servicer.set_ready()

    try:
        return await host.run(start=start)
    finally:
        await pool.close()  # after the server's last call has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What callers may ask for. A caller never chooses code."""

    configured: Verifier
    others: Mapping[str, Verifier]
    """`reward.allowed_verifiers`, by name."""
    tasks: GymOptions
    """The reasoning-gym tasks that a sample's metadata may name, and their options."""

    @property
    def evaluating(self) -> str:
        """Name of an offered verifier that runs text of a sample as code; empty when there is none."""
        names = [self.configured.name, *self.others]
        if verifiers.GYM in names:
            names += [verifiers.GYM_PREFIX + task for task in self.tasks]
        return next((name for name in names if verifiers.evaluates_text(name)), "")

    def find(self, name: str) -> Verifier:
        """Return the verifier that a caller asks for instead of the configured one.

        Raises:
            VerifierError: it is not offered.
        """
        if (verifier := self.others.get(name)) is None:
            known = ", ".join([repr(self.configured.name), *map(repr, self.others)])
            raise VerifierError(
                f"{name!r:.200} is not offered here; offered: {known:.500}. Add it to reward.allowed_verifiers"
            )
        return verifier


def find_offer(config: Config) -> Offered:
    """Return what a recipe offers.

    Raises:
        ConfigError: there is no such verifier, or it runs text as code and the recipe does not allow that.
    """
    reward = config.reward
    others = {name: _find(name, "reward.allowed_verifiers") for name in reward.allowed_verifiers}
    offered = Offered(configured=_find(reward.verifier, "reward.verifier"), others=others, tasks=gym_options(config))
    if offered.evaluating and not reward.evaluate_text:
        raise ConfigError(
            f"verifier {offered.evaluating!r} runs text of the answer as code, and reward.evaluate_text = false; set "
            f"reward.evaluate_text = true to run it in a sandbox, or use another verifier or task"
        )
    return offered


def _find(name: str, key: str) -> Verifier:
    try:
        return loader.find(name, directory=Path.cwd())
    except VerifierError as error:
        raise ConfigError(f"{key} = {error}") from None


def gym_options(config: Config) -> GymOptions:
    """Return the reasoning-gym tasks that samples may name, and the options that some of them are scored by.

    They are the tasks that this run generates, and those of the allow-list.
    """
    sources = [source for source in (config.data.eval, config.data.train) if source is not None]
    options = {source.reasoning_gym: dict(source.options) for source in sources if source.reasoning_gym}
    # A composite's entries carry the name of their own task.
    for part in options.pop("composite", {}).get("datasets", []):
        options.setdefault(part["name"], dict(part.get("config", {})))
    for name in config.reward.allowed_verifiers:
        if name.startswith(verifiers.GYM_PREFIX):
            options.setdefault(name.removeprefix(verifiers.GYM_PREFIX), {})
    return options
