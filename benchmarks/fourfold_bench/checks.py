"""What argparse cannot check: the numbers of a benchmark's settings."""

from __future__ import annotations

from typing import Final

from fourfold.errors import ConfigError

_MAX_FLUSH_SECONDS: Final = 10.0  # the service takes no more


def at_least(least: int, settings: object, *names: str) -> None:
    """Check fields that the option of the same name sets.

    Raises:
        ConfigError: one is below `least`.
    """
    for name in names:
        if (value := getattr(settings, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")


def timeout(seconds: float) -> None:
    """Check --timeout.

    Raises:
        ConfigError: nothing is done in such a time.
    """
    if not seconds > 0:
        raise ConfigError(f"--timeout {seconds}: it must be above 0 seconds")


def engine_memory(share: float) -> None:
    """Check --engine-memory.

    Raises:
        ConfigError: it is no share of a GPU.
    """
    if not 0 < share < 1:
        raise ConfigError(f"--engine-memory {share}: it is a share of the GPU, between 0 and 1")


def flush(seconds: float) -> None:
    """Check --flush.

    Raises:
        ConfigError: the rollout service would refuse it.
    """
    if not 0 <= seconds <= _MAX_FLUSH_SECONDS:
        raise ConfigError(f"--flush {seconds}: it must be at least 0 and at most {_MAX_FLUSH_SECONDS:g}")
