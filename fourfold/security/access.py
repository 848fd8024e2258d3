"""Decides which caller may call which service: the policy table, certificates, revocations and bearer tokens.

Inside a deployment every member has a certificate of one private CA (`fourfold certs`), whose URI
`spiffe://fourfold/svc/ROLE/MEMBER` is its principal. `POLICY` maps each service to the roles that may call it. A client
checks the server's principal too. Callers outside of it have a bearer token for a public port, which serves only the
services of `PUBLIC_SERVICES`, and health.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from fourfold.errors import ConfigError, PermissionDenied, Unauthenticated
from fourfold.security.material import (
    MEMBER_NAME,
    SPIFFE_PREFIX,
    Material,
    WatchedFiles,
    read_file,
    read_lines,
    read_material,
)
from fourfold.security.principal import Principal
from fourfold.security.tokens import TokenGrant, read_tokens

if TYPE_CHECKING:  # clients of agents must not import the configuration schema
    from fourfold.config.schema import SecurityConfig

ROLES: Final = (
    *("rollout", "trainer", "reward", "reference", "gateway", "environment", "coordinator"),
    *("viewer", "operator"),
)
"""Roles of certificates. Viewers are `fourfold run`, `watch`, `weights` and `view`, which only read the run.
Operators may change it: `fourfold reward`, `fourfold agents`."""
# Principals without a name: `open_channel` accepts any server of the role.
COORDINATOR: Final = Principal("coordinator")
ROLLOUT: Final = Principal("rollout")
VIEWER: Final = Principal("viewer", "viewer-0")

REVOKED_FILE: Final = "revoked.txt"
WARN_DAYS: Final = 14
"""Remaining validity below which `expiry_warning` warns."""

MEMBER_ROLES: Final = frozenset({"rollout", "trainer", "reward", "reference", "gateway", "environment"})
_COORDINATOR: Final = frozenset({"coordinator"})
_TRAINER: Final = frozenset({"trainer"})

# A service without a row is refused to every caller.
POLICY: Final[Mapping[str, frozenset[str]]] = {
    "fourfold.rollout.v1.RolloutService": frozenset({"coordinator", "gateway"}),
    "fourfold.rollout.v1.RolloutControlService": _COORDINATOR,
    "fourfold.reward.v1.RewardService": _COORDINATOR,
    "fourfold.reference.v1.ReferenceService": _COORDINATOR,
    "fourfold.trainer.v1.TrainerService": _COORDINATOR,
    "fourfold.trainer.v1.TrainerWeightService": _COORDINATOR,
    "fourfold.trainer.v1.RankService": _TRAINER,  # ranks on other machines
    "fourfold.coordinator.v1.MembershipService": MEMBER_ROLES,
    "fourfold.coordinator.v1.RendezvousService": _TRAINER,
    "fourfold.coordinator.v1.ExperienceService": frozenset({"gateway", "operator"}),
    "fourfold.coordinator.v1.RunService": frozenset(
        {"viewer", "gateway", "environment"}
    ),  # to find engines and gateways
    "fourfold.coordinator.v1.RunFileService": frozenset({"viewer"}),
    "fourfold.coordinator.v1.ScorerService": frozenset({"operator"}),
    "fourfold.agent.v1.AgentService": frozenset({"environment"}),
    # Health and reflection are open to every certificate of the deployment.
    "grpc.health.v1.Health": frozenset(ROLES),
    "grpc.reflection.v1alpha.ServerReflection": frozenset(ROLES),
}
PUBLIC_SERVICES: Final = frozenset(
    {
        *("fourfold.rollout.v1.RolloutService", "fourfold.agent.v1.AgentService"),
        *("fourfold.coordinator.v1.RunService", "fourfold.coordinator.v1.RunFileService"),
    }
)


@dataclass(frozen=True, eq=False, repr=False)
class Security:
    """TLS material, tokens and revocations of one process. They follow their files. None of them is ever logged.

    Use `load` or `for_agent` to make one.
    """

    _material: WatchedFiles[Material]
    _tokens: WatchedFiles[dict[str, TokenGrant]] | None = None
    _revoked: WatchedFiles[frozenset[str]] | None = None

    @staticmethod
    def load(config: SecurityConfig, member: Principal, *, public: bool = False) -> Security | None:
        """Read the files of `member`; return None when the recipe has no [security] table.

        Tokens are read for a service with a `public` port, and for roles that always may have one.
        ConfigError names a file that is missing, malformed or readable by others, or a certificate that is not usable.
        """
        if not config.directory:
            if config.tokens_file:
                raise ConfigError(
                    f"security.tokens_file = {config.tokens_file!r} without security.directory: tokens never travel "
                    f"without TLS; run `fourfold certs DIR` and set security.directory"
                )
            return None
        if not MEMBER_NAME.fullmatch(member.name):
            raise ConfigError(
                f"--member-id {member.name!r:.140}: with certificates a member id has 1 to 63 lower-case letters, "
                f"digits and dashes; choose another one"
            )
        folder, tokens_file = Path(config.directory), Path(config.tokens_file)
        own, revoked = folder / f"{member.name}.pem", folder / REVOKED_FILE
        tokens: WatchedFiles[dict[str, TokenGrant]] | None = None
        # Other machines need no token file.
        if config.tokens_file and (public or member.role in ("rollout", "gateway")):
            tokens = WatchedFiles([tokens_file], lambda: read_tokens(tokens_file))
            if not tokens.get():
                raise ConfigError(f"{tokens_file}: holds no token digest; make one with `fourfold certs token add`")
        return Security(
            WatchedFiles([folder / "ca.pem", own], lambda: read_material(folder, member)),
            tokens,
            WatchedFiles([revoked], lambda: read_revoked(revoked)),
        )

    @staticmethod
    def for_agent(authority: Path) -> Security:
        """Read the CA's certificate, the only file that a caller with a bearer token needs."""
        return Security(WatchedFiles([authority], lambda: Material(authority=read_file(authority))))

    @property
    def material(self) -> Material:
        """Current certificates and key; the same object until a file changes."""
        return self._material.get()

    @property
    def tokens(self) -> Mapping[str, TokenGrant]:
        """Current grants of bearer tokens, by token name."""
        return self._tokens.get() if self._tokens else {}

    @property
    def days_left(self) -> float:
        """Days until our certificate expires; infinite without one."""
        return (self.material.expires - datetime.datetime.now(datetime.UTC).timestamp()) / 86_400

    def channel_credentials(self, token: str = "") -> grpc.ChannelCredentials:
        """Return credentials for a channel; with `token`, every call sends it."""
        material = self.material
        channel = grpc.ssl_channel_credentials(
            root_certificates=material.authority,
            private_key=material.key or None,
            certificate_chain=material.certificate or None,
        )
        if not token:
            return channel
        return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))

    def server_credentials(self, *, public: bool) -> grpc.ServerCredentials:
        """Return credentials for a port. Each handshake uses the current files.

        An internal port requires a certificate of our CA from every caller; a public one does not.
        """
        # gRPC calls `changed` at each handshake.
        used = self.material

        def configuration() -> grpc.ServerCertificateConfiguration:
            pair = (used.key, used.certificate)
            return grpc.ssl_server_certificate_configuration([pair], None if public else used.authority)

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            material, before = self.material, used
            used = material
            return None if material is before else configuration()  # None keeps the present configuration

        return grpc.dynamic_ssl_server_credentials(
            configuration(),
            changed,  # type: ignore[arg-type]  # grpc documents None, the stubs do not
            require_client_authentication=not public,
        )

    def check_not_revoked(self, caller: Principal, certificates: Sequence[bytes]) -> None:
        """Raise PermissionDenied when one of the certificates (PEM) that a caller presented is revoked."""
        revoked = self._revoked.get() if self._revoked else frozenset[str]()
        if revoked and any(fingerprint(pem.decode("ascii")) in revoked for pem in certificates):
            raise PermissionDenied(
                f"the certificate of {caller} is revoked; its owner may get another one with `fourfold certs renew`",
                reason="CERTIFICATE_REVOKED",
            )


