"""Every metric has a name, a unit and a meaning."""

from __future__ import annotations

import re
from pathlib import Path

from fourfold import metrics
from fourfold.metrics import METRICS

ROOT = Path(__file__).parents[2]


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


def test_pages_name_metrics_that_exist() -> None:
    groups = "|".join({name.partition("/")[0] for name in METRICS})
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = [
        (page.name, name) for page in pages for name in re.findall(f"`((?:{groups})/[a-z0-9_]+)`", page.read_text())
    ]
    assert len(named) > 100
    assert [(page, name) for page, name in named if name not in METRICS] == []
