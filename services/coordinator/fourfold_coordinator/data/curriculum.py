"""Skips training prompts that the policy recently solved always or never (`[data.curriculum]`).

    position p of the endless order --> recent success rate r of its prompt --> drawn if u(seed, p) < weight(r)
                                                                           '--> skipped, p + 1 is next

The seed alone decides the order of the prompts, so that a position names the same prompt in every process. The skips
depend on the scores of the earlier steps, all of which are in samples.jsonl. A resumed run reads them again and then
skips the same prompts.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from fourfold.config.schema import CURRICULUM_GROUPS, CURRICULUM_LEAST, CurriculumConfig
from fourfold.seeds import derive_seed

# Drop reasons of attempts that count. Attempts with other reasons have no score, or were scored too late.
_COUNTED: Final = ("", "FILTERED", "NOT_SELECTED")
_RANGE: Final = 1 << 52  # range of `derive_seed`


class ScoredAttempt(NamedTuple):
    """One attempt in samples.jsonl."""

    group_id: str
    score: float | None
    dropped: str


class Curriculum:
    """The recent success rates of the training prompts, which decide the prompts to skip."""

    def __init__(self, config: CurriculumConfig, *, seed: int, prompt_at: Callable[[int], int]) -> None:
        """Start without scores: then no prompt is skipped. `prompt_at` gives the index of the prompt at a position."""
        self._config, self._seed, self._prompt_at = config, seed, prompt_at
        # Successes and attempts of the latest groups, by prompt.
        self._groups: defaultdict[int, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=CURRICULUM_GROUPS))

    def accepts(self, position: int) -> bool:
        """Return whether the prompt at a position is drawn now."""
        return derive_seed(self._seed, "curriculum", position) < self.weight(self._prompt_at(position)) * _RANGE

    def weight(self, prompt: int) -> float:
        """Return the probability that a prompt is drawn when its position comes.

        It is 1 for a prompt without scores, and otherwise

            CURRICULUM_LEAST + (1 - CURRICULUM_LEAST) * 4 r (1 - r)

        with the success rate r: r (1 - r) is the variance of a success, on which the advantages of a group depend.
        """
        groups, least = self._groups.get(prompt), CURRICULUM_LEAST
        if not groups:
            return 1.0
        rate = sum(successes for successes, _ in groups) / sum(attempts for _, attempts in groups)
        return least + (1 - least) * 4 * rate * (1 - rate)

    def add_step(self, attempts: Iterable[ScoredAttempt]) -> None:
        """Add the attempts of one step, in any order."""
        found: defaultdict[tuple[int, str], list[bool]] = defaultdict(list)
        for group_id, score, dropped in attempts:
            if score is not None and dropped in _COUNTED:
                position = int(group_id.removeprefix("p").partition("-")[0])  # see `Ledger.issue`
                found[position, group_id].append(score >= self._config.success)
        for (position, _), successes in sorted(found.items()):
            self._groups[self._prompt_at(position)].append((sum(successes), len(successes)))

    def restore(self, path: Path) -> None:
        """Forget all scores, and read those of the steps in samples.jsonl; the file may be missing."""
        self._groups.clear()
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            for _, step in groupby(rows, key=lambda row: row["step"]):
                self.add_step(ScoredAttempt(row["group_id"], row["score"], row["dropped"]) for row in step)
