"""The files and the command line of `fourfold certs`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold.security.access import ROLES, read_revoked
from fourfold.security.principal import Principal
from fourfold.security.tokens import read_tokens
from fourfold_tools import certs

ROOT = Path(__file__).parents[3]


def names(path: Path) -> tuple[list[str], list[str], set[str]]:
    """Return URIs, DNS names and IP addresses of a certificate."""
    leaf = x509.load_pem_x509_certificate(path.read_bytes())
    found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return (
        found.get_values_for_type(x509.UniformResourceIdentifier),
        found.get_values_for_type(x509.DNSName),
        {str(address) for address in found.get_values_for_type(x509.IPAddress)},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of certificates with the README's command."""
    assert cli_main.main(["certs", str(tmp_path / "certs"), "--host", "trainer.internal", "--host", "10.0.0.5"]) == 0
    return tmp_path / "certs"


def test_certificates_name_the_member_and_those_that_agents_connect_to_hosts(folder: Path) -> None:
    for role in ROLES:
        who = f"{role}-0"
        uris, dns, addresses = names(folder / f"{who}.pem")
        assert uris == [f"spiffe://fourfold/svc/{role}/{who}"]
        assert dns[:2] == [f"{who}.{role}.fourfold", f"{role}.fourfold"]
        if role in ("rollout", "gateway"):
            assert dns[2:] == ["localhost", "trainer.internal"]
            assert addresses == {"127.0.0.1", "::1", "10.0.0.5"}
        else:
            assert (dns[2:], addresses) == ([], set())


def test_other_users_cannot_read_keys_and_tokens_are_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = certs.make(tmp_path / "certs")
    open_files = {"ca.pem"}
    for path in (tmp_path / "certs").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if path.name in open_files else 0o600), path
        assert token not in path.read_text()
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700
    assert capsys.readouterr().out == ""


