"""Decides which addresses go through the proxy of the environment (http_proxy, https_proxy, no_proxy).

    services of the run, this machine                    never: a proxy of a company does not reach them
    scorers, judges and environments in a private network  never
    the hub, and scorers, judges, environments, sinks and collectors elsewhere    as the environment says

`fourfold.rpc.channel` turns the proxy off for every channel. Libraries read the environment, so `bypass` changes that.
"""

from __future__ import annotations

import ipaddress
import os
from typing import Final
from urllib.parse import urlsplit

from fourfold.errors import ConfigError

THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_PRIVATE_DOMAINS: Final = (".localhost", ".local", ".internal", ".svc")


def bypass(*hosts: str) -> None:
    """Make libraries of this process, and its children, connect to `hosts` without a proxy."""
    if not any(name.lower() in _PROXIES and value for name, value in os.environ.items()):
        return
    known = [os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    if "*" in map(str.strip, known):  # all hosts, but only where it stands alone
        value = "*"
    else:
        names = [name.strip() for name in ",".join(known).split(",")]
        value = ",".join(filter(None, dict.fromkeys([*names, *hosts])))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = value  # gRPC and curl read one, other libraries the other


def proxy_for(url: str) -> str | None:
    """Return the proxy of the environment for a URL (http, https, ws, wss), or None: connect directly.

    Raises ConfigError: it is no HTTP proxy.
    """
    import urllib.request  # loads a client of HTTP, which most processes do without

    parts = urlsplit(url)
    host = parts.hostname or ""
    address = parts.netloc.rpartition("@")[2]  # with the port, which no_proxy may have
    if is_private(host) or urllib.request.proxy_bypass(host) or urllib.request.proxy_bypass(address):
        return None
    proxies, scheme = urllib.request.getproxies(), parts.scheme.replace("ws", "http")
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy:
        return None
    kind, separator, _ = proxy.partition("://")  # the rest may have a password
    if not separator:
        return f"http://{proxy}"
    if kind.lower() not in ("http", "https"):
        raise ConfigError(
            f"the proxy of the environment for {host} is {kind}://...: only HTTP proxies are supported; set "
            f"{scheme}_proxy=http://HOST:PORT, or name {host} in no_proxy"
        )
    return proxy


def is_private(host: str) -> bool:
    """Return whether a host is on this machine or in a private network; names are judged by their domain."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.rstrip(".").lower()
        return "." not in name or name.endswith(_PRIVATE_DOMAINS)
