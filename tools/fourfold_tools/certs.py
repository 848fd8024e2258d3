"""Issues, renews and revokes the certificates of a private CA, and edits the token file, for `fourfold certs`.

    DIR/ca.pem          certificate of the CA; every process needs it
    DIR/MEMBER.pem      certificate and private key of one member, e.g. rollout-0.pem
    DIR/revoked.txt     revoked certificates; absent until the first revocation
    DIR/tokens.txt      SHA-256 of the bearer tokens, for services with a public port
    DIR/ca-key.pem      private key of the CA; never leaves this folder
    DIR/issued.txt      every issued certificate; never leaves this folder

`fourfold.security.material` documents the names in a member's certificate. Certificates of rollout services and
gateways also contain host names, for agents whose TLS library checks the host name.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fourfold.errors import ConfigError
from fourfold.security.access import REVOKED_FILE, ROLES, fingerprint
from fourfold.security.material import MEMBER_NAME, check_private, read_file, read_lines, server_name, uri
from fourfold.security.principal import Principal
from fourfold.security.tokens import DEFAULT_SCOPES, TokenGrant, parse_grant, read_tokens

VALID_DAYS: Final = 365
AUTHORITY_DAYS: Final = 3650
TOKENS_FILE: Final = "tokens.txt"
FIRST_OF_EACH: Final = tuple(Principal(role, f"{role}-0") for role in ROLES)

_KEY_FILE: Final = "ca-key.pem"
_CA_NAMES: Final = ("ca", "ca-key")  # a member's file of such a name would replace the CA's
_HOST_ROLES: Final = ("rollout", "gateway")  # agents connect only to these; a host name does not prove a role
_ISSUED_FILE: Final = "issued.txt"
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_PEM: Final = serialization.Encoding.PEM
_KEY_USAGES: Final = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An issued certificate, as recorded in one line of issued.txt."""

    fingerprint: str
    member: Principal
    expires: datetime.datetime
    hosts: tuple[str, ...] = ()

    @property
    def days_left(self) -> float:
        """Days until the certificate expires; negative afterwards."""
        return (self.expires - _now()).total_seconds() / 86_400

    def line(self) -> str:
        """Return the line of issued.txt, with its line end."""
        words = [self.fingerprint, str(self.member), f"{self.expires:%Y-%m-%dT%H:%M:%SZ}", ",".join(self.hosts)]
        return " ".join(words).rstrip() + "\n"


def parse_member(text: str) -> Principal:
    """Return the principal of "rollout-0" or "reward/math"; the role must exist, and the name be a free DNS label."""
    role, slash, name = text.partition("/")
    if not slash:
        role, name = text.partition("-")[0], text
    if role not in ROLES or not MEMBER_NAME.fullmatch(name) or name in _CA_NAMES:
        raise ConfigError(
            f"member {text!r:.80}: give ROLE-NUMBER or ROLE/NAME, with a role of {', '.join(ROLES)} and a name of 1 to "
            f"63 lower-case letters, digits and dashes, but not {' or '.join(_CA_NAMES)}, whose files are the CA's"
        )
    return Principal(role, name)


