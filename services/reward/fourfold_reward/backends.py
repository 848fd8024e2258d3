"""Makes the backend that a table [[reward]] asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fourfold.config import RewardConfig
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward import worker_sandbox
from fourfold_reward.backend import Backend
from fourfold_reward.configured import ConfiguredFunction
from fourfold_reward.pool import WorkerPool


def make_backend(options: ServeOptions, reward: RewardConfig, *, on_failure: Callable[[str], None]) -> Backend:
    """Make the backend of a table; it is not started.

    Args:
        on_failure: called with a message if a backend ends because of a bug.

    Raises:
        ConfigError: the table cannot be served here.
    """
    limit = reward.timeout_seconds
    match reward.kind:
        case "function":
            return _functions(options, reward, on_failure)
        case "command":
            from fourfold_reward.scorers.command import CommandPool

            sandbox = worker_sandbox.from_config(options.config, reward, options.run_dir, evaluating="")
            pool = CommandPool(
                reward.command,
                processes=reward.processes,
                timeout_seconds=limit,
                sandbox=sandbox,
                on_failure=on_failure,
            )
            return pool
        case "http":
            from fourfold_reward.scorers.openrlhf_server import OpenRlhfServer

            return OpenRlhfServer(reward.http, timeout_seconds=limit, on_failure=on_failure)
        case "judge":
            from fourfold_reward.scorers.judge import Judge

            assert reward.judge is not None
            return Judge(reward.judge, timeout_seconds=limit, on_failure=on_failure)
        case "model":
            return _reward_model(options, reward, on_failure)
    raise ConfigError(
        f"[[reward]] {reward.name!r} has target = {list(reward.target)}: these services run already, and the "
        f"coordinator calls them; start none here, or write function, command, model, http or judge"
    )


def _reward_model(options: ServeOptions, reward: RewardConfig, on_failure: Callable[[str], None]) -> Backend:
    """Return the backend of a reward model. This module imports no torch."""
    try:
        module = importlib.import_module("fourfold_reward.models.backend")
    except ImportError as error:
        raise ConfigError(
            f"[[reward]] {reward.name!r} is a reward model, which needs the module {error.name!r}; "
            f"{install_command('fourfold-reward[models]')}"
        ) from None
    backend: Backend = module.RewardModelBackend.from_config(options.config, reward, on_failure=on_failure)
    return backend


def _functions(options: ServeOptions, reward: RewardConfig, on_failure: Callable[[str], None]) -> WorkerPool:
    function = ConfiguredFunction.from_config(options.config, reward)
    return WorkerPool(
        verifier=function.verifier,
        options=function.options,
        processes=reward.processes,
        timeout_seconds=reward.timeout_seconds,
        on_failure=on_failure,
        sandbox=worker_sandbox.from_config(options.config, reward, options.run_dir, evaluating=function.evaluating),
    )