def expiry_warning(name: str, days_left: float) -> str:
    """Return a warning with advice when a certificate expires within `WARN_DAYS`; otherwise an empty string."""
    if days_left >= WARN_DAYS:
        return ""
    when = "has expired" if days_left <= 0 else f"expires in {days_left:.1f} days"
    return (
        f"the certificate of {name} {when}; run `fourfold certs renew DIR {name}` where ca-key.pem is, and copy "
        f"{name}.pem to its machine; no restart is needed"
    )


def fingerprint(pem: str) -> str:
    """Return the SHA-256 of a PEM certificate as 64 hexadecimal digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.strip())).hexdigest()


def read_revoked(path: Path) -> frozenset[str]:
    """Return the fingerprints in a file of lines "FINGERPRINT ROLE/MEMBER EXPIRY"; none when the file is absent."""
    if not path.exists():
        return frozenset()
    found: set[str] = set()
    for number, line in read_lines(path):
        word = line.split()[0]
        if len(word) != 64 or not set(word) <= set("0123456789abcdef"):
            raise ConfigError(f"{path}:{number}: no certificate's SHA-256; `fourfold certs revoke` writes this file")
        found.add(word)
    return frozenset(found)


def check_identity(service: str, identities: Sequence[str]) -> Principal:
    """Return the caller with a certificate of these URIs, if its role may call the service with this full name.

    Raises:
        Unauthenticated: the certificate has no URI of ours, or several.
        PermissionDenied: this role may not call the service.
    """
    found = [uri.removeprefix(SPIFFE_PREFIX) for uri in identities if uri.startswith(SPIFFE_PREFIX)]
    role, _, name = found[0].partition("/") if len(found) == 1 else ("", "", "")
    if role not in ROLES or not MEMBER_NAME.fullmatch(name):
        raise Unauthenticated(
            f"the certificate has no URI {SPIFFE_PREFIX}ROLE/MEMBER; use one made by this version's `fourfold certs`"
        )
    allowed = POLICY.get(service, frozenset())
    if role not in allowed:
        roles = ", ".join(sorted(allowed)) or "no role"
        raise PermissionDenied(f"{role}/{name} may not call {service}; allowed: {roles}")
    return Principal(role, name)
