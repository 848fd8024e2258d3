"""What the services of a run did wrong: counted for the report, and shown to watchers while it lasts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fourfold.text import MAX_ERROR, clean

from .ledger import Ledger

FAULTS: Final = "faults"
"""Key of the counts in the ledger."""
# A service that invents reasons must not fill the memory.
_MAX_KINDS: Final = 64
_OTHER: Final = "OTHER"


@dataclass(slots=True)
class _Fault:
    count: int
    first: str


class FaultLog:
    """Failed calls and failed samples by member and kind, with the first text of each."""

    def __init__(
        self,
        *,
        report: Callable[[str, str], None] = lambda _subject, _text: None,
        resolve: Callable[[str], None] = lambda _subject: None,
    ) -> None:
        """Know nothing yet.

        Args:
            report: told what is wrong now, by subject: `RunBoard.report`.
            resolve: told which subject is right again: `RunBoard.resolve`.
        """
        self._report, self._resolve = report, resolve
        self._found: dict[tuple[str, str], _Fault] = {}
        self._shown: dict[str, str] = {}  # member by subject

    def record(self, member_id: str, kind: str, text: str, *, count: int = 1) -> None:
        """Count a fault.

        Args:
            member_id: who made it.
            kind: UPPER_SNAKE_CASE: the reason of an error.
            text: of the error; the first one of each kind is kept.
            count: how many there were.
        """
        key = (member_id, kind)
        if key not in self._found and sum(name == member_id for name, _ in self._found) >= _MAX_KINDS:
            key = (member_id, _OTHER)
        fault = self._found.setdefault(key, _Fault(0, clean(text, MAX_ERROR)))
        fault.count += count

    def show(self, member_id: str, subject: str, text: str) -> None:
        """Say that something is wrong with `subject` now; shown until `clear`, or until the member is gone."""
        self._shown[subject] = member_id
        self._report(subject, text)

    def clear(self, subject: str) -> None:
        """Say that `subject` is right again."""
        if self._shown.pop(subject, None) is not None:
            self._resolve(subject)

    def gone(self, member_id: str) -> None:
        """Show nothing of a member any more that is gone."""
        for subject in [subject for subject, member in self._shown.items() if member == member_id]:
            self.clear(subject)

    def first_of(self, kinds: Mapping[str, object]) -> str:
        """Return who made the faults of these kinds first and with which words, for the end of a message."""
        known = {kind: (name, fault) for (name, kind), fault in reversed(self._found.items()) if kind in kinds}
        return "; ".join(f"the first {kind} came from {name}: {f.first}" for kind, (name, f) in known.items())

    def rows(self) -> list[dict[str, Any]]:
        """Return what goes into the report, ordered by member and kind."""
        return [
            {"peer": name, "kind": kind, "count": fault.count, "first": fault.first}
            for (name, kind), fault in sorted(self._found.items())
        ]

    def save(self, ledger: Ledger) -> None:
        """Keep the counts for a coordinator that goes on with the run."""
        ledger.put({FAULTS: json.dumps(self.rows())})

    def load(self, ledger: Ledger) -> None:
        """Take up what an earlier coordinator counted."""
        for row in json.loads(ledger.get(FAULTS) or "[]"):
            self.record(row["peer"], row["kind"], row["first"], count=row["count"])
