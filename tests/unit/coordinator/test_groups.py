"""Tests the choice of groups by dynamic sampling."""

from __future__ import annotations

import pytest

from fourfold.config.algorithm import FilterConfig
from fourfold_coordinator.training.groups import keep_group


@pytest.mark.parametrize(
    ("rule", "scores", "kept"),
    [
        ({"keep": "all"}, [1, 1], True),
        ({"keep": "varied"}, [1, 1], False),
        ({"keep": "varied"}, [0.5, 0.5, 0.5], False),
        ({"keep": "varied"}, [0.1 + 0.2, 0.3], True),  # compared exactly: an advantage would be, too
        ({"keep": "varied"}, [-3, 7], True),
        ({"keep": "varied"}, [1], False),
        ({"keep": "mean-inside"}, [1, 1], False),
        ({"keep": "mean-inside"}, [0, 0], False),
        ({"keep": "mean-inside"}, [0, 1], True),
        ({"keep": "mean-inside"}, [0.5, 0.5], True),  # OpenRLHF's rule
        ({"keep": "mean-inside", "low": 0.2, "high": 0.8}, [0, 0, 0, 0, 1], False),
        ({"keep": "mean-inside"}, [0.1] * 10, True),
        ({"keep": "mean-inside", "high": 0.1}, [0.1] * 10, False),  # added from left to right: 0.9999999999999999
    ],
)
def test_a_group_is_kept_for_its_scores(rule: dict[str, object], scores: list[float], kept: bool) -> None:
    assert keep_group(scores, FilterConfig.model_validate(rule)) is kept
