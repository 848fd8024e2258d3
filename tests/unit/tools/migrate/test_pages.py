"""The pages of docs/migration have the tables of the code, and numbers of recorded measurements."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.config import Config
from fourfold.config.recipe import _known_keys
from fourfold.errors import ConfigError
from fourfold_tools.migrate import openrlhf_rules, trl_rules, verl_rules
from fourfold_tools.migrate.common import Options
from fourfold_tools.migrate.pages import TABLES, markdown
from tests.unit.tools.migrate.test_openrlhf import write_model

ROOT = Path(__file__).parents[4]
FLAGS = re.compile(r"(?<=<!-- begin flags -->\n).*?(?=<!-- end flags -->)", re.DOTALL)


@pytest.mark.parametrize("system", TABLES)
def test_a_page_has_the_table_of_its_system(system: str) -> None:
    path = ROOT / "docs" / "migration" / f"{system}.md"
    text, table = path.read_text(), f"\n{markdown(system)}\n"
    if os.environ.get("FOURFOLD_UPDATE_SNAPSHOT"):
        path.write_text(FLAGS.sub(lambda _: table, text))
    found = FLAGS.search(path.read_text())
    assert found is not None
    assert found[0] == table, "FOURFOLD_UPDATE_SNAPSHOT=1 writes the table"


@pytest.mark.parametrize("system", TABLES)
def test_a_flag_has_a_key_that_exists_or_a_reason(system: str) -> None:
    for flag in TABLES[system].values():
        for key in filter(None, (part.strip() for part in flag.to.split(","))):
            table, _, name = key.rpartition(".")
            known = _known_keys(tuple(table.split("."))) if table else list(Config.model_fields)
            inner = table in ("algorithm.loss", "algorithm.advantage", "reward", "reward.model") or not table
            assert name in known or inner, f"{flag.name}: {key} is no key"
        if not flag.to:
            assert flag.how.startswith(("not needed", "no equivalent")), flag


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("trl", "model_name_or_path: POLICY\ndataset_name: a/b\neval_strategy: steps\nnum_processes: 4\n"),
        ("verl", "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=POLICY trainer.test_freq=5"),
    ],
)
def test_the_recipe_of_the_command_has_a_plan(
    system: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "POLICY")
    (tmp_path / "source").write_text(text)
    assert cli_main.main(["import", system, "source"]) == 0
    (tmp_path / "recipe.toml").write_text(capsys.readouterr().out)
    assert cli_main.main(["plan", "recipe.toml", "--skip-checks"]) == 0
    assert "held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rules", "least", "form"),
    [
        (
            openrlhf_rules,
            "--actor.model_name_or_path P --data.prompt_dataset d.jsonl --rollout.n_samples_per_prompt 8",
            " --{} {}",
        ),
        (trl_rules, "model_name_or_path: P\ndataset_name: d.jsonl\nnum_processes: 4", "\n{}: {}"),
        (
            verl_rules,
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=P actor_rollout_ref.rollout.n=8",
            " {}={}",
        ),
    ],
)
def test_no_value_of_a_flag_ends_in_a_traceback(rules: Any, least: str, form: str) -> None:
    for name in rules.TABLE:
        for value in ("null", "0", "-1", "[]", "x", "[{a: 1}]", "{datasets: 5}"):
            with suppress(ConfigError):
                draft = rules.convert(least + form.format(name, value), Options(source="s"), {}, {})
                draft.checked(draft.text("t"), "s")


def test_names_are_unique() -> None:
    for system, table in TABLES.items():
        names = [name for flag in table.values() for name in (flag.name, *flag.older.split())]
        assert len(names) == len(set(names)), system


@pytest.mark.parametrize("system", TABLES)
def test_measured_seconds_are_those_of_their_files(system: str) -> None:
    text = (ROOT / "docs" / "migration" / f"{system}.md").read_text()
    files = set(re.findall(r"benchmarks/results/[\w.-]+\.json", text))
    assert files
    for name in files:
        wall = json.loads((ROOT / name).read_text())["results"]["phases"]["wall"]
        assert f"{wall:.1f}" in text


def test_the_help_names_the_systems(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli_main.main(["import", "--help"])
    out = capsys.readouterr().out
    assert all(system in out for system in TABLES)
    assert cli_main.main(["--help"]) == 0
    assert "convert a run configuration of OpenRLHF, TRL or verl into a recipe" in capsys.readouterr().out
