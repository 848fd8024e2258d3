"""`fourfold reward ACTION RUN ...`: lists the scorers of a running run, and replaces them without a stop.

scorer  weight  part    services                       samples  agreement
math         1  live    accuracy@1.0 at registered       1,024
                canary  accuracy@2.0 at 127.0.0.1:50061    256  25% of the groups
style      0.2  live    judge@7b at 127.0.0.1:50062      1,280
                shadow  judge@14b at 127.0.0.1:50063       640  rank 0.930, flips 4.0%, shift +0.02 over 640 samples
"""

from __future__ import annotations

import argparse
from typing import Final

from fourfold.cli.numbers import number, whole
from fourfold.coordinator.client import ScorerClient
from fourfold.coordinator.v1 import scorer_service_pb2 as pb
from fourfold.errors import ConfigError
from fourfold.text import align_columns

from .weights import add_actions, find_coordinator

# A change waits until new services have answered and scored one sample.
_TIMEOUT_SECONDS: Final = 60.0
_MAX_TIMEOUT: Final = 3600.0
_ACTIONS: Final = {
    "list": "show the scorers",
    "add": "add a term to the score",
    "swap": "make other services live",
    "canary": "let other services score a share of the prompt groups",
    "shadow": "let other services score next to the live ones, without effect, and compare",
    "promote": "make the canary, or else the shadow, live",
    "rollback": "remove canary and shadow; without them, go back to the services before the last replacement",
    "remove": "remove a term of the score",
    "rescore": "score all samples again that no step has yet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = add_actions(parser, _ACTIONS)
    for name, action in actions.items():
        action.add_argument(
            "--timeout", type=number, default=_TIMEOUT_SECONDS, metavar="SECONDS", help="of the call; default: 60"
        )
        if name == "list":
            continue
        action.add_argument("name", metavar="NAME", help="name of the scorer, as in `fourfold reward list`")
        if name in ("add", "swap", "canary", "shadow"):
            action.add_argument(
                "--target",
                action="append",
                required=True,
                metavar="HOST:PORT",
                help="address of a reward service that runs already; may be repeated",
            )
    actions["add"].add_argument("--weight", type=number, default=1.0, help="factor of its score; default: 1")
    actions["canary"].add_argument("--share", type=number, required=True, help="share of the groups, such as 0.25")
    actions["shadow"].add_argument(
        "--gradients",
        action="store_true",
        help="compare the policy gradients, too; costs two more forward and backward passes per step, and 4 bytes per "
        "parameter of a rank's part",
    )
    promote = actions["promote"]
    promote.add_argument("--min-rank-correlation", type=number, metavar="R", help="of a shadow: refuse below it")
    promote.add_argument("--min-samples", type=whole, default=0, metavar="N", help="of a shadow: refuse with fewer")


def main(args: argparse.Namespace) -> int:
    """Do one action, and print the scorers of the run after it."""
    if not 0 < args.timeout <= _MAX_TIMEOUT:  # false for NaN, too
        raise ConfigError(f"--timeout {args.timeout:g}: it must be above 0 and at most {_MAX_TIMEOUT:g} s")
    address, certs = find_coordinator(args.where, args.recipe)
    with ScorerClient(address, certs=certs, timeout=args.timeout) as client:
        match args.action:
            case "add":
                client.add(args.name, args.target, weight=args.weight)
            case "swap":
                client.swap(args.name, args.target)
            case "canary":
                client.canary(args.name, args.target, share=args.share)
            case "shadow":
                client.shadow(args.name, args.target, compare_gradients=args.gradients)
            case "promote":
                client.promote(args.name, min_rank_correlation=args.min_rank_correlation, min_samples=args.min_samples)
            case "rollback":
                client.rollback(args.name)
            case "rescore":
                client.rescore(args.name)
            case "remove":
                client.remove(args.name)
        print("\n".join(table(client.list_scorers())))
    return 0


def table(scorers: list[pb.Scorer]) -> list[str]:
    """Return the lines of the table at the top of this module."""
    if not scorers:
        return ["agents bring all rewards; the run has no scorers"]
    rows = [("scorer", "weight", "part", "services", "samples", "agreement")]
    for scorer in scorers:
        name, weight = scorer.name, f"{scorer.weight:g}"
        for part in ("live", "canary", "shadow", "previous"):
            if not scorer.HasField(part):
                continue
            deployment: pb.Deployment = getattr(scorer, part)
            note = {"canary": f"{scorer.canary_share:.0%} of the groups", "shadow": _agreement(scorer)}.get(part, "")
            note = "; ".join(filter(None, (note, deployment.problem)))
            samples = "" if part == "previous" else f"{deployment.samples:,}"
            rows.append((name, weight, part, _services(deployment), samples, note))
            name = weight = ""
    return align_columns(rows, left=(0, 2, 3, 5))


def _services(deployment: pb.Deployment) -> str:
    return f"{', '.join(deployment.scorers) or 'unknown'} at {', '.join(deployment.targets) or 'registered'}"


def _agreement(scorer: pb.Scorer) -> str:
    if not scorer.HasField("agreement"):
        return "nothing to compare yet"
    found = scorer.agreement
    rank = f"{found.rank_correlation:.3f}" if found.HasField("rank_correlation") else "-"
    text = f"rank {rank}, flips {found.flip_share:.1%}, shift {found.mean_shift:+.3g} over {found.samples:,} samples"
    return text + (f", gradient cosine {found.gradient_cosine:.3f}" if found.HasField("gradient_cosine") else "")
