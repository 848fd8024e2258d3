"""docs/registration.md says what the registry and our own membership do."""

from __future__ import annotations

import re
from pathlib import Path

from fourfold.rpc.limits import MEMBER_LIMITS
from fourfold.service import membership
from fourfold_coordinator.routing import registry

PAGE = Path(__file__).resolve().parents[2] / "docs/registration.md"


def test_the_page_about_registration_has_the_numbers_and_the_reasons_of_the_registry() -> None:
    page, source = PAGE.read_text(), Path(registry.__file__).read_text()
    for number in (
        f"ttl = {registry.TTL_SECONDS:g} s",
        f"now {registry.TTL_SECONDS:g} s",
        f"has {registry.MAX_MEMBERS} members, or this member {MEMBER_LIMITS.concurrent_calls} calls",
        f"After {registry._OVERDUE_SHARE:.0%} of the `ttl`".replace("%", " %"),
        f"begin with {membership._FIRST_BACKOFF_SECONDS:g} s and double up to {membership._MAX_BACKOFF_SECONDS:g} s",
    ):
        assert number in page, number
    reasons = set(re.findall(r'reason="([A-Z_]+)"', source)) - {"SECOND_TRAINER"}
    assert reasons and {reason for reason in reasons if f" {reason} |" not in page} == set()
    # Errors after which the service ends, in the page and in our own membership.
    rows = [
        row.strip("| ").split(" | ") for row in page.splitlines() if re.match(r"\| (both|Register|KeepAlive) \|", row)
    ]
    assert {row[1] for row in rows if row[-1].startswith("end")} | {"ALREADY_EXISTS"} == {
        error.code for error in membership._PERMANENT
    }