def test_the_token_is_printed_once_and_an_authority_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["certs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.split()[-1].startswith("ff_") and out.count("ff_") == 1
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli_main.main(["certs", str(tmp_path)]) == 1
    assert (
        "ca.pem: exists already, and an existing CA is not overwritten; `fourfold certs add" in capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("host", ["https://x", "", "a b", "a,b", "trainer.fourfold", "x" * 254])
def test_a_malformed_host_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="host "):
        certs.make(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "member",
    ["rollout", "rollout-", "Rollout-0", "rollout_0", "ca", "reward/ca", "reward/ca-key", "x-0", "x/y-0"],
)
def test_a_malformed_member_is_refused(member: str) -> None:
    if member == "rollout":  # a name may equal a role
        assert certs.parse_member(member) == Principal("rollout", "rollout")
        return
    with pytest.raises(ConfigError, match="give ROLE-NUMBER or ROLE/NAME"):
        certs.parse_member(member)


@pytest.mark.parametrize("name", ["ca", "ca-key"])
def test_no_member_replaces_a_file_of_the_authority(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = (folder / f"{name}.pem").read_bytes()
    assert cli_main.main(["certs", "add", str(folder), f"reward/{name}"]) == 1
    assert "not ca or ca-key, whose files are the CA's" in capsys.readouterr().err
    assert (folder / f"{name}.pem").read_bytes() == before


def test_a_recipe_says_how_many_members_there_are(tmp_path: Path) -> None:
    recipe = (ROOT / "recipes/by_hand.toml").read_text().replace("[rollout]\nreplicas = 0", "[rollout]\nreplicas = 3")
    (tmp_path / "r.toml").write_text(recipe)
    words = ["--recipe", str(tmp_path / "r.toml"), "--member", "reward/math"]
    assert cli_main.main(["certs", str(tmp_path / "certs"), *words]) == 0
    assert {path.stem for path in (tmp_path / "certs").glob("*-[0-9].pem")} == {
        "rollout-0", "rollout-1", "rollout-2", "trainer-0", "reward-0", "reference-0", "coordinator-0",
        "viewer-0", "operator-0",
    }  # fmt: skip
    assert names(tmp_path / "certs" / "math.pem")[0] == ["spiffe://fourfold/svc/reward/math"]


def test_each_pool_of_a_recipe_has_members(tmp_path: Path) -> None:
    pools = "[[rollout.pool]]\nname = 'a_b'\nreplicas = 2\n[[rollout.pool]]\nname = 'c'\n"
    recipe = (ROOT / "recipes/by_hand.toml").read_text().replace("[rollout]\nreplicas = 0\n", "[rollout]\n")
    (tmp_path / "r.toml").write_text(recipe + pools)
    assert cli_main.main(["certs", str(tmp_path / "certs"), "--recipe", str(tmp_path / "r.toml")]) == 0
    assert {path.stem for path in (tmp_path / "certs").glob("rollout-*.pem")} == {
        "rollout-a-b-0", "rollout-a-b-1", "rollout-c-0",
    }  # fmt: skip


def test_members_are_added_and_none_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["certs", "add", str(folder), "rollout-1", "--host", "node-7"]) == 0
    assert "node-7" in names(folder / "rollout-1.pem")[1]
    for again in (["rollout-1"], ["reward/rollout-1"], ["reward/a", "reference/a"]):
        assert cli_main.main(["certs", "add", str(folder), *again]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "fourfold: rollout-1 has a certificate",
        "fourfold: rollout-1 has a certificate",
        "fourfold: two members are named 'a'",
    ]
    assert not (folder / "a.pem").exists()


def test_a_renewal_keeps_names_and_changes_key_and_certificate(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("*.pem")}
    hosts = names(folder / "rollout-0.pem")
    assert cli_main.main(["certs", "renew", str(folder), "rollout-0", "--days", "30"]) == 0
    changed = {path.name for path, text in before.items() if path.read_bytes() != text}
    assert changed == {"rollout-0.pem"}
    assert names(folder / "rollout-0.pem") == hosts
    assert 29.9 < next(i for i in certs.current(folder) if i.member.name == "rollout-0").days_left <= 30
    assert cli_main.main(["certs", "renew", str(folder)]) == 0
    assert {path.name for path, text in before.items() if path.read_bytes() == text} == {"ca.pem", "ca-key.pem"}


def test_a_revocation_holds_every_certificate_that_a_member_had(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs.renew(folder, ["reward-0"])
    assert cli_main.main(["certs", "revoke", str(folder), "reward-0"]) == 0
    had = [issued for issued in certs.all_issued(folder) if issued.member.name == "reward-0"]
    assert len(had) == 2
    assert read_revoked(folder / "revoked.txt") == {issued.fingerprint for issued in had}
    assert cli_main.main(["certs", "revoke", str(folder), "trainer-0", "reward-0"]) == 0
    assert len((folder / "revoked.txt").read_text().splitlines()) == 3, "nothing is in it twice"
    capsys.readouterr()
    assert cli_main.main(["certs", "status", str(folder)]) == 0
    states = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert (states["reward/reward-0"], states["rollout/rollout-0"]) == ("revoked", "days")
    assert cli_main.main(["certs", "revoke", str(folder), "reward-9"]) == 1
    assert "'reward-9' has no certificate of" in capsys.readouterr().err


def test_status_advises_to_renew_in_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs.renew(folder, ["reward-0"], days=13)
    certs.renew(folder, ["trainer-0"], days=-1)
    capsys.readouterr()
    assert cli_main.main(["certs", "status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"expires in 13 days; run `fourfold certs renew {folder} reward-0`" in out
    assert f"expired; run `fourfold certs renew {folder} trainer-0`" in out


def test_tokens_are_added_listed_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scope", "info", "--days", "3", "--concurrent-calls", "4", "--calls-per-second", "0.5"]
    capsys.readouterr()
    assert cli_main.main(["certs", "token", "add", str(folder), "alice", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ff_") and len(printed.out.split()) == 1, "stdout is a token file"
    assert "copy the file to every rollout service and gateway. The token is not shown again" in printed.err
    assert cli_main.main(["certs", "token", "add", str(folder), "laptop", "--scope", "view"]) == 0
    assert "copy the file to the machine of the coordinator. The token" in capsys.readouterr().err
    assert cli_main.main(["certs", "token", "remove", str(folder), "laptop"]) == 0
    assert "copy the file to the machine of the coordinator." in capsys.readouterr().out
    grant = read_tokens(folder / "tokens.txt")["alice"]
    assert (set(grant.scopes), dict(grant.limits)) == ({"info"}, {"concurrent_calls": 4.0, "calls_per_second": 0.5})
    assert grant.expires is not None
    assert cli_main.main(["certs", "token", "add", str(folder), "alice"]) == 1
    assert cli_main.main(["certs", "token", "list", str(folder)]) == 0
    listed = capsys.readouterr().out
    assert "token agent" in listed and "token alice" in listed and "concurrent_calls=4" in listed
    assert cli_main.main(["certs", "token", "remove", str(folder), "alice"]) == 0
    assert set(read_tokens(folder / "tokens.txt")) == {"agent"}
    for wrong in (
        ["remove", str(folder), "bob"],
        ["add", str(folder)],
        ["add", str(folder), "a b"],
        ["add", str(folder), "agent\n"],
    ):
        assert cli_main.main(["certs", "token", *wrong]) == 1


@pytest.mark.parametrize("words", [["renewx"], ["tokens"], ["stats", "folder"]])
def test_a_misspelt_action_makes_no_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli_main.main(["certs", *words]) == 1
    assert f"has no action '{words[0]}'; did you mean `" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert cli_main.main(["certs", "make", words[0]]) == 0


def test_an_action_after_the_folder_is_named_in_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["certs", f"{tmp_path}/a b", "add", "reward-1"]) == 1
    assert f"comes before the folder: `fourfold certs add '{tmp_path}/a b' reward-1`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_the_authority_nothing_is_issued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ca-key.pem").unlink()
    assert cli_main.main(["certs", "renew", str(folder)]) == 1
    assert "ca-key.pem: cannot read it (No such file or directory); it is needed to issue" in capsys.readouterr().err
    assert cli_main.main(["certs", "status", str(folder.parent)]) == 1
    assert "give the folder that `fourfold certs DIR` made" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b"\xff\n", b"abc rollout/rollout-0 tomorrow\n", b"abc\n"])
def test_a_malformed_line_of_issued_certificates_is_named(folder: Path, line: bytes) -> None:
    with (folder / "issued.txt").open("ab") as file:
        file.write(line)
    with pytest.raises(ConfigError, match=r"issued\.txt:10: malformed; only `fourfold certs` may write this file"):
        certs.current(folder)


def test_a_malformed_list_of_revocations_is_named(tmp_path: Path) -> None:
    assert read_revoked(tmp_path / "revoked.txt") == frozenset()
    (tmp_path / "revoked.txt").write_text(f"# x\n{'a' * 64} reward/reward-0 2027-01-01T00:00:00Z\nreward-0\n")
    with pytest.raises(ConfigError, match=r"revoked\.txt:3: no certificate's SHA-256"):
        read_revoked(tmp_path / "revoked.txt")


def test_files_that_were_edited_and_end_without_a_newline_keep_their_lines(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.make(folder, [], [Principal("rollout", "rollout-0"), Principal("rollout", "rollout-1")])
    for name, change in (
        ("tokens.txt", lambda: certs.add_token(folder / "tokens.txt", "anna")),
        ("revoked.txt", lambda: certs.revoke(folder, ["rollout-1"])),
    ):
        if name == "revoked.txt":
            certs.revoke(folder, ["rollout-0"])
        path = folder / name
        path.write_text(path.read_text().rstrip("\n"))
        change()
    assert set(read_tokens(folder / "tokens.txt")) == {"agent", "anna"}
    assert len(read_revoked(folder / "revoked.txt")) == 2


def test_a_left_over_file_is_found_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "tokens.txt").write_text("")
    with pytest.raises(ConfigError, match=r"tokens\.txt: exists"):
        certs.make(tmp_path, [], [Principal("rollout", "rollout-0")])
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.txt"]
