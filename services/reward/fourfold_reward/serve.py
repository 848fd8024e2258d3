"""The role `reward`: `fourfold serve reward RECIPE` runs this until it is told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.serve import Host, ServeOptions
from fourfold_reward import loader, verifiers
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
        ConfigError: the verifier's name leads nowhere.
    """
    reward = options.config.reward
    verifier = find_configured(reward.verifier)
    host = Host(options, role=Role.ROLE_REWARD)
    pool = WorkerPool(
        verifier=verifier,
        options=gym_options(options.config),
        processes=reward.processes,
        timeout_seconds=reward.timeout_seconds,
        on_failure=host.fatal,
    )
    servicer = RewardServicer(pool, lambda name: find_offered(name, pool.verifier))
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    host.server.add(service, add_RewardServiceServicer_to_server, servicer)

    async def start() -> None:
        await pool.start()
        servicer.set_ready()

    try:
        return await host.run(start=start)
    finally:
        await pool.close()  # after the server's last call has ended


def find_configured(name: str) -> Verifier:
    """Return the verifier that the recipe names.

    Raises:
        ConfigError: no such verifier.
    """
    try:
        return loader.find(name, directory=Path.cwd())
    except VerifierError as error:
        raise ConfigError(f"reward.verifier = {error}") from None


def find_offered(name: str, configured: Verifier) -> Verifier:
    """Return the verifier that a caller asks for: a built-in, or the configured one. A caller never chooses code.

    Raises:
        VerifierError: any other name.
    """
    if name == configured.name:
        return configured
    if not verifiers.is_builtin(name):
        known = ", ".join(known for known, _ in verifiers.describe())
        raise VerifierError(f"{name!r:.200} is not offered here; use {configured.name!r} or a built-in: {known}")
    return loader.find(name, directory=Path("/"))


def gym_options(config: Config) -> GymOptions:
    """Return the options of the reasoning-gym tasks that this run generates: some of them are scored by these."""
    sources = [source for source in (config.data.eval, config.data.train) if source is not None]
    options = {s.reasoning_gym: dict(s.options) for s in sources if s.reasoning_gym and s.options}
    # A composite's entries carry the name of their own task.
    for part in options.pop("composite", {}).get("datasets", []):
        options.setdefault(part["name"], dict(part.get("config", {})))
    return options
