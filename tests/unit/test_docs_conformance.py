"""docs/conformance.md lists every rule of `fourfold conformance`, and every option."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from fourfold_tools.cli import conformance
from fourfold_tools.conformance.checks import Checks
from fourfold_tools.conformance.gateway import CHECKS as GATEWAY
from fourfold_tools.conformance.membership import MEMBERSHIP, REGISTRATION
from fourfold_tools.conformance.reward import CHECKS as REWARD
from fourfold_tools.conformance.rollout import CHECKS as ROLLOUT

PAGE = Path(__file__).resolve().parents[2] / "docs/conformance.md"
UPDATE = "FOURFOLD_UPDATE_SNAPSHOT"
PARTS: dict[str, tuple[Checks, ...]] = {  # type: ignore[type-arg]  # of several kinds of probes
    "reward": (REWARD,),
    "membership": (REGISTRATION, MEMBERSHIP),
    "rollout": (ROLLOUT,),
    "gateway": (GATEWAY,),
}


def _table(part: str) -> str:
    rows = [f"| `{name}` | {rule} |\n" for checks in PARTS[part] for name, rule in checks.rules.items()]
    return "| rule | what it requires |\n|---|---|\n" + "".join(rows)


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_every_rule(part: str) -> None:
    text = PAGE.read_text()
    pattern = re.compile(rf"(<!-- rules: {part} -->\n\n)((?:\|.*\n)*)")
    if os.environ.get(UPDATE):
        text = pattern.sub(lambda match: match[1] + _table(part), text)
        PAGE.write_text(text)
    found = pattern.search(text)
    assert found and found[2] == _table(part), f"run the tests with {UPDATE}=1 to write the table"


def test_the_page_has_every_option() -> None:
    parser = argparse.ArgumentParser()
    conformance.add_arguments(parser)
    services = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    options = {
        option for service in services.choices.values() for option in service._option_string_actions if "--" in option
    }
    assert options - {"--help"} == set(re.findall(r"^\| `(--[a-z-]+)", PAGE.read_text(), re.MULTILINE))


def test_every_rule_is_a_sentence_of_its_own() -> None:
    for parts in PARTS.values():
        for checks in parts:
            assert all(rule.endswith(".") and "|" not in rule for rule in checks.rules.values()), checks.rules
            assert len(set(checks.names)) == len(checks.names)
