"""Counts the failures of a run's services for the report, and shows current failures to watchers of the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Final

from fourfold.text import MAX_ERROR, clean

from .ledger import Ledger

FAULTS: Final = "faults"  # key of the counts in the ledger
# Most kinds per member: services send the kinds, and arbitrary kinds must not exhaust the memory.
_MAX_KINDS: Final = 64
_OTHER: Final = "OTHER"


@dataclass(slots=True)
class _Fault:
    count: int
    first: str  # text of the first one


class FaultLog:
    """Counts failed calls and failed samples by member and kind, and keeps the first text of each kind."""

    def __init__(
        self,
        *,
        report: Callable[[str, str], None] = lambda _subject, _text: None,
        resolve: Callable[[str], None] = lambda _subject: None,
    ) -> None:
        """Start without faults; the arguments are `RunBoard.report_condition` and `resolve_condition`."""
        self._report, self._resolve = report, resolve
        self._faults: dict[tuple[str, str], _Fault] = {}  # by member and kind
        self._shown: dict[str, str] = {}  # id of the member, by subject of the condition

    def record(self, member_id: str, kind: str, text: str, *, count: int = 1) -> None:
        """Count faults of one kind (the error's reason, in UPPER_SNAKE_CASE); keep the first text of each kind."""
        key = (member_id, kind)
        if key not in self._faults and sum(name == member_id for name, _ in self._faults) >= _MAX_KINDS:
            key = (member_id, _OTHER)
        self._faults.setdefault(key, _Fault(0, clean(text, MAX_ERROR))).count += count

    def show(self, member_id: str, subject: str, text: str) -> None:
        """Show a problem of `subject` until `clear`, or until the member leaves."""
        self._shown[subject] = member_id
        self._report(subject, text)

    def clear(self, subject: str) -> None:
        """End the problem of `subject`; do nothing if there is none."""
        if self._shown.pop(subject, None) is not None:
            self._resolve(subject)

    def forget(self, member_id: str) -> None:
        """End all problems of a member that left; its counts stay."""
        for subject in [subject for subject, member in self._shown.items() if member == member_id]:
            self.clear(subject)

    def first_of(self, kinds: Container[str]) -> str:
        """Return the first fault of each of these kinds, as a text to append to a message."""
        # In reverse, so that the first member with a kind replaces the later ones.
        known = {kind: (name, fault) for (name, kind), fault in reversed(self._faults.items()) if kind in kinds}
        return "; ".join(f"the first {kind} came from {name}: {f.first}" for kind, (name, f) in known.items())

    def members(self, kinds: Container[str]) -> set[str]:
        """Return the ids of the members with a fault of one of these kinds."""
        return {name for name, kind in self._faults if kind in kinds}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the report, ordered by member and kind."""
        return [
            {"peer": name, "kind": kind, "count": fault.count, "first": fault.first}
            for (name, kind), fault in sorted(self._faults.items())
        ]

    def counts(self) -> dict[str, int]:
        """Return the number of faults by kind, kinds in the order of their first fault."""
        found: dict[str, int] = {}
        for (_, kind), fault in self._faults.items():
            found[kind] = found.get(kind, 0) + fault.count
        return found

    def save(self, ledger: Ledger) -> None:
        """Store the counts in the ledger, for a coordinator that resumes the run."""
        ledger.put({FAULTS: json.dumps(self.rows())})

    def load(self, ledger: Ledger) -> None:
        """Add the counts of earlier coordinators of the run."""
        for row in json.loads(ledger.get(FAULTS) or "[]"):
            self.record(row["peer"], row["kind"], row["first"], count=row["count"])
