"""The files of `fourfold sample`, and the rows that it writes.

sampling.json  what is asked for (`Sampling`)
groups.jsonl   a line for each prompt that is done: {"position": in the order of the prompts, "rows": of the prompt,
               "scores": of all its answers, "left_out": number of its answers by reason}

A process that was killed has lost the prompts in progress alone, which have no line yet.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fourfold.algorithm.selection import SelectionConfig
from fourfold.errors import ConfigError
from fourfold.table import Table

from .files import replace_file


class Sampling(Table):
    """What `fourfold sample` asks for."""

    selection: SelectionConfig
    prompts: int
    """Prompts from the beginning of the order of training. 0: as many as there are."""
    truncated: bool
    """Whether answers that `sampling.max_new_tokens` has cut may be in a row."""


def places(file: Path) -> list[tuple[int, int]]:
    """Return position and place in the file, in bytes, of every line of groups.jsonl, by position; empty: no file.

    Raises:
        ConfigError: a line is damaged. A last line that a killed process has cut is left out.
    """
    found = dict[int, int]()
    place = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    try:
                        found.setdefault(json.loads(line)["position"], place)
                    except (ValueError, TypeError, KeyError):
                        raise ConfigError(
                            f"{file}:{number}: is no line of `fourfold sample`; remove the line, so that its prompt is "
                            f"sampled again"
                        ) from None
                place += len(line)
    except FileNotFoundError:
        return []
    return sorted(found.items())


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """Counts of the prompts, answers and rows of a file."""

    prompts: int = 0
    without_rows: int = 0  # prompts without a selected answer
    rows: int = 0
    answers: int = 0  # with a score
    score_sum: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)  # answers that could not be selected, by reason

    def add(self, rows: Sequence[object], scores: Sequence[float], left_out: Mapping[str, int]) -> None:
        """Count a prompt."""
        self.prompts += 1
        self.rows += len(rows)
        self.without_rows += not rows
        self.answers += len(scores)
        self.score_sum += sum(scores)
        self.left_out.update(left_out)


def write_rows(groups: Path, out: Path) -> SampledRows:
    """Write the rows of groups.jsonl in the order of the prompts; `out` appears when it is complete, with a row."""
    result, in_order = SampledRows(), places(groups)

    def lines() -> Iterator[str]:
        with groups.open("rb") as file:
            for _, place in in_order:
                file.seek(place)
                line = json.loads(file.readline())
                result.add(line["rows"], line["scores"], line["left_out"])
                yield from (json.dumps(row, ensure_ascii=False) + "\n" for row in line["rows"])

    found = lines() if in_order else iter(())
    if (first := next(found, None)) is not None:
        replace_file(out, itertools.chain([first], found))
    return result
