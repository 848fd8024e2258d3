"""Chooses the replica for a call: the one that is expected to finish it first.

    prompt, samples --Demand--> choose_replica <--Candidate-- replica: outstanding work, load report, cached prefixes

Pure functions and small tables, which `router.py` uses.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from fourfold.arrays import Int32Array

# (number of leading tokens, digest of them) for several lengths of one prompt, the shortest first.
PrefixKeys = tuple[tuple[int, bytes], ...]

_MIN_PREFIX_TOKENS: Final = 64
_MAX_PREFIXES: Final = 1 << 16  # room for about 5,000 prompts with a dozen prefixes each
_PACE_WINDOW: Final = 64  # number of latest calls
_SPEED_HALF_LIFE_SECONDS: Final = 60.0
_MEAN_WINDOW: Final = 4096  # after this number of completions, a new length has the weight 1 / 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work that one call adds to a replica."""

    samples: int  # counted against the replica's capacity
    tokens: int = 0  # expected, prompts included; 0 for calls that are not measured in tokens
    prefix: PrefixKeys = ()  # of the prompt

    @property
    def size(self) -> int:
        """Return the load that the call adds to a replica: tokens, or samples for calls without tokens."""
        return self.tokens or self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may get a call. Sizes are those of `Demand.size`."""

    name: str
    outstanding: int  # size of its calls in flight
    speed: float | None = None  # tokens per second; None if unknown
    room: int | None = None  # tokens that still fit into its KV cache; None if unknown, which counts as enough
    held: int = 0  # leading tokens of the prompt that its prefix cache holds
    avoided: bool = False  # the same call failed there before
    full: bool = False  # it has no room until some of its samples are finished
    wait: float = 0.0  # seconds until it has room, if it is full
    quiet: float = 0.0  # seconds since it finished a sample, or since it got work


def choose_replica(candidates: Sequence[Candidate], size: int, *, backlog_seconds: float = 0.0) -> Candidate:
    """Return the candidate that is expected to finish a call of `size` first; if it is full, the caller waits for it.

        seconds = wait + (outstanding + size - held) / speed

    An unknown speed counts as the mean of the known ones. If no speed is known, the candidate with the least
    outstanding work is chosen. A held prefix saves its prefill, so a call goes to the replica that holds it unless
    another one still finishes earlier. A call that does not fit into a KV cache waits in that engine's queue, however
    fast the engine is, so candidates with room come first. Ties are broken by name.

    If some candidates have room, the caller waits for a full one under two conditions:

    - The full one finishes the call earlier than the best one with room. Both speeds must be known.
    - The best one with room finishes it after `backlog_seconds`, when all replicas together have done all other work:
      as long as many calls wait, every replica with room is useful.

    A replica that was just filled has no room before the work of a whole round is done. A replica that is quiet for
    longer than all its work should take may hang, so no call waits for it.
    """
    known = [candidate.speed for candidate in candidates if candidate.speed is not None]
    mean_speed = fmean(known) if known else 1.0

    def is_crowded(candidate: Candidate) -> bool:
        return candidate.room is not None and candidate.room < size

    def seconds(candidate: Candidate) -> float:
        work = candidate.outstanding + size - min(candidate.held, size)
        return candidate.wait + work / (candidate.speed or mean_speed)

    def rank(candidate: Candidate) -> tuple[bool, bool, float, str]:
        return candidate.avoided, is_crowded(candidate), seconds(candidate), candidate.name

    free = [candidate for candidate in candidates if not candidate.full]
    if not free:
        return min(candidates, key=rank)
    best = min(free, key=rank)
    if best.avoided or best.speed is None or seconds(best) <= backlog_seconds:
        return best
    busy = [c for c in candidates if c.full and c.speed and not c.avoided and not is_crowded(c)]
    sooner = [(max(seconds(c), c.quiet), c.name, c) for c in busy if max(seconds(c), c.quiet) < seconds(best)]
    return min(sooner)[2] if sooner else best


def prefix_keys(token_ids: Int32Array) -> PrefixKeys:
    """Return the keys of the leading 64, 128, 256, ... tokens of a prompt, int32 [n >= 1], and of the whole prompt.

    Equal keys mean equal tokens. Because the lengths double, a prompt has about a dozen keys, and the longest key that
    two prompts share covers at least half of their common prefix, for example in the next turn of a conversation.
    """
    data = token_ids.astype("<i4").tobytes()
    digest, done, keys = hashlib.blake2b(digest_size=16), 0, list[tuple[int, bytes]]()
    doublings = (_MIN_PREFIX_TOKENS << i for i in itertools.count())
    for count in (*itertools.takewhile(lambda n: n < len(token_ids), doublings), len(token_ids)):
        digest.update(data[4 * done : 4 * count])
        keys.append((count, digest.copy().digest()))
        done = count
    return tuple(keys)


class PrefixHolders:
    """Remembers which cache got each prompt prefix last; forgets the least recently used prefixes.

    A holder identifies one cache with one version of the weights: an update makes a new holder, because cached
    attention states of old weights are of no use.
    """

    def __init__(self, limit: int = _MAX_PREFIXES) -> None:
        self._holders: OrderedDict[bytes, object] = OrderedDict()
        self._limit = limit

    def held(self, keys: PrefixKeys) -> dict[object, int]:
        """Return the number of leading tokens of a prompt that each holder has."""
        found = ((self._holders.get(digest), count) for count, digest in keys)
        return {holder: count for holder, count in found if holder is not None}

    def add(self, keys: PrefixKeys, holder: object) -> None:
        """Note that a prompt goes to `holder`."""
        for _, digest in keys:
            self._holders[digest] = holder
            self._holders.move_to_end(digest)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)


class CompletionLengths:
    """Moving mean of the lengths of a run's completions, in tokens."""

    def __init__(self) -> None:
        self._mean, self._count = 0.0, 0

    def add(self, lengths: Iterable[int]) -> None:
        """Add the lengths of completions."""
        for length in lengths:
            self._count = min(self._count + 1, _MEAN_WINDOW)
            self._mean += (length - self._mean) / self._count

    def expected(self, longest: int) -> int:
        """Return the expected length of a completion of at most `longest` tokens; `longest` before the first one."""
        return min(round(self._mean), longest) if self._count else longest


