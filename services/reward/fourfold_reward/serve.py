"""Runs the reward service: `fourfold serve reward RECIPE`, or `serve_reward` in the script of a reward function."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config, RewardConfig
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.model.folder import resolve
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.reward.function import RewardFunction
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward.backends import make_backend
from fourfold_reward.metrics_source import reward_source
from fourfold_reward.servicer import RewardServicer

# A recipe must describe a run. The reward role reads no table but those that `serve_reward` adds.
_MINIMAL_RECIPE: Final[dict[str, Any]] = {
    "name": "reward",
    "steps": 1,
    "model": {"source": "none"},
    "data": {"train": {"path": "none.jsonl"}},
    "sampling": {"max_new_tokens": 1},
    "batch": {"prompts_per_step": 1, "group_size": 2},
}


def main(options: ServeOptions) -> int:
    """Serve until a signal or a fatal error; return the exit code."""
    return asyncio.run(serve(options))


async def serve(options: ServeOptions) -> int:
    """Start the scorer, then serve. Raises ConfigError: the recipe has no such scorer, or it cannot be served."""
    reward = _table(options)
    host = ServiceHost(options, role=Role.ROLE_REWARD)
    backend = make_backend(options, reward, on_failure=host.fatal)
    servicer = RewardServicer(backend, name=reward.name)
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    host.server.add(service, add_RewardServiceServicer_to_server, servicer)
    host.exporter.add(reward_source(backend, servicer))

    async def start() -> None:
        await backend.start()
        tokens = backend.reads.tokens
        servicer.set_ready(await asyncio.to_thread(_tokenizer_sha256, options.config, reward) if tokens else b"")

    try:
        return await host.run(start=start)
    finally:
        await backend.close()  # after the last call of the server has ended


def _table(options: ServeOptions) -> RewardConfig:
    """Return the table that this service serves. Raises ConfigError: there is none of this name."""
    try:
        return options.config.scorer(options.scorer)
    except KeyError:
        known = ", ".join(repr(table.name) for table in options.config.reward)
        raise ConfigError(
            f"--scorer {options.scorer!r} is not the name of a table [[reward]]; the recipe has {known}"
        ) from None


def _tokenizer_sha256(config: Config, reward: RewardConfig) -> bytes:
    """Return the hash of the run's tokenizer, for a function that reads tokens; it may convert a built-in model."""
    try:
        return tokenizer_sha256(resolve(config.model.source, config.data.chat_template))
    except ConfigError as error:
        raise ConfigError(
            f"the scorer {reward.title!r} reads sampled tokens, and the tokenizer that made them "
            f"cannot be read here: {error}; start it with `fourfold serve reward RECIPE` on a machine with the model"
        ) from None


def serve_reward(
    function: RewardFunction,
    *,
    listen: str = "127.0.0.1:50053",
    coordinator: str = "",
    member: str = "reward-0",
    scorer: str = "",
    certs: str | Path = "",
    advertise: str = "",
    processes: int = 1,
    timeout_seconds: float = 10.0,
    network: bool = False,
    environment: tuple[str, ...] = (),
    memory_gib: int = 8,
    metrics_listen: str = "",
    tracing_endpoint: str = "",
) -> int:
    """Serve a reward function until SIGTERM or Ctrl-C.

    Sandboxed worker processes execute its file again: call this under `if __name__ == "__main__":`.

    Args:
        function: of one ScoreInput; a top-level `def` or `async def` of a file.
        listen: "HOST:PORT"; port 0 takes any free port. Prints "READY HOST:PORT".
        coordinator: "HOST:PORT" to register at; empty: none.
        member: member id of this service.
        scorer: the [[reward]] that it serves; empty: the first without addresses.
        certs: folder that `fourfold certs` made. Empty: no TLS, and `listen` must be a loopback address.
        advertise: host name for callers; default: the host in `listen`.
        processes: number of worker processes.
        timeout_seconds: time limit of one sample.
        network: whether the function may open sockets.
        environment: variables that the function may read, besides PATH, HOME and the like.
        memory_gib: memory limit of a worker process.
        metrics_listen: "HOST:PORT" on loopback to serve metrics for Prometheus; empty: none.
        tracing_endpoint: where spans go, as tracing.endpoint in a recipe; empty: nowhere.

    Returns the exit code: 0 after a drain, 1 after an error. Raises ConfigError for a wrong argument or function.
    """
    reward: dict[str, Any] = {
        "name": scorer or "reward",
        "function": _name_of(function),
        "processes": processes,
        "timeout_seconds": timeout_seconds,
        "network": network,
        "environment": environment,
        "memory_gib": memory_gib,
    }
    options = ServeOptions(
        role="reward",
        recipe=Path(),
        config=_config(reward=reward, security={"directory": str(certs)}, tracing={"endpoint": tracing_endpoint}),
        member_id=member,
        scorer=scorer,
        listen=listen,
        coordinator=coordinator,
        advertise=advertise,
        metrics_listen=metrics_listen,
    )
    return main(options)


def _config(**tables: dict[str, Any]) -> Config:
    return Config.model_validate({**_MINIMAL_RECIPE, **tables})


def _name_of(function: RewardFunction) -> str:
    """Return FILE:NAME, by which a worker process finds a function."""
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(function) or ""
    except TypeError:  # a callable object, or C code
        file = ""
    if not name.isidentifier() or not Path(file).is_file():
        raise ConfigError(
            f"serve_reward({function!r:.100}): worker processes load the function by its file and name; define it with "
            f"`def` at the top level of a .py file"
        )
    return f"{Path(file).resolve()}:{name}"
