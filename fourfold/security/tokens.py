"""Reads the file of bearer tokens, checks the token of a call, and reads that of an option.

The file has one line per token, with the token's SHA-256 and never the token itself:

    NAME SHA256 [scopes=generate,info] [expires=2027-01-31T00:00:00Z] [concurrent_calls=4] [tokens_in_flight=20000]
        [calls_per_second=10]

(on one line). An absent option does not restrict: all scopes but `view`, no expiry, the limits of the port.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError, PermissionDenied, Unauthenticated
from fourfold.security.material import read_lines
from fourfold.security.principal import CallerLimits

# Methods of the public services that each scope allows: sampling, reading limits, sessions that are trained on, and
# reading what a run has recorded.
SCOPES: Final[Mapping[str, frozenset[str]]] = {
    "generate": frozenset(
        {"Generate", "ScoreTokens", "ParseCompletion", "Tokenize", "Detokenize", "ApplyChatTemplate"}
    ),
    "info": frozenset({"GetInfo", "GetQuota", "WatchLoad"}),
    "train": frozenset({"NextTask", "OpenSession", "CloseSession", "ExportSession", "WatchSession"}),
    "view": frozenset({"GetRun", "WatchRun", "GetWeightPlane", "ReadFile"}),
}
DEFAULT_SCOPES: Final = frozenset(SCOPES) - {"view"}
"""Scopes of a token that names none: whoever samples from a model need not read all prompts and answers of a run."""
# Limits that a token may have.
LIMITS: Final = tuple(limit.name for limit in fields(CallerLimits))

_TOKEN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """Rights of the holder of one bearer token."""

    name: str
    """Names the holder in logs and quotas; unique in the file."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    scopes: frozenset[str] = DEFAULT_SCOPES
    expires: datetime.datetime | None = None
    """With time zone; None: never."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits that replace the port's defaults; keys from `LIMITS`."""

    def line(self) -> str:
        """Return the grant as a line of the file, without a line end."""
        words = [self.name, self.digest.hex()]
        if self.scopes != DEFAULT_SCOPES:
            words.append(f"scopes={','.join(sorted(self.scopes))}")
        if self.expires is not None:
            words.append(f"expires={self.expires.astimezone(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}")
        return " ".join([*words, *(f"{key}={value:.15g}" for key, value in self.limits.items())])


def parse_grant(line: str) -> TokenGrant:
    """Return the grant of one line of the file. The ConfigError of a malformed line has no file name and number."""
    name, digest, *options = line.split() if len(line.split()) > 1 else ("", "")
    if not _TOKEN_NAME.fullmatch(name) or not _DIGEST.fullmatch(digest):
        raise ConfigError("no token digest; a line is NAME, a space, and 64 hexadecimal digits, then KEY=VALUE words")
    scopes, expires, limits = DEFAULT_SCOPES, None, dict[str, float]()
    for option in options:
        key, _, value = option.partition("=")
        if key == "scopes":
            scopes = frozenset(value.split(","))
            if not scopes <= set(SCOPES):
                raise ConfigError(f"{option!r:.80}: unknown scope; known are {', '.join(SCOPES)}")
        elif key == "expires":
            expires = _time(value)
        elif key in LIMITS:
            limits[key] = _limit(key, value)
        else:
            raise ConfigError(f"{option!r:.80}: unknown word; known are scopes=, expires=, {'=, '.join(LIMITS)}=")
    return TokenGrant(name=name, digest=bytes.fromhex(digest), scopes=scopes, expires=expires, limits=limits)


def read_tokens(path: Path) -> dict[str, TokenGrant]:
    """Return the grants in a token file by name. Empty lines and lines that start with # are skipped."""
    grants: dict[str, TokenGrant] = {}
    for number, line in read_lines(path, hint="`fourfold certs DIR` makes one"):
        try:
            grant = parse_grant(line)
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        if grant.name in grants:
            raise ConfigError(f"{path}:{number}: the name {grant.name!r} occurs twice; give each token its own")
        grants[grant.name] = grant
    return grants


def read_token(given: str) -> str:
    """Return the token of an option `--token TOKEN`, or that of a file, `@FILE`, which keeps it out of `ps`."""
    if not given.startswith("@"):
        return given
    try:
        token = Path(given[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token {given}: the file cannot be read: {error}") from None
    if not token:
        raise ConfigError(f"--token {given}: the file is empty; write the token of `fourfold certs token add` into it")
    return token


def check_token(authorization: str, method: str, grants: Mapping[str, TokenGrant]) -> TokenGrant:
    """Return the grant of the token in an `authorization` header; without the header it is empty.

    `method` is the name of the called method, without its service. `grants` are all grants, by token name.

    Raises:
        Unauthenticated: the token is missing, unknown or expired.
        PermissionDenied: no scope of the token allows the method.
    """
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("no bearer token; send the metadata `authorization: Bearer TOKEN`", reason="NO_TOKEN")
    digest = hashlib.sha256(token.strip().encode()).digest()
    # Constant time: every entry is compared, so the duration leaks nothing about the digests.
    found = [grant for grant in grants.values() if hmac.compare_digest(digest, grant.digest)]
    if not found:
        raise Unauthenticated("unknown bearer token; ask the owner of this deployment for one")
    grant = found[0]
    if grant.expires is not None and grant.expires <= datetime.datetime.now(datetime.UTC):
        raise Unauthenticated(
            f"the bearer token {grant.name!r} expired at {grant.expires:%Y-%m-%d %H:%M} UTC; ask the owner of this "
            f"deployment for a new one",
            reason="TOKEN_EXPIRED",
        )
    if not any(method in SCOPES[scope] for scope in grant.scopes):
        raise PermissionDenied(
            f"the bearer token {grant.name!r} may not call {method}: its scopes are "
            f"{', '.join(sorted(grant.scopes))}; ask the owner of this deployment for another one",
            reason="TOKEN_SCOPE",
        )
    return grant


def _time(value: str) -> datetime.datetime:
    try:
        time = datetime.datetime.fromisoformat(value)
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise ConfigError(f"expires={value!r:.40} is not a time; give for example 2027-01-31T00:00:00Z") from None


def _limit(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{key}={value!r:.40} is not a number above 0")
    return number
