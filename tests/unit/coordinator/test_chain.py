"""`fourfold run A.toml B.toml`: what is checked, started, skipped and told when a run does not end."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.program import LAUNCH_OPTIONS, program
from fourfold.model import folder as model_folder
from fourfold_coordinator.cli.chain import run_chain
from fourfold_coordinator.launch.run_folder import make_run_dir
from fourfold_coordinator.launch.run_names import MODEL_FOLDER, REPORT_FILE
from tests.fakes.toy import make_config
from tests.unit.model.test_folder import write_model

NAMES = ("sft", "rm", "ppo")
RECIPES = [Path(f"{name}.toml") for name in NAMES]


class Chain:
    """Recipes of which each begins with the run before, and `fourfold run` with starts that take no time."""

    def __init__(self, root: Path) -> None:
        self.sources = dict(zip(NAMES, (str(write_model(root / "base")), "run:sft", "run:rm"), strict=True))
        for name, source in self.sources.items():
            config = make_config(root, name=name, model={"source": source}, steps=4)
            Path(f"{name}.toml").write_text(configuration.dump(config))
        self.events: list[str] = []
        self.ends: dict[str, int | BaseException] = {}  # how runs end that do not end well

    def check(self, config: Config, file: Path) -> Config:
        model_folder.check(config.model.source)
        self.events.append(f"check {file}")
        return config

    def start(self, args: argparse.Namespace) -> int:
        """Make the run's folder, or continue in it; write export and report."""
        self.events.append(f"resume {args.resume}" if args.resume else f"start {args.recipe}")
        folder = args.resume
        if folder is None:
            folder, _ = make_run_dir(configuration.load(args.recipe, args.set), args.recipe.stem)
        model_folder.resolve(self.sources[folder.name])
        end = self.ends.pop(folder.name, 0)
        if isinstance(end, BaseException):
            raise end
        if not end:
            write_model(folder / MODEL_FOLDER)
            (folder / REPORT_FILE).write_text(json.dumps({"steps": 4}))
        return end

    def run(self, **changes: Any) -> int:
        options = {"recipe": RECIPES, "resume": None, "set": [], "name": "", **LAUNCH_OPTIONS}
        self.events.clear()
        return run_chain(argparse.Namespace(**{**options, **changes}), check=self.check, start=self.start)


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.chdir(tmp_path)
    return Chain(tmp_path)


def test_all_recipes_are_checked_before_the_first_one_starts(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    assert chain.run() == 0
    assert chain.events == [f"check {file}" for file in RECIPES] + [f"start {file}" for file in RECIPES]
    assert capsys.readouterr().out.startswith("Checked sft -> rm -> ppo: about ")
    (model := Path("runs/rm/model/model.safetensors")).unlink()
    with pytest.raises(
        ConfigError, match=r"sft.toml: runs/sft exists. To continue .* run sft.toml rm.toml ppo.toml --re"
    ):
        chain.run()
    assert chain.run(resume=Path()) == 0 and chain.events == []
    assert capsys.readouterr().out.count("is done already: runs/") == 3
    assert not model.exists()


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (1, 1, ""),
        (130, 130, ""),
        (ConfigError("no room"), 1, "fourfold: no room\n"),
        (KeyboardInterrupt(), 130, "fourfold: interrupted\n"),
    ],
)
def test_a_run_that_does_not_end_well_ends_the_chain_which_continues_there(
    chain: Chain, capsys: pytest.CaptureFixture[str], end: int | BaseException, code: int, text: str
) -> None:
    chain.ends["rm"] = end
    assert chain.run(set=["seed=5"], launcher="ray") == code
    assert chain.events[3:] == ["start sft.toml", "start rm.toml"]
    assert capsys.readouterr().err.replace(program(), "fourfold") == (
        f"{text}Run 2 of 3: rm (rm.toml) has not ended. Not started: ppo. To continue here: fourfold run sft.toml "
        f"rm.toml ppo.toml --resume --set seed=5 --launcher ray\n"
    )
    assert chain.run(set=["seed=5"], resume=Path()) == 0
    assert chain.events == [
        *("check runs/rm/config.toml", "check ppo.toml"),
        *("resume runs/rm", "start ppo.toml"),
    ]
    assert capsys.readouterr().err == "", "the recipes are those of the runs"


def test_a_run_is_not_trained_further_below_one_that_began_with_it(chain: Chain) -> None:
    chain.ends["rm"] = 1
    chain.run()
    assert chain.run(resume=Path()) == 0
    with pytest.raises(ConfigError, match=r"runs/rm began with run:sft, whose weights will be others, because sft is"):
        chain.run(resume=Path(), set=["steps=6"])
    shutil.rmtree("runs/rm")
    shutil.rmtree("runs/ppo")
    chain.ends["sft"] = 1
    assert chain.run(resume=Path(), set=["steps=6"]) == 1 and chain.events[-1] == "resume runs/sft"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["sft.toml", "rm.toml", "--name", "x"], 1, "--name x is for one new run; set `name` in the recipes"),
        (["--resume", "sft.toml", "rm.toml"], 1, "--resume sft.toml: beside recipes it takes no folder"),
        (["rm.toml", "sft.toml"], 1, "rm.toml: model.source = 'run:sft': sft.toml makes it later"),
        (["rm.toml"], 1, "model.source = 'run:sft': no run sft in "),
        (["--resume"], 2, "give recipes, or --resume RUN_DIR"),
        ([], 2, "give recipes, or --resume RUN_DIR"),
    ],
)
def test_a_wrong_command_starts_nothing(
    chain: Chain, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    assert cli_main.main(["run", *words]) == code
    assert text in capsys.readouterr().err
    assert not Path("runs").exists()
