"""Checks the environment of a recipe before a process is started; see `fourfold.plan.preflight`.

One process loads the environment in the sandbox, like the processes of the service. No episode begins.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.plan.preflight import Preflight
from fourfold_reward import worker_sandbox
from fourfold_reward.environment.pool import EnvironmentPool
from fourfold_reward.environment.spec import NETWORK_KINDS, EnvironmentSpec


def check_environment(preflight: Preflight) -> None:
    """Load the environment and the tools of the recipe, if the launcher starts them.

    Raises ConfigError: keys contradict each other, or they cannot be loaded.
    """
    config = preflight.config
    if not config.environment.replicas:  # the code of a service that the user starts may be on another machine
        return
    check_keys(config)
    spec = EnvironmentSpec.from_config(config, directory=Path.cwd())
    if spec.kind not in NETWORK_KINDS:  # the servers of these may not be there yet
        asyncio.run(_load(spec, config))


def check_keys(config: Config) -> None:
    """Raise ConfigError if an environment service of this recipe would have nothing to do."""
    environment = config.environment
    if not environment.source and not environment.tools:
        raise ConfigError("[environment] names no environment; set source to FILE.py:NAME, or tools")
    if not environment.source and config.agents.reward != "service":
        raise ConfigError(
            f"environment.source is empty, so the run must score the answers, and agents.reward = "
            f'"{config.agents.reward}"; set agents.reward = "service", or name an environment'
        )
    if config.agents.source != "tasks":
        raise ConfigError(
            f'agents.source = "{config.agents.source}": an environment service attempts tasks of the run; set it to '
            f'"tasks"'
        )


async def _load(spec: EnvironmentSpec, config: Config) -> None:
    pool = EnvironmentPool(
        spec,
        processes=1,
        step_seconds=config.environment.step_seconds,
        sandbox=worker_sandbox.for_environment(config, None),
        on_failure=lambda _: None,  # no process is replaced: it ends at once
    )
    try:
        await pool.start()
    finally:
        await pool.close()