class MeasuredSpeed:
    """Tokens per second that one replica sampled for this run, from its finished samples.

    By Little's law a sample of `tokens` tokens that took `seconds` beside `samples` others on average shows a speed of
    tokens / seconds * samples, whether the samples share the speed or wait in a queue. An engine with few samples is
    slow because it has few, so each measurement counts in proportion to its samples.
    """

    def __init__(self) -> None:
        self._sum = self._weight = self._at = 0.0

    def add(self, *, tokens: int, seconds: float, samples: float, now: float) -> None:
        """Add a finished sample; `samples` is the mean number in flight at the replica meanwhile, itself included."""
        if tokens <= 0 or seconds <= 0 or samples <= 0:
            return
        fade = 0.5 ** ((now - self._at) / _SPEED_HALF_LIFE_SECONDS)
        self._at, self._weight = now, self._weight * fade + samples
        self._sum = self._sum * fade + samples * (tokens / seconds * samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed; None before the first sample."""
        return self._sum / self._weight if self._weight else None


class SamplingPace:
    """Median time per token of a run's latest calls, in the longest sample of each."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_PACE_WINDOW)

    def add(self, seconds: float, tokens: int) -> None:
        """Add a call that finished all its samples; `tokens` is what it sampled of the longest one."""
        if tokens > 0:
            self._latest.append(seconds / tokens)

    @property
    def seconds_per_token(self) -> float | None:
        """Return the median; None before the first call has ended."""
        # Not the mean: one engine that is ten times slower than the others would set the flushes of all.
        return median(self._latest) if self._latest else None
