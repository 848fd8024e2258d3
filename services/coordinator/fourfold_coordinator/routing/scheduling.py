"""Which of several replicas gets a call: the one that is expected to be done with it first.

    prompt, samples --Demand--> choose <--Candidate-- replica: outstanding work, report (load.py), held prefix

Pure functions and small maps; `routing.py` asks them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from fourfold.arrays import Int32Array

PrefixKeys = tuple[tuple[int, bytes], ...]
"""(tokens, digest of that many leading tokens) of one prompt, shortest first."""

_SHORTEST_PREFIX: Final = 64
_MOST_PREFIXES: Final = 1 << 16
_LENGTHS_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one call asks of a replica."""

    samples: int
    """Counted against the replica's capacity."""
    tokens: int = 0
    """Expected, prompts included; 0: the work is not measured in tokens."""
    prefix: PrefixKeys = ()
    """Of its prompt."""

    @property
    def size(self) -> int:
        """What it adds to a replica's outstanding work: tokens, or samples where there are none."""
        return self.tokens or self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as the choice sees it. Sizes are tokens, or samples for services that sample nothing."""

    name: str
    outstanding: int
    """Size of what it was given and has not answered."""
    speed: float | None = None
    """Tokens that it samples in a second; None: not known."""
    room: int | None = None
    """Tokens that its KV cache still takes; None: not known, taken for enough."""
    held: int = 0
    """Leading tokens of the prompt that are in its cache."""
    avoided: bool = False
    """Whether it has just failed this very work."""


def choose_replica(candidates: Sequence[Candidate], size: int) -> Candidate:
    """Return the candidate that is expected to be done first with a call of `size`.

        seconds = (outstanding + size - held) / speed

    A speed that is not known is taken for the mean of those that are, and for 1 where none is: then the choice is the
    replica with the least outstanding. A prefix that is held saves its prefill, so that a call goes to who holds it
    unless that one is later by more than this. What does not fit into the room of a KV cache waits in that engine's
    queue, whatever its speed, so a replica with room comes first. Ties go by name.

    Args:
        candidates: at least one.
        size: of the call.
    """
    known = [candidate.speed for candidate in candidates if candidate.speed is not None]
    usual = fmean(known) if known else 1.0

    def rank(candidate: Candidate) -> tuple[bool, bool, float, str]:
        waits = candidate.room is not None and candidate.room < size
        left = candidate.outstanding + size - min(candidate.held, size)
        return candidate.avoided, waits, left / (candidate.speed or usual), candidate.name

    return min(candidates, key=rank)


def prefix_keys(token_ids: Int32Array) -> PrefixKeys:
    """Return the keys of a prompt's leading 64, 128, 256, ... tokens and of the whole prompt.

    Equal keys mean equal tokens. Doubling keeps their number at a dozen, and still finds at least half of what two
    prompts have in common, such as the next turn of a conversation.

    Args:
        token_ids: int32 [n], n >= 1.
    """
    data = token_ids.astype("<i4").tobytes()
    digest, done, keys = hashlib.blake2b(digest_size=16), 0, list[tuple[int, bytes]]()
    for count in (*_doublings(len(token_ids)), len(token_ids)):
        digest.update(data[4 * done : 4 * count])
        keys.append((count, digest.copy().digest()))
        done = count
    return tuple(keys)


def _doublings(end: int) -> Iterable[int]:
    count = _SHORTEST_PREFIX
    while count < end:
        yield count
        count *= 2


class PrefixHolders:
    """Who was given which prefixes last: the ones used longest ago are forgotten first.

    A holder is whatever stands for one cache with one version of the weights; after an update it is another one, and
    what it held is found no more.
    """

    def __init__(self, limit: int = _MOST_PREFIXES) -> None:
        self._holders: OrderedDict[bytes, object] = OrderedDict()
        self._limit = limit

    def held(self, keys: PrefixKeys) -> dict[object, int]:
        """Return the leading tokens that each holder has of a prompt."""
        found = ((self._holders.get(digest), count) for count, digest in keys)
        return {holder: count for holder, count in found if holder is not None}

    def give(self, keys: PrefixKeys, holder: object) -> None:
        """Note that a prompt went to `holder`."""
        for _, digest in keys:
            self._holders[digest] = holder
            self._holders.move_to_end(digest)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)


class CompletionLengths:
    """The mean length of the completions of a run, the last few thousand above all."""

    def __init__(self) -> None:
        self._mean, self._count = 0.0, 0

    def add(self, lengths: Iterable[int]) -> None:
        """Take the lengths of completions, in tokens."""
        for length in lengths:
            self._count = min(self._count + 1, _LENGTHS_REMEMBERED)
            self._mean += (length - self._mean) / self._count

    def expected(self, longest: int) -> int:
        """Return the tokens to expect of a completion of at most `longest`; `longest` before any was seen."""
        return min(round(self._mean), longest) if self._count else longest


def call_tokens(*, samples: int, prompt: int, expected: int) -> int:
    """Return the size of a call in tokens: every sample counts its prompt, as it does in the KV cache's report."""
    return samples * (prompt + expected)
