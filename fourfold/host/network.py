"""Finds the network interface that has an address."""

from __future__ import annotations

import socket

import psutil

from fourfold.errors import ConfigError


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
    raise ConfigError(
        f"no network interface of this machine has the address {host}; name one of {known} with --interface"
    )