def make(
    directory: Path,
    hosts: Sequence[str] = (),
    members: Sequence[Principal] = FIRST_OF_EACH,
    *,
    days: float = VALID_DAYS,
) -> str:
    """Make a CA, certificates of its members that are valid for `days`, and one token; return the token.

    A missing folder is made with mode 0700. `hosts` are names and addresses at which agents reach rollout services and
    gateways, besides this machine.

    Raises:
        ConfigError: a host is malformed, or the folder already has a CA. Nothing is overwritten.
    """
    members_with_hosts = _with_hosts(members, hosts)
    names = ("ca.pem", _KEY_FILE, _ISSUED_FILE, TOKENS_FILE)
    if existing := [path for name in names if (path := directory / name).exists()]:
        raise ConfigError(
            f"{existing[0]}: exists already, and an existing CA is not overwritten; `fourfold certs add {directory} "
            f"MEMBER` makes one more certificate, `fourfold certs renew {directory}` new ones"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    _write(directory / _KEY_FILE, _private(key), mode=0o600)
    _write(directory / "ca.pem", _authority(key).public_bytes(_PEM), mode=0o644)
    _issue(directory, members_with_hosts, days)
    return add_token(directory / TOKENS_FILE, "agent")


def add(directory: Path, members: Sequence[Principal], hosts: Sequence[str] = (), *, days: float = VALID_DAYS) -> None:
    """Make certificates for new members; their names must be new, also among other roles."""
    members_with_hosts = _with_hosts(members, hosts)
    names = {issued.member.name for issued in current(directory)}
    for member in members:
        if member.name in names:
            raise ConfigError(
                f"{member.name} has a certificate; `fourfold certs renew {directory} {member.name}` makes another one"
            )
    _issue(directory, members_with_hosts, days)


def renew(directory: Path, names: Sequence[str] = (), *, days: float = VALID_DAYS) -> list[Issued]:
    """Replace certificates and keys of the named members, or of all, by new ones; return the new certificates."""
    return _issue(directory, [(issued.member, issued.hosts) for issued in _chosen(directory, names)], days)


def revoke(directory: Path, names: Sequence[str]) -> None:
    """Revoke every certificate that these members ever had. A renewal afterwards makes a valid one."""
    chosen = {issued.member for issued in _chosen(directory, names)}
    path = directory / REVOKED_FILE
    lines = [f"{line}\n" for line in read_file(path).decode().splitlines()] if path.exists() else []
    # Expired certificates are refused anyway.
    new = [issued.line() for issued in all_issued(directory) if issued.member in chosen and issued.days_left > 0]
    _write(path, "".join(dict.fromkeys([*lines, *new])).encode(), mode=0o644)


def current(directory: Path) -> list[Issued]:
    """Return the newest certificate of each member."""
    return list({issued.member: issued for issued in all_issued(directory)}.values())


def all_issued(directory: Path) -> list[Issued]:
    """Return all issued certificates, the oldest first; `directory` must be the folder of a CA."""
    path = directory / _ISSUED_FILE
    found: list[Issued] = []
    for number, line in read_lines(path, "give the folder that `fourfold certs DIR` made, where ca-key.pem is"):
        try:
            digest, member, expires, *hosts = line.split()
            time = datetime.datetime.fromisoformat(expires).astimezone(datetime.UTC)
            names = tuple(hosts[0].split(",")) if hosts else ()
        except (ValueError, OverflowError):
            raise ConfigError(
                f"{path}:{number}: malformed; only `fourfold certs` may write this file: restore it from a backup"
            ) from None
        found.append(Issued(fingerprint=digest, member=parse_member(member), expires=time, hosts=names))
    return found


def add_token(
    path: Path,
    name: str,
    *,
    scopes: Sequence[str] = (),
    days: float | None = None,
    limits: dict[str, float] | None = None,
) -> str:
    """Make a token, append its grant to the file, and return the token. The token itself is stored nowhere.

    A missing file is made. `scopes` are keys of `tokens.SCOPES`; none means `tokens.DEFAULT_SCOPES`. Without `days` the
    token stays valid. `limits` has keys of `tokens.LIMITS`.

    Raises:
        ConfigError: the name is malformed or taken, or a scope or limit is unknown.
    """
    token = "ff_" + secrets.token_urlsafe(32)  # never starts with a dash, which command lines read as an option
    grant = TokenGrant(
        name=name,
        digest=hashlib.sha256(token.encode()).digest(),
        scopes=frozenset(scopes or DEFAULT_SCOPES),
        expires=None if days is None else _now() + datetime.timedelta(days=days),
        limits=limits or {},
    )
    grant = parse_grant(grant.line())  # checks the name, the scopes and the limits
    if path.exists() and grant.name in read_tokens(path):
        raise ConfigError(f"{path}: has a token named {name!r}; choose another name, or remove that one")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []  # an edited file may end without \n
    _write(path, "\n".join([*lines, grant.line(), ""]).encode(), mode=0o600)
    return token


def remove_token(path: Path, name: str) -> None:
    """Remove a token's line. Services that read the file refuse the token from its next call on."""
    if name not in read_tokens(path):
        raise ConfigError(f"{path}: has no token named {name!r:.80}; `fourfold certs token list` shows them")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    _write(path, "".join(line for line in lines if line.split()[:1] != [name]).encode(), mode=0o600)


def _with_hosts(members: Sequence[Principal], hosts: Sequence[str]) -> list[tuple[Principal, tuple[str, ...]]]:
    """Return the host names of each member.

    Malformed hosts are refused, and two members of one name: the name is the member's id and its file name.
    """
    for host in hosts:
        _general_name(host)
    names = [member.name for member in members]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two members are named {twice[0]!r}; a member id occurs once in a run")
    return [(member, tuple(hosts) if member.role in _HOST_ROLES else ()) for member in members]


def _chosen(directory: Path, names: Sequence[str]) -> list[Issued]:
    """Return the newest certificates of the named members, or of all members without names."""
    known = {issued.member.name: issued for issued in current(directory)}
    if missing := [name for name in names if name not in known]:
        raise ConfigError(
            f"{missing[0]!r:.80} has no certificate of {directory}; it has {', '.join(known)}. `fourfold certs add "
            f"{directory} MEMBER` makes one"
        )
    return [known[name] for name in names] if names else list(known.values())


def _issue(directory: Path, members: Sequence[tuple[Principal, tuple[str, ...]]], days: float) -> list[Issued]:
    """Write and record a new certificate for each member (principal, host names)."""
    key_file = directory / _KEY_FILE
    key = serialization.load_pem_private_key(read_file(key_file, hint="it is needed to issue certificates"), None)
    check_private(key_file)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_file}: not a key that `fourfold certs` made")
    authority = x509.load_pem_x509_certificate(read_file(directory / "ca.pem"))
    made: list[Issued] = []
    for member, hosts in members:
        own = ec.generate_private_key(ec.SECP256R1())
        leaf = _leaf(member, own, hosts, authority, key, days)
        text = leaf.public_bytes(_PEM)
        made.append(
            Issued(fingerprint=fingerprint(text.decode()), member=member, expires=leaf.not_valid_after_utc, hosts=hosts)
        )
        # Recorded before it is written, so that every existing certificate can be revoked.
        record = os.open(directory / _ISSUED_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(record, "w", encoding="utf-8") as file:
            file.write(made[-1].line())
        _write(directory / f"{member.name}.pem", text + _private(own), mode=0o600)
    return made


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("Fourfold private CA")
    return (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    member: Principal,
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: float,
) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri(member))]
    names += [x509.DNSName(server_name(member)), x509.DNSName(server_name(Principal(member.role)))]
    if member.role in _HOST_ROLES:
        names += [_general_name(host) for host in dict.fromkeys((*_LOCAL, *hosts))]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _builder(_name(member.name), authority.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    begin = _now() - datetime.timedelta(minutes=5)  # clocks of other machines may be behind
    # The minimum keeps the begin before the end for `days` <= 0, with which tests make expired certificates.
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(begin, _now() + datetime.timedelta(days=days - 1)))
        .not_valid_after(_now() + datetime.timedelta(days=days))
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in _KEY_USAGES})


def _name(text: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "fourfold"), x509.NameAttribute(NameOID.COMMON_NAME, text)]
    )


def _general_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise ConfigError(
            f"host {host!r:.80} is neither an address nor a name; give for example 10.0.0.5 or trainer.internal"
        )
    if host.lower().endswith(".fourfold"):
        raise ConfigError(f"host {host!r}: names in .fourfold are reserved for members; give the host's own name")
    return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _write(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file atomically, with `mode` from the start."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
