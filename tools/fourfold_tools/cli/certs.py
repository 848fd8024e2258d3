"""Implements `fourfold certs`: issues certificates and tokens by `fourfold_tools.certs`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold.cli.numbers import positive
from fourfold.errors import ConfigError
from fourfold.security.access import REVOKED_FILE, WARN_DAYS, read_revoked
from fourfold.security.principal import Principal
from fourfold.security.tokens import DEFAULT_SCOPES, LIMITS, SCOPES, read_tokens
from fourfold.text import nearest_name
from fourfold_tools import certs

_MAX_DAYS: Final = 36_500
_ACTIONS: Final = ("make", "add", "renew", "revoke", "status", "token")


def complete(words: Sequence[str]) -> list[str]:
    """Return the words with the action `make`, which the short form `fourfold certs DIR` omits."""
    if not words or words[0] in (*_ACTIONS, "-h", "--help"):
        return list(words)
    if near := nearest_name(words[0], _ACTIONS):
        raise ConfigError(
            f"`fourfold certs` has no action {words[0]!r}; did you mean `{near}`? A folder of that name needs the long "
            f"form: `fourfold certs make {words[0]}`"
        )
    if len(words) > 1 and words[1] in _ACTIONS:
        swapped = shlex.join([words[1], words[0], *words[2:]])
        raise ConfigError(f"the action comes before the folder: `fourfold certs {swapped}`")
    return ["make", *words]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "`fourfold certs DIR` means `fourfold certs make DIR`."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = _action(actions, "make", "make a CA, a certificate for each member, and a token for agents")
    text = "make one certificate for each replica of this recipe; default: one for each role"
    _members(make, "--recipe", type=Path, metavar="RECIPE", help=text)
    _repeatable(make, "--member", "also for this member, named as for `add`; may be repeated", metavar="MEMBER")
    add = _action(actions, "add", "make certificates for more members")
    _members(
        add, "member", nargs="+", metavar="MEMBER", help="member id such as rollout-1, or ROLE/NAME such as reward/math"
    )
    renew = _action(actions, "renew", "replace certificates; running services load them without a restart")
    renew.add_argument("member", nargs="*", metavar="MEMBER", help="member ids; default: all")
    _days(renew)
    revoke = _action(actions, "revoke", "refuse all certificates issued to a member so far")
    revoke.add_argument("member", nargs="+", metavar="MEMBER", help="member ids")
    _action(actions, "status", "list certificates and tokens with their expiry")
    _token_arguments(_action(actions, "token", "add, remove or list the tokens of agents", directory=False))


def main(args: argparse.Namespace) -> int:
    """Run one action; print its result and the next step."""
    directory = args.directory
    match args.action:
        case "make":
            print(_make(args))
        case "add":
            members = [certs.parse_member(text) for text in args.member]
            certs.add(directory, members, args.host, days=args.days)
            print(f"Written: {', '.join(f'{directory / member.name}.pem' for member in members)}")
        case "renew":
            for issued in certs.renew(directory, args.member, days=args.days):
                print(f"{directory / issued.member.name}.pem: valid until {issued.expires:%Y-%m-%d}")
            print("Services on this machine use them for new connections; copy them to the other machines.")
        case "revoke":
            certs.revoke(directory, args.member)
            print(
                f"{directory / REVOKED_FILE}: {', '.join(args.member)} is refused from the next call on; copy the file "
                f"beside ca.pem on every machine. `fourfold certs renew` makes new certificates."
            )
        case "status":
            print("\n".join(_status(directory)))
        case "token":
            _token(args)
    return 0


def _make(args: argparse.Namespace) -> str:
    directory = args.directory
    members = _of_recipe(args.recipe) if args.recipe else certs.FIRST_OF_EACH
    members = [*members, *(certs.parse_member(text) for text in args.member)]
    token = certs.make(directory, args.host, list(dict.fromkeys(members)), days=args.days)
    names = [issued.member.name for issued in certs.current(directory)]
    return f"""Certificates for {", ".join(names)}: {directory}, valid for {args.days:g} days. In the recipe:

  [security]
  directory = "{directory}"
  tokens_file = "{directory / certs.TOKENS_FILE}"

A machine needs ca.pem, MEMBER.pem of each service that runs on it, tokens.txt for rollout services, gateways and the
coordinator of a run with view.public_listen, viewer-0.pem for `fourfold run` and `fourfold watch`, and operator-0.pem
for `fourfold reward`. Do not copy ca-key.pem and issued.txt.
An external agent needs ca.pem and this token, which is not shown again:

  {token}
