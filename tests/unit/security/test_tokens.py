"""The token file, and the permissions of a token."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

import pytest

from fourfold.agent.v1 import agent_service_pb2
from fourfold.coordinator.v1 import run_file_service_pb2, run_service_pb2
from fourfold.errors import ConfigError, PermissionDenied, Unauthenticated
from fourfold.rollout.v1 import rollout_service_pb2
from fourfold.security.access import PUBLIC_SERVICES
from fourfold.security.tokens import SCOPES, TokenGrant, check_token, parse_grant, read_tokens

DIGEST = "0" * 64


def test_every_public_method_is_in_one_scope() -> None:
    services = (
        rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"],
        agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"],
        run_service_pb2.DESCRIPTOR.services_by_name["RunService"],
        run_file_service_pb2.DESCRIPTOR.services_by_name["RunFileService"],
    )
    methods = {method.name for service in services for method in service.methods}
    assert {service.full_name for service in services} == PUBLIC_SERVICES
    assert sorted(method for scope in SCOPES.values() for method in scope) == sorted(methods)


def test_a_line_without_options_allows_everything_but_view_for_ever() -> None:
    assert parse_grant(f"agent \t{DIGEST} ") == TokenGrant(name="agent", digest=bytes(32))
    grant = parse_grant(f"agent {DIGEST}")
    assert (sorted(grant.scopes), grant.expires, dict(grant.limits)) == (["generate", "info", "train"], None, {})


@pytest.mark.parametrize(
    "line",
    [
        f"agent {DIGEST}",
        f"agent {DIGEST} scopes=info",
        f"a-b_C {DIGEST} scopes=generate expires=2027-01-31T12:00:00Z concurrent_calls=4 tokens_in_flight=1234567 "
        "calls_per_second=0.5",
    ],
)
def test_parsing_and_writing_a_line_are_inverse(line: str) -> None:
    assert parse_grant(line).line() == line


def test_limits_and_expiry_are_read() -> None:
    grant = parse_grant(f"agent {DIGEST} expires=2027-01-31 concurrent_calls=4 calls_per_second=0.5")
    assert grant.limits == {"concurrent_calls": 4.0, "calls_per_second": 0.5}
    assert grant.expires == datetime.datetime(2027, 1, 31, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("scopes=admin", "unknown scope; known are generate, info, train"),
        ("scopes=", "unknown scope"),
        ("expires=0001-01-01T00:00:00+14:00", "is not a time; give for example"),
        ("expires=tomorrow", "expires='tomorrow' is not a time; give for example"),
        ("calls_per_second=0", "is not a number above 0"),
        ("calls_per_second=nan", "is not a number above 0"),
        ("tokens_in_flight=inf", "is not a number above 0"),
        ("concurrent_calls=x", "is not a number above 0"),
        ("calls=1", "unknown word; known are scopes=, expires=, concurrent_calls="),
        ("x" * 4000, "unknown word"),
    ],
)
def test_a_malformed_option_is_named_with_file_and_line(tmp_path: Path, options: str, words: str) -> None:
    file = tmp_path / "tokens.txt"
    file.write_text(f"# mine\n\nagent {DIGEST} {options}\n")
    with pytest.raises(ConfigError) as refused:
        read_tokens(file)
    assert refused.value.message.startswith(f"{file}:3: ")
    assert words in refused.value.message and len(refused.value.message) < 400


@pytest.mark.parametrize("text", ["agent abc", "agent", f"{DIGEST}", f"a/b {DIGEST}", f"agent {'G' * 64}"])
def test_a_line_without_a_digest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"tokens\.txt:1: no token digest"):
        read_tokens(tmp_path / "tokens.txt")


def test_a_name_occurs_once(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text(f"a {DIGEST}\na {'1' * 64}\n")
    with pytest.raises(ConfigError, match=r":2: the name 'a' occurs twice"):
        read_tokens(tmp_path / "tokens.txt")


def test_the_header_must_hold_a_known_token() -> None:
    token = "ff_x"
    digest = hashlib.sha256(token.encode()).digest()
    grants = {"agent": TokenGrant(name="agent", digest=digest)}
    assert check_token(f"Bearer {token}", "Generate", grants) is grants["agent"]
    for header in ("", token, f"Basic {token}", f"Bearer {token}x", "Bearer ", f"Bearer {digest.hex()}"):
        with pytest.raises(Unauthenticated):
            check_token(header, "Generate", grants)


def test_a_method_outside_of_the_scopes_is_refused_and_an_unknown_one_always() -> None:
    digest = hashlib.sha256(b"t").digest()
    everything = TokenGrant(name="a", digest=digest)
    info = TokenGrant(name="a", digest=digest, scopes=frozenset({"info"}))
    assert check_token("Bearer t", "WatchLoad", {"a": info}) is info
    for method, grant in (("Generate", info), ("Train", everything)):
        with pytest.raises(PermissionDenied, match=f"may not call {method}") as refused:
            check_token("Bearer t", method, {"a": grant})
        assert refused.value.reason == "TOKEN_SCOPE"
