"""Which rights a worker process has: the policy of its sandbox, by the kind of verifier that it runs.

Built-in verifiers read texts of the policy: their workers read Python's own files, write nothing, and have neither a
network nor further processes. A verifier that evaluates texts as code does so in a process for each sample. A reward
function of the operator is trusted with the machine's files and may start processes. It reads neither keys nor run
folders, gets a clean environment, and has a network only by `reward.network`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.sandbox import Policy, SandboxSupport, environment, probe, python_paths

_log = logging.getLogger(__name__)

_GIB: Final = 1 << 30
_BUILTIN_GIB: Final = 2
# Threads of numerical libraries reserve memory on machines with many cores, and a scorer needs one.
_BUILTIN_VARIABLES: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# reasoning-gym imports matplotlib, which looks for all fonts of the machine when it cannot read its cache.
_FONTS: Final = ("/etc/fonts", str(Path.home() / ".cache/matplotlib"), str(Path.home() / ".config/matplotlib"))
_CPU_MARGIN_SECONDS: Final = 5  # above the wall-clock limit, which says more
# More than those that the user has: services beside us may start threads at any time.
_PROCESSES: Final = 4096
_FUNCTION_OPEN_FILES: Final = 4096
# Besides what the recipe names: where programs of a user keep their secrets.
_SECRETS_AT_HOME: Final = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config/gcloud", ".config/gh"),
    *(".netrc", ".git-credentials", ".pypirc", ".cache/huggingface/token"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """How workers are confined; the defaults are those of a recipe."""

    enabled: bool = True
    """False: a worker has every right, and every environment variable, of the service."""
    evaluate: bool = False
    """Whether built-in verifiers that run text as code are offered: a worker then starts a process for such a sample,
    which has no right to start another one."""
    required: bool = False
    """Whether built-in verifiers run only where all of their policy is enforced."""
    hidden: tuple[str, ...] = ()
    """Keys and run folders."""
    network: bool = False
    """Of reward functions, like all below."""
    memory_gib: int = 8
    environment: tuple[str, ...] = ()
    """Names of further variables."""

    def policy(self, *, builtin: bool, timeout_seconds: float, scratch: Path) -> Policy | None:
        """Return the policy of a worker; None when it has every right.

        Args:
            builtin: whether it runs built-in verifiers.
            timeout_seconds: wall-clock limit of a sample; the one on CPU time is a little higher.
            scratch: folder for temporary files of a reward function.
        """
        if not self.enabled:
            return None
        cpu_seconds = int(timeout_seconds) + _CPU_MARGIN_SECONDS
        if builtin:
            return Policy(
                read=(*python_paths(), str(Path(__file__).parent), *_FONTS),
                write=("/dev/null",),
                hidden=self.hidden,
                processes=_PROCESSES if self.evaluate else 0,
                memory_bytes=_BUILTIN_GIB * _GIB,
                address_bytes=2 * _BUILTIN_GIB * _GIB,
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
            memory_bytes=self.memory_gib * _GIB,
            cpu_seconds=cpu_seconds * len(os.sched_getaffinity(0)),
            open_files=_FUNCTION_OPEN_FILES,
        )

    def variables(self, *, builtin: bool, scratch: Path) -> dict[str, str]:
        """Return the environment of a worker."""
        if not self.enabled:
            return dict(os.environ)
        if builtin:
            return environment() | _BUILTIN_VARIABLES
        return environment(self.environment) | {"TMPDIR": str(scratch)}


def from_config(config: Config, run_dir: Path | None, *, evaluating: str) -> Confinement:
    """Return the confinement that a recipe asks for, after a look at what this machine offers.

    Args:
        config: the recipe.
        run_dir: folder of the run, where the service was told.
        evaluating: an offered verifier that evaluates texts of the policy as code; empty when there is none.

    Raises:
        ConfigError: TLS is configured, such a verifier is offered, and the machine cannot confine it.
    """
    reward, security = config.reward, config.security
    if reward.sandbox == "off":
        _log.warning('reward.sandbox = "off": scorers run with every right of this service')
        return Confinement(enabled=False)
    required = bool(security.directory and evaluating)
    offer = probe()
    if not offer.complete:
        _check(offer, evaluating, required=required)
    hidden = [security.directory, security.tokens_file, str(run_dir or ""), "runs"]
    return Confinement(
        evaluate=bool(evaluating),
        required=required,
        hidden=tuple(str(Path(path).resolve()) for path in hidden if path),
        network=reward.network,
        memory_gib=reward.memory_gib,
        environment=reward.environment,
    )


def _check(offer: SandboxSupport, evaluating: str, *, required: bool) -> None:
    if required:
        raise ConfigError(
            f"verifier {evaluating!r} evaluates texts of the policy as code, and this machine cannot confine it: "
            f"{offer.missing()}. With [security] it must be confined: add what is missing, run the service on another "
            f'machine, or set reward.sandbox = "off" to run it with every right of the service'
        )
    _log.warning("scorers are confined %s; the machine has %s", offer.describe(), offer.missing())
