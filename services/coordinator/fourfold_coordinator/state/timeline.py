"""Records when each member of a run worked, and formats timeline.jsonl: one line per step, for `fourfold view`.

    {"step": 3, "start": 1790000000.125, "end": 1790000011.5,
     "members": {"rollout-0": {"generate": [[0.0, 6.031]], "update": [[9.1, 9.5]]}, "trainer-0": {"train": [[6.6, 9]]}}}

`start` and `end` are UTC in seconds since 1970; an interval is [begin, end] in seconds after `start`. A member works on
a phase while it has a call of that phase: generate, score, reference, train, checkpoint, export; `update` is a weight
update. Calls that overlap are one interval, and a member has at most 12 intervals of a phase in a line: of more, those
with the smallest gaps between them are joined. An engine with one interval of sampling and one of an update takes about
75 bytes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter

from fourfold.host.clock import SYSTEM_CLOCK, Clock

from .typed_json import Finite, Whole, parse

TIMELINE_FILE: Final = "timeline.jsonl"
_MAX_INTERVALS: Final = 12  # most intervals of one member and phase
_SMALL_GAP: Final = 0.005  # seconds; a shorter pause between two calls does not show

_Row = tuple[str, str]  # member and phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A line of timeline.jsonl: when members worked in one step."""

    step: Whole
    start: Finite
    end: Finite
    members: dict[str, dict[str, list[tuple[Finite, Finite]]]]  # intervals by member and phase

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """The intervals since the last `take`. Used on one event loop; recording a call takes 4 us."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._running = defaultdict[_Row, int](int)
        self._began: dict[_Row, float] = {}  # start times of rows with running calls
        self._done = defaultdict[_Row, list[list[float]]](list)
        self._taken = clock.monotonic()

    def begin(self, member: str, phase: str) -> None:
        """Note that a member begins a call of a phase."""
        row = member, phase
        if not self._running[row]:
            self._began[row] = self._clock.monotonic()
        self._running[row] += 1

    def end(self, member: str, phase: str) -> None:
        """Note the end of a call that was begun."""
        row = member, phase
        self._running[row] -= 1
        if not self._running[row]:
            del self._running[row]
            self._add(row, self._began.pop(row), self._clock.monotonic())

    @contextmanager
    def during(self, member: str, phase: str) -> Iterator[None]:
        """Record the block as a call."""
        self.begin(member, phase)
        try:
            yield
        finally:
            self.end(member, phase)

    def take(self, step: int) -> dict[str, object]:
        """Return the line of a step; running calls are cut at its end and continue in the next line."""
        now = self._clock.monotonic()
        for row, began in self._began.items():
            self._add(row, began, now)
            self._began[row] = now
        members = defaultdict[str, dict[str, list[list[float]]]](dict)
        for (member, phase), intervals in sorted(self._done.items()):
            members[member][phase] = [[round(t - self._taken, 3) for t in interval] for interval in intervals]
        start = self._clock.now() - (now - self._taken)
        line = {"step": step, "start": round(start, 3), "end": round(self._clock.now(), 3), "members": dict(members)}
        self._done.clear()
        self._taken = now
        return line

    def _add(self, row: _Row, begin: float, end: float) -> None:
        intervals = self._done[row]
        if intervals and begin - intervals[-1][1] < _SMALL_GAP:
            intervals[-1][1] = end
            return
        intervals.append([begin, end])
        if len(intervals) > _MAX_INTERVALS:
            gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(intervals)]
            index = gaps.index(min(gaps))
            intervals[index][1] = intervals.pop(index + 1)[1]


_LINE: Final = TypeAdapter(StepTimeline)


def parse_line(line: str | bytes) -> StepTimeline:
    """Return a line of timeline.jsonl; raise ValueError for a text that is none."""
    return parse(_LINE, line)
