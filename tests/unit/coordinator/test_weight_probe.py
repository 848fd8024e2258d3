"""The probe prompt: differences that pass, that fail, and engines that compute with old weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


def test_an_engine_that_did_not_move_with_the_trainer_is_stale(probe: LogprobProbe) -> None:
    probe.set_engine_logprobs(ENGINE, 1, logprobs(0.02))
    with pytest.raises(WrongState, match=r"bit for bit those of version 1, .* moved by up to 0.05 nats") as error:
        probe.compare(ENGINE, 2, logprobs(0.02))
    assert error.value.reason == "STALE_WEIGHTS"
    probe.compare(ENGINE, 2, logprobs(0.0201))


def test_a_change_too_small_to_see_is_only_noted(probe: LogprobProbe, caplog: pytest.LogCaptureFixture) -> None:
    probe.set_trainer_logprobs(3, logprobs(0.0501))
    probe.set_engine_logprobs(ENGINE, 2, logprobs(0.05))
    probe.compare(ENGINE, 3, logprobs(0.05))
    assert "stale" in caplog.text


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