"""


def _of_recipe(path: Path) -> list[Principal]:
    """Return the members of a recipe's run, at least one for each role."""
    from fourfold import config as configuration

    config = configuration.load(path)
    counts = {
        "coordinator": 1,
        "trainer": config.trainer.replicas,
        "reference": config.reference.replicas,
        "viewer": 1,
        "operator": 1,
    }
    if config.agents.source != "none":
        counts |= {"gateway": config.gateway.replicas, "environment": config.environment.replicas}
    slots = [(role, role, count) for role, count in counts.items()]
    slots += [("rollout", pool.member_prefix, pool.replicas) for pool in config.rollout_pools]
    slots += [("reward", table.member_prefix, table.replicas) for table in config.reward if not table.target]
    return [Principal(role, f"{name}-{index}") for role, name, count in slots for index in range(max(count, 1))]


def _status(directory: Path) -> list[str]:
    revoked, lines = read_revoked(directory / REVOKED_FILE), list[str]()
    for issued in certs.current(directory):
        left = issued.days_left
        state = "expired" if left <= 0 else f"expires in {left:.0f} days"
        if left < WARN_DAYS:
            state += f"; run `fourfold certs renew {directory} {issued.member.name}`"
        if issued.fingerprint in revoked:
            state = "revoked"
        lines.append(f"{issued.member!s:28} {issued.expires:%Y-%m-%d}  {state}")
    tokens = directory / certs.TOKENS_FILE
    return [*lines, *(_tokens(tokens) if tokens.exists() else [])]


def _token(args: argparse.Namespace) -> None:
    path = args.directory / certs.TOKENS_FILE
    if args.change == "list":
        print("\n".join(_tokens(path)))
        return
    if not args.name:
        raise ConfigError(f"`fourfold certs token {args.change} DIR NAME`: NAME is missing; give the token's name")
    if args.change == "remove":
        known = read_tokens(path).get(args.name)
        scopes = known.scopes if known is not None else ()
        certs.remove_token(path, args.name)
        print(f"{path}: {args.name} is refused from the next call on; copy the file to {_checkers(scopes)}.")
        return
    limits = {key: getattr(args, key) for key in LIMITS if getattr(args, key) is not None}
    token = certs.add_token(path, args.name, scopes=args.scope, days=args.days, limits=limits)
    # The token alone is on stdout, so that `> token.txt` gives a file for `fourfold chat --token @token.txt` and
    # `fourfold view --run-token-file token.txt`.
    text = f"{path}: added {args.name}; copy the file to {_checkers(args.scope)}. The token is not shown again:"
    print(text, file=sys.stderr, flush=True)
    print(token)


def _checkers(scopes: Collection[str]) -> str:
    """Return the services that check a token with these scopes; without scopes, with the default ones."""
    viewed, sampled = "view" in scopes, set(scopes or DEFAULT_SCOPES) - {"view"}
    found = ["the machine of the coordinator"] if viewed else []
    return " and ".join(found + (["every rollout service and gateway"] if sampled else []))


def _tokens(path: Path) -> list[str]:
    lines: list[str] = []
    for grant in read_tokens(path).values():
        expires = f"{grant.expires:%Y-%m-%d}" if grant.expires else "never expires"
        words = [f"scopes {','.join(sorted(grant.scopes))}", *(f"{k}={v:g}" for k, v in grant.limits.items())]
        lines.append(f"{'token ' + grant.name:28} {expires}  {'  '.join(words)}")
    return lines


def _action(actions: Any, name: str, text: str, *, directory: bool = True) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    if directory:
        parser.add_argument(
            "directory", type=Path, metavar="DIR", help="folder of the files (security.directory of the recipe)"
        )
    return parser


def _members(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    parser.add_argument(name, **options)
    text = "host name or address by which agents reach rollout services and gateways; may be repeated"
    _repeatable(parser, "--host", text, metavar="HOST")
    _days(parser)


def _repeatable(parser: argparse.ArgumentParser, flag: str, text: str, **options: Any) -> None:
    parser.add_argument(flag, action="append", default=[], help=text, **options)


def _days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=_days_number, default=365, help="validity of the certificates (default 365)")


def _token_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("change", choices=("add", "remove", "list"))
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder with tokens.txt")
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="name of the token, for logs")
    _repeatable(parser, "--scope", "allowed calls; may be repeated; default: all but view", choices=tuple(SCOPES))
    parser.add_argument("--days", type=_days_number, help="validity of the token; default: unlimited")
    for key in LIMITS:
        parser.add_argument(f"--{key.replace('_', '-')}", type=positive, metavar="N", help="limit of the token")


def _days_number(text: str) -> float:
    value = positive(text)
    if value > _MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is above the limit of {_MAX_DAYS} days; give fewer")
    return value
