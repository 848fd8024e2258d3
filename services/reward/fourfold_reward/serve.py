"""Runs the reward service: `fourfold serve reward RECIPE`, or `serve_reward` in the script of a reward function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fourfold.config import Config, RewardConfig
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.model.folder import resolve
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_reward import loader, verifiers, worker_sandbox
from fourfold_reward.exported import reward_source
from fourfold_reward.loader import Verifier, VerifierError
from fourfold_reward.pool import WorkerPool
from fourfold_reward.sample import RewardFunction
from fourfold_reward.servicer import RewardServicer
from fourfold_reward.verifiers import GymOptions

# A recipe must describe a run. The reward role reads only [reward] and [security], which `serve_reward` adds.
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
    """Start the workers, then serve. Raises ConfigError: a verifier is unknown, not allowed, or cannot be loaded."""
    reward = options.config.scorer(options.scorer)
    allowed = AllowedVerifiers.from_config(options.config, reward)
    host = ServiceHost(options, role=Role.ROLE_REWARD)
    pool = WorkerPool(
        verifier=allowed.default,
        options=allowed.tasks,
        processes=reward.processes,
        timeout_seconds=reward.timeout_seconds,
        on_failure=host.fatal,
        sandbox=worker_sandbox.from_config(options.config, reward, options.run_dir, evaluating=allowed.evaluating),
    )
    servicer = RewardServicer(pool, allowed.find)
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    host.server.add(service, add_RewardServiceServicer_to_server, servicer)
    host.exporter.add(reward_source(pool, servicer))

    async def start() -> None:
        await pool.start()
        tokens = pool.reads.tokens
        servicer.set_ready(await asyncio.to_thread(_tokenizer_sha256, options.config, reward) if tokens else b"")

    try:
        return await host.run(start=start)
    finally:
        await pool.close()  # after the last call of the server has ended


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
    metrics_listen: str = "",
) -> int:
    """Serve a reward function until SIGTERM or Ctrl-C.

    The function runs in sandboxed worker processes, as with `fourfold serve reward`. The workers execute its file
    again, so a script calls this under `if __name__ == "__main__":`.

    Args:
        function: takes one ScoreInput; returns a number, a Score, an Abstain or None. It is a top-level `def` or
            `async def` of a file.
        listen: "HOST:PORT"; port 0 takes any free port. Prints "READY HOST:PORT" with the address in use.
        coordinator: "HOST:PORT" of the coordinator to register at; empty: none.
        member: member id of this service.
        certs: folder that `fourfold certs` made. Empty: no TLS, and `listen` must be a loopback address.
        advertise: host name for callers; default: the host in `listen`.
        processes: number of worker processes.
        timeout_seconds: time limit of one sample.
        network: whether the function may open sockets.
        environment: environment variables that the function may read, besides PATH, HOME and the like.
        memory_gib: memory limit of a worker process.
        metrics_listen: "HOST:PORT" on loopback to serve metrics for Prometheus; empty: none.

    Returns:
        The exit code: 0 after a drain, 1 after an error.

    Raises:
        ConfigError: The function cannot be loaded in another process, or an argument is wrong.
    """
    reward: dict[str, Any] = {
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
        config=Config.model_validate({**_MINIMAL_RECIPE, "reward": reward, "security": {"directory": str(certs)}}),
        member_id=member,
        listen=listen,
        coordinator=coordinator,
        advertise=advertise,
        metrics_listen=metrics_listen,
    )
    return main(options)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedVerifiers:
    """The verifiers that callers may select. A caller cannot name code that the recipe does not name."""

    default: Verifier
    others: Mapping[str, Verifier]  # of `reward.allowed_verifiers`, by name
    tasks: GymOptions  # the reasoning-gym tasks that a sample's metadata may name, with their options

    @classmethod
    def from_config(cls, config: Config, reward: RewardConfig) -> AllowedVerifiers:
        """Find the verifiers of a recipe.

        Raises ConfigError: a verifier is unknown, or runs text as code without `reward.evaluate_text`.
        """
        allowed = cls(
            default=_find(reward.function, "reward.function", config),
            others={name: _find(name, "reward.allowed_verifiers", config) for name in reward.allowed_verifiers},
            tasks=_gym_options(config, reward),
        )
        if allowed.evaluating and not reward.evaluate_text:
            raise ConfigError(
                f"verifier {allowed.evaluating!r} runs text of the answer as code, and reward.evaluate_text = false; "
                f"set reward.evaluate_text = true to run it in a sandbox, or use another verifier or task"
            )
        return allowed

    @property
    def evaluating(self) -> str:
        """Name of an allowed verifier that runs text of a sample as code; empty if there is none."""
        found = (verifiers.find_evaluating(name, self.tasks) for name in (self.default.name, *self.others))
        return next(filter(None, found), "")

    def find(self, name: str) -> Verifier:
        """Return the verifier that a caller selects instead of the default one.

        Raises VerifierError: the verifier is not allowed.
        """
        if (verifier := self.others.get(name)) is None:
            allowed = ", ".join([repr(self.default.name), *map(repr, self.others)])
            raise VerifierError(
                f"{name!r:.200} is not allowed here; allowed: {allowed:.500}. Add it to reward.allowed_verifiers"
            )
        return verifier


def _find(name: str, key: str, config: Config) -> Verifier:
    try:
        return replace(loader.find(name, directory=Path.cwd()), answer_field=config.data.answer_field)
    except VerifierError as error:
        raise ConfigError(f"{key} = {error}") from None


def _tokenizer_sha256(config: Config, reward: RewardConfig) -> bytes:
    """Return the hash of the run's tokenizer, for a function that reads tokens; it may convert a built-in model."""
    try:
        return tokenizer_sha256(resolve(config.model.source))
    except ConfigError as error:
        raise ConfigError(
            f"reward.function = {reward.function!r} takes completion_ids, and the tokenizer that made them "
            f"cannot be read here: {error}; start it with `fourfold serve reward RECIPE` on a machine with the model"
        ) from None


def _gym_options(config: Config, reward: RewardConfig) -> GymOptions:
    """Return the reasoning-gym tasks that this run generates or that the recipe allows, with their options."""
    sources = [source for source in (config.data.eval, config.data.train) if source is not None]
    options = {source.reasoning_gym: dict(source.options) for source in sources if source.reasoning_gym}
    # An entry of a composite names its own task.
    for part in options.pop("composite", {}).get("datasets", []):
        options.setdefault(part["name"], dict(part.get("config", {})))
    for name in reward.allowed_verifiers:
        if name.startswith(verifiers.GYM_PREFIX):
            options.setdefault(name.removeprefix(verifiers.GYM_PREFIX), {})
    return options
