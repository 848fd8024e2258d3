"""Refuses the requests that web pages make to an HTTP port of this machine.

A loopback port without tokens trusts every program of this machine. The browser is one of them, and runs the scripts of
web sites. Three headers tell these requests, and no script can change them: with DNS rebinding, `Host` has the name of
the site; `Origin` and `Sec-Fetch-Site` tell which page sends the request. Other clients send only `Host`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from fourfold.address import is_loopback


def joined(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request by their names in lower case; repeated ones become one, so that each counts."""
    headers: dict[str, str] = {}
    for name, value in fields:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def refusal(method: str, headers: Mapping[str, str], names: Collection[str] = ()) -> tuple[int, str] | None:
    """Return status and text of the answer to a request of a foreign page; None for any other request.

    A page may link to GET: its browser shows the answer to the user, and does not give it to the page.

    Args:
        method: such as "GET".
        headers: as `joined` returns them.
        names: further names of this machine, under which a reverse proxy passes requests on.
    """
    host = headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    name = name.removesuffix(".")  # the root of DNS
    if not is_loopback(name.strip("[]")) and name not in map(str.lower, names):
        return 421, f"Host {host[:100]!r} is not this machine; use http://127.0.0.1:PORT/"
    follows_link = method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
    own_origins = (f"http://{host}", f"https://{host}")  # https: a reverse proxy has TLS
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin", own_origins[0]).lower()
    if (site in ("none", "same-origin") or follows_link) and origin in own_origins:
        return None
    return 403, "the request comes from a web page of another site, which may not use this port"
