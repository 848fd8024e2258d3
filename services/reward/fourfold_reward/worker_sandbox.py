"""Defines the rights of worker processes: one sandbox policy for built-in verifiers, one for users' reward functions.

Built-in verifiers read text of the model. Their workers can read Python's own files, write nothing, and use neither
network nor other processes. A reward function belongs to the operator of the service: it may use the machine's files
and start processes, but it cannot read keys and run folders, gets few environment variables, and has network access
only with `reward.network`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.config import Config, RewardConfig
from fourfold.errors import ConfigError
from fourfold.sandbox import Policy, environment, probe, python_paths
from fourfold.workers.child import Rights

_log = logging.getLogger(__name__)

_BUILTIN_BYTES: Final = 2 << 30
# Numerical libraries reserve memory for one thread per core. A verifier needs one thread.
_BUILTIN_VARIABLES: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# reasoning-gym imports matplotlib, which scans all fonts of the machine if it cannot read its cache.
_FONTS: Final = ("/etc/fonts", str(Path.home() / ".cache/matplotlib"), str(Path.home() / ".config/matplotlib"))
# The wall-clock limit must strike first, because its error is clearer than SIGXCPU.
_CPU_MARGIN_SECONDS: Final = 5
# RLIMIT_NPROC counts all processes and threads of the user, including services that start threads later.
_PROCESSES: Final = 4096
# Where common programs keep a user's credentials.
_SECRETS_AT_HOME: Final = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".config/gh"),
    *(".netrc", ".git-credentials", ".pypirc", ".cache/huggingface/token"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSandbox:
    """Sandbox settings of the workers. The defaults are those of a recipe."""

    enabled: bool = True  # False: workers have all rights and environment variables of the service
    # Allow built-in verifiers that run text as code. Their worker forks a process for each sample, which can start no
    # further process.
    evaluate: bool = False
    required: bool = False  # built-in verifiers refuse to run if the machine cannot enforce their whole policy
    hidden: tuple[str, ...] = ()  # paths of keys and run folders
    # For reward functions only:
    network: bool = False  # allow the network
    memory_gib: int = 8
    environment: tuple[str, ...] = ()  # names of additional environment variables

    def rights(self, scratch: Path, *, builtin: bool, timeout_seconds: float) -> Rights:
        """Return the rights of a child with this folder for its temporary files, for calls of limited time."""
        policy = self._policy(builtin, timeout_seconds, scratch) if self.enabled else None
        return Rights(policy=policy, variables=self._variables(builtin, scratch), starts_programs=not builtin)

    def _policy(self, builtin: bool, timeout_seconds: float, scratch: Path) -> Policy:
        cpu_seconds = int(timeout_seconds) + _CPU_MARGIN_SECONDS
        if builtin:
            return Policy(
                read=(*python_paths(), str(Path(__file__).parent), *_FONTS),
                write=("/dev/null",),
                hidden=self.hidden,
                processes=_PROCESSES if self.evaluate else 0,
                memory_bytes=_BUILTIN_BYTES,
                address_bytes=2 * _BUILTIN_BYTES,
                cpu_seconds=cpu_seconds,
                open_files=64,
                required=self.required,
            )
        return Policy(
            read=("/",),
            write=("/", str(scratch)),
            hidden=(*self.hidden, *(str(Path.home() / name) for name in _SECRETS_AT_HOME)),
            network=self.network,
            processes=_PROCESSES,
            memory_bytes=self.memory_gib << 30,
            cpu_seconds=cpu_seconds * len(os.sched_getaffinity(0)),
            open_files=4096,
        )

    def _variables(self, builtin: bool, scratch: Path) -> dict[str, str]:
        if not self.enabled:
            return dict(os.environ)
        if builtin:
            return environment() | _BUILTIN_VARIABLES
        return environment(self.environment) | {"TMPDIR": str(scratch)}


def from_config(config: Config, reward: RewardConfig, run_dir: Path | None, *, evaluating: str) -> WorkerSandbox:
    """Return the sandbox that a recipe asks for; warn if this machine cannot enforce all of it.

    Args:
        evaluating: the verifier or task that runs text of the model as code; empty if there is none.

    Raises:
        ConfigError: TLS is configured, there is such a verifier, and the machine cannot enforce its policy.
    """
    security = config.security
    if reward.sandbox == "off":
        _log.warning('reward.sandbox = "off": reward workers run with all rights of this service')
        return WorkerSandbox(enabled=False)
    # Without TLS the service serves loopback only: a development machine, where a warning is enough.
    required = bool(security.directory and evaluating)
    support = probe()
    if required and not support.complete:
        raise ConfigError(
            f"verifier {evaluating!r} runs text of the model as code, and this machine cannot enforce its sandbox: "
            f"{support.missing()}. [security] requires the whole sandbox: install what is missing, run the service on "
            f'another machine, or set reward.sandbox = "off" to run the verifier with all rights of the service'
        )
    if not support.complete:
        _log.warning("sandbox of reward workers is enforced %s; missing: %s", support.describe(), support.missing())
    return WorkerSandbox(
        evaluate=bool(evaluating),
        required=required,
        hidden=_hidden(config, run_dir),
        network=reward.network,
        memory_gib=reward.memory_gib,
        environment=reward.environment,
    )


def for_environment(config: Config, run_dir: Path | None) -> WorkerSandbox:
    """Return the sandbox of an environment's processes; warn if this machine cannot enforce all of it."""
    environment = config.environment
    support = probe()
    if not support.complete:
        _log.warning("sandbox of environments is enforced %s; missing: %s", support.describe(), support.missing())
    return WorkerSandbox(
        hidden=_hidden(config, run_dir),
        network=environment.network,
        memory_gib=environment.memory_gib,
        environment=tuple(environment.variables),
    )


def _hidden(config: Config, run_dir: Path | None) -> tuple[str, ...]:
    security = config.security
    # "runs" is the folder of all runs when the service was started without a run folder.
    paths = [security.directory, security.tokens_file, str(run_dir or ""), "runs"]
    return tuple(str(Path(path).resolve()) for path in paths if path)
