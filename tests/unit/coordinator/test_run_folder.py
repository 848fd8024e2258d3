"""Names of run folders, and the link to the latest."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold_coordinator.launch.run_folder import METRICS_FILE, find_run, free_name, link_latest, make_run_dir
from tests.fakes.toy import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


def test_runs_of_one_name_are_numbered_and_none_is_called_latest(tmp_path: Path, config: Config) -> None:
    made = [make_run_dir(config, name, tmp_path)[0].name for name in ("demo", "demo", "latest", "latest")]
    assert made == ["demo", "demo-2", "latest-2", "latest-3"]
    with pytest.raises(ConfigError, match="choose another"):
        make_run_dir(config, "demo.failed", tmp_path)


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
