"""Names of run folders, the link to the latest, the page of their files, and the room that a run needs."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import stat
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from fourfold import config as configuration
from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host import program
from fourfold.host.disk import make_private_folder
from fourfold.tracing import export
from fourfold_coordinator.cli import run, runs
from fourfold_coordinator.launch import run_folder
from fourfold_coordinator.launch.run_folder import find_run, free_name, link_latest, make_run_dir
from fourfold_coordinator.launch.run_names import METRICS_FILE
from fourfold_coordinator.sinks import sink
from fourfold_coordinator.state import experiences, recipe_history, sample_tokens, samples, timeline, trajectory_index
from tests.fakes.toy import make_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


def test_runs_of_one_name_are_numbered_and_none_is_called_latest(tmp_path: Path, config: Config) -> None:
    made = [make_run_dir(config, name, tmp_path)[0].name for name in ("demo", "demo", "latest", "latest")]
    assert made == ["demo", "demo-2", "latest-2", "latest-3"]
    with pytest.raises(ConfigError, match="choose another"):
        make_run_dir(config, "demo.failed", tmp_path)


def test_the_folder_of_a_run_is_private(tmp_path: Path, config: Config) -> None:
    before = os.umask(0o022)
    try:
        run_dir, _ = make_run_dir(config, "demo", tmp_path / "runs")
        make_private_folder(by_hand := tmp_path / "a" / "b" / "by-hand")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run_dir, by_hand, by_hand.parent)] == [0o700, 0o700, 0o755]
    by_hand.chmod(0o750)
    make_private_folder(by_hand)
    assert stat.S_IMODE(by_hand.stat().st_mode) == 0o750, "its user may open it"
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "demo", Path("/proc/none/demo")):
        with pytest.raises(ConfigError, match=f"{wrong}: cannot make the folder of the run"):
            make_private_folder(wrong)
    with pytest.raises(ConfigError, match="cannot make the folder of the run"):
        make_run_dir(config, "demo", tmp_path / "file")


def test_the_run_of_another_user_is_named_as_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "demo"
    run_dir.mkdir()
    (tmp_path / "latest").symlink_to("demo")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read every folder
    for path in (run_dir, tmp_path / "latest"):
        with pytest.raises(
            ConfigError, match=r"demo: the folder is private to the user with uid \d+; run this command"
        ):
            find_run(path)


def test_a_run_keeps_the_date_on_which_it_began(tmp_path: Path, config: Config) -> None:
    before = datetime.datetime.now().replace(microsecond=0)
    run_dir, made = make_run_dir(config, "demo", tmp_path)
    file = run_dir / "config.toml"
    assert before <= datetime.datetime.fromisoformat(made.data.date) <= datetime.datetime.now()
    assert configuration.load(file).data.date == made.data.date
    os.utime(file, (0, 0))
    # A coordinator or a gateway that is started with the recipe of the user, which has no date.
    assert configuration.fix_date(config, run_dir) == configuration.with_date(config, made.data.date)
    assert configuration.fix_date(configuration.with_date(config, "2020-01-01"), run_dir).data.date == "2020-01-01"


def test_latest_is_the_run_that_was_started_last(tmp_path: Path, config: Config) -> None:
    first, second = (make_run_dir(config, "demo", tmp_path)[0] for _ in range(2))
    for run_dir in (first, second, first):
        link_latest(run_dir)
        assert find_run(tmp_path / "latest") == run_dir
    assert find_run(second) == second
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["latest"]


@pytest.mark.parametrize("wrong", ["runs/quikstart", "quickstart", "Quickstar"])
def test_a_wrong_name_names_the_nearest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run_dir(config, "quickstart")
    with pytest.raises(ConfigError, match=f"{wrong} does not exist; did you mean runs/quickstart"):
        find_run(Path(wrong))
    for other in ("runs/math", "hf:owner/quickstart", "builtin:quickstart"):
        assert find_run(Path(other)) == Path(other)


def test_a_name_that_is_no_path_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"^x{5,76}\S*: cannot be read \(File name too long\); give the name of a folder"
    ):
        find_run(Path("x" * 300))


def test_a_folder_called_latest_is_left_alone(tmp_path: Path, config: Config) -> None:
    (tmp_path / "latest" / "precious").mkdir(parents=True)
    link_latest(make_run_dir(config, "demo", tmp_path)[0])
    assert (tmp_path / "latest" / "precious").is_dir() and not list(tmp_path.glob(".latest*"))


def test_a_start_that_failed_leaves_its_name_and_the_last_one_is_kept(tmp_path: Path, config: Config) -> None:
    for text in ("one", "two"):
        run_dir, _ = make_run_dir(config, "demo", tmp_path)
        (run_dir / "log").write_text(text)
        assert free_name(run_dir) == tmp_path / "demo.failed"
        assert find_run(tmp_path / "latest") == tmp_path / "demo.failed"
    assert (tmp_path / "demo.failed" / "log").read_text() == "two"
    assert make_run_dir(config, "demo", tmp_path)[0].name == "demo"


def test_a_run_that_did_a_step_keeps_its_name(tmp_path: Path, config: Config) -> None:
    run_dir, _ = make_run_dir(config, "demo", tmp_path)
    (run_dir / METRICS_FILE).write_text("{}\n")
    assert free_name(run_dir) == run_dir and run_dir.is_dir()


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ('reward.function="nope.py:f"', "cannot read"),
        ('model.source="builtin:nope"', "builtin:nope"),
        ('critic={source="/nope"}', "critic.source = '/nope': no such folder"),
        ("model.max_context_tokens=999999", "batch.tokens_per_micro_batch"),
    ],
)
def test_a_key_of_a_resumed_run_is_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run_dir(configuration.load(ROOT / "recipes" / "quickstart.toml", ["algorithm.preset=ppo"]), "r")
    monkeypatch.setattr(run, "RunCommand", lambda *_: pytest.fail("the run has started"))
    before = (tmp_path / "runs/r/config.toml").read_text()
    assert cli_main.main(["run", "--resume", "runs/r", "--set", key]) == 1
    assert error in capsys.readouterr().err
    assert (tmp_path / "runs/r/config.toml").read_text() == before


FILES, _, KEYS = (Path(__file__).parents[3] / "docs/run_folder.md").read_text().partition("\n## samples.jsonl\n")
STATE = (experiences, recipe_history, sample_tokens, samples, timeline, trajectory_index)
NAME = re.compile(r"_?([A-Z]\w*_)?(FILE|FOLDER|LOCK|SUFFIX|LATEST)")


def test_the_page_has_every_file() -> None:
    modules = (export, program, run_folder, runs, sink, *STATE)
    names = [str(value) for module in modules for key, value in vars(module).items() if NAME.fullmatch(key)]
    assert len(names) > 20
    rows = " ".join(re.findall(r"^\| (`.*)", FILES, re.MULTILINE))
    known = {part for text in re.findall(r"`([^`]+)`", rows) for part in text.split("/")}
    elsewhere = {
        "latest": "`runs/latest`",
        ".failed": ".failed`",
        ".deleted": ".deleted`",
        "model-step-": "`model-step-N/`",
    }
    assert [name for name in names if name not in known and elsewhere.get(name, name) not in FILES] == []


def test_the_page_has_every_key_of_a_sample() -> None:
    rows = re.findall(r"^\| (`.*?) \|", KEYS, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [field.name for field in fields(samples.SampleLine)]


@pytest.mark.parametrize(
    "words", [["run", "r.toml"], ["run", "--resume", "runs/r"], ["serve", "coordinator", "r.toml"]]
)
def test_a_run_that_cannot_begin_for_want_of_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100 << 20))
    recipe = (ROOT / "recipes" / "quickstart.toml").read_text()
    (tmp_path / "r.toml").write_text(recipe)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.toml").write_text(recipe)
    assert cli_main.main(words) == 1
    assert "100 MiB of disk free, a run needs at least 256 MiB to start; free some space" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "r" / "ledger.sqlite").exists()
