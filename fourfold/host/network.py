"""Finds the network interface that has an address."""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

import psutil

from fourfold.address import is_loopback
from fourfold.errors import ConfigError

log = logging.getLogger("fourfold.host")

NCCL_VARIABLE: Final = "NCCL_SOCKET_IFNAME"


def nccl_interface(host: str, interface: str = "") -> str:
    """Return NCCL's variable for a service that others reach at `host`, or on a named interface; the user's value wins.

    It names "lo" for a service on loopback, which no other machine reaches, and with a warning if no interface has
    `host`.
    """
    # NCCL takes a plain name for the beginning of one: "eth1" would also be eth10.
    return os.environ.get(NCCL_VARIABLE) or f"={interface or _interface_for_nccl(host)}"


def _interface_for_nccl(host: str) -> str:
    if is_loopback(host):
        return "lo"
    try:
        return interface_of(host)
    except ConfigError as error:  # behind a translation of addresses; weights by other ways need no NCCL
        log.warning(
            "NCCL uses loopback alone; for weights between machines set %s to the interface of their network. "
            "reason=%s",
            NCCL_VARIABLE,
            error,
        )
        return "lo"


def interface_of(host: str) -> str:
    """Return the name of this machine's interface with an address, e.g. "eth0" for "10.0.0.1" or a name of it.

    Raises ConfigError: no interface has it.
    """
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(
            f"the host name {host!r} is unknown here ({error.strerror or error}); give an address"
        ) from None
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if wanted & {address.address.partition("%")[0] for address in addresses}:
            return name
    known = ", ".join(sorted(interfaces))
    raise ConfigError(f"no network interface of this machine has the address {host}; it has {known}")
