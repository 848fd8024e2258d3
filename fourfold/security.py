"""Who may call what: certificates, bearer tokens, and the policy table.

Inside a deployment every service has a certificate of one private CA (`fourfold certs`) with
its identity as URI, `spiffe://fourfold/svc/NAME`. The table below says which identities may
call which service; a service without a row is refused to everybody. Agents from outside come
with a bearer token to a port that carries nothing but `RolloutService` and health.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from fourfold.errors import ConfigError, PermissionDenied, Unauthenticated
from fourfold.principal import Principal

if TYPE_CHECKING:  # an agent that only calls needs no schema
    from fourfold.config import SecurityConfig

IDENTITIES: Final = ("rollout", "trainer", "reward", "reference", "coordinator", "agent")
SPIFFE_PREFIX: Final = "spiffe://fourfold/svc/"

_MEMBERS: Final = frozenset({"rollout", "trainer", "reward", "reference"})
_COORDINATOR: Final = frozenset({"coordinator"})

POLICY: Final[Mapping[str, frozenset[str]]] = {
    "fourfold.rollout.v1.RolloutService": frozenset({"coordinator", "agent"}),
    "fourfold.rollout.v1.RolloutControlService": _COORDINATOR,
    "fourfold.reward.v1.RewardService": _COORDINATOR,
    "fourfold.reference.v1.ReferenceService": _COORDINATOR,
    "fourfold.trainer.v1.TrainerService": _COORDINATOR,
    "fourfold.trainer.v1.TrainerWeightService": _COORDINATOR,
    "fourfold.coordinator.v1.MembershipService": _MEMBERS,
    "fourfold.coordinator.v1.RunService": frozenset({"coordinator", "agent"}),
    # Any certificate of the deployment may ask whether a service lives and what it offers.
    "grpc.health.v1.Health": frozenset(IDENTITIES),
    "grpc.reflection.v1alpha.ServerReflection": frozenset(IDENTITIES),
}
PUBLIC_SERVICES: Final = frozenset({"fourfold.rollout.v1.RolloutService"})

SCOPES: Final[Mapping[str, frozenset[str]]] = {
    "generate": frozenset({"Generate"}),
    "info": frozenset({"GetInfo", "WatchLoad"}),
}
"""Methods of the public services that a scope allows."""
LIMITS: Final = ("concurrent_calls", "tokens_in_flight", "calls_per_second")
"""Limits that a token may carry."""

_TOKEN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """What the holder of one bearer token may do."""

    name: str
    """Names the holder in logs and quotas; unique in the file."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    scopes: frozenset[str] = frozenset(SCOPES)
    """Keys of `SCOPES`."""
    expires: datetime.datetime | None = None
    """With time zone; None: never."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """By the names of `LIMITS`; a limit that is absent is the port's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Loaded TLS material and token digests of one process. Never logged."""

    authority: bytes = field(repr=False)
    """Certificate of the private CA, PEM."""
    certificate: bytes = field(default=b"", repr=False)
    """Our own certificate, PEM; empty for an agent that comes with a token."""
    key: bytes = field(default=b"", repr=False)
    """Its private key, PEM."""
    tokens: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Name of each bearer token, and the SHA-256 digest of the token."""

    @staticmethod
    def load(config: SecurityConfig, identity: str) -> Security | None:
        """Read the files of `identity`; None when the recipe has no [security] table.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        if not config.directory:
            if config.tokens_file:
                raise ConfigError(
                    f"security.tokens_file = {config.tokens_file!r} without security.directory: tokens never travel "
                    f"without TLS; run `fourfold certs DIR` and set security.directory"
                )
            return None
        folder = Path(config.directory)
        return Security(
            authority=_read(folder / "ca.pem"),
            certificate=_read(folder / f"{identity}.pem"),
            key=_read(folder / f"{identity}-key.pem"),
            # Nobody else has a port for agents; a machine without one needs no file of tokens.
            tokens=read_tokens(Path(config.tokens_file)) if config.tokens_file and identity == "rollout" else {},
        )

    @staticmethod
    def for_agent(authority: Path) -> Security:
        """Read only the CA's certificate: all that a caller with a bearer token needs.

        Raises:
            ConfigError: the file is missing.
        """
        return Security(authority=_read(authority))

    def channel_credentials(self, token: str = "") -> grpc.ChannelCredentials:
        """Return credentials for a channel; with `token` every call carries it."""
        channel = grpc.ssl_channel_credentials(
            root_certificates=self.authority,
            private_key=self.key or None,
            certificate_chain=self.certificate or None,
        )
        if not token:
            return channel
        return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))

    def server_credentials(self, *, public: bool) -> grpc.ServerCredentials:
        """Return credentials for a port; an internal one asks every caller for a certificate of our CA."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            root_certificates=None if public else self.authority,
            require_client_auth=not public,
        )


def read_tokens(path: Path) -> dict[str, bytes]:
    """Read lines of "name sha256hex"; empty lines and lines that start with # are skipped.

    Raises:
        ConfigError: the file is missing, empty, or a line is malformed.
    """
    tokens: dict[str, bytes] = {}
    for number, line in enumerate(_read(path).decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _TOKEN_LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{path}:{number}: no token digest; a line is NAME, a space, and 64 hexadecimal digits")
        if match[1] in tokens:
            raise ConfigError(f"{path}:{number}: the name {match[1]!r} occurs twice; give each token its own")
        tokens[match[1]] = bytes.fromhex(match[2])
    if not tokens:
        raise ConfigError(f"{path}: holds no token digest; make one with `fourfold certs`")
    return tokens


def check_token(authorization: str, tokens: Mapping[str, bytes]) -> str:
    """Return the name of the token in an `authorization` header.

    Raises:
        Unauthenticated: there is none, or nobody knows it.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("no bearer token; send the metadata `authorization: Bearer TOKEN`")
    digest = hashlib.sha256(token.strip().encode()).digest()
    # Every entry is compared, so that the time tells nothing about which one was near.
    names = [name for name, known in tokens.items() if hmac.compare_digest(digest, known)]
    if not names:
        raise Unauthenticated("unknown bearer token; ask the owner of this deployment for one")
    return names[0]


def check_identity(service: str, identities: list[str]) -> Principal:
    """Check a caller's certificate against the policy table.

    Args:
        service: full name of the called service.
        identities: URIs of the certificate.

    Returns:
        The caller.

    Raises:
        Unauthenticated: the certificate carries no identity of ours.
        PermissionDenied: this identity may not call the service.
    """
    names = {uri.removeprefix(SPIFFE_PREFIX) for uri in identities if uri.startswith(SPIFFE_PREFIX)}
    if not names:
        raise Unauthenticated(f"the certificate has no URI {SPIFFE_PREFIX}NAME; use one made by `fourfold certs`")
    allowed = POLICY.get(service, frozenset())
    if not names & allowed:
        who = ", ".join(sorted(allowed)) or "nobody"
        raise PermissionDenied(f"{', '.join(sorted(names))} may not call {service}; allowed: {who}")
    return Principal(min(names & allowed))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror}); `fourfold certs DIR` makes the files that security needs"
        ) from None
