"""Reads and writes addresses "host:port"."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from fourfold.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
_MAX_CHARACTERS: Final = 255 + len(":65535")  # a DNS name has at most 255 characters
# Labels of 1 to 63 characters: Python raises UnicodeError for others, not OSError.
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_BRACKETED: Final = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]")
_PORT: Final = re.compile(r"[0-9]{1,5}")


def split_target(target: str) -> tuple[str, int]:
    """Return host (without brackets) and port of "host:port", or raise ConfigError."""
    if len(target) > _MAX_CHARACTERS:
        raise ConfigError(
            f"an address of {len(target)} characters, {target[:40]!r}...; HOST:PORT has at most {_MAX_CHARACTERS}"
        )
    host, colon, port = target.rpartition(":")
    if not colon or not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"{target!r} is not an address; give HOST:PORT, for example 127.0.0.1:50051")
    if _BRACKETED.fullmatch(host):
        return host[1:-1], int(port)
    if ":" in host:
        raise ConfigError(f"{target!r}: put an IPv6 address in brackets, for example [::1]:50051")
    if not _HOST_NAME.fullmatch(host):
        raise ConfigError(f"{target!r}: the host is neither an IP address nor a name of letters, digits, '.' and '-'")
    return host, int(port)


def join_target(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or "localhost". Other names are not resolved: DNS may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether `host` means every address of this machine: others cannot connect to it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
