"""Which version of the weights sampled which tokens of one sample."""

from __future__ import annotations

from collections import deque

from fourfold_rollout.engine import SampleOutput


class SampleVersions:
    """Cuts a sample's outputs where the weights changed.

    At each change the engine tells how many tokens the sample has; those that come out later, or
    all together at the end, are counted against it.
    """

    def __init__(self) -> None:
        self._given = 0
        self._ends: deque[tuple[int, int]] = deque()  # (tokens of the sample, version that sampled the last of them)

    def end(self, token_count: int, version: int) -> None:
        """Know that the first `token_count` tokens are there; those that no earlier call counted are of `version`."""
        counted = self._ends[-1][0] if self._ends else self._given
        if token_count <= counted:
            return
        if self._ends and self._ends[-1][1] == version:
            self._ends.pop()
        self._ends.append((token_count, version))

    def cut(self, output: SampleOutput, version: int) -> list[tuple[int, SampleOutput]]:
        """Return an output as (version, tokens) in order; `version` sampled what was not counted.

        Neighbours have different versions; only the last one, which may be empty, has the reason of the finish.
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
    """Return the pieces that end at `bounds`, counted from the sample's start."""
    pieces: list[tuple[int, SampleOutput]] = []
    low = 0
    for index, (end, version) in enumerate(bounds):
        high = end - start
        finish = output.finish if index == len(bounds) - 1 else None
        piece = SampleOutput(token_ids=output.token_ids[low:high], logprobs=output.logprobs[low:high], finish=finish)
        pieces.append((version, piece))
        low = high
    return pieces
