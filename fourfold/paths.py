"""Reads the paths that users write."""

from __future__ import annotations

from pathlib import Path

from fourfold.errors import ConfigError


def expand_home(path: str, where: str) -> Path:
    """Return a path whose ~ is replaced by a home folder.

    Args:
        path: as a user wrote it.
        where: name of its place, for messages.

    Raises:
        ConfigError: this machine has no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{where}: this machine has no such user; write the whole path") from None
