"""Splits the output of one sample by the policy version that sampled each token."""

from __future__ import annotations

from collections import deque

from fourfold_rollout.engine import SampleOutput


class SampleVersions:
    """The boundaries between the versions in one sample.

    At each change of weights the engine reports how many tokens the sample has. Tokens that are put later, or all at
    once at the end, are attributed by these counts.
    """

    def __init__(self) -> None:
        self._given = 0
        self._ends: deque[tuple[int, int]] = deque()  # (token count of the sample, version of the last of them)

    def end(self, token_count: int, version: int) -> None:
        """Record that the first `token_count` tokens exist; those without a version yet are of `version`."""
        counted = self._ends[-1][0] if self._ends else self._given
        if token_count <= counted:
            return
        if self._ends and self._ends[-1][1] == version:
            self._ends.pop()
        self._ends.append((token_count, version))

    def cut(self, output: SampleOutput, version: int) -> list[tuple[int, SampleOutput]]:
        """Return an output as (version, tokens) in order; tokens after the last boundary are of `version`.

        Neighbours have different versions. Only the last piece has the finish, and it may be empty.
        """
        start, self._given = self._given, self._given + len(output.token_ids)
        if not self._ends:
            return [(version, output)]
        bounds: list[tuple[int, int]] = []
        at = start
        for end, sampled_by in (*self._ends, (self._given, version)):
            upto = min(end, self._given)
            if upto <= at:
                continue
            if bounds and bounds[-1][1] == sampled_by:
                bounds.pop()
            bounds.append((upto, sampled_by))
            at = upto
        while self._ends and self._ends[0][0] <= self._given:
            self._ends.popleft()
        return _slices(output, start, bounds) or [(version, output)]


def _slices(output: SampleOutput, start: int, bounds: list[tuple[int, int]]) -> list[tuple[int, SampleOutput]]:
    """Return the pieces that end at `bounds`, which are positions in the sample; the output begins at `start`."""
    pieces: list[tuple[int, SampleOutput]] = []
    low = 0
    for index, (end, version) in enumerate(bounds):
        high = end - start
        finish = output.finish if index == len(bounds) - 1 else None
        piece = SampleOutput(
            token_ids=output.token_ids[low:high],
            logprobs=output.logprobs[low:high],
            finish=finish,
            constrained=output.constrained[low:high],
        )
        pieces.append((version, piece))
        low = high
    return pieces
