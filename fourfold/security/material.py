"""Reads the certificate files of one process, proves that they are usable, and follows their changes.

    DIR/ca.pem          certificate of the deployment's private CA
    DIR/MEMBER.pem      certificate and private key of one member, in one file so that a renewal is atomic

A member's certificate has the URI `spiffe://fourfold/svc/ROLE/MEMBER`, which identifies a caller to a server, and the
DNS names `MEMBER.ROLE.fourfold` and `ROLE.fourfold`, with which a client's TLS library identifies a server. The DNS
names are never resolved.
"""

from __future__ import annotations

import logging
import math
import re
import ssl
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from fourfold.errors import ConfigError
from fourfold.security.principal import Principal

log = logging.getLogger("fourfold.security.material")

T = TypeVar("T")

SPIFFE_PREFIX: Final = "spiffe://fourfold/svc/"
# A member id must be a DNS label. DNS ignores case, so capitals are not allowed.
MEMBER_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_PEM_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)
_HANDSHAKE_ROUNDS: Final = 8  # messages in each direction; TLS 1.3 needs two


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """PEM texts of one process. Never logged."""

    authority: bytes = field(repr=False)
    """Certificate of the private CA."""
    certificate: bytes = field(default=b"", repr=False)
    """Our own certificate; empty for an agent, which has a token instead."""
    key: bytes = field(default=b"", repr=False)
    """Private key of `certificate`."""
    expires: float = math.inf
    """Expiry of `certificate`, in seconds since the epoch."""


class WatchedFiles(Generic[T]):
    """The parsed content of some files, read again when one of them changes. Thread-safe.

    Each `get` costs one `stat` per file. When a changed file cannot be read, the error is logged once and the previous
    content stays in force: a mistake in a file must not end a run.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Read for the first time. A missing file may appear later. `read` may raise ConfigError."""
        self._paths: Final = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._current_stamps()  # before reading, so that the next `get` sees a change in between
        self._value = read()

    def get(self) -> T:
        """Return the current content, read again if a file has changed."""
        stamps = self._current_stamps()
        if stamps != self._stamps:
            with self._lock:
                if stamps != self._stamps:
                    try:
                        self._value = self._read()
                    except (ConfigError, OSError) as error:
                        log.error("rejected a changed file, its previous content stays in force: %s", error)
                    self._stamps = stamps
        return self._value

    def _current_stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def server_name(member: Principal) -> str:
    """Return the DNS name in the certificate of `member`; a principal without a name means any member of its role."""
    return f"{member.name}.{member.role}.fourfold" if member.name else f"{member.role}.fourfold"


def uri(member: Principal) -> str:
    """Return the URI in the certificate of `member`."""
    return f"{SPIFFE_PREFIX}{member.role}/{member.name}"


def read_material(folder: Path, member: Principal) -> Material:
    """Read the files of `member`, and check that only this user can read the key and that the certificate is usable."""
    path = folder / f"{member.name}.pem"
    authority = read_file(folder / "ca.pem")
    text = read_file(
        path, hint=f"copy it from the folder with ca-key.pem; there, `fourfold certs add DIR {member}` makes it"
    )
    check_private(path)
    blocks = [(match[1], match[0]) for match in _PEM_BLOCK.finditer(text)]
    return Material(
        authority=authority,
        certificate=b"".join(block for label, block in blocks if label == b"CERTIFICATE"),
        key=b"".join(block for label, block in blocks if label.endswith(b"PRIVATE KEY")),
        expires=_check_usable(authority, path, member),
    )


def check_private(path: Path) -> None:
    """Raise ConfigError when other users can read a file with a private key."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users may read this private key (mode {mode:04o}); run `chmod 600 {path}`, and "
            f"`fourfold certs renew` if another user may have read it"
        )


def read_file(path: Path, hint: str = "`fourfold certs DIR` makes the files that security needs") -> bytes:
    """Return the content of a file, or raise ConfigError with `hint` as advice."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror}); {hint}") from None


def read_lines(path: Path, hint: str = "") -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of a file, without empty lines and comments (#); raise as `read_file`."""
    text = (read_file(path, hint) if hint else read_file(path)).decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _check_usable(authority: bytes, path: Path, member: Principal) -> float:
    """Check a certificate with a TLS handshake in memory; return its expiry in seconds since the epoch."""
    # The standard library cannot parse or verify a certificate outside of a handshake, and `cryptography` is optional.
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(path, password="")  # without a password OpenSSL prompts on the terminal
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.load_verify_locations(cadata=authority.decode("ascii"))
        found = _shake_hands(client, server, server_name(member))
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{path}: {_explain(error, path, member)}") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: its certificate and key do not belong to each other and to ca.pem ({error}); copy both anew "
            f"from the folder that `fourfold certs` made"
        ) from None
    if ("URI", uri(member)) not in found.get("subjectAltName", ()):
        raise ConfigError(f"{path}: the certificate has no URI {uri(member)}; use one made by `fourfold certs`")
    return float(ssl.cert_time_to_seconds(found["notAfter"]))


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> Mapping[str, Any]:
    """Return the server's certificate as the client receives it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(down, up, server_hostname=name)
    sides = (caller, server.wrap_bio(up, down, server_side=True))
    for _ in range(_HANDSHAKE_ROUNDS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return caller.getpeercert() or {}


def _explain(error: ssl.SSLCertVerificationError, path: Path, member: Principal) -> str:
    if "expired" in error.verify_message:
        return f"the certificate has expired; `fourfold certs renew {path.parent} {member.name}` makes a new one"
    if "ostname" in error.verify_message:
        return f"this is not the certificate of {member}; copy {path.name} from the folder that `fourfold certs` made"
    return f"not a certificate of the CA in ca.pem ({error.verify_message}); both must come from one `fourfold certs`"
