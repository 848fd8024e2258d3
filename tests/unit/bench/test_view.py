"""The benchmark of `fourfold view` opens every page of a run that it wrote."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Match, Route
from starlette.testclient import TestClient

from fourfold_bench.view.benchmark import _pages
from fourfold_bench.view.synthetic import RunShape, SyntheticRun
from fourfold_coordinator.state.trajectory_index import ORDERS, TrajectoryIndex
from fourfold_coordinator.view.app import make_app
from fourfold_coordinator.view.reader import RunFolders


def test_every_page_is_measured_and_has_content(tmp_path: Path) -> None:
    source = SyntheticRun(tmp_path / "large", RunShape(steps=2, prompts_per_step=1, tokens=16, distinct_steps=2))
    for step in (1, 2):
        source.write_step(step)
    source.finish()
    TrajectoryIndex(source.folder).update()
    app = make_app(RunFolders([source.folder], cache=tmp_path / "cache"))
    pages = _pages(source.folder)
    opened = set()
    with TestClient(app, base_url="http://127.0.0.1:8440") as client:
        for path in pages.values():
            assert client.get(path).status_code == 200, path
            scope = {"type": "http", "method": "GET", "path": path.partition("?")[0], "root_path": ""}
            opened |= {
                route.path for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL
            }
        answers = client.get(pages["answers"]).text
    assert opened == {route.path for route in app.routes if isinstance(route, Route)}
    assert "step 0, mean 0" in answers and "step 2, mean 1" in answers and answers.count("<td><pre") == 20


def test_the_docs_name_the_orders_of_samples() -> None:
    text = (Path(__file__).parents[3] / "docs/view.md").read_text()
    assert f"Orders: {', '.join(ORDERS)} |" in text
