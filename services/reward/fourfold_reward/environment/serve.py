"""Runs the environment service: `fourfold serve environment RECIPE`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Final

from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, FourfoldError
from fourfold.rpc.channel import check_target, open_channel
from fourfold.security.access import COORDINATOR
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward import worker_sandbox
from fourfold_reward.environment.check import check_keys
from fourfold_reward.environment.gateways import Gateway
from fourfold_reward.environment.members import RunGateways, open_gateway
from fourfold_reward.environment.metrics_source import environment_source
from fourfold_reward.environment.pool import EnvironmentPool
from fourfold_reward.environment.python_tool import PythonTool
from fourfold_reward.environment.runner import EpisodeLimits, Runner
from fourfold_reward.environment.spec import PYTHON_TOOL, EnvironmentSpec

_log = logging.getLogger(__name__)

_RECONNECT_SECONDS: Final = 1.0


def main(options: ServeOptions) -> int:
    """Run episodes until a signal or a fatal error; return the exit code."""
    return asyncio.run(serve(options))


async def serve(options: ServeOptions) -> int:
    """Start the environment's processes, find the gateways, and attempt their tasks.

    Raises ConfigError: the recipe names no environment, it cannot be loaded, or there is no way to find a gateway.
    """
    config, environment = options.config, options.config.environment
    check_keys(config)
    if not options.coordinator and not options.gateway:
        raise ConfigError(
            "an environment service needs a gateway: give --coordinator HOST:PORT to find those of the run, or "
            "--gateway HOST:PORT"
        )
    host = ServiceHost(options, role=Role.ROLE_ENVIRONMENT)
    pool = EnvironmentPool(
        EnvironmentSpec.from_config(config, directory=Path.cwd()),
        processes=environment.processes,
        step_seconds=environment.step_seconds,
        sandbox=worker_sandbox.for_environment(config, options.run_dir),
        on_failure=host.fatal,
    )
    limits = EpisodeLimits(
        max_turns=environment.max_turns,
        max_new_tokens=config.sampling.max_new_tokens,
        episode_seconds=environment.episode_seconds,
        scores=config.agents.reward == "service",
        tool_calls=environment.tool_calls,
    )
    python = None
    if PYTHON_TOOL in environment.tools:
        python = PythonTool(seconds=environment.step_seconds, required=bool(config.security.directory))
    runner = Runner(pool, limits, concurrent=environment.concurrent_episodes, python=python)
    host.exporter.add(environment_source(pool, runner))
    host.on_drain.append(runner.drain)

    async def attend() -> int:
        if options.gateway:
            async with open_gateway(options.gateway, host.security) as channel:
                await runner.serve(Gateway(channel, f"gateway at {options.gateway}"))
        else:
            await _follow_gateways(host, options.coordinator, runner)
        return 0

    try:
        return await host.run(start=pool.start, until=attend())
    finally:
        await pool.close()


async def _follow_gateways(host: ServiceHost, coordinator: str, runner: Runner) -> None:
    """Serve the gateways of the run; follow gateways that join, move and leave."""
    gateways = RunGateways(runner, host.security, incarnation=host.incarnation)
    channel = open_channel(coordinator, host.security, server=COORDINATOR)
    client = AsyncCoordinatorClient(channel, peer=f"coordinator at {coordinator}")
    try:
        while True:
            try:
                async with aclosing(client.watch_run()) as states:
                    async for state in states:
                        members = [m for m in state.members if m.role == "gateway" and _usable(host, m.target)]
                        gateways.update({m.member_id: m.target for m in members})
            except FourfoldError as error:
                _log.warning("run not followed: cause=%s", error.message)
            await asyncio.sleep(_RECONNECT_SECONDS)
    finally:
        await gateways.close()
        await channel.close()


def _usable(host: ServiceHost, target: str) -> bool:
    try:
        check_target(target, host.security)
    except ConfigError as error:
        _log.warning("gateway ignored: cause=%s", error.message)
        return False
    return True
