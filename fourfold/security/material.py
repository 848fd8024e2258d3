"""The certificate files of one process: read, checked, and known to be usable before anything listens.

    DIR/ca.pem          certificate of the deployment's private CA
    DIR/MEMBER.pem      certificate and private key of one member, in one file so that a renewal is atomic

A member's certificate has the URI `spiffe://fourfold/svc/ROLE/MEMBER`, which names its bearer to a
server, and the DNS names `MEMBER.ROLE.fourfold` and `ROLE.fourfold`, which a client asks TLS to check.
They are never looked up: they say who answers, not where.
"""

from __future__ import annotations

import math
import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold.security.principal import Principal

SPIFFE_PREFIX: Final = "spiffe://fourfold/svc/"
MEMBER_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A member id that a certificate can carry: a DNS label. DNS ignores case, so there are no capitals."""

_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)
_ROUNDS: Final = 8  # messages each way; TLS 1.3 needs two


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """PEM texts. Never logged."""

    authority: bytes = field(repr=False)
    """Certificate of the private CA."""
    certificate: bytes = field(default=b"", repr=False)
    """Our own certificate; empty for an agent that comes with a token."""
    key: bytes = field(default=b"", repr=False)
    """Its private key."""
    expires: float = math.inf
    """When our certificate expires, in seconds since the epoch."""


def server_name(who: Principal) -> str:
    """Return the DNS name in the certificate of `who`; a principal without a name stands for any of its role."""
    return f"{who.name}.{who.role}.fourfold" if who.name else f"{who.role}.fourfold"


def uri(who: Principal) -> str:
    """Return the URI in the certificate of `who`."""
    return f"{SPIFFE_PREFIX}{who.role}/{who.name}"


def read_material(folder: Path, who: Principal) -> Material:
    """Read and check the files of `who`.

    Raises:
        ConfigError: a file is missing, malformed, readable by others, expired, or of somebody else.
    """
    path = folder / f"{who.name}.pem"
    authority = read_file(folder / "ca.pem")
    text = read_file(
        path, hint=f"copy it from the folder with ca-key.pem; there, `fourfold certs add DIR {who}` makes it"
    )
    check_private(path)
    blocks = [(match[1], match[0]) for match in _BLOCK.finditer(text)]
    return Material(
        authority=authority,
        certificate=b"".join(block for label, block in blocks if label == b"CERTIFICATE"),
        key=b"".join(block for label, block in blocks if label.endswith(b"PRIVATE KEY")),
        expires=_expiry(authority, path, who),
    )


def check_private(path: Path) -> None:
    """Refuse a file with a private key that other users can read.

    Raises:
        ConfigError: they can.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users may read this private key (mode {mode:04o}); run `chmod 600 {path}`, and "
            f"`fourfold certs renew` if somebody may have read it"
        )


def read_file(path: Path, hint: str = "`fourfold certs DIR` makes the files that security needs") -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: it cannot be read; `hint` is the advice.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); {hint}") from None


def _expiry(authority: bytes, path: Path, who: Principal) -> float:
    """Return when a certificate expires, after a TLS handshake in memory as proof that it is usable."""
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(path, password="")  # without it OpenSSL asks the terminal
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(cadata=authority.decode("ascii"))
        found = _shake_hands(client, server, server_name(who))
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{path}: {_meaning(error, path, who)}") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: it and ca.pem are no certificate, key and CA that belong together ({error}); copy both anew "
            f"from the folder that `fourfold certs` made"
        ) from None
    if ("URI", uri(who)) not in found.get("subjectAltName", ()):
        raise ConfigError(f"{path}: the certificate has no URI {uri(who)}; use one made by `fourfold certs`")
    return float(ssl.cert_time_to_seconds(found["notAfter"]))


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> Mapping[str, Any]:
    """Return what the client is shown of the server's certificate."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(down, up, server_hostname=name)
    sides = (caller, server.wrap_bio(up, down, server_side=True))
    for _ in range(_ROUNDS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return caller.getpeercert() or {}


def _meaning(error: ssl.SSLCertVerificationError, path: Path, who: Principal) -> str:
    if "expired" in error.verify_message:
        return f"the certificate has expired; `fourfold certs renew {path.parent} {who.name}` makes a new one"
    if "ostname" in error.verify_message:
        return f"this is not the certificate of {who}; copy {path.name} from the folder that `fourfold certs` made"
    return f"not a certificate of the CA in ca.pem ({error.verify_message}); both must come from one `fourfold certs`"
