"""Tests the pages of `fourfold view` without a browser: content, escapes, access, and that nothing is written."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from fourfold.errors import ConfigError
from fourfold.host.disk import append_lines
from fourfold.host.program import program
from fourfold_coordinator.cli import view
from fourfold_coordinator.launch.run_folder import write_stop_reason
from fourfold_coordinator.reporting.run_totals import RunTotals
from fourfold_coordinator.state.ledger import Ledger
from fourfold_coordinator.state.trajectory_index import TrajectoryIndex
from fourfold_coordinator.view.app import COOKIE, make_app
from fourfold_coordinator.view.charts import Line, gantt, line_chart, short_number, thin_out
from fourfold_coordinator.view.pages import recipe_differences, step_parts
from fourfold_coordinator.view.reader import LocalCoordinator, RunFolders
from fourfold_coordinator.view.templates import moment
from tests.support.view_run import append_step, trajectory, write_run

LOCAL = "http://127.0.0.1:8440"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "runs" / "one"), write_run(tmp_path / "runs" / "two", rate=1e-4)]


@pytest.fixture
def client(folders: list[Path], tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(make_app(RunFolders(folders, cache=tmp_path / "cache")), base_url=LOCAL) as client:
        yield client


PAGES = (
    "/", "/run/one", "/run/one?m=time/step", "/run/one/samples", "/run/one/samples?text=apples&order=longest",
    "/run/one/sample/p2-0-0", "/run/one/sample/q1-0-0", "/run/one/answers", "/run/one/timeline",
    "/run/one/timeline?step=1", "/run/one/weights", "/run/one/recipe?other=two", "/compare?run=one&run=two",
)  # fmt: skip


def test_every_page_escapes_hostile_text_and_allows_only_own_scripts(client: TestClient) -> None:
    for path in PAGES:
        page = client.get(path)
        assert page.status_code == 200, f"{path}: {page.text}"
        assert "<img" not in page.text and page.text.count("<script") == 1 and "<b>:" not in page.text, path
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy
        assert not re.search(r"(src|href)=\"(https?:)?//", page.text), "nothing comes from the network"
        assert "access-control-allow-origin" not in page.headers and page.headers["x-content-type-options"] == "nosniff"


def test_the_pages_show_what_the_run_has(client: TestClient) -> None:
    curves = client.get("/run/one").text
    assert "few scores differ" in curves and "raise sampling.temperature" in curves and curves.count("<polyline") >= 2
    assert "3 of 9" in curves and "0.5 [0.4, 0.6]" in curves
    assert "<dt>math, step 3</dt><dd>0.75 [0.4, 0.9]" in curves and "eval/code/score" in curves
    sample = client.get("/run/one/sample/p2-0-0").text
    advantage = 'the scores)</dt><dd class="up">+0.707</dd>'  # of the better of two: 0.5 / sqrt(0.5)
    assert advantage in sample and '<td class="n">1</td><td class="n">+0.707</td>' in sample
    assert "-0.5 nats, 60.7%; version 1" in sample and "turn 1, sampled" in sample
    assert "the same prompt at step 1 and at step 3" in sample and "apples 2" in sample
    answers = client.get("/run/one/answers").text
    assert '<td>eval/math/pass_at_2</td><td class="n">0.75</td><td class="n">0.75</td>' in answers
    assert "&lt;script&gt;" in answers and "step 3, mean 0.5" in answers
    timeline = client.get("/run/one/timeline").text
    assert "rollout-0&lt;b&gt;: generate, 0.00 to 2.00 s" in timeline and "The step began at 0.5 s." in timeline
    assert (
        ">2.0000<" in timeline
        and ">67 %<" in timeline
        and 'class="key p-generate"' in timeline
        and "p-evaluate" not in timeline
    )
    assert "training loop: train" in timeline
    assert "no timeline.jsonl" in client.get("/run/one/timeline?step=1").text
    for page in (client.get("/run/one/recipe?other=two").text, client.get("/compare?run=one&run=two").text):
        assert (
            "trainer.learning_rate" in page
            and "0.0001" in page
            and "batch.group_size</code></td><td><code>2</code></td><td>" not in page
        )
    assert "STALE" in client.get("/run/one/samples?dropped=STALE").text
    fruit = client.get("/run/one/samples?source=fruit").text
    assert "<option selected>fruit</option>" in fruit and "3 trajectories" in fruit and "pears" not in fruit
    assert 'samples?source=fruit">fruit</a>' in client.get("/run/one/sample/p2-0-1").text


def test_runs_with_the_same_name_are_shown_together(folders: list[Path], tmp_path: Path) -> None:
    parents, names = ("runs-b", "b/runs", "c/runs"), ["one", "one (runs-b)", "one (runs)", "one (runs) 2"]
    given = [folders[0], *(write_run(tmp_path / parent / "one", text=parent) for parent in parents)]
    runs = RunFolders(given, cache=tmp_path / "cache")
    assert {run.folder: run.name for run in runs.all()} == dict(zip(given, names, strict=True))
    with TestClient(make_app(runs), base_url=LOCAL) as client:
        for name, parent in zip(names[1:], parents, strict=True):
            assert f"{parent} in step 2" in client.get(f"/run/{quote(name)}/sample/p2-0-0").text
        assert 'href="/run/one%20%28runs-b%29"' in client.get("/").text


def test_the_number_of_alarms_that_are_not_shown_is(folders: list[Path], tmp_path: Path) -> None:
    for step in range(4, 123):
        append_step(folders[0], step, [], alarms=[f"alarm {step}; do it"])
    with TestClient(make_app(RunFolders(folders, cache=tmp_path / "cache")), base_url=LOCAL) as client:
        page = client.get("/run/one").text
        assert "(the newest 100 of 120)" in page and page.count("<td>do it</td>") == 100
        assert "alarm 122" in page and "alarm 22<" not in page
        assert "the newest" not in client.get("/run/two").text
        assert "few scores differ <small>(step 2)</small>" in page


def test_wrong_addresses_are_errors_with_the_value_and_a_fix(client: TestClient) -> None:
    for path, status, text in (
        ("/run/three", 404, "no run has the name &#39;three&#39;"),
        ("/run/..%2f..%2fetc", 404, ""),
        ("/run/one/sample/..%2f..%2fconfig.toml", 404, "no trajectory"),
        ("/static/../app.py", 404, ""),
        ("/static/%2e%2e/app.py", 404, ""),
        ("/compare?run=<script>", 404, "&lt;script&gt;"),
        ("/run/one/samples?score_from=high", 400, "score_from = &#39;high&#39; is no number"),
        ("/run/one/samples?step_from=99999999999999999999999", 400, "too large"),
        ("/run/one/samples?score_from=nan", 400, "too large"),
        ("/run/one/samples?q=apples", 400, "a search has no key &#39;q&#39;; it has text, page, and step_from"),
        ("/run/one/curves", 404, "there is no page &#39;/run/one/curves&#39;"),
        ("/run/one/samples?order=random", 400, "choose one of newest"),
        ("/run/one/samples?page=-1", 400, "no whole number"),
        ("/run/one/timeline?step=x", 400, "no whole number"),
        (f"/run/one/timeline?step={'9' * 5000}", 400, "no whole number"),
        ("/run/one/answers?before=2", 400, "no evaluation with answers"),
    ):
        page = client.get(path)
        assert page.status_code == status and text in page.text, f"{path}: {page.text}"
    assert client.post("/").status_code == 405


def test_a_huge_text_is_cut_and_the_rest_is_a_page_further(folders: list[Path], tmp_path: Path) -> None:
    words = "".join(f"w{index:05d} " for index in range(30_000))
    append_step(folders[0], 4, [trajectory("h4-0-0", words, step=4)])
    with TestClient(make_app(RunFolders(folders[:1], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        page = client.get("/run/one/sample/h4-0-0")
        assert len(page.text) < 400_000 and 'href="?from=2000"' in page.text and "of 210,014" in page.text
        later = client.get("/run/one/sample/h4-0-0?from=209000").text
        assert later.count('class="p1 v3"') == 1014 and "earlier" in later and "more &rarr;" not in later
        assert len(client.get("/run/one/samples").text) < 30_000


def test_prompts_are_shown_without_marks_and_found_by_all_of_their_words(folders: list[Path], tmp_path: Path) -> None:
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n7 * 8?<|im_end|>\n<|im_start|>assistant\n"
    append_step(folders[0], 4, [trajectory("c4-0-0", "56", step=4, prompt=chat)])
    path = folders[0] / "report.json"
    report = json.loads(path.read_text())
    for key in ("answers_before", "answers_after"):
        report[key] = [{**each, "prompt": chat} for each in report[key]]
    path.write_text(json.dumps(report))
    with TestClient(make_app(RunFolders(folders[:1], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        found = client.get("/run/one/samples?text=brief").text
        assert "1 trajectory<" in found and "<bdi>7 * 8?</bdi>" in found and "im_start" not in found
        assert '<pre dir="auto">7 * 8?</pre>' in client.get("/run/one/answers").text
        assert f"prompt: {len(chat)} tokens" in client.get("/run/one/sample/c4-0-0").text, "the whole prompt"


def test_a_page_waits_for_a_small_index_and_follows_a_large_one(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, update = threading.Event(), TrajectoryIndex.update

    def slow(index: TrajectoryIndex) -> int:
        ready.wait(20)
        return update(index)

    with TestClient(make_app(RunFolders(folders, cache=tmp_path / "cache")), base_url=LOCAL) as client:
        whole = client.get("/run/one/samples").text
        assert "9 trajectories<" in whole and "data-live" not in whole
        assert "No trajectory fits this search." in client.get("/run/one/samples?text=grapes").text
        monkeypatch.setattr(TrajectoryIndex, "update", slow)
        monkeypatch.setattr("fourfold_coordinator.view.reader._INDEX_SECONDS", 0.01)
        empty = client.get("/run/two/samples").text
        assert "0 trajectories; the index is being built: 0.0 MB are missing" in empty and "data-live" in empty
        assert "None so far." in empty and "fits" not in empty
        assert "the index is being built" in client.get("/run/two/sample/p2-0-0").text
        ready.set()


def test_a_held_out_score_names_the_answers_without_a_score(folders: list[Path], tmp_path: Path) -> None:
    path = folders[0] / "report.json"
    report = json.loads(path.read_text())
    report["evals"] = [report["evals"][0] | {"n": 1, "missing": 239}]
    path.write_text(json.dumps(report))
    with TestClient(make_app(RunFolders(folders, cache=tmp_path / "cache")), base_url=LOCAL) as client:
        text = "1 of 240 answers; 239 without a score"
        curves, answers = client.get("/run/one").text, client.get("/run/one/answers").text
        assert curves.count("held-out score, step 0") == 1 and "held-out score, step 3" not in curves
        assert text in curves and "step 0: 239 of 240 answers without a score" in curves
        listed = client.get("/").text
        assert text in answers and text in listed and listed.count("(8 answers)") == 2, "of the other run"
        whole = client.get("/run/two").text
        assert "0.5 [0.4, 0.6] <small>(8 answers)</small>" in whole and "without a score" not in whole
        assert "one: step 0: 239 of 240" in client.get("/compare?run=one&run=two").text


def test_a_run_of_pairs_is_shown_with_its_accuracy_and_margin(folders: list[Path], tmp_path: Path) -> None:
    path, values = folders[0] / "metrics.jsonl", {"pair/accuracy": 0.75, "pair/margin": 0.5}
    path.write_text("".join(json.dumps({"step": step, **values}) + "\n" for step in (1, 2)))
    with TestClient(make_app(RunFolders(folders, cache=tmp_path / "cache")), base_url=LOCAL) as client:
        page = client.get("/run/one").text
    assert "<dt>accuracy, step 2</dt><dd>0.75</dd>" in page and page.count("<polyline") >= 2


def test_a_copy_says_where_its_run_is_continued(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    copy = tmp_path / "home/fourfold/view/remote/0123/one"
    shutil.copytree(folders[0], copy)
    (copy / "report.json").unlink()
    with TestClient(make_app(RunFolders([copy], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        shown = client.get("/run/one").text
    assert "This is a copy, which ends after step 3 of 9." in shown and "fourfold run --resume runs/one<" in shown


def test_every_page_of_an_interrupted_run_says_how_to_continue(folders: list[Path], tmp_path: Path) -> None:
    stopped, failed = folders[0], folders[1].rename(folders[1].with_name("two.failed"))
    for folder in (stopped, failed):
        (folder / "report.json").unlink()
    (failed / "metrics.jsonl").unlink()

    def says(client: TestClient, run: str, *texts: str) -> None:
        for page in ("", "/samples", "/sample/p2-0-0", "/answers", "/timeline", "/weights", "/recipe"):
            shown = client.get(f"/run/{run}{page}").text
            assert not [text for text in texts if text not in shown], f"{page}: {shown}"

    with TestClient(make_app(RunFolders([stopped, failed], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        says(client, "one", "stopped after step 3 of 9. The run has no checkpoint")
        says(client, "one", f"{program()} run --resume {stopped}<")
        says(client, "one", f"{stopped}/logs/coordinator-0.log")
        says(client, "two.failed", 'class="state failed"', "failed before its first step", "coordinator-0.log")
        ledger = Ledger(stopped / "ledger.sqlite")
        totals = RunTotals(ledger)
        for _ in range(2):
            totals.add_recovery(0, "", trainer_kept=False)
        totals.save()
        ledger.commit_checkpoint(step=0, data_position=0, policy_version=0)
        ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=1)
        ledger.close()
        says(client, "one", "stopped after step 1 of 9", "from the checkpoint of step 0, and repeats 1 step:")
        write_stop_reason(stopped, "SIGTERM")
        says(client, "one", "This run was stopped by SIGTERM after step 1 of 9.")
        assert "coordinator-0.log" not in client.get("/run/one").text, "the reason is known"
    (stopped / "report.json").write_text('{"steps": 9}')
    with TestClient(make_app(RunFolders([stopped], cache=tmp_path / "cache")), base_url=LOCAL) as client:
        says(client, "one", "This run was resumed 2 times.")


def test_a_timeline_begins_with_the_first_work(folders: list[Path], tmp_path: Path) -> None:
    line = {"step": 2, "start": 1e9, "end": 1e9 + 104, "members": {"rollout-0": {"generate": [[99.0, 102.0]]}}}
    append_lines(folders[0] / "timeline.jsonl", json.dumps(line).encode() + b"\n")
    with TestClient(make_app(RunFolders(folders[:1], cache=tmp_path)), base_url=LOCAL) as client:
        page = client.get("/run/one/timeline?step=2").text
    assert "rollout-0: generate, 0.00 to 3.00 s" in page and "training loop: train, 3.50 to 4.50 s" in page
    assert "The step began at 1.5 s." in page and ">4 s<" in page and ">6 s<" not in page


def test_a_run_of_a_shared_folder_is_in_progress_while_its_ledger_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    for address, age, state in (
        ("10.0.0.1:50050", 5.0, "running"),
        ("10.0.0.1:50050", 60.0, "stopped"),
        ("127.0.0.1:50050", 5.0, "stopped"),
    ):
        (tmp_path / "coordinator.address").write_text(address)
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        assert LocalCoordinator(tmp_path).state() == state, f"{address} {age}"


def test_no_page_writes_to_a_run(folders: list[Path], tmp_path: Path, client: TestClient) -> None:
    def state() -> dict[str, tuple[int, int, bytes]]:
        found = [path for folder in folders for path in [folder, *folder.rglob("*")]]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.read_bytes() if p.is_file() else b"") for p in found}

    before = state()
    for path in PAGES:
        client.get(path)
    assert state() == before
    assert list((tmp_path / "cache").glob("one-*/index.db")), "its own index is elsewhere"


def test_the_index_that_a_run_keeps_is_used(folders: list[Path], tmp_path: Path) -> None:
    TrajectoryIndex(folders[0]).update()
    cache = tmp_path / "other-cache"
    with TestClient(make_app(RunFolders(folders, cache=cache)), base_url=LOCAL) as client:
        assert "9 trajectories" in client.get("/run/one/samples").text and not cache.exists()
        os.utime(folders[0] / "index.db", (1.0, 1.0))
        append_step(folders[0], 4, [trajectory("n4-0-0", "newest", step=4)])
        assert client.get("/run/one/samples").status_code == 200
        assert list(cache.glob("one-*/index.db")), "the run has stopped to keep it"


def test_without_a_token_only_names_of_this_machine_are_answered(client: TestClient) -> None:
    for host in ("127.0.0.1:8440", "localhost:1", "LOCALHOST", "[::1]:8440"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8440", "", "[::2]"):
        answer = client.get("/run/one", headers={"host": host})
        assert answer.status_code == 421 and "learning" not in answer.text
    page = {"sec-fetch-site": "cross-site"}
    assert client.get("/run/one", headers=page).status_code == 403
    assert client.get("/run/one", headers=page | {"sec-fetch-mode": "navigate"}).status_code == 200, "it may link here"


def test_with_a_token_nothing_is_shown_to_others(folders: list[Path], tmp_path: Path) -> None:
    app = make_app(RunFolders(folders, cache=tmp_path), token="secret-token-of-the-test")
    with TestClient(app, base_url="http://machine:8440", follow_redirects=False) as client:
        for path in ("/", "/run/one", "/static/view.css", "/?token=wrong", "/?token=", "/?token=\u00e4"):
            answer = client.get(path)
            assert answer.status_code == 401 and "one" not in answer.text.replace("token", ""), path
        assert client.get("/", headers={"authorization": "Bearer secret-token-of-the-test"}).status_code == 200
        answer = client.get("/run/one?token=secret-token-of-the-test&m=time/step")
        assert answer.status_code == 303 and "token" not in answer.headers["location"]
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(COOKIE) and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert client.get(answer.headers["location"]).status_code == 200, "with the cookie"


def test_wrong_arguments_are_errors_before_anything_is_served(tmp_path: Path, folders: list[Path]) -> None:
    def run(*words: str) -> None:
        parser = argparse.ArgumentParser()
        view.add_arguments(parser)
        view.main(parser.parse_args([*words]))

    short = tmp_path / "token"
    short.write_text("short\n")
    for words, text in (
        ([str(tmp_path)], "no run is in this folder"),
        ([str(folders[0]), str(folders[0])], "one: the run is given twice; give it once"),
        ([str(folders[0]), "--listen", "8440"], "is not an address; give HOST:PORT"),
        ([str(folders[0]), "--listen", "127.0.0.1:99999"], "is not an address; give HOST:PORT"),
        ([str(folders[0]), "--listen", "0.0.0.0:0"], "is beyond loopback.*add --tls-cert and --tls-key, or .* ssh -L"),
        ([str(folders[0]), "--token-file", str(short)], "16 or more"),
        ([str(folders[0]), "--tls-cert", str(short)], "give both or none"),
        (
            [str(folders[0]), "--tls-cert", str(short), "--tls-key", "no.pem"],
            "--tls-cert .*no.pem: they cannot be used",
        ),
        ([str(folders[0]), "--certs", "certs"], "--certs certs is for runs of other machines; add HOST:PORT"),
        ([str(folders[0]), "--run-token-file", str(short)], "--run-token-file .* is for runs of other machines"),
        ([str(folders[0]), "--copy-limit", "2"], "--copy-limit 2.0 is for runs of other machines"),
        (["127.0.0.1:8441", "--copy-limit", "0"], "--copy-limit 0: a limit in GiB is above 0"),
        (["machine.example:8441"], r"machine.example:8441 is another machine, which needs TLS; add --certs DIR with"),
    ):
        with pytest.raises(ConfigError, match=text):
            run(*words)


def test_charts_draw_the_extremes_of_long_lines_and_skip_empty_ones() -> None:
    points = [(float(x), 5.0 if x == 777 else 0.0) for x in range(10_000)]
    assert len(thin_out(points)) <= 402 and (777.0, 5.0) in thin_out(points)
    assert line_chart([Line(name="a", points=[])]) == ""
    one = line_chart([Line(name='"><script>', points=[(1.0, 2.0)], bars=[(1.25, 2.5)])])
    assert "<script>" not in one and "<circle" in one
    ticks = re.findall(r"middle\">([^<]*)<", line_chart([Line(name="a", points=[(1.0, 0.1), (2.0, 0.2)])]))
    assert ticks == ["1", "2"], "no parts of steps"
    assert "NaN" not in one and gantt([("a<b", {"train": [(0.0, 1.0)], "x": [(3.0, 2.0)]})], 2.0).count("<rect") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-0.25, "-0.25"), (4.4829e-6, "4.483e-06"), (9999, "9999"), (9999.96, "10k"), (-269_060_000, "-269.1M"),
     (2e12, "2000G"), (1e14, "1e+14")],
)  # fmt: skip
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert short_number(value) == text


def test_times_are_marked_for_the_browser_and_other_texts_escaped() -> None:
    found = moment("2026-11-26T14:01:54.744+01:00")
    assert found == '<time datetime="2026-11-26T13:01:54Z">2026-11-26 13:01 UTC</time>'
    assert [moment(text) for text in ("", "<b>", "0001-01-01T00:00+23:59")] == [
        "",
        "&lt;b&gt;",
        "0001-01-01T00:00+23:59",
    ]


def test_parts_of_a_step_follow_each_other_and_equal_recipes_have_no_differences() -> None:
    row = {"time/train": 1.0, "time/generate": 2.0, "time/publish": None, "time/other": 0.5, "time/step": 3.5}
    assert step_parts(row) == [("generate", 0.0, 2.0), ("train", 2.0, 3.0), ("other", 3.0, 3.5)]
    tables = {"name": "a", "x": {"y": 1}, "reward": [{"name": "r", "weight": 1.0}]}
    assert recipe_differences([tables, {**tables, "name": "b"}]) == []
    other = {**tables, "reward": [{"name": "r", "weight": 2.0}]}
    assert recipe_differences([tables, other]) == [("reward.r.weight", ["1.0", "2.0"])]
