"""Every metric has a name, a unit and a meaning."""

from __future__ import annotations

from fourfold import metrics
from fourfold.metrics import METRICS


def test_every_name_has_a_unit_and_a_meaning() -> None:
    constants = [v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)]
    assert sorted(constants) == sorted(METRICS)
    for name, meaning in METRICS.items():
        assert name.count("/") == 1, name
        assert name == name.lower()
        assert len(meaning) > 10
        unit = meaning.partition(":")[0]
        if unit != meaning:
            assert len(unit) < 25, f"{name}: the unit comes before the colon"
