"""Serves one Python function as a reward service, from the script that defines it."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.sample import RewardFunction
from fourfold_reward.serve import serve

# A recipe must describe a run. The reward role reads only [reward] and [security] of it, which are added below.
_RECIPE: Final[dict[str, Any]] = {
    "name": "reward",
    "steps": 1,
    "model": {"source": "none"},
    "data": {"train": {"path": "none.jsonl"}},
    "sampling": {"max_new_tokens": 1},
    "batch": {"prompts_per_step": 1, "group_size": 2},
}


def serve_reward(
    function: RewardFunction,
    *,
    listen: str = "127.0.0.1:50053",
    coordinator: str = "",
    member: str = "reward-0",
    certs: str | Path = "",
    advertise: str = "",
    processes: int = 1,
    timeout_seconds: float = 10.0,
    network: bool = False,
    environment: tuple[str, ...] = (),
    memory_gib: int = 8,
) -> int:
    """Serve a reward function until SIGTERM or Ctrl-C.

    The function runs in sandboxed worker processes, as with `fourfold serve reward`. The workers execute its file
    again, so a script calls this under `if __name__ == "__main__":`.

    Args:
        function: takes one ScoreInput; returns a number, a Score, an Abstain or None. It is a top-level `def` or
            `async def` of a file.
        listen: "HOST:PORT"; port 0: any free one. Prints "READY HOST:PORT" with the address in use.
        coordinator: "HOST:PORT" of the coordinator to register at; empty: none.
        member: member id of this service.
        certs: folder that `fourfold certs` made. Empty: no TLS, and `listen` must be a loopback address.
        advertise: host that callers dial; default: the host in `listen`.
        processes: number of worker processes.
        timeout_seconds: longest time for one sample.
        network: whether the function may open sockets.
        environment: environment variables that the function may read, besides PATH, HOME and the like.
        memory_gib: memory limit of a worker process.

    Returns:
        The exit code: 0 after a drain, 1 after an error.

    Raises:
        ConfigError: The function cannot be loaded in another process, or an argument is wrong.
    """
    reward: dict[str, Any] = {
        "verifier": _name(function),
        "processes": processes,
        "timeout_seconds": timeout_seconds,
        "network": network,
        "environment": environment,
        "memory_gib": memory_gib,
    }
    recipe = {**_RECIPE, "reward": reward}
    if certs:
        recipe["security"] = {"directory": str(certs)}
    options = ServeOptions(
        role="reward",
        recipe=Path(),
        config=Config.model_validate(recipe),
        member_id=member,
        listen=listen,
        coordinator=coordinator,
        advertise=advertise,
    )
    return asyncio.run(serve(options))


def _name(function: RewardFunction) -> str:
    """Return the name by which a worker process finds a function: FILE:NAME."""
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function) or ""
    except TypeError:  # a callable object, or a function written in C
        file = ""
    if not name.isidentifier() or not Path(file).is_file():
        raise ConfigError(
            f"serve_reward({function!r:.100}): worker processes load the function by its file and name; define it with "
            f"`def` at the top level of a .py file"
        )
    return f"{Path(file).resolve()}:{name}"
