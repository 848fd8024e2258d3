"""The probe prompt: differences that pass, that fail, and engines that compute with old weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fourfold.arrays import Float32Array
from fourfold.errors import WrongState
from fourfold_coordinator.weights.probe import LogprobProbe

ENGINE = ("rollout-0", "a" * 32)


def logprobs(shift: float, count: int = 4) -> Any:
    values = np.full(count, -1 - shift, np.float32)
    values[0] = np.nan
    return values


@pytest.fixture
def probe() -> LogprobProbe:
    probe = LogprobProbe(np.arange(4, dtype=np.int32), tolerance=0.1)
    probe.set_trainer_logprobs(1, logprobs(0))
    probe.set_trainer_logprobs(2, logprobs(0.05))
    return probe


def test_a_probe_within_the_tolerance_passes_with_its_distance(probe: LogprobProbe) -> None:
    assert probe.compare(ENGINE, 1, logprobs(0.02)) == pytest.approx((0.02, 0.02), abs=1e-6)


@pytest.mark.parametrize("values", [logprobs(0.5), np.full(4, np.nan, np.float32)])
def test_a_probe_that_differs_names_the_engine(probe: LogprobProbe, values: Any) -> None:
    with pytest.raises(WrongState, match=r"rollout-0: after the update to version 1 .* allows 0.1") as error:
        probe.compare(ENGINE, 1, values)
    assert error.value.reason == "PROBE_DIFFERS"


def moved_probe(tokens: int, moved: int, change: float) -> LogprobProbe:
    """Return a probe whose trainer moved so many of its log-probabilities from version 1 to 2."""
    probe, values = LogprobProbe(np.arange(tokens, dtype=np.int32), tolerance=1), np.full(tokens, -2, np.float32)
    values[0] = np.nan
    probe.set_trainer_logprobs(1, values)
    values = values.copy()
    values[1 : 1 + moved] += np.float32(change)
    probe.set_trainer_logprobs(2, values)
    return probe


def stuck(tokens: int) -> Float32Array:
    return np.array([np.nan, *[-2.1] * (tokens - 1)], np.float32)


@pytest.mark.parametrize(
    ("tokens", "moved", "change", "text"),
    [
        (64, 32, 0.002, "32 of 63 .* up to 0.002"),
        (5, 4, 0.06, "4 of 4 .* up to 0.06"),
        (64, 1, 4, "1 of 63 .* up to 4"),
    ],
)
def test_an_engine_that_did_not_move_with_the_trainer_is_stale(
    tokens: int, moved: int, change: float, text: str
) -> None:
    probe, engine = moved_probe(tokens, moved, change), stuck(tokens)
    probe.set_engine_logprobs(ENGINE, 1, engine)
    with pytest.raises(WrongState, match=rf"bit for bit those of version 1, while {text} nats") as error:
        probe.compare(ENGINE, 2, engine)
    assert error.value.reason == "STALE_WEIGHTS"
    probe.compare(ENGINE, 2, np.nextafter(engine, 0))


@pytest.mark.parametrize(
    ("tokens", "moved", "change"), [(64, 31, 0.016), (64, 63, 0.0009), (64, 1, 0.24), (12, 11, 0.016), (5, 1, 0.125)]
)
def test_a_change_that_rounding_can_hide_is_only_noted(
    tokens: int, moved: int, change: float, caplog: pytest.LogCaptureFixture
) -> None:
    probe, engine = moved_probe(tokens, moved, change), stuck(tokens)
    probe.set_engine_logprobs(ENGINE, 1, engine)
    probe.compare(ENGINE, 2, engine)
    assert "stale" in caplog.text and "may be lost in rounding" in caplog.text


def test_small_changes_add_up_as_long_as_the_engine_stands_still() -> None:
    probe, engine = moved_probe(12, 0, 0), stuck(12)
    probe.set_engine_logprobs(ENGINE, 1, engine)
    with pytest.raises(WrongState, match=r"those of version 1, while 11 of 11 .* up to 0.06") as error:
        for version in range(2, 200):
            values = stuck(12) + np.float32(0.1 + 0.016 * (version - 1))
            probe.set_trainer_logprobs(version, values)
            probe.compare(ENGINE, version, engine)
            probe.set_engine_logprobs(ENGINE, version, engine)
    assert error.value.reason == "STALE_WEIGHTS" and version == 5


def test_a_trainer_that_did_not_move_makes_nobody_stale(probe: LogprobProbe, caplog: pytest.LogCaptureFixture) -> None:
    probe.set_trainer_logprobs(3, logprobs(0.05))
    probe.set_engine_logprobs(ENGINE, 2, logprobs(0.05))
    probe.compare(ENGINE, 3, logprobs(0.05))
    assert caplog.text == ""


def test_a_probe_of_one_token_is_made_long_enough() -> None:
    probe = LogprobProbe(np.array([7], np.int32), tolerance=1)
    assert probe.token_ids.tolist() == [7, 7]
    assert probe.sample().temperature == 1.0
    assert len(LogprobProbe(np.arange(500, dtype=np.int32), tolerance=1).token_ids) == 64
