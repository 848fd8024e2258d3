"""Tests the choice of a replica for a call: its formula as a table, prefix keys and expected lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fourfold_coordinator.routing.scheduling import (
    Candidate,
    CompletionLengths,
    MeasuredSpeed,
    PrefixHolders,
    SamplingPace,
    choose_replica,
    prefix_keys,
)

C = Candidate


@pytest.mark.parametrize(
    ("candidates", "size", "best"),
    [
        ([C(name="a", outstanding=0), C(name="b", outstanding=0)], 10, "a"),
        ([C(name="b", outstanding=0), C(name="a", outstanding=0)], 10, "a"),
        ([C(name="a", outstanding=11), C(name="b", outstanding=10)], 1, "b"),
        # (100 + 20) / 30 = 4 s beside (0 + 20) / 4 = 5 s
        ([C(name="a", outstanding=0, speed=4.0), C(name="b", outstanding=100, speed=30.0)], 20, "b"),
        ([C(name="a", outstanding=0, speed=6.0), C(name="b", outstanding=100, speed=30.0)], 20, "a"),
        # an unknown speed counts as the mean of the others, (2 + 6) / 2
        ([C(name="a", outstanding=10, speed=2.0), C(name="b", outstanding=30, speed=6.0),
          C(name="c", outstanding=17)], 2, "c"),
        ([C(name="a", outstanding=10, speed=2.0), C(name="b", outstanding=30, speed=6.0),
          C(name="c", outstanding=20)], 2, "b"),
        # a KV cache that is full comes after one that is not, however fast it is; what is not known is enough
        ([C(name="a", outstanding=0, speed=100.0, room=19), C(name="b", outstanding=900, speed=1.0, room=20)], 20, "b"),
        ([C(name="a", outstanding=0, speed=100.0, room=19), C(name="b", outstanding=900, speed=1.0)], 20, "b"),
        ([C(name="a", outstanding=9, room=0), C(name="b", outstanding=8, room=-50)], 20, "b"),
        # a held prefix is worth what it saves and no more
        ([C(name="a", outstanding=0), C(name="b", outstanding=63, held=64)], 500, "b"),
        ([C(name="a", outstanding=0), C(name="b", outstanding=65, held=64)], 500, "a"),
        ([C(name="a", outstanding=0), C(name="b", outstanding=25, held=64)], 20, "a"),
        # a replica that failed this very call comes last
        ([C(name="a", outstanding=0, avoided=True), C(name="b", outstanding=99, room=0)], 1, "b"),
    ],
)  # fmt: skip
def test_the_choice(candidates: list[Candidate], size: int, best: str) -> None:
    assert choose_replica(candidates, size).name == best


SLOW, FAST = C(name="slow", outstanding=0, speed=1.0), C(name="fast", outstanding=40, speed=10.0, full=True)


@pytest.mark.parametrize(
    ("candidates", "backlog", "best"),
    [
        # 20 s at the slow one beside (40 + 20) / 10 = 6 s at the fast one, which is full
        ([SLOW, FAST], 0.0, "fast"),
        ([SLOW, FAST], 19.0, "fast"),
        ([SLOW, FAST], 20.0, "slow"),  # other calls take as long
        ([SLOW, replace(FAST, outstanding=190)], 0.0, "slow"),
        ([SLOW, replace(FAST, wait=13.0)], 0.0, "fast"),
        ([SLOW, replace(FAST, wait=14.0)], 0.0, "slow"),  # its samples end too late
        ([SLOW, replace(FAST, quiet=19.0)], 0.0, "fast"),
        ([SLOW, replace(FAST, quiet=20.0)], 0.0, "slow"),  # it may hang
        ([SLOW, replace(FAST, speed=None)], 0.0, "slow"),
        ([replace(SLOW, speed=None), FAST], 0.0, "slow"),
        ([SLOW, replace(FAST, avoided=True)], 0.0, "slow"),
        ([replace(SLOW, avoided=True), FAST], 0.0, "slow"),
        ([SLOW, replace(FAST, room=0)], 0.0, "slow"),
        ([replace(SLOW, full=True), FAST], 0.0, "fast"),
    ],
)
def test_a_call_waits_for_a_full_replica_that_will_finish_it_first(
    candidates: list[Candidate], backlog: float, best: str
) -> None:
    assert choose_replica(candidates, 20, backlog_seconds=backlog).name == best


def test_the_measured_speed_is_that_of_all_samples_in_flight_and_fades() -> None:
    speed = MeasuredSpeed()
    assert speed.tokens_per_second is None
    speed.add(tokens=0, seconds=1.0, samples=1.0, now=0.0)
    speed.add(tokens=5, seconds=0.0, samples=1.0, now=0.0)
    assert speed.tokens_per_second is None
    speed.add(tokens=100, seconds=2.0, samples=8.0, now=10.0)
    assert speed.tokens_per_second == 400
    speed.add(tokens=100, seconds=2.0, samples=1.0, now=10.0)
    assert speed.tokens_per_second == (8 * 400 + 50) / 9, "an engine with one sample is slow because it has one"
    speed.add(tokens=100, seconds=1.0, samples=9.0, now=70.0)
    assert speed.tokens_per_second == pytest.approx((4 * 400 + 25 + 9 * 900) / 13.5)


def test_keys_of_a_prompt_stand_for_its_leading_tokens() -> None:
    tokens = np.arange(300, dtype=np.int32)
    keys = prefix_keys(tokens)
    assert [count for count, _ in keys] == [64, 128, 256, 300]
    assert prefix_keys(tokens.astype(np.int32)[:256])[:3] == keys[:3], "a shorter prompt is found in a longer one"
    other = tokens.copy()
    other[128] += 1
    assert [a == b for a, b in zip(prefix_keys(other), keys, strict=True)] == [True, True, False, False]
    assert [count for count, _ in prefix_keys(tokens[:5])] == [5]
    assert [count for count, _ in prefix_keys(tokens[:64])] == [64]


def test_a_prefix_is_found_with_who_was_given_it_last_and_the_oldest_is_forgotten() -> None:
    prefixes, first = PrefixHolders(limit=4), np.arange(130, dtype=np.int32)
    prefixes.add(prefix_keys(first), "a")
    assert prefixes.held(prefix_keys(first)) == {"a": 130}
    later = np.concatenate([first, first])
    assert prefixes.held(prefix_keys(later)) == {"a": 128}
    prefixes.add(prefix_keys(first[:64]), "b")
    assert prefixes.held(prefix_keys(later)) == {"b": 64, "a": 128}
    prefixes.add(prefix_keys(first + 1), "c")  # three keys more than there is room for
    assert prefixes.held(prefix_keys(first)) == {"b": 64}


def test_expected_lengths_are_the_mean_of_those_seen_and_never_above_the_limit() -> None:
    lengths = CompletionLengths()
    assert lengths.expected(512) == 512
    lengths.add([10, 20, 60])
    assert lengths.expected(512) == 30
    assert lengths.expected(16) == 16
    lengths.add([100] * 20_000)
    assert lengths.expected(512) >= 98, "what was long ago fades"


def test_the_pace_is_the_median_of_the_latest_calls() -> None:
    pace = SamplingPace()
    assert pace.seconds_per_token is None
    pace.add(5.0, 0)
    assert pace.seconds_per_token is None, "a call without tokens has no pace"
    for seconds in (1.0, 2.0, 90.0):
        pace.add(seconds, 10)
    assert pace.seconds_per_token == 0.2, "one slow engine does not make all slow"
    for _ in range(100):
        pace.add(4.0, 10)
    assert pace.seconds_per_token == 0.4
