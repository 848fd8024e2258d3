"""Malformed and hostile files of a run on the pages of `fourfold view`: each is named, and the rest is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.state.sample_tokens import TOKENS_FILE
from fourfold_coordinator.state.samples import SAMPLES_FILE
from fourfold_coordinator.view.app import make_app
from fourfold_coordinator.view.charts import Line, line_chart
from fourfold_coordinator.view.reader import RunFolders, RunReader
from tests.support.view_run import write_run

LOCAL = "http://127.0.0.1:8440"
PAGES = (
    "/", "/compare?run=one", "/run/one", "/run/one/answers", "/run/one/timeline", "/run/one/weights",
    "/run/one/recipe", "/run/one/samples", "/run/one/sample/p2-0-0",
)  # fmt: skip


def report(**values: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | values).encode()


def last_line(**values: Any) -> Callable[[bytes], bytes]:
    """Return an edit of the last line of a file."""

    def edit(data: bytes) -> bytes:
        *lines, last = data.splitlines(keepends=True)
        return b"".join([*lines, json.dumps(json.loads(last) | values).encode() + b"\n"])

    return edit


def instead(data: bytes) -> Callable[[bytes], bytes]:
    return lambda _: data


DEEP = b"[" * 100_000 + b"\n"
CASES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("report.json", report(seconds="<b>9"), "report.json: seconds is &#39;&lt;b&gt;9&#39;: "),
    ("report.json", report(seconds=1e999), "report.json: seconds is inf"),
    ("report.json", report(diagnosis=5), "report.json: diagnosis is 5"),
    ("report.json", report(evals=[{"step": "x", "score": 1}]), "report.json: evals.0.step is"),
    ("report.json", report(evals=[{"step": 1, "score": 10**400}]), "report.json: evals.0.score is"),
    ("report.json", report(answers_before=[{"prompt": 5}]), "report.json: answers_before.0.prompt is 5"),
    ("report.json", instead(b'{"seconds": 1'), "report.json: "),
    ("report.json", instead(b"\xff"), "report.json: "),
    ("report.json", instead(DEEP), "report.json: its arrays or objects are nested too deeply"),
    (
        "evaluations.jsonl",
        instead(b'{"step": 1, "sets": 5}\n'),
        "evaluations.jsonl: 1 lines are left out; in the first",
    ),
    ("ledger.sqlite", instead(b"no database" * 99), "ledger.sqlite: file is not a database"),
    ("metrics.jsonl", last_line(step=10**400), "metrics.jsonl: 1 lines are left out; in the first, step is 1000"),
    ("metrics.jsonl", last_line(alarms=[5]), "in the first, alarms.0 is 5"),
    (
        "metrics.jsonl",
        lambda data: b"[1]\n" + DEEP + data,
        "metrics.jsonl: 2 lines are left out; in the first, it is [1]",
    ),
    ("timeline.jsonl", last_line(end=1e400), "timeline.jsonl: 1 lines are left out; in the first, end is inf"),
    ("timeline.jsonl", last_line(members={"a": {"train": [["<b>", 1]]}}), "members.a.train.0.0 is &#39;&lt;b&gt;"),
    ("config.toml", instead(b"steps = ["), "config.toml: "),
    ("config.toml", instead(b"a." * 2_000 + b"a = 1"), "config.toml: its tables are nested too deeply"),
    ("model/tokenizer.json", instead(b"{}"), "model/tokenizer.json: "),
    (SAMPLES_FILE, last_line(version_spans=[[1, 10**13]]), "samples.jsonl: 1 of its lines cannot be read"),
    (SAMPLES_FILE, last_line(score="<b>"), "score is &#39;&lt;b&gt;&#39;"),
    (SAMPLES_FILE, last_line(terms={"a": 5}), "terms.a is 5"),
    (SAMPLES_FILE, last_line(sample_id="\ud800"), "samples.jsonl: 1 of its lines cannot be read"),
    (SAMPLES_FILE, lambda data: data + DEEP, "nested too deeply"),
    (TOKENS_FILE, lambda data: data + b"[]\n", "tokens.jsonl: 1 of its lines cannot be read"),
]


@pytest.mark.parametrize(("name", "edit", "fault"), CASES)
def test_a_malformed_file_is_named_and_the_other_parts_stay(
    tmp_path: Path, name: str, edit: Callable[[bytes], bytes], fault: str
) -> None:
    folder = write_run(tmp_path / "one")
    path = folder / name
    path.write_bytes(edit(path.read_bytes() if path.exists() else b""))
    with TestClient(make_app(RunFolders([folder], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        pages = {page: client.get(page) for page in PAGES}
        assert {name: page.status_code for name, page in pages.items()} == dict.fromkeys(PAGES, 200)
        assert any(fault in page.text for page in pages.values()), [
            page.text.partition('"faults">')[2][:400] for page in pages.values()
        ]
        assert not any("<b>9" in page.text for page in pages.values())
        assert "<polyline" in pages["/run/one"].text and "apples 2" in pages["/run/one/sample/p2-0-0"].text
        _repair(path, tmp_path / "fresh")
        # Each page reads its own files again.
        _until(lambda: sum('class="fault"' in client.get(page).text for page in PAGES) == 0)


def _repair(path: Path, fresh: Path) -> None:
    whole = write_run(fresh / "one")
    found = next(whole.rglob(path.name), None)
    if found is None:
        path.unlink()
        return
    new = path.with_name("new")
    new.write_bytes(found.read_bytes())
    new.replace(path)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_coordinator.view.reader._LINE_BYTES", 1000)
    folder = write_run(tmp_path / "one")
    reader = RunReader(folder, cache=tmp_path / "cache")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"[" * 5000)
    for _ in range(2):
        assert len(reader.steps()) == 3
        (fault,) = reader.faults()
        assert "1 lines are left out; in the first, it has more than 1,000 bytes" in fault


def test_a_trajectory_whose_tokens_are_damaged_is_shown_as_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    path = folder / TOKENS_FILE
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_text("".join(json.dumps(line | {"tokens": "AAAA"}) + "\n" for line in lines))
    with TestClient(make_app(RunFolders([folder], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        page = client.get("/run/one/sample/p2-0-1").text
        assert "its line of tokens.jsonl has damaged tokens: " in page and 'id="text">apples 2' in page


def test_a_line_of_an_earlier_release_has_no_source(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    path = folder / SAMPLES_FILE
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "source"}) + "\n" for row in rows))
    with TestClient(make_app(RunFolders([folder], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        page = client.get("/run/one/sample/p2-0-1")
        assert page.status_code == 200 and "<dt>source" not in page.text and 'class="fault"' not in page.text


@pytest.mark.parametrize(
    "values", [(1e300, -1e300), (0.0, 2e-323), (5e-324, 5e-324), (1.0, 1.0 + 2**-52), (-1.0, -1.0)]
)
def test_charts_of_extreme_numbers_are_drawn(values: tuple[float, float]) -> None:
    chart = line_chart(
        [Line(name="a", points=[(float(x), y) for x, y in enumerate(values)], bars=[(-1e300, 1e300), None])]
    )
    assert chart.count("<polyline") == 1 and "nan" not in chart and "inf" not in chart


def test_a_stopped_run_has_the_tokenizer_of_a_built_in_model_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('name = "demo"\n[model]\nsource = "builtin:smollm2-135m-instruct"\n')
    monkeypatch.setattr(Tokenizer, "load", lambda path: path)
    monkeypatch.setattr(model_folder, "resolve", lambda source: tmp_path)
    for ready in (False, True):
        monkeypatch.setattr(model_folder, "is_ready", lambda source, ready=ready: ready)
        found = RunReader(folder, cache=tmp_path / "cache")
        assert found.state() != "running" and (found.tokenizer() is not None) == ready
