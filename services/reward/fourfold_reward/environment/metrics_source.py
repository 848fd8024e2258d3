"""Exports the episodes and processes at the environment service's metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fourfold.service.exporter import Exported, Reading, Source
from fourfold_reward.environment.pool import EnvironmentPool
from fourfold_reward.environment.runner import Runner

_EPISODES: Final = Exported(
    "fourfold_environment_episodes_total",
    "counter",
    "ended episodes by outcome: DONE, TRUNCATED, or the reason for which they were abandoned",
    ("outcome",),
)
_RUNNING: Final = Exported("fourfold_environment_running_episodes", "gauge", "episodes that run now")
_PROCESSES: Final = Exported("fourfold_environment_processes", "gauge", "worker processes", ("state",))
_DEATHS: Final = Exported("fourfold_environment_process_deaths_total", "counter", "worker processes that died or hung")
EXPORTED: Final = (_EPISODES, _RUNNING, _PROCESSES, _DEATHS)


def environment_source(pool: EnvironmentPool, runner: Runner) -> Source:
    """Return the numbers of a service."""

    def read() -> Iterator[Reading]:
        yield _EPISODES, dict(runner.outcomes)
        yield _RUNNING, runner.running
        yield _PROCESSES, pool.states()
        yield _DEATHS, pool.deaths

    return read
