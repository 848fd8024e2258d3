"""`fourfold certs DIR`: a private CA, one certificate per service identity, and a token for agents.

    DIR/ca.pem, ca-key.pem            the authority; keep ca-key.pem away from the services
    DIR/NAME.pem, NAME-key.pem        rollout, trainer, reward, reference, coordinator, agent
    DIR/tokens.txt                    "name sha256hex" of the bearer tokens; the token itself is printed once

A certificate's identity is its URI `spiffe://fourfold/svc/NAME`; its names are localhost,
127.0.0.1, ::1 and the given hosts. Needs `cryptography` (the extra `fourfold[certs]`).
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fourfold.errors import ConfigError
from fourfold.security import IDENTITIES, SPIFFE_PREFIX

VALID_DAYS: Final = 365
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def make(directory: Path, hosts: Sequence[str] = ()) -> str:
    """Write the files, print what to do with them, and return the agent's token.

    Args:
        directory: where; made if missing (mode 0700).
        hosts: names and addresses at which services are dialled, besides this machine.

    Raises:
        ConfigError: a host is malformed, or one of the files exists: nothing is overwritten.
    """
    names = [_general_name(host) for host in dict.fromkeys((*_LOCAL, *hosts))]
    files = [directory / f"{name}{end}" for name in ("ca", *IDENTITIES) for end in (".pem", "-key.pem")]
    existing = [path for path in (*files, directory / "tokens.txt") if path.exists()]
    if existing:
        raise ConfigError(
            f"{existing[0]}: exists, and certificates are never overwritten; choose another folder, or move this one "
            f"away and restart every service with the new files"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key)
    _write_pair(directory, "ca", authority, authority_key)
    for identity in IDENTITIES:
        key = ec.generate_private_key(ec.SECP256R1())
        _write_pair(directory, identity, _leaf(identity, key, names, authority, authority_key), key)
    token = "ff_" + secrets.token_urlsafe(32)  # never begins with a dash, which a command line would take for an option
    digest = hashlib.sha256(token.encode()).hexdigest()
    _write(directory / "tokens.txt", f"agent {digest}\n".encode(), mode=0o600)
    print(_explain(directory, token))
    return token


def _explain(directory: Path, token: str) -> str:
    return f"""Certificates for {", ".join(IDENTITIES)}: {directory}, valid for {VALID_DAYS} days.
Give every service ca.pem and its own NAME.pem and NAME-key.pem, and put into the recipe:

  [security]
  directory = "{directory}"
  tokens_file = "{directory / "tokens.txt"}"

Keep {directory / "ca-key.pem"} to yourself. An agent outside needs ca.pem and this token,
which is shown only now:

  {token}
"""


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("Fourfold private CA")
    return (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    identity: str,
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    uri = x509.UniformResourceIdentifier(SPIFFE_PREFIX + identity)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _builder(_name(identity), authority.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([uri, *names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks of other machines
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "fourfold"), x509.NameAttribute(NameOID.COMMON_NAME, text)]
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or any(c.isspace() or c in ":/,@" for c in host) or not host.isascii():
        raise ConfigError(
            f"host {host!r} is neither an address nor a name; give for example 10.0.0.5 or trainer.internal"
        )
    return x509.DNSName(host)


def _write_pair(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(directory / f"{name}-key.pem", private, mode=0o600)
    _write(directory / f"{name}.pem", certificate.public_bytes(pem), mode=0o644)


def _write(path: Path, data: bytes, *, mode: int) -> None:
    # O_EXCL: never over a file that appeared meanwhile; the mode from the first byte on.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
